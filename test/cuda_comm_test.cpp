// Collectives on device memory, on the emulated driver: the same bits as on host memory, in stream
// order, whatever the device is like.
#include <array>
#include <catch2/catch.hpp>
#include <optional>

#include "test/cuda_collectives.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// By messages on the host as well: a region rounds small floats once, not at every hop.
Options with(Nanoseconds timeout, size_t piece = 0) {
  Options options;
  options.transports = "loopback,shm,ucx";
  options.timeout = timeout;
  options.piece_bytes = piece;
  return options;
}

}  // namespace

TEST_CASE("every collective on device memory gives the bits it gives on host memory") {
  const auto seed = static_cast<uint64_t>(GENERATE(range(1, 5)));
  const int ranks = GENERATE(1, 2, 3, 4);
  const CudaWorld world(roomy(seed));
  const auto problems = run_cuda_ranks(world, ranks, with(20s, 4096), [](const CudaRank& me) {
    for (const Kind& kind : kKinds) {
      check_like_host(me, kind, {DType::f32, Op::sum, 0, 0});
      check_like_host(me, kind, {DType::f32, Op::sum, 1, 0});
      check_like_host(me, kind, {DType::bf16, Op::avg, 777, me.comm.size() - 1}, 2);
      check_like_host(me, kind, {DType::i64, Op::max, 10'000, 0}, 8);
    }
  });
  CHECK(problems == "");
}

TEST_CASE("all types and operations are reduced on the device as on the host") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 3, with(20s), [](const CudaRank& me) {
    for (int type = 0; type < kDTypes; ++type)
      for (int op = 0; op < kOps; ++op) {
        const double factor = 0.5 + static_cast<double>(me.rank());
        const Shape shape{static_cast<DType>(type), {static_cast<Op>(op), factor}, 500, 0};
        check_like_host(me, kKinds[0], shape);
        check_like_host(me, kKinds[1], shape);
      }
  });
  CHECK(problems == "");
}

TEST_CASE("long messages are cut into pieces and divided among lanes") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(20s, 256 << 10), [](const CudaRank& me) {
    for (const Kind& kind : kKinds) check_like_host(me, kind, {DType::f32, Op::sum, 400'001, 1}, 4);
  });
  CHECK(problems == "");
}

TEST_CASE("managed memory is device memory; memory that kernels cannot use is refused") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(20s), [](const CudaRank& me) {
    check_like_host(me, kKinds[0], {DType::f32, Op::sum, 1000, 0}, 0, true);
    const Memory device(me.world, 64);
    std::array<float, 16> host{};
    const Status status =
        me.comm.all_reduce(host.data(), device.get(), 16, DType::f32, Op::sum, me.handle()).wait();
    me.problems.check(status.code() == Code::invalid_argument,
                      "host and device memory in one call");
    me.problems.check(status.message().find("pinned") != std::string::npos, status.message());
    // Nothing was started: the ranks still agree.
    check_like_host(me, kKinds[0], {DType::f32, Op::sum, 100, 0});
  });
  CHECK(problems == "");
}

TEST_CASE("many calls in a row on one stream, none waited for") {
  const auto seed = static_cast<uint64_t>(GENERATE(range(1, 4)));
  const CudaWorld world(roomy(seed));
  const auto problems = run_cuda_ranks(world, 3, with(20s), [](const CudaRank& me) {
    constexpr size_t kCount = 5000;
    const Memory memory(me.world, kCount * 4);
    const std::vector<int32_t> ones(kCount, 1);
    memory.set(me.stream, ones);
    std::vector<Work> works;
    for (int i = 0; i < 15; ++i)
      works.push_back(
          me.comm.all_reduce(memory.get(), memory.get(), kCount, DType::i32, Op::sum, me.handle()));
    const auto result = memory.get<int32_t>(me.stream, kCount);
    for (Work& work : works) me.problems.ok(work.wait(), "one of many");
    me.problems.check(result == std::vector<int32_t>(kCount, 14348907), "3^15 expected");
  });
  CHECK(problems == "");
}

TEST_CASE("one communicator on several streams") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(20s), [](const CudaRank& me) {
    constexpr size_t kCount = 3000;
    std::vector<std::unique_ptr<CudaStream>> streams;
    std::vector<std::unique_ptr<Memory>> memories;
    std::vector<Work> works;
    const std::vector<int32_t> ones(kCount, 1);
    for (int i = 0; i < 6; ++i) {
      streams.push_back(std::make_unique<CudaStream>(me.world));
      memories.push_back(std::make_unique<Memory>(me.world, kCount * 4));
    }
    for (size_t i = 0; i < streams.size(); ++i) {
      memories[i]->set(*streams[i], ones);
      works.push_back(me.comm.all_reduce(memories[i]->get(), memories[i]->get(), kCount, DType::i32,
                                         Op::sum, {streams[i]->get()}));
    }
    for (size_t i = 0; i < streams.size(); ++i)
      me.problems.check(
          memories[i]->get<int32_t>(*streams[i], kCount) == std::vector<int32_t>(kCount, 2),
          "a stream of six");
    for (Work& work : works) me.problems.ok(work.wait(), "a stream of six");
  });
  CHECK(problems == "");
}

TEST_CASE("a device with room for one block and one queue is enough for one rank") {
  if (real_driver()) return skip("of the emulated driver");
  const std::string problems = run_ranks(2, 60s, [](const Rendezvous& where) {
    // Each process has its own device.
    EmulatedOptions options;
    options.seed = static_cast<uint64_t>(where.rank) + 1;
    options.hardware_queues = 1;
    options.resident_blocks = 1;
    const CudaWorld world(options);
    auto comm = Communicator::create(where, with(20s, 64 << 10));
    rank_ok(comm.status());
    if (!comm.ok()) return 1;
    const CudaStream stream(world);
    Problems problems;
    for (const Kind& kind : kKinds)
      check_like_host({world, *comm, stream, problems}, kind, {DType::f32, Op::sum, 100'001, 1}, 4);
    RANK_CHECK(problems.text() == "");
    return 0;
  });
  CHECK(problems == "");
}

TEST_CASE("ranks whose workers do not fit on their device together time out, and say so") {
  if (real_driver()) return skip("of the emulated driver");
  EmulatedOptions options = roomy();
  options.resident_blocks = 1;
  const CudaWorld world(options);
  const auto problems = run_cuda_ranks(world, 2, with(500ms), [](const CudaRank& me) {
    const Memory memory(me.world, 4000);
    const Status status =
        me.comm.all_reduce(memory.get(), memory.get(), 1000, DType::f32, Op::sum, me.handle())
            .wait();
    me.problems.check(status.code() == Code::timeout, status.to_string());
    me.stream.wait();
  });
  CHECK(problems == "");
}

// ---- groups -----------------------------------------------------------------------------------

TEST_CASE("a group of several types on several streams, the legacy one among them") {
  // Processes: ranks in one would share the legacy stream, and wait for each other there.
  const std::string problems = run_ranks(2, 60s, [](const Rendezvous& where) {
    const CudaWorld world(roomy(static_cast<uint64_t>(where.rank) + 1));
    auto comm = Communicator::create(where, with(20s));
    rank_ok(comm.status());
    if (!comm.ok()) return 1;
    constexpr size_t kCount = 2000;
    const CudaStream stream(world), other(world);
    const Memory a(world, kCount * 4), b(world, kCount * 8), c(world, kCount * 4);
    auto second = comm->split(0, 0);
    rank_ok(second.status());
    for (int round = 0; round < 5; ++round) {
      a.set(stream, std::vector<int32_t>(kCount, 1));
      b.set(stream, std::vector<int64_t>(kCount, 5));
      c.set(other, std::vector<int32_t>(kCount, 7));
      const Stream third = where.rank == 0 ? Stream{} : Stream{other.get()};
      Group group;
      // The communicators in opposite order on each rank: their workers must not wait for each
      // other.
      const auto on_first = [&] {
        comm->all_reduce(a.get(), a.get(), kCount, DType::i32, Op::sum, {stream.get()});
      };
      if (where.rank == 0) on_first();
      second->all_reduce(b.get(), b.get(), kCount, DType::i64, Op::sum, {stream.get()});
      if (where.rank == 1) on_first();
      comm->all_reduce(c.get(), c.get(), kCount, DType::i32, Op::max, third);
      rank_ok(group.submit().wait());
      RANK_CHECK(a.get<int32_t>(stream, kCount) == std::vector<int32_t>(kCount, 2));
      RANK_CHECK(b.get<int64_t>(stream, kCount) == std::vector<int64_t>(kCount, 10));
      RANK_CHECK(c.get<int32_t>(other, kCount) == std::vector<int32_t>(kCount, 7));
      // What the legacy stream of each rank begins with, the other rank has behind it.
      Group crossed;
      if (where.rank == 0) {
        second->all_reduce(c.get(), c.get(), kCount, DType::i32, Op::sum, {});
        comm->all_reduce(a.get(), a.get(), kCount, DType::i32, Op::sum, {stream.get()});
      } else {
        comm->all_reduce(a.get(), a.get(), kCount, DType::i32, Op::sum, {});
        second->all_reduce(c.get(), c.get(), kCount, DType::i32, Op::sum, {other.get()});
      }
      rank_ok(crossed.submit().wait());
      RANK_CHECK(a.get<int32_t>(stream, kCount) == std::vector<int32_t>(kCount, 4));
      RANK_CHECK(c.get<int32_t>(other, kCount) == std::vector<int32_t>(kCount, 14));
    }
    return 0;
  });
  CHECK(problems == "");
}

TEST_CASE("several ranks in one thread, on one stream and on streams of their own") {
  const bool shared = GENERATE(true, false);
  const auto seed = static_cast<uint64_t>(GENERATE(1, 2, 3));
  const CudaWorld world(roomy(seed));
  constexpr int kRanks = 3;
  constexpr size_t kCount = 4000;
  std::array<Communicator, kRanks> comms;
  {
    const uint16_t port = free_port();
    std::vector<Work> made;
    for (int rank = 0; rank < kRanks; ++rank) {
      Rendezvous where;
      where.rank = rank;
      where.size = kRanks;
      where.coordinator = fmt::format("127.0.0.1:{}", port);
      where.secret = "a secret";
      made.push_back(Communicator::create(where, with(20s), &comms[static_cast<size_t>(rank)]));
    }
    for (Work& work : made) REQUIRE(work.wait().ok());
  }
  std::vector<std::unique_ptr<CudaStream>> streams;
  std::vector<std::unique_ptr<Memory>> memories;
  for (int i = 0; i < kRanks; ++i) {
    streams.push_back(std::make_unique<CudaStream>(world));
    memories.push_back(std::make_unique<Memory>(world, kCount * 4));
  }
  const std::vector<int32_t> ones(kCount, 1);
  const auto stream_of = [&](size_t rank) -> const CudaStream& {
    return *streams[shared ? 0 : rank];
  };
  const int before = real_driver() ? 0 : EmulatedDriver::launches();
  for (int round = 0; round < 5; ++round) {
    for (size_t i = 0; i < kRanks; ++i) memories[i]->set(stream_of(i), ones);
    Group group;
    for (size_t i = 0; i < kRanks; ++i)
      comms[i].all_reduce(memories[i]->get(), memories[i]->get(), kCount, DType::i32, Op::sum,
                          {stream_of(i).get()});
    const Work all = group.submit();
    for (size_t i = 0; i < kRanks; ++i)
      CHECK(memories[i]->get<int32_t>(stream_of(i), kCount) ==
            std::vector<int32_t>(kCount, kRanks));
    CHECK(Work(all).wait().ok());
  }
  // One worker for each group and stream.
  if (!real_driver()) CHECK(EmulatedDriver::launches() - before == 5 * (shared ? 1 : kRanks));
}

// ---- messages ---------------------------------------------------------------------------------

TEST_CASE("messages between device buffers, and between device and host") {
  const auto seed = static_cast<uint64_t>(GENERATE(1, 2, 3));
  const CudaWorld world(roomy(seed));
  const auto problems = run_cuda_ranks(world, 2, with(20s, 4096), [](const CudaRank& me) {
    constexpr size_t kCount = 5000;
    const int peer = 1 - me.comm.rank();
    const Memory out(me.world, kCount * 4), in(me.world, kCount * 4);
    std::vector<int32_t> numbers(kCount), host(kCount);
    for (size_t i = 0; i < kCount; ++i) numbers[i] = static_cast<int32_t>(i * 10 + me.rank());
    std::vector<int32_t> expected(kCount);
    for (size_t i = 0; i < kCount; ++i)
      expected[i] = static_cast<int32_t>(i * 10 + static_cast<size_t>(peer));
    out.set(me.stream, numbers);
    {
      Group group;
      for (int i = 0; i < 4; ++i) {  // more than run at once, both ways
        me.comm.send(out.get(), kCount, DType::i32, peer, me.handle());
        me.comm.recv(in.get(), kCount, DType::i32, peer, me.handle());
      }
      me.problems.ok(group.submit().wait(), "messages");
    }
    me.problems.check(in.get<int32_t>(me.stream, kCount) == expected, "device to device");
    {
      Group group;
      me.comm.send(out.get(), kCount, DType::i32, peer, me.handle());
      me.comm.recv(host.data(), kCount, DType::i32, peer);
      me.problems.ok(group.submit().wait(), "messages to the host");
    }
    me.problems.check(host == expected, "device to host");
    const Memory mine(me.world, kCount * 4);
    const CudaStream other(me.world);
    Group group;
    me.comm.send(out.get(), kCount, DType::i32, me.comm.rank(), me.handle());
    me.comm.recv(mine.get(), kCount, DType::i32, me.comm.rank(), {other.get()});
    me.problems.ok(group.submit().wait(), "to myself");
    me.problems.check(mine.get<int32_t>(other, kCount) == numbers, "to myself");
  });
  CHECK(problems == "");
}

// ---- several communicators --------------------------------------------------------------------

// Of two types: kernels that were not loaded before would wait for each other at their first
// launch.
TEST_CASE("two communicators on two streams in opposite order") {
  const auto seed = static_cast<uint64_t>(GENERATE(range(1, 8)));
  const CudaWorld world(roomy(seed));
  const auto problems = run_cuda_ranks(world, 2, with(20s), [](const CudaRank& me) {
    constexpr size_t kCount = 3000;
    auto second = me.comm.split(0, 0);
    me.problems.ok(second.status(), "split");
    const CudaStream other(me.world);
    const Memory a(me.world, kCount * 4), b(me.world, kCount * 8);
    a.set(me.stream, std::vector<int32_t>(kCount, 1));
    b.set(other, std::vector<int64_t>(kCount, 1));
    Work x, y;
    const auto on_first = [&] {
      x = me.comm.all_reduce(a.get(), a.get(), kCount, DType::i32, Op::sum, me.handle());
    };
    const auto on_second = [&] {
      y = second->all_reduce(b.get(), b.get(), kCount, DType::i64, Op::sum, {other.get()});
    };
    if (me.rank() == 0) on_first();
    on_second();
    if (me.rank() == 1) on_first();
    me.problems.check(a.get<int32_t>(me.stream, kCount) == std::vector<int32_t>(kCount, 2), "a");
    me.problems.check(b.get<int64_t>(other, kCount) == std::vector<int64_t>(kCount, 2), "b");
    me.problems.ok(x.wait(), "first");
    me.problems.ok(y.wait(), "second");
  });
  CHECK(problems == "");
}
