// How device memory travels between processes and devices: chosen by what can be had, each way by
// force, and every way with the same bits, in stream order, through failures and graphs.
#include <array>
#include <atomic>
#include <catch2/catch.hpp>

#include "test/cuda_collectives.h"
#include "test/environment.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

Options with(std::string_view way, size_t piece = 0, Nanoseconds timeout = 20s) {
  Options options;
  options.transports = "loopback,shm,ucx";  // the host's results by messages, too
  options.timeout = timeout;
  options.piece_bytes = piece;
  options.cuda_path = way;
  return options;
}

// Ranks as processes, each with the devices of `options`, on device `device_of(rank)`.
std::string run_device_processes(int ranks, const Options& options,
                                 const std::function<int(int)>& device_of,
                                 const EmulatedOptions& emulated,
                                 const std::function<void(const CudaRank&)>& body) {
  return run_ranks(ranks, 60s, [&](const Rendezvous& where) {
    EmulatedOptions own = emulated;
    own.seed += static_cast<uint64_t>(where.rank);
    const CudaWorld world(own, device_of(where.rank));
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    const CudaStream stream(world);
    Problems problems;
    body({world, *comm, stream, problems});
    RANK_CHECK(problems.text() == "");
    return 0;
  });
}

int device_0(int) {
  return 0;
}

Work sum(const CudaRank& me, const Memory& memory, size_t count) {
  return me.comm.all_reduce(memory.get(), memory.get(), count, DType::i32, Op::sum, me.handle());
}

// By which transports the collectives on device memory go.
std::string way_of(const CudaRank& me) {
  const Memory memory(me.world, 400);
  memory.set(me.stream, std::vector<int32_t>(100, 1));
  Work work = sum(me, memory, 100);
  me.problems.ok(work.wait(), "a first sum");
  return work.report().transport;
}

}  // namespace

TEST_CASE("between processes: every way gives the bits of host memory") {
  const std::string way = GENERATE("direct", "staged");
  const int ranks = GENERATE(2, 3, 4);
  Environment environment;  // checksums are for what the host can read
  if (ranks == 3) environment.set("RINGFOLD_VERIFY", "1");
  if (real_driver() && ranks > 2) return;  // of one device they take turns
  EmulatedOptions emulated = roomy(static_cast<uint64_t>(ranks));
  emulated.devices = 2;
  const auto by_turns = [](int rank) { return real_driver() ? 0 : rank % 2; };
  const auto problems =
      run_device_processes(ranks, with(way, 4096), by_turns, emulated, [&](const CudaRank& me) {
        me.problems.check(way_of(me) == (way == "staged" ? "shm" : way), "way");
        for (const Kind& kind : kKinds) {
          check_like_host(me, kind, {DType::f32, Op::sum, 0, 0});
          check_like_host(me, kind, {DType::f32, Op::sum, 1, 0});
          check_like_host(me, kind, {DType::bf16, Op::avg, 777, me.comm.size() - 1}, 2);
          check_like_host(me, kind, {DType::i64, {Op::premul_sum, 3}, 10'000, 0}, 8);
        }
        if (real_driver()) return;
        // Between processes all of it went by the other's memory, or none.
        const auto traffic = EmulatedDriver::traffic();
        me.problems.check((traffic.read_others != 0) == (way == "direct"), "read from others");
        me.problems.check((traffic.read_pinned != 0) == (way == "staged"), "read from pinned");
        me.problems.check(EmulatedDriver::opened() == (way == "direct" ? ranks - 1 : 0), "opened");
      });
  CHECK(problems == "");
}

TEST_CASE("all algorithms, long messages and several devices of one process") {
  if (real_driver()) return skip("of the emulated driver");
  EmulatedOptions emulated = roomy();
  emulated.devices = 2;
  const CudaWorld first(emulated), second(first, 1);
  first.enter();
  for (const Algorithm algorithm :
       {Algorithm::ring, Algorithm::halving_doubling, Algorithm::recursive_doubling}) {
    Options options = with("direct", 32 << 10);
    options.algorithm = algorithm;
    Problems problems;
    const uint16_t port = free_port();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 4; ++rank)
      threads.emplace_back([&, rank] {
        const CudaWorld& world = rank % 2 == 1 ? second : first;
        world.enter();
        Rendezvous where;
        where.rank = rank;
        where.size = 4;
        where.coordinator = fmt::format("127.0.0.1:{}", port);
        where.secret = "a secret";
        auto comm = Communicator::create(where, options);
        problems.ok(comm.status(), "create");
        if (!comm.ok()) return;
        const CudaStream stream(world);
        const CudaRank me{world, *comm, stream, problems};
        problems.check(way_of(me) == "direct", "way");
        for (const Kind& kind : kKinds) check_like_host(me, kind, {DType::f32, Op::sum, 70'001, 1});
        check_like_host(me, kKinds[0], {DType::f16, Op::avg, 400'001, 0}, 2);
        // In place, and each sends what it receives.
        const Memory memory(world, 400'000);
        memory.set(stream, std::vector<int32_t>(100'000, 1));
        problems.ok(sum(me, memory, 100'000).wait(), "in place");
        problems.check(memory.get<int32_t>(stream, 100'000) == std::vector<int32_t>(100'000, 4),
                       "in place");
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(problems.text() == "");
  }
}

TEST_CASE("users' memory may be of a kind that cannot be shared") {
  const auto problems =
      run_device_processes(2, with("direct"), device_0, roomy(), [](const CudaRank& me) {
        CUdeviceptr memory = 0;
        me.problems.check(
            me.world.driver().cuMemAllocAsync(&memory, 4000, me.stream.get()) == CUDA_SUCCESS,
            "cuMemAllocAsync");
        (void)me.world.driver().cuMemsetD8Async(memory, 1, 4000, me.stream.get());
        me.problems.ok(
            me.comm
                .all_reduce(reinterpret_cast<void*>(memory), reinterpret_cast<void*>(memory), 4000,
                            DType::i8, Op::sum, me.handle())
                .wait(),
            "sum");
        std::vector<int8_t> got(4000);
        (void)me.world.driver().cuMemcpyDtoHAsync(got.data(), memory, 4000, me.stream.get());
        me.stream.wait();
        me.problems.check(got == std::vector<int8_t>(4000, 2), "result");
      });
  CHECK(problems == "");
}

// ---- the choice -------------------------------------------------------------------------------

TEST_CASE("a way that cannot be had: auto takes the next, force says what is missing") {
  if (real_driver()) return skip("of the emulated driver");
  struct Lack {
    const char* way;
    bool ipc, peer_access;
    const char* missing;
  };
  const auto lack = GENERATE(Lack{"direct", false, true, "exporting device memory"},
                             Lack{"direct", true, false, "mapping another process's device memory"},
                             Lack{"ucx", true, true, "not both have a UCX that moves device"});
  EmulatedOptions emulated = roomy();
  emulated.devices = 2;
  emulated.ipc = lack.ipc;
  emulated.peer_access = lack.peer_access;
  const auto own_device = [](int rank) { return rank; };
  const auto refused =
      run_device_processes(2, with(lack.way), own_device, emulated, [&](const CudaRank& me) {
        const Memory memory(me.world, 400);
        const Status status = sum(me, memory, 100).wait();
        me.problems.check(status.code() == Code::unsupported, status.to_string());
        for (const std::string_view part :
             {std::string_view("RINGFOLD_CUDA_PATH="), std::string_view(lack.way),
              std::string_view("rank 0 to rank 1"), std::string_view(lack.missing)})
          me.problems.check(status.message().find(part) != std::string::npos, status.message());
        int32_t one = 1;  // host memory has no part in it
        me.problems.ok(me.comm.all_reduce(&one, &one, 1, DType::i32, Op::sum).wait(), "host");
        me.problems.check(one == 2, "host");
      });
  CHECK(refused == "");
  const auto taken =
      run_device_processes(2, with("auto"), own_device, emulated, [&](const CudaRank& me) {
        const bool direct = lack.ipc && lack.peer_access;
        me.problems.check(way_of(me) == (direct ? "direct" : "shm"), way_of(me));
      });
  CHECK(taken == "");
}

TEST_CASE("without a current context the ranks stage, or say which of them has none") {
  if (real_driver()) return skip("of the emulated driver");
  for (const std::string_view way : {"direct", "auto"}) {
    const std::string problems = run_ranks(2, 20s, [&](const Rendezvous& where) {
      const CudaWorld world(roomy());
      if (where.rank == 1) (void)world.driver().cuCtxSetCurrent(nullptr);
      auto comm = Communicator::create(where, with(way));
      if (!rank_ok(comm.status())) return 1;
      world.enter();
      const CudaStream stream(world);
      const Memory memory(world, 400);
      memory.set(stream, std::vector<int32_t>(100, 1));
      Problems ignored;
      Work work = sum({world, *comm, stream, ignored}, memory, 100);
      const Status status = work.wait();
      if (way == "auto") {
        rank_ok(status);
        RANK_CHECK(work.report().transport == "shm");
        return 0;
      }
      RANK_CHECK(status.code() == Code::unsupported);
      RANK_CHECK(status.message().find("rank 1 (process") != std::string::npos);
      RANK_CHECK(status.message().find("no CUDA context was current") != std::string::npos);
      return 0;
    });
    CHECK(problems == "");
  }
}

TEST_CASE("RINGFOLD_CUDA_PATH is read, must be a way, and the ranks must agree on it") {
  Environment environment;
  environment.set("RINGFOLD_CUDA_PATH", "pigeon");
  Rendezvous alone;
  const auto refused = Communicator::create(alone);
  REQUIRE(!refused.ok());
  CHECK(refused.status().message() ==
        "RINGFOLD_CUDA_PATH=\"pigeon\": expected auto, direct, ucx or staged");
  if (real_driver()) return skip("the rest is of the emulated driver");
  environment.set("RINGFOLD_CUDA_PATH", "staged");
  const auto staged = run_device_processes(2, with(""), device_0, roomy(), [](const CudaRank& me) {
    me.problems.check(way_of(me) == "shm", way_of(me));
  });
  CHECK(staged == "");
  environment.unset("RINGFOLD_CUDA_PATH");
  const std::string differ = run_ranks(2, 20s, [](const Rendezvous& where) {
    const auto comm = Communicator::create(where, with(where.rank == 0 ? "direct" : "staged"));
    RANK_CHECK(!comm.ok());
    RANK_CHECK(comm.status().message().find("cuda path") != std::string::npos);
    return 0;
  });
  CHECK(differ == "");
}

TEST_CASE("where memory is read directly, one rank's host memory is a mismatch that says so") {
  if (real_driver()) return skip("of the emulated driver");
  const auto problems =
      run_device_processes(2, with("direct"), device_0, roomy(), [](const CudaRank& me) {
        const Memory memory(me.world, 400);
        std::array<int32_t, 100> host{};
        const Status status =
            me.rank() == 0
                ? sum(me, memory, 100).wait()
                : me.comm.all_reduce(host.data(), host.data(), 100, DType::i32, Op::sum).wait();
        me.problems.check(status.code() == Code::mismatch, status.to_string());
        me.problems.check(status.message().find("100 elements on devices") != std::string::npos,
                          status.to_string());
        me.stream.wait();
      });
  CHECK(problems == "");
}

// ---- copies -----------------------------------------------------------------------------------

TEST_CASE("staged: a byte crosses the bus once a hop each way, and nothing is copied twice") {
  if (real_driver()) return skip("of the emulated driver");
  const int ranks = GENERATE(2, 4);
  Options options = with("staged", 8192);
  options.algorithm = Algorithm::ring;
  const auto problems =
      run_device_processes(ranks, options, device_0, roomy(), [&](const CudaRank& me) {
        const size_t n = me.size(), part = 16384;  // bytes: two pieces
        const Memory memory(me.world, n * part);
        memory.set(me.stream, std::vector<int32_t>(n * part / 4, 1));
        const auto before = EmulatedDriver::traffic();
        me.problems.ok(sum(me, memory, n * part / 4).wait(), "sum");
        me.problems.check(memory.get<int32_t>(me.stream, n * part / 4) ==
                              std::vector<int32_t>(n * part / 4, static_cast<int32_t>(n)),
                          "result");
        const auto after = EmulatedDriver::traffic();
        const auto parts = [&](uint64_t a, uint64_t b) {
          return static_cast<double>(b - a) / part;
        };
        // Every one of 2(n-1) parts that arrive is read from pinned memory once.
        me.problems.check(parts(before.read_pinned, after.read_pinned) == 2.0 * (n - 1),
                          fmt::format("{} parts read from pinned memory",
                                      parts(before.read_pinned, after.read_pinned)));
        // Written: the own part that is sent first; each sum; and nothing in the second half, where
        // what arrives is sent on from where it landed.
        me.problems.check(parts(before.written_pinned, after.written_pinned) == 1.0 + (n - 1),
                          fmt::format("{} parts written to pinned memory",
                                      parts(before.written_pinned, after.written_pinned)));
        // Device memory: the input is read once, and each part written that was added to or came.
        me.problems.check(parts(before.read_device, after.read_device) == n,
                          fmt::format("{} parts read from the device",
                                      parts(before.read_device, after.read_device)));
        me.problems.check(parts(before.written_device, after.written_device) == 2.0 * (n - 1),
                          fmt::format("{} parts written to the device",
                                      parts(before.written_device, after.written_device)));
      });
  CHECK(problems == "");
}

TEST_CASE("direct: a byte is read from its peer once a hop, and pinned memory sees none") {
  if (real_driver()) return skip("of the emulated driver");
  const int ranks = GENERATE(2, 4);
  Options options = with("direct", 8192);
  options.algorithm = Algorithm::ring;
  const auto problems =
      run_device_processes(ranks, options, device_0, roomy(), [&](const CudaRank& me) {
        const size_t n = me.size(), part = 16384;
        const Memory memory(me.world, n * part);
        const auto before = EmulatedDriver::traffic();
        me.problems.ok(sum(me, memory, n * part / 4).wait(), "sum");
        const auto after = EmulatedDriver::traffic();
        me.stream.wait();
        const auto parts = [&](uint64_t a, uint64_t b) {
          return static_cast<double>(b - a) / part;
        };
        const double hops = 2.0 * (n - 1);
        me.problems.check(after.read_pinned == before.read_pinned, "pinned read");
        me.problems.check(after.written_pinned == before.written_pinned, "pinned written");
        me.problems.check(
            parts(before.read_others, after.read_others) == hops,
            fmt::format("{} parts read from others", parts(before.read_others, after.read_others)));
        me.problems.check(parts(before.read_device, after.read_device) == n, "device read");
        // As when it is staged, and to a slot for each of 2(n-1) sends: by the same command.
        me.problems.check(parts(before.written_device, after.written_device) == 2 * hops,
                          fmt::format("{} parts written to the device",
                                      parts(before.written_device, after.written_device)));
      });
  CHECK(problems == "");
}

// ---- streams, communicators, graphs -----------------------------------------------------------

TEST_CASE("the default and the per-thread stream, several operations and communicators at once") {
  if (real_driver()) return skip("of the emulated driver");
  const auto problems =
      run_device_processes(2, with("direct"), device_0, roomy(), [](const CudaRank& me) {
        constexpr size_t kCount = 3000, kRounds = 5;
        auto second = me.comm.split(0, 0);
        me.problems.ok(second.status(), "split");
        if (!second.ok()) return;
        const std::array<CUstream, 4> streams = {nullptr, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD,
                                                 me.stream.get()};
        for (const CUstream stream : streams) {
          const Memory a(me.world, kCount * 4), b(me.world, kCount * 8);
          const std::vector<int32_t> ones(kCount, 1);
          const std::vector<int64_t> twos(kCount, 2);
          const auto copy_in = [&](const Memory& to, const void* from, size_t bytes) {
            (void)me.world.driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to.get()), from,
                                                      bytes, stream);
          };
          copy_in(a, ones.data(), kCount * 4);
          copy_in(b, twos.data(), kCount * 8);
          std::vector<Work> works;
          for (size_t round = 0; round < kRounds; ++round) {
            works.push_back(
                me.comm.all_reduce(a.get(), a.get(), kCount, DType::i32, Op::sum, {stream}));
            works.push_back(
                second->all_reduce(b.get(), b.get(), kCount, DType::i64, Op::sum, {stream}));
          }
          std::vector<int32_t> got_a(kCount);
          std::vector<int64_t> got_b(kCount);
          const auto copy_out = [&](void* to, const Memory& from, size_t bytes) {
            (void)me.world.driver().cuMemcpyDtoHAsync(to, reinterpret_cast<CUdeviceptr>(from.get()),
                                                      bytes, stream);
          };
          copy_out(got_a.data(), a, kCount * 4);
          copy_out(got_b.data(), b, kCount * 8);
          (void)me.world.driver().cuStreamSynchronize(stream);
          me.problems.check(got_a == std::vector<int32_t>(kCount, 1 << kRounds), "first");
          me.problems.check(got_b == std::vector<int64_t>(kCount, 2 << kRounds), "second");
          for (Work& work : works) {
            me.problems.ok(work.wait(), "one of many");
            me.problems.check(work.report().transport == "direct", "way");
          }
        }
      });
  CHECK(problems == "");
}

TEST_CASE("between processes: two communicators on two streams in opposite order") {
  if (real_driver()) return skip("of the emulated driver");
  const auto seed = static_cast<uint64_t>(GENERATE(range(1, 5)));
  const auto problems =
      run_device_processes(2, with("direct"), device_0, roomy(seed), [](const CudaRank& me) {
        constexpr size_t kCount = 3000;
        auto second = me.comm.split(0, 0);
        me.problems.ok(second.status(), "split");
        if (!second.ok()) return;
        const CudaStream other(me.world);
        const Memory a(me.world, kCount * 4), b(me.world, kCount * 8);
        a.set(me.stream, std::vector<int32_t>(kCount, 1));
        b.set(other, std::vector<int64_t>(kCount, 1));
        Work x, y;
        const auto on_first = [&] { x = sum(me, a, kCount); };
        if (me.rank() == 0) on_first();
        y = second->all_reduce(b.get(), b.get(), kCount, DType::i64, Op::sum, {other.get()});
        if (me.rank() == 1) on_first();
        me.problems.check(a.get<int32_t>(me.stream, kCount) == std::vector<int32_t>(kCount, 2),
                          "a");
        me.problems.check(b.get<int64_t>(other, kCount) == std::vector<int64_t>(kCount, 2), "b");
        me.problems.ok(x.wait(), "first");
        me.problems.ok(y.wait(), "second");
      });
  CHECK(problems == "");
}

TEST_CASE("captured collectives go directly while the pool has room, then staged, on all ranks") {
  if (real_driver()) return skip("of the emulated driver");
  const auto problems =
      run_device_processes(2, with("direct"), device_0, roomy(), [](const CudaRank& me) {
        constexpr size_t kCount = 4 << 20, kCalls = 3;  // elements; each takes most of the pool
        const Memory x(me.world, kCount * 4), small(me.world, 4000);
        x.set(me.stream, std::vector<int32_t>(kCount, 1));
        small.set(me.stream, std::vector<int32_t>(1000, 1));
        me.stream.wait();
        const auto& driver = me.world.driver();
        CUgraph graph = nullptr;
        CUgraphExec exec = nullptr;
        (void)driver.cuStreamBeginCapture(me.stream.get(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        me.problems.ok(sum(me, small, 1000).wait(), "capture");
        for (size_t i = 0; i < kCalls; ++i) me.problems.ok(sum(me, x, kCount).wait(), "capture");
        (void)driver.cuStreamEndCapture(me.stream.get(), &graph);
        (void)driver.cuGraphInstantiate(&exec, graph, 0);
        (void)driver.cuGraphDestroy(graph);
        const auto before = EmulatedDriver::traffic();
        for (int replay = 1; replay <= 2; ++replay) {
          (void)driver.cuGraphLaunch(exec, me.stream.get());
          if (replay == 1) me.problems.ok(sum(me, small, 1000).wait(), "between replays");
        }
        me.problems.check(small.get<int32_t>(me.stream, 1000) == std::vector<int32_t>(1000, 8),
                          "small");
        me.problems.check(x.get<int32_t>(me.stream, 10) == std::vector<int32_t>(10, 64), "x");
        const auto after = EmulatedDriver::traffic();
        me.problems.check(after.read_others > before.read_others, "some directly");
        me.problems.check(after.read_pinned > before.read_pinned, "some staged");
        me.problems.ok(me.comm.barrier().wait(), "barrier");
        (void)driver.cuGraphExecDestroy(exec);
      });
  CHECK(problems == "");
}

// ---- failures ---------------------------------------------------------------------------------

TEST_CASE(
    "between processes: a rank is killed while its memory is read; the others' streams pass") {
  if (real_driver()) return skip("of the emulated driver");
  const std::string way = GENERATE("direct", "staged");
  const auto seed = static_cast<uint64_t>(GENERATE(range(1, 4)));
  const Shared<std::atomic<int>> in_the_middle;
  Processes processes(3, [&](const Rendezvous& where) {
    EmulatedOptions options = roomy(seed + static_cast<uint64_t>(where.rank));
    const CudaWorld world(options);
    auto comm = Communicator::create(where, with(way, 4096, 30s));
    if (!rank_ok(comm.status())) return 1;
    const CudaStream stream(world);
    constexpr size_t kCount = 1 << 18;
    const Memory memory(world, kCount * 4);
    Status status;
    for (int round = 0; status.ok() && round < 10000; ++round) {
      if (round == 2) ++*in_the_middle;
      status =
          comm->all_reduce(memory.get(), memory.get(), kCount, DType::i32, Op::sum, {stream.get()})
              .wait();
    }
    RANK_CHECK(status.code() == Code::peer_lost);
    stream.wait();
    memory.set(stream, std::vector<int32_t>(10, 4));
    RANK_CHECK(memory.get<int32_t>(stream, 1)[0] == 4);
    return 0;
  });
  while (*in_the_middle < 3) std::this_thread::sleep_for(100us);
  std::this_thread::sleep_for(std::chrono::microseconds(seed * 1700));
  processes.kill(2);
  const auto outcomes = processes.wait(20s);
  CHECK(outcomes[0].to_string() == "ok");
  CHECK(outcomes[1].to_string() == "ok");
  CHECK(outcomes[2].signal == SIGKILL);
}

TEST_CASE("between processes: an abort in mid-flight, and a new communicator afterwards") {
  if (real_driver()) return skip("of the emulated driver");
  const auto seed = static_cast<uint64_t>(GENERATE(range(1, 4)));
  const auto problems = run_device_processes(
      3, with("direct", 4096), device_0, roomy(seed), [seed](const CudaRank& me) {
        constexpr size_t kCount = 1 << 18;
        const Memory memory(me.world, kCount * 4);
        {
          auto second = me.comm.split(0, 0);
          me.problems.ok(second.status(), "split");
          if (!second.ok()) return;
          Status status;
          std::thread abort([&] {
            if (me.rank() != seed % 3) return;
            std::this_thread::sleep_for(std::chrono::microseconds(1000 + seed * 700));
            second->abort("enough");
          });
          while (status.ok())
            status = second
                         ->all_reduce(memory.get(), memory.get(), kCount, DType::i32, Op::sum,
                                      me.handle())
                         .wait();
          me.problems.check(status.code() == Code::aborted, status.to_string());
          me.stream.wait();
          abort.join();
        }
        // Pools that were in use then are given out anew.
        auto third = me.comm.split(0, 0);
        me.problems.ok(third.status(), "split again");
        if (!third.ok()) return;
        memory.set(me.stream, std::vector<int32_t>(kCount, 1));
        me.problems.ok(
            third->all_reduce(memory.get(), memory.get(), kCount, DType::i32, Op::sum, me.handle())
                .wait(),
            "anew");
        me.problems.check(memory.get<int32_t>(me.stream, kCount) == std::vector<int32_t>(kCount, 3),
                          "result");
      });
  CHECK(problems == "");
}

TEST_CASE("communicators come and go: pools are used again, and nothing piles up") {
  if (real_driver()) return skip("of the emulated driver");
  const auto problems =
      run_device_processes(2, with("direct"), device_0, roomy(), [](const CudaRank& me) {
        size_t bytes = 0;
        for (int i = 0; i < 10; ++i) {
          auto other = me.comm.split(0, 0);
          me.problems.ok(other.status(), "split");
          if (!other.ok()) return;
          const Memory memory(me.world, 4000);
          memory.set(me.stream, std::vector<int32_t>(1000, 1));
          me.problems.ok(
              other->all_reduce(memory.get(), memory.get(), 1000, DType::i32, Op::sum, me.handle())
                  .wait(),
              "sum");
          me.problems.check(memory.get<int32_t>(me.stream, 1000) == std::vector<int32_t>(1000, 2),
                            "result");
          if (i == 2) bytes = EmulatedDriver::device_bytes();
        }
        me.problems.check(EmulatedDriver::device_bytes() == bytes, "device memory");
        me.problems.check(EmulatedDriver::opened() <= 3,
                          fmt::format("{} mappings", EmulatedDriver::opened()));
      });
  CHECK(problems == "");
}
