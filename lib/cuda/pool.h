// Device memory of this rank that the other ranks of a communicator read, and the way to theirs: by
// the address itself within a process, by CUDA's IPC between processes of a host. Only memory of
// the library's own is ever exported: users' may be of a kind that IPC refuses.
//
// Threads: any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ringfold/status.h"

namespace ringfold::cuda {

class Device;

// What a rank tells the others of its pool; plain bytes.
struct Offer {
  uint64_t begin = 0, bytes = 0;  // of the pool, as its rank sees it; 0: it has none
  uint64_t process = 0, library = 0, context = 0;
  int32_t device = -1;            // its number there
  uint32_t exported = 0;          // whether the handle holds
  uint64_t offset = 0;            // of the pool in the exported allocation
  std::array<char, 64> handle{};  // CUipcMemHandle
  std::array<char, 80> why{};     // there is no pool, or no handle
};

class Pool {
 public:
  // On this thread's current context. May wait for what runs on the device.
  static Result<std::shared_ptr<Pool>> make();
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  [[nodiscard]] Device& device() const { return device_; }
  [[nodiscard]] const Offer& offer() const { return offer_; }

  // The address at which this device reads another rank's pool, while this one lives.
  [[nodiscard]] Result<const std::byte*> reach(const Offer& theirs);

  // Memory for as long as the pool lives; null: there is no more. Ranks that take the same get the
  // same answers.
  std::byte* take(size_t bytes);

 private:
  Pool(Device& device, std::byte* memory);
  void describe();
  Status allow_peer(const Offer& theirs);

  Device& device_;
  std::byte* const memory_;
  Offer offer_;
  std::mutex lock_;  // guards what follows
  size_t used_ = 0;
  std::vector<std::array<char, 64>> opened_;
};

}  // namespace ringfold::cuda
