#include "tools/bench_device.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "lib/cuda/path.h"
#include "tools/bench_subject.h"

namespace ringfold::tools {
namespace {

constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
using Address = unsigned long long;   // CUdeviceptr

// Calls a function of the driver by its name; -1 if it has none such.
template <class... Arguments>
int driver_call(const char* name, Arguments... arguments) {
  static void* const kLibrary = dlopen("libcuda.so.1", RTLD_NOW);
  if (kLibrary == nullptr) return -1;
  auto* const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(kLibrary, name));
  return function != nullptr ? function(arguments...) : -1;
}

Status checked(int result, const char* what) {
  if (result == 0) return {};
  return {Code::system, fmt::format("{}: CUDA error {}", what, result)};
}

Address address(const std::byte* memory) {
  return reinterpret_cast<Address>(memory);
}

}  // namespace

Result<std::unique_ptr<Gpu>> Gpu::open(int local_rank) {
  if (Status status = cuda::usable(); !status.ok()) return status;
  std::unique_ptr<Gpu> gpu(new Gpu);
  if (Status status = gpu->make(local_rank); !status.ok()) return status;
  return gpu;
}

Status Gpu::make(int local_rank) {
  int devices = 0, device = 0;
  if (driver_call("cuInit", 0U) != 0 || driver_call("cuDeviceGetCount", &devices) != 0 ||
      devices == 0)
    return {Code::unsupported, "the CUDA driver finds no device"};
  void* context = nullptr;
  int result = driver_call("cuDeviceGet", &device, local_rank % devices);
  if (result == 0) result = driver_call("cuDevicePrimaryCtxRetain", &context, device);
  if (result == 0) result = driver_call("cuCtxSetCurrent", context);
  if (Status status = checked(result, "the device's context"); !status.ok()) return status;
  result = driver_call("cuStreamCreate", &stream_, kNonBlocking);
  if (result == 0) result = driver_call("cuEventCreate", &begin_, 0U);
  if (result == 0) result = driver_call("cuEventCreate", &end_, 0U);
  return checked(result, "a stream and its events");
}

Gpu::~Gpu() {
  if (begin_ != nullptr) (void)driver_call("cuEventDestroy_v2", begin_);
  if (end_ != nullptr) (void)driver_call("cuEventDestroy_v2", end_);
  if (stream_ != nullptr) (void)driver_call("cuStreamDestroy_v2", stream_);
}

std::byte* Gpu::allocate(size_t bytes) const {
  Address memory = 0;
  must(checked(driver_call("cuMemAlloc_v2", &memory, bytes), "device memory"));
  return reinterpret_cast<std::byte*>(memory);  // NOLINT(performance-no-int-to-ptr)
}

void Gpu::free(std::byte* memory) const {
  if (memory != nullptr) (void)driver_call("cuMemFree_v2", address(memory));
}

void Gpu::upload(std::byte* to, const std::byte* from, size_t bytes) const {
  wait();
  must(checked(driver_call("cuMemcpyHtoD_v2", address(to), static_cast<const void*>(from), bytes),
               "a copy to the device"));
}

void Gpu::download(std::byte* to, const std::byte* from, size_t bytes) const {
  wait();
  must(checked(driver_call("cuMemcpyDtoH_v2", static_cast<void*>(to), address(from), bytes),
               "a copy from the device"));
}

void Gpu::wait() const {
  must(checked(driver_call("cuStreamSynchronize", stream_), "the stream"));
}

void Gpu::begin() const {
  must(checked(driver_call("cuEventRecord", begin_, stream_), "an event"));
}

double Gpu::end() const {
  float milliseconds = 0;
  must(checked(driver_call("cuEventRecord", end_, stream_), "an event"));
  must(checked(driver_call("cuEventSynchronize", end_), "the stream"));
  must(checked(driver_call("cuEventElapsedTime_v2", &milliseconds, begin_, end_), "a time"));
  return static_cast<double>(milliseconds) / 1e3;
}

}  // namespace ringfold::tools
