// Measures what only a device can tell: kernels against a copy, and the round trip of a worker's
// command. Prints one JSON object. For tools/gpu_check.
//
//   cuda_measure [--emulated]    the emulated driver, with little work: to try the program itself
#include <dlfcn.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "lib/cuda/worker.h"
#include "test/cuda_test_driver.h"
#include "test/emulated_driver/emulated_driver.h"

using namespace ringfold;
using namespace ringfold::cuda;
using nlohmann::json;

namespace {

[[noreturn]] void give_up(const std::string& what) {
  fmt::print(stderr, "cuda_measure: {}\n", what);
  std::exit(1);
}

void need(CUresult result, const char* what) {
  if (Status status = check(result, what); !status.ok()) give_up(status.to_string());
}
void need(const Status& status) {
  if (!status.ok()) give_up(status.to_string());
}

void* in_library(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return library == nullptr ? nullptr : dlsym(library, name);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Gpu {
  test::TestDriver driver{};
  CUcontext context = nullptr;
  bool emulated = false;

  CUstream stream() const {
    CUstream stream = nullptr;
    need(call().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "stream");
    return stream;
  }
  CUdeviceptr memory(size_t bytes) const {
    CUdeviceptr memory = 0;
    need(driver.cuMemAlloc(&memory, bytes), "device memory");
    need(driver.cuMemsetD8Async(memory, 0, bytes, nullptr), "clearing");
    need(driver.cuStreamSynchronize(nullptr), "clearing");
    return memory;
  }
};

// Seconds of one of `repeats` runs on the stream, after one to warm up.
template <class Run>
double seconds_each(const Gpu& gpu, CUstream stream, int repeats, const Run& run) {
  run();
  need(gpu.driver.cuStreamSynchronize(stream), "warm-up");
  const double begin = now();
  for (int i = 0; i < repeats; ++i) run();
  need(gpu.driver.cuStreamSynchronize(stream), "measuring");
  return (now() - begin) / repeats;
}

// Bytes a second of each kernel, and of a copy on the device that moves as many.
json measure_kernels(const Gpu& gpu, Device& device) {
  const size_t bytes = gpu.emulated ? size_t{1} << 16 : size_t{256} << 20;
  const int repeats = gpu.emulated ? 1 : 20;
  const CUdeviceptr a = gpu.memory(bytes), b = gpu.memory(bytes), out = gpu.memory(bytes);
  const CUstream stream = gpu.stream();
  const double copy = 2 * static_cast<double>(bytes) / seconds_each(gpu, stream, repeats, [&] {
                        need(gpu.driver.cuMemcpyDtoDAsync(out, a, bytes, stream), "copy");
                      });
  json result = {{"copy_bytes_per_second", copy}, {"bytes", bytes}};
  for (int type = 0; type < kDTypes; ++type) {
    Command command;
    command.dtype = static_cast<DType>(type);
    command.a = reinterpret_cast<const void*>(a);
    command.b = reinterpret_cast<const void*>(b);
    command.out = reinterpret_cast<void*>(out);
    command.count = bytes / size_of(command.dtype);
    void* parameters[] = {&command};
    const unsigned blocks = gpu.emulated ? 2 : 1056;
    const double seconds = seconds_each(gpu, stream, repeats, [&] {
      need(call().cuLaunchKernel(device.reduce(command.dtype), blocks, 1, 1, kWorkerThreads, 1, 1,
                                 0, stream, parameters, nullptr),
           "launch");
    });
    const double rate = 3 * static_cast<double>(bytes) / seconds;
    result["sum"][std::string(name(command.dtype))] = {{"bytes_per_second", rate},
                                                       {"of_copy", rate / copy}};
  }
  for (const CUdeviceptr memory : {a, b, out}) need(gpu.driver.cuMemFree(memory), "free");
  need(gpu.driver.cuStreamDestroy(stream), "stream");
  return result;
}

// From posting a command of one element to seeing that it is done.
json measure_round_trip(const Gpu& gpu, Device& device) {
  const CUdeviceptr memory = gpu.memory(64);
  const CUstream stream = gpu.stream();
  std::vector<double> seconds(gpu.emulated ? 20 : 10'000);
  {
    Worker worker(device, stream);
    if (!worker.serve(true, DType::f32, 4)) give_up("serve");
    need(worker.launch(stream));
    while (!worker.begun()) std::this_thread::yield();
    Command command;
    command.a = command.b = reinterpret_cast<const void*>(memory);
    command.out = reinterpret_cast<void*>(memory + 32);
    command.count = 1;
    for (double& each : seconds) {
      Ticket ticket;
      const double begin = now();
      if (!worker.post(command, &ticket)) give_up("post");
      while (!worker.done(ticket)) {
      }
      each = now() - begin;
    }
    worker.release();
  }
  need(gpu.driver.cuStreamSynchronize(stream), "worker");
  need(gpu.driver.cuMemFree(memory), "free");
  need(gpu.driver.cuStreamDestroy(stream), "stream");
  std::ranges::sort(seconds);
  return {{"median_seconds", seconds[seconds.size() / 2]},
          {"p99_seconds", seconds[seconds.size() * 99 / 100]}};
}

json measure(Gpu& gpu, FindFunction find) {
  gpu.driver = test::test_driver(find);
  need(driver().status());
  need(gpu.driver.cuInit(0), "cuInit");
  CUdevice device_number = 0;
  need(gpu.driver.cuDeviceGet(&device_number, 0), "device 0");
  std::array<char, 256> name{};
  need(gpu.driver.cuDeviceGetName(name.data(), name.size(), device_number), "its name");
  need(gpu.driver.cuDevicePrimaryCtxRetain(&gpu.context, device_number), "its context");
  need(gpu.driver.cuCtxSetCurrent(gpu.context), "its context");
  const auto device = Device::of(gpu.context);
  need(device.status());
  const json result = {{"device", name.data()},
                       {"emulated", gpu.emulated},
                       {"kernels", measure_kernels(gpu, **device)},
                       {"command_round_trip", measure_round_trip(gpu, **device)}};
  need(gpu.driver.cuCtxSetCurrent(nullptr), "its context");
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  Gpu gpu;
  gpu.emulated = argc == 2 && std::strcmp(argv[1], "--emulated") == 0;
  if (argc > 2 || (argc == 2 && !gpu.emulated)) give_up("usage: cuda_measure [--emulated]");
  if (!gpu.emulated) {
    need(driver().status());
    fmt::print("{}\n", measure(gpu, in_library).dump(2));
    return 0;
  }
  test::EmulatedOptions options;
  options.hardware_queues = 8;
  options.resident_blocks = 64;
  const test::EmulatedDriver emulated(options);
  fmt::print("{}\n", measure(gpu, test::emulated_function).dump(2));
}
