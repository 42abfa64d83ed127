// Device memory that processes share: the traps of CUDA's IPC as the emulated driver sets them, and
// what the library makes of it.
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <cstring>
#include <thread>

#include "lib/cuda/pool.h"
#include "test/cuda_device.h"
#include "test/emulated_driver/state.h"
#include "test/processes.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;
using cuda::call;

namespace {

constexpr unsigned kLazy = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;

// What two ranks tell each other.
struct Board {
  std::atomic<int> stage{0};
  CUipcMemHandle handle{}, second{};
  cuda::Offer offer;
  CUdeviceptr base = 0;
  void wait_for(int s) const {
    while (stage.load() < s) std::this_thread::sleep_for(50us);
  }
};

// Of a process of its own, which says whether its end was `signal`.
bool ends_by(int signal, const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);
    std::signal(SIGSEGV, SIG_DFL);
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(2);
    body();
    _exit(0);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == signal;
}

}  // namespace

TEST_CASE("a handle: for whole allocations of cuMemAlloc, not for the process that made it") {
  if (real_driver()) return skip("of the emulated driver");
  const CudaWorld world;
  CUdeviceptr memory = 0, pooled = 0, managed = 0, base = 0;
  size_t bytes = 0;
  REQUIRE(call().cuMemAlloc(&memory, 5000) == CUDA_SUCCESS);
  REQUIRE(world.driver().cuMemAllocAsync(&pooled, 5000, nullptr) == CUDA_SUCCESS);
  REQUIRE(world.driver().cuMemAllocManaged(&managed, 5000, CU_MEM_ATTACH_GLOBAL) == CUDA_SUCCESS);
  CUipcMemHandle handle;
  CHECK(call().cuIpcGetMemHandle(&handle, memory) == CUDA_SUCCESS);
  CHECK(call().cuIpcGetMemHandle(&handle, memory + 512) == CUDA_ERROR_INVALID_VALUE);
  CHECK(call().cuMemGetAddressRange(&base, &bytes, memory + 512) == CUDA_SUCCESS);
  CHECK(base == memory);
  CHECK(bytes >= 5000);
  CHECK(call().cuIpcGetMemHandle(&handle, pooled) == CUDA_ERROR_INVALID_VALUE);
  CHECK(call().cuIpcGetMemHandle(&handle, managed) == CUDA_ERROR_INVALID_VALUE);
  REQUIRE(call().cuIpcGetMemHandle(&handle, memory) == CUDA_SUCCESS);
  CUdeviceptr opened = 0;
  CHECK(call().cuIpcOpenMemHandle(&opened, handle, kLazy) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(EmulatedDriver::opened() == 0);
}

TEST_CASE("what one process writes, another reads; a handle is opened once and closed once") {
  if (real_driver()) return skip("of the emulated driver");
  const Shared<Board> board;
  const std::string problems = run_ranks(2, 20s, [&board](const Rendezvous& where) {
    const CudaWorld world;
    const CudaStream stream(world);
    if (where.rank == 0) {
      const Memory memory(world, 4096, 512);
      memory.set(stream, std::vector<int32_t>(100, 17));
      stream.wait();
      const auto here = reinterpret_cast<CUdeviceptr>(memory.get());
      RANK_CHECK(call().cuMemGetAddressRange(&board->base, nullptr, here) == CUDA_SUCCESS);
      RANK_CHECK(call().cuIpcGetMemHandle(&board->handle, board->base) == CUDA_SUCCESS);
      board->base = here - board->base;
      board->stage = 1;
      board->wait_for(2);
      // Nobody may free it now.
      RANK_CHECK(ends_by(SIGABRT, [&] { (void)world.driver().cuMemFree(here - board->base); }));
      board->stage = 3;
      board->wait_for(4);
      return 0;
    }
    board->wait_for(1);
    CUdeviceptr opened = 0, again = 0;
    RANK_CHECK(call().cuIpcOpenMemHandle(&opened, board->handle, kLazy) == CUDA_SUCCESS);
    RANK_CHECK(call().cuIpcOpenMemHandle(&again, board->handle, kLazy) ==
               CUDA_ERROR_ALREADY_MAPPED);
    std::vector<int32_t> got(100);
    const auto read = [&] {
      return world.driver().cuMemcpyDtoHAsync(got.data(), opened + board->base, 400, stream.get());
    };
    RANK_CHECK(read() == CUDA_SUCCESS);
    stream.wait();
    RANK_CHECK(got == std::vector<int32_t>(100, 17));
    board->stage = 2;
    board->wait_for(3);
    RANK_CHECK(call().cuIpcCloseMemHandle(opened) == CUDA_SUCCESS);
    RANK_CHECK(call().cuIpcCloseMemHandle(opened) == CUDA_ERROR_INVALID_VALUE);
    // Whoever reads on is found out.
    RANK_CHECK(ends_by(SIGABRT, [&] { emulated::reach(reinterpret_cast<void*>(opened)); }));
    board->stage = 4;
    return 0;
  });
  CHECK(problems == "");
}

TEST_CASE("a device opens a handle once however often it is asked, and closes what nobody uses") {
  if (real_driver()) return skip("of the emulated driver");
  const Shared<Board> board;
  const std::string problems = run_ranks(2, 20s, [&board](const Rendezvous& where) {
    const CudaWorld world;
    const auto device = cuda::Device::of(world.context());
    if (!rank_ok(device.status())) return 1;
    if (where.rank == 0) {
      for (CUipcMemHandle* handle : {&board->handle, &board->second}) {
        CUdeviceptr memory = 0;
        RANK_CHECK(call().cuMemAlloc(&memory, 4096) == CUDA_SUCCESS);
        RANK_CHECK(call().cuIpcGetMemHandle(handle, memory) == CUDA_SUCCESS);
      }
      board->stage = 1;
      board->wait_for(2);
      return 0;
    }
    board->wait_for(1);
    const auto one = (*device)->open(board->handle), two = (*device)->open(board->handle);
    RANK_CHECK(one.ok());
    RANK_CHECK(two.ok());
    if (one.ok() && two.ok()) RANK_CHECK(*one == *two);
    RANK_CHECK(EmulatedDriver::opened() == 1);
    (*device)->close(board->handle);
    rank_ok((*device)->open(board->second).status());
    RANK_CHECK(EmulatedDriver::opened() == 2);  // the first has a user left
    (*device)->close(board->handle);
    RANK_CHECK(EmulatedDriver::opened() == 2);  // closing calls no driver
    rank_ok((*device)->open(board->second).status());
    RANK_CHECK(EmulatedDriver::opened() == 1);
    rank_ok((*device)->open(board->handle).status());
    RANK_CHECK(EmulatedDriver::opened() == 2);
    board->stage = 2;
    return 0;
  });
  CHECK(problems == "");
}

TEST_CASE("a pool: part of an allocation, and reached by other processes where it lies") {
  if (real_driver()) return skip("of the emulated driver");
  const Shared<Board> board;
  const std::string problems = run_ranks(2, 20s, [&board](const Rendezvous& where) {
    const CudaWorld world;
    const auto device = cuda::Device::of(world.context());
    if (!rank_ok(device.status())) return 1;
    // So that the pool does not begin where its allocation does.
    auto chunk = (*device)->take_shared(size_t{192} << 20);
    rank_ok(chunk.status());
    (*device)->give_shared(*chunk);
    rank_ok((*device)->take_shared(640).status());
    auto pool = cuda::Pool::make();
    if (!rank_ok(pool.status())) return 1;
    RANK_CHECK((*pool)->offer().offset == 640);
    const CudaStream stream(world);
    if (where.rank == 0) {
      std::byte* const memory = (*pool)->take(400);
      const std::vector<int32_t> numbers(100, 23);
      (void)world.driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(memory), numbers.data(),
                                             400, stream.get());
      stream.wait();
      board->offer = (*pool)->offer();
      const auto own = (*pool)->reach(board->offer);  // within the process: as it is
      RANK_CHECK(own.ok());
      if (own.ok()) RANK_CHECK(*own == memory);
      board->stage = 1;
      board->wait_for(2);
      RANK_CHECK((*pool)->take(size_t{1} << 40) == nullptr);
      return 0;
    }
    board->wait_for(1);
    const auto theirs = (*pool)->reach(board->offer);
    if (!rank_ok(theirs.status())) return 1;
    std::vector<int32_t> got(100);
    (void)world.driver().cuMemcpyDtoHAsync(got.data(), reinterpret_cast<CUdeviceptr>(*theirs), 400,
                                           stream.get());
    stream.wait();
    RANK_CHECK(got == std::vector<int32_t>(100, 23));
    cuda::Offer none;
    std::strcpy(none.why.data(), "out of luck");
    RANK_CHECK((*pool)->reach(none).status().message() == "out of luck");
    board->stage = 2;
    return 0;
  });
  CHECK(problems == "");
}

TEST_CASE("devices of one process: access is enabled once, or refused with a reason") {
  if (real_driver()) return skip("of the emulated driver");
  EmulatedOptions options;
  options.devices = 2;
  options.peer_access = GENERATE(true, false);
  const CudaWorld first(options), second(first, 1);
  const auto other = cuda::Pool::make();
  first.enter();
  const auto pool = cuda::Pool::make();
  REQUIRE(other.ok());
  REQUIRE(pool.ok());
  for (int twice = 0; twice < 2; ++twice) {
    const auto reached = (*pool)->reach((*other)->offer());
    if (options.peer_access) {
      CHECK(reached.ok());
    } else {
      CHECK(reached.status().code() == Code::unsupported);
      CHECK(reached.status().message() == "CUDA device 0 cannot access device 1");
    }
  }
}
