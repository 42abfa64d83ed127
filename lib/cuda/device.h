// What the library keeps for each CUDA context, for the life of the process: the loaded kernels,
// and pinned memory. All of it is got ready at the first use, before anything of ours runs on the
// device, because allocating and loading may wait for what runs. The memory only grows if that was
// not enough.
//
// Threads: any.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/worker.h"
#include "lib/cuda/driver.h"
#include "ringfold/types.h"

namespace ringfold::cuda {

inline constexpr int kMaxLanes = 8;  // of one worker

// Makes a context the current one of this thread for a while, if it is not.
class InContext {
 public:
  explicit InContext(CUcontext context);
  ~InContext();
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  bool pushed_ = false;
};

// The lanes of one worker, and how often each was launched and given commands.
struct Gate {
  Lane* lanes = nullptr;
  std::array<uint32_t, kMaxLanes> launches{}, posted{};
  std::vector<std::byte*> kept;  // pinned memory, to be given back when the lanes have left
};

class Device {
 public:
  // The one of this context; made at the first call.
  static Result<Device*> of(CUcontext context);

  [[nodiscard]] CUcontext context() const { return context_; }
  [[nodiscard]] CUfunction worker(DType type) const { return at(workers_, type); }
  [[nodiscard]] CUfunction reduce(DType type) const { return at(reduces_, type); }

  // A gate whose lanes have all left their last launch.
  Result<Gate*> take_gate();
  void give_gate(Gate* gate);
  // A non-blocking stream of the library's own, to fork to.
  Result<CUstream> take_stream();
  void give_stream(CUstream stream);

  // Pinned memory, aligned to 64 bytes, that kernels reach by the same address. May allocate: not
  // on the engine's thread.
  Result<std::byte*> take_pinned(size_t bytes);
  void give_pinned(std::byte* memory);

 private:
  using Functions = std::array<CUfunction, kDTypes>;
  explicit Device(CUcontext context) : context_(context) {}
  static CUfunction at(const Functions& functions, DType type) {
    return functions[static_cast<size_t>(type)];
  }
  Status load(const void* image, const char* kind, Functions& functions);
  Status make_ready();
  Status add_gates();
  Status add_pinned(size_t bytes);
  void put_back(std::byte* memory);

  const CUcontext context_;
  Functions workers_{}, reduces_{};

  std::mutex lock_;  // guards what follows
  std::vector<std::unique_ptr<Gate>> gates_;
  std::vector<Gate*> free_gates_;  // those whose lanes may still have to leave among them
  std::vector<CUstream> free_streams_;
  std::map<std::byte*, size_t> free_, taken_;  // pinned ranges
};

// Forgets all devices with what they keep. For tests, when they change the driver.
void forget_devices();

}  // namespace ringfold::cuda
