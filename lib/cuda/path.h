// Collectives on device memory, as a communicator sees them. Without CUDA in the build no memory is
// device memory (path_none.cpp).
//
// Threads: any, unless said otherwise.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "lib/engine/compute.h"
#include "ringfold/schedule.h"
#include "ringfold/status.h"
#include "ringfold/types.h"

namespace ringfold::cuda {

class Device;
class Pool;

// How messages of device memory travel; automatic: the first of them that can be had.
enum class Way : uint8_t { automatic, direct, ucx, staged };
// The words for them in RINGFOLD_CUDA_PATH.
inline constexpr std::array<std::string_view, 4> kWays = {"auto", "direct", "ucx", "staged"};
[[nodiscard]] constexpr std::string_view name(Way way) {
  return kWays[static_cast<size_t>(way)];
}

// Whether only kernels should touch it: device or managed memory. Host memory, pinned or not, and
// null are not.
[[nodiscard]] bool is_device_memory(const void* pointer);

// Whether a call with these buffers is in the order of the stream, and so for the device.
[[nodiscard]] inline bool is_ordered(const void* one, const void* other, Stream stream) {
  return stream.orders_all || is_device_memory(one) || is_device_memory(other);
}

// Ok if this build and this machine's driver serve calls on a device; else why not.
[[nodiscard]] Status usable();

// Gets the device of this thread's current context ready, if it has one, so that no call needs to
// do it while something runs there. A failure comes again at the first call that needs the device.
void prepare();
// Why prepare() has nothing to get ready: no driver, or no current context; ok if it has.
[[nodiscard]] Status has_device();

// This thread's context, for another thread to take up.
class Carried {
 public:
  Carried();
  void enter() const;

 private:
  [[maybe_unused]] void* context_ = nullptr;  // not used in builds without CUDA
};

// What one communicator keeps for its collectives on one device: the slots of those that run, in
// pinned memory or in its pool.
class Path {
 public:
  // Operations of a communicator that have slots at once.
  static constexpr int kAtOnce = 2;

  Path(Device& device, int at_once) : device_(device), at_once_(at_once) {}
  Path(std::shared_ptr<Pool> pool, int at_once);
  ~Path();
  Path(const Path&) = delete;
  Path& operator=(const Path&) = delete;

  // Sees to it that there are slots for operations with pieces of that size. By the caller.
  Status reserve(size_t piece_bytes);
  // An operation comes to be, in the order of the calls, and gets its turn.
  uint64_t enter();
  // Slots for the operation whose turn it is; null: not yet.
  std::byte* take_slots(uint64_t turn);
  void leave(uint64_t turn, std::byte* slots);

  [[nodiscard]] Device& device() const { return device_; }
  // Of the memory of the slots.
  [[nodiscard]] MemoryKind kind() const { return pool_ ? MemoryKind::cuda : MemoryKind::host; }
  [[nodiscard]] const std::shared_ptr<Pool>& pool() const { return pool_; }

 private:
  struct Block {
    std::byte* memory = nullptr;
    size_t bytes = 0;
    bool taken = false;
  };

  const std::shared_ptr<Pool> pool_;  // null: pinned memory
  Device& device_;
  const int at_once_;
  std::mutex lock_;   // guards what follows
  size_t bytes_ = 0;  // of a block
  std::vector<Block> blocks_;
  uint64_t entered_ = 0;
  std::deque<uint64_t> waiting_;  // turns without slots, in order
};

// What a call wants of the device.
struct DeviceCall {
  const Schedule* schedule = nullptr;
  int position = 0;
  const void* input = nullptr;
  void* work = nullptr;
  DType type = DType::f32;
  Reduction reduction;
  size_t piece = 0;  // elements
  bool point_to_point = false;
  Stream stream;
  const std::byte* factor = nullptr;  // set by make_compute() and record(): of the worker
};

// Puts to[i] = from[i] * factor on the stream, rounded as premul_sum does.
[[nodiscard]] Status enqueue_copy(const void* from, void* to, size_t count, DType type,
                                  double factor, Stream stream);
// Waits for the stream, and reads a factor of the type that is in memory of the device.
[[nodiscard]] Result<double> wait_for_factor(const void* factor, DType type, Stream stream);
// Copies behind what is on both streams now, and before what comes after on either.
[[nodiscard]] Status move(const void* from, Stream from_stream, void* to, Stream to_stream,
                          size_t count, DType type);

// The compute of an operation on device memory, behind what is on the stream now. Its worker is
// launched by the next launch_workers() of this thread.
[[nodiscard]] Result<std::unique_ptr<Compute>> make_compute(const DeviceCall& call,
                                                            std::shared_ptr<Path>& path);

// An operation that was captured in a graph: made anew for each replay, by a thread of the driver.
class Replayed {
 public:
  virtual ~Replayed() = default;
  virtual void start(std::unique_ptr<Compute> compute) noexcept = 0;
  // It cannot be started.
  virtual void fail(const Status& why) noexcept = 0;
};

// Whether a graph is being captured from the stream. Then path_of_captured() and record() take the
// place of make_compute(): the graph owns `operation` from then on.
[[nodiscard]] bool is_captured(Stream stream);
// Slots for this call alone: in the pool of `direct` (null: there is none) while that has room,
// else pinned. Ranks that capture the same calls get the same answers.
[[nodiscard]] Result<std::shared_ptr<Path>> path_of_captured(const DeviceCall& call,
                                                             const std::shared_ptr<Path>& direct);
[[nodiscard]] Status record(const DeviceCall& call, std::shared_ptr<Path> path,
                            std::unique_ptr<Replayed> operation);

// What this thread's calls since the last time need can be launched. Before the operations are
// handed over.
[[nodiscard]] Status can_launch_workers();
// Launches it; after the operations were handed to their engines, which may need to run meanwhile.
[[nodiscard]] Status launch_workers();

}  // namespace ringfold::cuda
