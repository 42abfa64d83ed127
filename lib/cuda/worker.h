// The worker kernel's host side: one launch, from before it until its lanes are told that it has
// ended. It is the gate of its stream and carries out the commands of all operations it serves.
//
// Threads: any.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "lib/cuda/device.h"

namespace ringfold::cuda {

// When a command is done: the count that each of its lanes must have reached.
struct Ticket {
  std::array<uint32_t, kMaxLanes> counts{};
  uint32_t lanes = 0;  // bits
};

class Worker {
 public:
  // For work behind what is on `stream` now, and before what comes after.
  Worker(Device& device, CUstream stream) : device_(device), stream_(stream) {}
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  [[nodiscard]] Device& device() const { return device_; }
  [[nodiscard]] CUstream stream() const { return stream_; }

  // One more operation to serve, before the launch. Only one type is reduced by one worker, but any
  // are copied: false if it cannot serve this one.
  [[nodiscard]] bool serve(bool reduces, DType type, size_t bytes);
  // Before the launch the stream brings one element that is on the device to pinned memory, where
  // it can be read once the worker has begun.
  Result<const std::byte*> bring(const void* element, DType type);
  // An operation is over, or will never be. After the last one the launch ends.
  void release();

  // Whether there is nothing to serve (any more).
  [[nodiscard]] bool idle() const;

  // For a stream that is being captured: puts the kernel into its graph. Each replay is one launch.
  Status capture(CUstream stream);
  // A replay is about to come, with operations to serve; false if one is still under way: then both
  // end as soon as the operations of that one do.
  [[nodiscard]] bool begin_replay(int operations);

  // Puts the kernel on `stream`, its own or one that was forked from it.
  Status launch(CUstream stream);

  // Gives back the device's stream that it was launched on when it is over.
  void keep(CUstream stream) { own_stream_ = stream; }

  // Whether the stream has reached it: from now on post() may be called.
  [[nodiscard]] bool begun() const;
  // Hands a command to one or more lanes; false if there is no room now.
  bool post(const Command& command, Ticket* ticket);
  [[nodiscard]] bool done(const Ticket& ticket) const;

 private:
  struct Brought {
    const void* from;
    std::byte* to;
    DType type;
  };

  [[nodiscard]] bool begun(int lane) const;
  Status take_gate();
  Status copy_brought(CUstream stream);
  CUresult put(CUstream stream);
  void end();

  Device& device_;
  const CUstream stream_;
  DType type_ = DType::u8;
  bool reduces_ = false;
  size_t bytes_ = 0;  // of the largest operation
  CUstream own_stream_ = nullptr;
  std::vector<Brought> brought_;

  mutable std::mutex lock_;  // guards what follows
  int operations_ = 0;
  bool launched_ = false;
  Gate* gate_ = nullptr;
  int lanes_ = 0;
  int next_lane_ = 0;
};

}  // namespace ringfold::cuda
