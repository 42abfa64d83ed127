// Device memory and streams for tests: on the emulated driver, or with RINGFOLD_TEST_DRIVER=real on
// the first device of this machine.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "lib/cuda/device.h"
#include "test/cuda_test_driver.h"
#include "test/emulated_driver/emulated_driver.h"

namespace ringfold::test {

inline bool real_driver() {
  const char* const value = std::getenv("RINGFOLD_TEST_DRIVER");
  return value != nullptr && std::strcmp(value, "real") == 0;
}

inline void* real_function(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return library == nullptr ? nullptr : dlsym(library, name);
}

// A driver, initialised, with its context current in this thread. Gives out device memory
// from one allocation: others, and releases, may wait for what runs on the device, and so for a
// rank that has not come so far because it waits for one of them.
class CudaWorld {
 public:
  explicit CudaWorld(const EmulatedOptions& options = {}, int device = 0)
      : emulated_(real_driver() ? nullptr : std::make_unique<EmulatedDriver>(options)),
        driver_(test_driver(real_driver() ? real_function : emulated_function)),
        last_(true) {
    REQUIRE(driver_.cuInit(0) == CUDA_SUCCESS);
    begin(device);
  }
  // Another device of the driver of `first`, which lives longer.
  CudaWorld(const CudaWorld& first, int device) : driver_(first.driver_), last_(false) {
    begin(device);
  }
  ~CudaWorld() {
    driver_.cuCtxSetCurrent(context_);
    driver_.cuMemFree(device_);
    driver_.cuMemFree(managed_);
    driver_.cuCtxSetCurrent(nullptr);
    emulated_.reset();
    if (last_) cuda::forget_devices();
  }
  CudaWorld(const CudaWorld&) = delete;
  CudaWorld& operator=(const CudaWorld&) = delete;

  // Makes the context current in a further thread.
  void enter() const { (void)driver_.cuCtxSetCurrent(context_); }
  // `bytes` of device or managed memory, until the world ends.
  [[nodiscard]] CUdeviceptr take(size_t bytes, bool managed) const {
    const size_t begin =
        (managed ? managed_used_ : device_used_).fetch_add((bytes + 511) / 512 * 512);
    if (begin + bytes > kPool) std::abort();
    return (managed ? managed_ : device_) + begin;
  }
  [[nodiscard]] CUcontext context() const { return context_; }
  [[nodiscard]] const TestDriver& driver() const { return driver_; }

 private:
  static constexpr size_t kPool = size_t{256} << 20;  // of addresses; memory where it is touched

  void begin(int device) {
    REQUIRE(driver_.cuDevicePrimaryCtxRetain(&context_, device) == CUDA_SUCCESS);
    enter();
    REQUIRE(driver_.cuMemAlloc(&device_, kPool) == CUDA_SUCCESS);
    REQUIRE(driver_.cuMemAllocManaged(&managed_, kPool, CU_MEM_ATTACH_GLOBAL) == CUDA_SUCCESS);
  }
  std::unique_ptr<EmulatedDriver> emulated_;
  TestDriver driver_;
  const bool last_;  // to end
  CUcontext context_ = nullptr;
  CUdeviceptr device_ = 0, managed_ = 0;
  mutable std::atomic<size_t> device_used_{0}, managed_used_{0};
};

// A stream that synchronises with the legacy stream, as cudaStreamCreate() makes it.
class CudaStream {
 public:
  explicit CudaStream(const CudaWorld& world) : world_(world) {
    if (cuda::call().cuStreamCreate(&stream_, CU_STREAM_DEFAULT) != CUDA_SUCCESS) std::abort();
  }
  ~CudaStream() { (void)world_.driver().cuStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  [[nodiscard]] CUstream get() const { return stream_; }
  void wait() const {
    if (world_.driver().cuStreamSynchronize(stream_) != CUDA_SUCCESS) std::abort();
  }

 private:
  const CudaWorld& world_;
  CUstream stream_ = nullptr;
};

// Device memory, `phase` bytes behind where an allocation begins.
class Memory {
 public:
  Memory(const CudaWorld& world, size_t bytes, size_t phase = 0, bool managed = false)
      : world_(world), phase_(phase), begin_(world.take(bytes + phase, managed)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] void* get() const { return reinterpret_cast<void*>(begin_ + phase_); }

  // Puts the elements there, in the order of the stream; waits for nothing.
  template <class T>
  void set(const CudaStream& stream, const std::vector<T>& from) const {
    if (from.empty()) return;
    if (world_.driver().cuMemcpyHtoDAsync(begin_ + phase_, from.data(), from.size() * sizeof(T),
                                          stream.get()) != CUDA_SUCCESS)
      std::abort();
  }
  // What is there when the stream has come so far.
  template <class T>
  [[nodiscard]] std::vector<T> get(const CudaStream& stream, size_t count) const {
    std::vector<T> to(count);
    if (count > 0 &&
        world_.driver().cuMemcpyDtoHAsync(to.data(), begin_ + phase_, count * sizeof(T),
                                          stream.get()) != CUDA_SUCCESS)
      std::abort();
    stream.wait();
    return to;
  }

 private:
  const CudaWorld& world_;
  const size_t phase_;
  const CUdeviceptr begin_;
};

}  // namespace ringfold::test
