// The table of the CUDA driver's functions, the emulated driver that takes its place in tests, and
// the worker kernel between the two.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "lib/cuda/worker.h"
#include "test/cuda_device.h"
#include "test/elements.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::cuda;
using test::Memory;

namespace {

void* nothing(const char*) {
  return nullptr;
}

// The emulated functions but one.
void* without_launch(const char* name) {
  return std::strcmp(name, "cuLaunchKernel") == 0 ? nullptr : test::emulated_function(name);
}

bool wait_until(const std::function<bool()>& done, Nanoseconds limit = std::chrono::seconds(10)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace

// ---- the table --------------------------------------------------------------------------------

TEST_CASE("without a driver the table says so") {
  replace_driver(nullptr);
  if (driver().ok()) return test::skip("this machine has a CUDA driver");
  CHECK(driver().status().code() == Code::unsupported);
  CHECK(driver().status().message().find("no CUDA driver") != std::string::npos);
  CHECK(driver().status().message().find("libcuda.so.1") != std::string::npos);
}

TEST_CASE("a driver that is too old, or lacks a function, is told apart") {
  if (test::real_driver()) return test::skip("of the emulated driver");
  test::EmulatedOptions old;
  old.version = 12080;
  {
    const test::EmulatedDriver emulated(old);
    REQUIRE_FALSE(driver().ok());
    CHECK(driver().status().message().find("CUDA 12.8") != std::string::npos);
    CHECK(driver().status().message().find("driver 580") != std::string::npos);
  }
  const test::EmulatedDriver emulated;
  REQUIRE(driver().ok());
  replace_driver(without_launch);
  REQUIRE_FALSE(driver().ok());
  CHECK(driver().status().message().find("cuLaunchKernel") != std::string::npos);
  replace_driver(nothing);
  REQUIRE_FALSE(driver().ok());
}

TEST_CASE("names are those of the version compiled against") {
  if (test::real_driver()) return test::skip("of the emulated driver");
  const test::EmulatedDriver emulated;
  CHECK(test::emulated_function("cuMemAlloc_v2") != nullptr);
  CHECK(test::emulated_function("cuMemAlloc") == nullptr);
}

// ---- the emulated driver ----------------------------------------------------------------------

TEST_CASE("the host cannot touch device memory") {
  if (test::real_driver()) return test::skip("of the emulated driver");
  const test::CudaWorld world;
  const Memory memory(world, 4096);
  // In a child of its own: it shall not live.
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    *static_cast<volatile char*>(memory.get()) = 1;
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGSEGV);
}

TEST_CASE("copies and kernels reach device memory, in stream order") {
  const test::CudaWorld world;
  const test::CudaStream stream(world);
  constexpr size_t kCount = 1000;
  std::vector<float> a(kCount), b(kCount, 0.5f);
  std::iota(a.begin(), a.end(), 0.0f);
  const Memory x(world, kCount * 4), y(world, kCount * 4), z(world, kCount * 4);
  x.set(stream, a);
  y.set(stream, b);
  const auto device = Device::of(world.context());
  REQUIRE(device.ok());
  Command command;
  command.a = x.get(), command.b = y.get(), command.out = z.get();
  command.count = kCount;
  void* parameters[] = {&command};
  REQUIRE(call().cuLaunchKernel((*device)->reduce(DType::f32), 3, 1, 1, kWorkerThreads, 1, 1, 0,
                                stream.get(), parameters, nullptr) == CUDA_SUCCESS);
  const auto result = z.get<float>(stream, kCount);
  for (size_t i = 0; i < kCount; ++i) REQUIRE(result[i] == a[i] + b[i]);
}

// On a real device this is what proves the conversions: each pattern of a small float, with others.
TEST_CASE("kernels on the device give the reference's bits") {
  const test::CudaWorld world;
  const test::CudaStream stream(world);
  const auto device = Device::of(world.context());
  REQUIRE(device.ok());
  constexpr size_t kCount = 3 << 16;
  for (int type = 0; type < kDTypes; ++type)
    for (int op = 0; op < kOps; ++op) {
      Command command;
      command.dtype = static_cast<DType>(type);
      command.op = static_cast<Op>(op);
      command.count = kCount;
      command.scale_a = command.op == Op::premul_sum ? 0.3 : 1.0;
      command.count_a = 2, command.count_b = 5, command.total = 7;
      const size_t element = size_of(command.dtype), bytes = kCount * element;
      std::vector<uint8_t> a(bytes), b(bytes), expected(bytes);
      test::fill_hashed(command.dtype, b.data(), kCount, 7);
      test::fill_hashed(command.dtype, a.data(), kCount, 8);
      for (size_t i = 0; i < kCount && element <= 2; ++i)
        std::memcpy(a.data() + i * element, &i, element);
      const Memory x(world, bytes), y(world, bytes), z(world, bytes);
      x.set(stream, a);
      y.set(stream, b);
      Command here = command;
      here.a = a.data(), here.b = b.data(), here.out = expected.data();
      reduce_reference(here);
      command.a = x.get(), command.b = y.get(), command.out = z.get();
      void* parameters[] = {&command};
      REQUIRE(call().cuLaunchKernel((*device)->reduce(command.dtype), 7, 1, 1, kWorkerThreads, 1, 1,
                                    0, stream.get(), parameters, nullptr) == CUDA_SUCCESS);
      INFO(name(command.dtype) << " " << name(command.op));
      CHECK((z.get<uint8_t>(stream, bytes) == expected));
    }
}

TEST_CASE("streams that share a hardware queue hold each other up, others do not") {
  if (test::real_driver()) return test::skip("of the emulated driver");
  const int queues = GENERATE(1, 8);
  test::EmulatedOptions options;
  options.hardware_queues = queues;
  const test::CudaWorld world(options);
  // With eight queues two of sixteen streams are apart from the first for certain, by any seed of
  // use.
  std::vector<std::unique_ptr<test::CudaStream>> streams;
  for (int i = 0; i < 16; ++i) streams.push_back(std::make_unique<test::CudaStream>(world));
  std::atomic<bool> release{false};
  std::atomic<int> passed{0};
  struct Shared {
    std::atomic<bool>& release;
    std::atomic<int>& passed;
  } shared{release, passed};
  const auto hold = [](void* data) {
    auto& s = *static_cast<Shared*>(data);
    while (!s.release) std::this_thread::sleep_for(std::chrono::microseconds(100));
  };
  const auto pass = [](void* data) { ++static_cast<Shared*>(data)->passed; };
  // The first stream is held, and something waits behind it on the same stream.
  REQUIRE(call().cuLaunchHostFunc(streams[0]->get(), hold, &shared) == CUDA_SUCCESS);
  REQUIRE(call().cuLaunchHostFunc(streams[0]->get(), pass, &shared) == CUDA_SUCCESS);
  for (size_t i = 1; i < streams.size(); ++i)
    REQUIRE(call().cuLaunchHostFunc(streams[i]->get(), pass, &shared) == CUDA_SUCCESS);
  if (queues == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    CHECK(passed == 0);
  } else {
    CHECK(wait_until([&] { return passed > 0; }));
    CHECK(passed < 16);
  }
  release = true;
  CHECK(wait_until([&] { return passed == 16; }));
}

TEST_CASE("the legacy stream waits for the others, and they for it") {
  test::EmulatedOptions options;
  options.hardware_queues = 8;
  const test::CudaWorld world(options);
  const test::CudaStream stream(world);
  const Memory memory(world, 4);
  const auto& driver = world.driver();
  const auto address = reinterpret_cast<CUdeviceptr>(memory.get());
  for (int round = 0; round < 20; ++round) {
    REQUIRE(driver.cuMemsetD8Async(address, 1, 4, stream.get()) == CUDA_SUCCESS);
    REQUIRE(driver.cuMemsetD8Async(address, 2, 4, nullptr) == CUDA_SUCCESS);
    REQUIRE(driver.cuMemsetD8Async(address, 3, 1, stream.get()) == CUDA_SUCCESS);
    const auto bytes = memory.get<uint8_t>(stream, 4);
    CHECK(bytes == std::vector<uint8_t>{3, 2, 2, 2});
  }
}

TEST_CASE("graphs replay, and what they own lives as long as they") {
  if (test::real_driver()) return test::skip("of the emulated driver");
  const test::CudaWorld world;
  const test::CudaStream stream(world);
  const Memory memory(world, 4);
  const auto& driver = world.driver();
  std::atomic<int> counter{0}, ended{0};
  const auto count = [](void* data) { ++*static_cast<std::atomic<int>*>(data); };
  REQUIRE(driver.cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
  CUstreamCaptureStatus status{};
  CUgraph graph = nullptr;
  REQUIRE(call().cuStreamGetCaptureInfo(stream.get(), &status, nullptr, &graph, nullptr, nullptr,
                                        nullptr) == CUDA_SUCCESS);
  CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  REQUIRE(call().cuLaunchHostFunc(stream.get(), count, &counter) == CUDA_SUCCESS);
  CUuserObject object = nullptr;
  REQUIRE(call().cuUserObjectCreate(&object, &ended, count, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) ==
          CUDA_SUCCESS);
  REQUIRE(call().cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE) ==
          CUDA_SUCCESS);
  void* pinned = nullptr;  // may wait for the device: not while a graph is captured
  CHECK(call().cuMemHostAlloc(&pinned, 64, 0) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  REQUIRE(driver.cuStreamEndCapture(stream.get(), &graph) == CUDA_SUCCESS);
  CHECK(counter == 0);
  CUgraphExec exec = nullptr;
  REQUIRE(driver.cuGraphInstantiate(&exec, graph, 0) == CUDA_SUCCESS);
  REQUIRE(driver.cuGraphDestroy(graph) == CUDA_SUCCESS);
  for (int i = 0; i < 3; ++i) REQUIRE(driver.cuGraphLaunch(exec, stream.get()) == CUDA_SUCCESS);
  REQUIRE(driver.cuStreamSynchronize(stream.get()) == CUDA_SUCCESS);
  CHECK(counter == 3);
  CHECK(ended == 0);
  REQUIRE(driver.cuGraphExecDestroy(exec) == CUDA_SUCCESS);
  CHECK(ended == 1);
  CHECK(test::EmulatedDriver::user_objects() == 0);
}

// ---- the worker kernel ------------------------------------------------------------------------

namespace {

Command sum_of(const Memory& a, const Memory& b, const Memory& out, size_t count) {
  Command command;
  command.dtype = DType::i32;
  command.a = a.get(), command.b = b.get(), command.out = out.get();
  command.count = count;
  return command;
}

}  // namespace

TEST_CASE("a worker opens its stream only when its operations are over, whatever is resident") {
  test::EmulatedOptions options;
  options.seed = GENERATE(range(1, 7));
  options.resident_blocks = GENERATE(1, 2, 8);
  const test::CudaWorld world(options);
  const test::CudaStream stream(world);
  const auto device = Device::of(world.context());
  REQUIRE(device.ok());
  constexpr size_t kCount = 300'000;
  std::vector<int32_t> ones(kCount, 1);
  const Memory a(world, kCount * 4), b(world, kCount * 4), out(world, kCount * 4);
  for (int launch = 1; launch <= 3; ++launch) {
    a.set(stream, ones);
    b.set(stream, ones);
    auto worker = std::make_unique<Worker>(**device, stream.get());
    REQUIRE(worker->serve(true, DType::i32, kCount * 4));
    CHECK_FALSE(worker->serve(true, DType::f32, 4));
    REQUIRE(worker->serve(false, DType::f32, 4));
    REQUIRE(worker->launch(stream.get()).ok());
    REQUIRE(wait_until([&] { return worker->begun(); }));
    // Doubles b: 2, 4, 8, ...
    for (int step = 0; step < 2 * static_cast<int>(kLaneCommands); ++step) {
      Ticket ticket;
      const Command command = step == 0 ? sum_of(a, b, b, kCount) : sum_of(b, b, b, kCount);
      REQUIRE(wait_until([&] { return worker->post(command, &ticket); }));
      REQUIRE(wait_until([&] { return worker->done(ticket); }));
    }
    Ticket last;
    Command copy = sum_of(b, b, out, kCount);
    copy.b = nullptr;
    copy.dtype = DType::u8;
    copy.count = kCount * 4;
    REQUIRE(worker->post(copy, &last));
    worker->release();
    worker->release();  // the second operation: now it ends, after what was posted
    const auto result = out.get<int32_t>(stream, kCount);
    CHECK(worker->done(last));
    for (const int32_t value : result) REQUIRE(value == 0);  // 2^32, wrapped
  }
}

TEST_CASE("many small commands fill the rings and lose nothing") {
  test::EmulatedOptions options;
  options.resident_blocks = GENERATE(1, 8);
  const test::CudaWorld world(options);
  const test::CudaStream stream(world);
  const auto device = Device::of(world.context());
  constexpr size_t kCount = 400;
  std::vector<int32_t> numbers(kCount);
  std::iota(numbers.begin(), numbers.end(), 0);
  const Memory a(world, kCount * 4), out(world, kCount * 4);
  a.set(stream, numbers);
  Worker worker(**device, stream.get());
  REQUIRE(worker.serve(true, DType::i32, size_t{1} << 20));
  REQUIRE(worker.launch(stream.get()).ok());
  REQUIRE(wait_until([&] { return worker.begun(); }));
  std::vector<Ticket> tickets(kCount);
  int refused = 0;
  for (size_t i = 0; i < kCount; ++i) {
    Command one;
    one.dtype = DType::i32;
    one.a = static_cast<std::byte*>(a.get()) + i * 4;
    one.b = one.a;
    one.out = static_cast<std::byte*>(out.get()) + i * 4;
    one.count = 1;
    REQUIRE(wait_until([&] {
      const bool posted = worker.post(one, &tickets[i]);
      refused += posted ? 0 : 1;
      return posted;
    }));
  }
  for (const Ticket& ticket : tickets) REQUIRE(wait_until([&] { return worker.done(ticket); }));
  worker.release();
  const auto result = out.get<int32_t>(stream, kCount);
  for (size_t i = 0; i < kCount; ++i) REQUIRE(result[i] == 2 * numbers[i]);
  CHECK(refused > 0);
}

TEST_CASE("a worker whose operations failed before the stream came to it lets the stream pass") {
  const test::CudaWorld world;
  const test::CudaStream stream(world);
  const auto device = Device::of(world.context());
  {
    Worker worker(**device, stream.get());
    REQUIRE(worker.serve(true, DType::f32, 4));
    REQUIRE(worker.launch(stream.get()).ok());
    worker.release();
  }
  CHECK(world.driver().cuStreamSynchronize(stream.get()) == CUDA_SUCCESS);
}

TEST_CASE("pinned memory is given out without overlap and comes back whole") {
  if (test::real_driver()) return test::skip("of the emulated driver");
  const test::CudaWorld world;
  const auto device = Device::of(world.context());
  const size_t before = test::EmulatedDriver::pinned_bytes();
  std::vector<std::byte*> taken;
  for (const size_t bytes : {100, 64, 5000, 1, 1 << 20}) {
    const auto memory = (*device)->take_pinned(bytes);
    REQUIRE(memory.ok());
    std::memset(*memory, static_cast<int>(taken.size()), bytes);
    taken.push_back(*memory);
  }
  for (size_t i = 0; i < taken.size(); ++i) CHECK(*taken[i] == static_cast<std::byte>(i));
  for (const size_t i : {1, 3, 0, 4, 2}) (*device)->give_pinned(taken[i]);
  const auto all = (*device)->take_pinned(size_t{64} << 20);  // in one piece again
  REQUIRE(all.ok());
  CHECK(test::EmulatedDriver::pinned_bytes() == before);
  (*device)->give_pinned(*all);
}
