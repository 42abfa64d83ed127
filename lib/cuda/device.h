// What the library keeps for each CUDA context, for the life of the process: the loaded kernels,
// pinned memory, and device memory that other ranks read. All of it is got ready at the first use,
// before anything of ours runs on the device, because allocating and loading may wait for what
// runs. The memory only grows if that was not enough.
//
// Threads: any.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/worker.h"
#include "lib/cuda/driver.h"
#include "lib/cuda/ranges.h"
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

  // Device memory that other processes may map: from allocations that are never freed, for nobody
  // knows who has them mapped. May allocate.
  Result<std::byte*> take_shared(size_t bytes);
  void give_shared(std::byte* memory);
  // Maps what another process has exported, once however often it is asked for. May wait for what
  // runs on the device. What was closed stays mapped until the next is opened: close() calls no
  // driver.
  Result<std::byte*> open(const CUipcMemHandle& handle);
  void close(const CUipcMemHandle& handle);

 private:
  using Functions = std::array<CUfunction, kDTypes>;
  static constexpr size_t kAlignment = 64;  // of memory that is given out
  explicit Device(CUcontext context) : context_(context) {}
  static CUfunction at(const Functions& functions, DType type) {
    return functions[static_cast<size_t>(type)];
  }
  Status load(const void* image, const char* kind, Functions& functions);
  Status make_ready();
  Status add_gates();
  Status add_pinned(size_t bytes);

  const CUcontext context_;
  Functions workers_{}, reduces_{};

  std::mutex lock_;  // guards what follows
  std::vector<std::unique_ptr<Gate>> gates_;
  std::vector<Gate*> free_gates_;  // those whose lanes may still have to leave among them
  std::vector<CUstream> free_streams_;
  Ranges pinned_{kAlignment}, shared_{kAlignment};
  struct Opened {
    std::byte* memory = nullptr;
    int users = 0;
  };
  std::map<std::string, Opened> opened_;  // by handle
};

// Forgets all devices with what they keep. For tests, when they change the driver.
void forget_devices();

}  // namespace ringfold::cuda
