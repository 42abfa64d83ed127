// What becomes of the operations when a rank is late, dies, aborts or calls something else: N ranks
// in one thread and virtual time, from a seed that every failing case prints.
#include <fmt/core.h>

#include <catch2/catch.hpp>
#include <ctime>
#include <random>

#include "test/world.h"

using namespace ringfold;
using namespace ringfold::test;

namespace {

using Outcomes = std::vector<std::shared_ptr<Outcome>>;

// One int64 all-reduce in place on every rank of a communicator.
struct Sum {
  std::vector<std::vector<int64_t>> data;
  Outcomes outcomes;

  Sum(int ranks, size_t count) : data(static_cast<size_t>(ranks)) {
    for (size_t r = 0; r < data.size(); ++r)
      for (size_t i = 0; i < count; ++i)
        data[r].push_back(static_cast<int64_t>((r + 1) * 1000 + i));
  }
  [[nodiscard]] World::Call call(size_t rank, Algorithm algorithm = Algorithm::ring) {
    World::Call call;
    call.schedule.algorithm = algorithm;
    call.schedule.size = static_cast<int>(data.size());
    call.schedule.count = data[rank].size();
    call.piece = 16;
    call.input = data[rank].data();
    call.work = data[rank].data();
    return call;
  }
  void submit(World& world, size_t comm, int rank, Algorithm algorithm = Algorithm::ring) {
    outcomes.push_back(world.submit(comm, rank, call(static_cast<size_t>(rank), algorithm)));
  }
  [[nodiscard]] bool exact() const {
    const auto n = static_cast<int64_t>(data.size());
    for (const auto& mine : data)
      for (size_t i = 0; i < mine.size(); ++i)
        if (mine[i] != n * (n + 1) / 2 * 1000 + n * static_cast<int64_t>(i)) return false;
    return true;
  }
};

constexpr auto kLimit = std::chrono::seconds(100);

bool finish(World& world, const Outcomes& outcomes) {
  return world.run([&] { return World::all_done(outcomes); }, kLimit);
}

void check_all(const Outcomes& outcomes, Code code) {
  for (const auto& outcome : outcomes) {
    CHECK(outcome->status.code() == code);
    CHECK(outcome->status.message() == outcomes[0]->status.message());
  }
}

}  // namespace

TEST_CASE("a rank that never calls: a time-out on all others, in the same words") {
  World world(4, 7);
  const size_t comm = world.open_all();
  Sum sum(4, 100);
  for (const int r : {0, 1, 3}) sum.submit(world, comm, r);
  const Nanoseconds start = world.clock().now();
  REQUIRE(finish(world, sum.outcomes));
  CHECK(world.clock().now() - start < std::chrono::seconds(61));
  check_all(sum.outcomes, Code::timeout);
  CHECK(sum.outcomes[0]->status.message().find("all_reduce i64 sum of 100 elements") !=
        std::string::npos);
  CHECK(sum.outcomes[0]->status.message().find("from position") != std::string::npos);

  SECTION("the rank that comes too late hears of it as well") {
    Sum late(4, 100);
    late.submit(world, comm, 2);
    REQUIRE(finish(world, late.outcomes));
    CHECK(late.outcomes[0]->status.code() == Code::timeout);
  }
  SECTION("another communicator of the same ranks goes on") {
    const size_t other = world.open_all();
    Sum good(4, 1000);
    for (int r = 0; r < 4; ++r) good.submit(world, other, r);
    REQUIRE(finish(world, good.outcomes));
    check_all(good.outcomes, Code::ok);
    CHECK(good.exact());
  }
}

// Or its driver might go to sleep for long, with the operation still in hand.
TEST_CASE("a turn in which a deadline passes has moved, and the next one ends the operation") {
  World world(2, 7);
  const size_t comm = world.open_all();
  Sum sum(2, 100);
  sum.submit(world, comm, 0);
  world.settle(std::chrono::milliseconds(1));
  world.clock().pass(std::chrono::seconds(61));
  CHECK(world.engine(0).poll());
  while (world.engine(0).poll()) continue;
  CHECK(sum.outcomes[0]->status.code() == Code::timeout);
}

TEST_CASE("ranks that call different things: a mismatch on all of them, whoever is met first") {
  for (int odd = 0; odd < 4; ++odd) {
    for (const size_t count : {size_t{0}, size_t{99}, size_t{101}, size_t{5000}}) {
      World world(4, 11);
      const size_t comm = world.open_all();
      Sum sum(4, 100);
      sum.data[static_cast<size_t>(odd)].resize(count);
      for (int r = 0; r < 4; ++r) sum.submit(world, comm, r);
      INFO("rank " << odd << " calls with " << count << " elements");
      REQUIRE(finish(world, sum.outcomes));
      for (int r = 0; r < 4; ++r) CHECK(world.channel(comm, r).health().code() == Code::mismatch);
    }
  }
}

TEST_CASE("another algorithm, operation or collective is a mismatch too") {
  const std::string what = GENERATE("algorithm", "operation", "collective", "type");
  World world(5, 3);
  const size_t comm = world.open_all();
  Sum sum(5, 64);
  for (int r = 0; r < 5; ++r) {
    World::Call call = sum.call(static_cast<size_t>(r));
    if (r == 3 && what == "algorithm") call.schedule.algorithm = Algorithm::recursive_doubling;
    if (r == 3 && what == "operation") call.reduction = Op::max;
    if (r == 3 && what == "collective") {
      call.schedule.collective = Collective::all_gather;
      call.schedule.count = 60;
    }
    if (r == 3 && what == "type") call.type = DType::u64;
    sum.outcomes.push_back(world.submit(comm, r, call));
  }
  INFO("rank 3 differs in the " << what);
  REQUIRE(finish(world, sum.outcomes));
  for (int r = 0; r < 5; ++r) CHECK(world.channel(comm, r).health().code() == Code::mismatch);
}

TEST_CASE("a rank dies in mid-ring: all others lose it, and communicators without it go on") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Faults faults;
    faults.max_delay = std::chrono::milliseconds(2);
    World world(5, seed, faults);
    const size_t comm = world.open_all();
    const size_t without = world.open({0, 2, 3, 4});
    Sum sum(5, 4000);
    for (int r = 0; r < 5; ++r) sum.submit(world, comm, r);
    std::mt19937_64 random(seed);
    for (uint64_t rounds = random() % 400; rounds > 0; --rounds)
      if (!world.round()) world.clock().pass(std::chrono::microseconds(20));
    INFO("seed " << seed);
    if (sum.outcomes[1]->done) continue;  // too late
    world.hub().kill(1);
    world.pause(1);
    Outcomes others;
    for (const size_t r : {0, 2, 3, 4}) others.push_back(sum.outcomes[r]);
    REQUIRE(finish(world, others));
    bool any_lost = false;
    for (const auto& outcome : others) {
      CHECK((outcome->status.ok() || outcome->status.code() == Code::peer_lost));
      any_lost |= !outcome->status.ok();
    }
    CHECK(any_lost);
    Sum good(4, 1000);
    for (int r = 0; r < 4; ++r)
      good.outcomes.push_back(
          world.submit(without, r == 0 ? 0 : r + 1, good.call(static_cast<size_t>(r))));
    REQUIRE(finish(world, good.outcomes));
    check_all(good.outcomes, Code::ok);
    CHECK(good.exact());
    world.resume(1);
  }
}

TEST_CASE("a rank that dies after the first communicator was aborted is lost, not aborted") {
  World world(3, 6);
  const size_t first = world.open_all(), second = world.open_all();
  world.engine(0).fail(world.channel(first, 0).id, Status(Code::aborted, "enough"), true);
  world.settle(std::chrono::milliseconds(1));
  Sum sum(3, 50);
  for (const int r : {0, 1}) sum.submit(world, second, r);
  world.hub().kill(2);
  world.pause(2);
  REQUIRE(finish(world, sum.outcomes));
  check_all(sum.outcomes, Code::peer_lost);
  world.resume(2);
}

TEST_CASE("abort ends everything pending and everything later, on every rank") {
  World world(3, 5);
  const size_t comm = world.open_all();
  std::vector<std::unique_ptr<Sum>> sums;
  for (int i = 0; i < 10; ++i) {  // more than run at once
    sums.push_back(std::make_unique<Sum>(3, 50));
    for (const int r : {0, 1}) sums.back()->submit(world, comm, r);
  }
  world.settle(std::chrono::milliseconds(5));
  world.engine(1).fail(world.channel(comm, 1).id, Status(Code::aborted, "enough"), true);
  for (const auto& sum : sums) {
    REQUIRE(finish(world, sum->outcomes));
    check_all(sum->outcomes, Code::aborted);
  }
  Sum later(3, 50);
  later.submit(world, comm, 2);
  REQUIRE(finish(world, later.outcomes));
  check_all(later.outcomes, Code::aborted);
}

TEST_CASE("messages between two ranks: any number open, matched in order, both ways") {
  World world(3, 9);
  const size_t comm = world.open_all();
  constexpr int kMessages = 40;
  std::vector<std::vector<int64_t>> out(kMessages), in(kMessages);
  Outcomes outcomes;
  const auto call = [&](std::vector<int64_t>& data, bool sends, int partner) {
    World::Call c;
    c.schedule.collective = Collective::broadcast;
    c.schedule.algorithm = Algorithm::chain;
    c.schedule.size = 2;
    c.schedule.count = data.size();
    c.piece = 8;
    c.point_to_point = true;
    c.partner = partner;
    c.input = sends ? data.data() : nullptr;
    c.work = sends ? nullptr : data.data();
    return c;
  };
  for (int m = 0; m < kMessages; ++m) {
    const auto i = static_cast<size_t>(m);
    out[i].assign(1 + i * 3 % 50, m + 1);
    in[i].assign(out[i].size(), -1);
    outcomes.push_back(
        world.submit(comm, m % 2 == 0 ? 0 : 2, call(out[i], true, m % 2 == 0 ? 2 : 0)));
  }
  world.settle(std::chrono::milliseconds(1));
  for (int m = 0; m < kMessages; ++m)
    outcomes.push_back(world.submit(comm, m % 2 == 0 ? 2 : 0,
                                    call(in[static_cast<size_t>(m)], false, m % 2 == 0 ? 0 : 2)));
  REQUIRE(finish(world, outcomes));
  check_all(outcomes, Code::ok);
  CHECK(in == out);
}

TEST_CASE("random operations on several communicators: exact, in whatever order they interleave") {
  int operations = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    const int n = 2 + static_cast<int>(random() % 6);
    Faults faults;
    faults.max_delay = std::chrono::microseconds(random() % 500);
    faults.reorder = random() % 2 == 0;
    World world(n, seed, faults);
    constexpr size_t kComms = 3;
    for (size_t c = 0; c < kComms; ++c) (void)world.open_all();
    // Each communicator has its list of operations; each rank goes through the lists in an order of
    // its own.
    std::vector<std::vector<std::unique_ptr<Sum>>> lists(kComms);
    std::vector<std::vector<Algorithm>> algorithms(kComms);
    for (size_t c = 0; c < kComms; ++c)
      for (int i = 0; i < 12; ++i) {
        lists[c].push_back(std::make_unique<Sum>(n, random() % 300));
        algorithms[c].push_back(static_cast<Algorithm>(random() % 3));
        ++operations;
      }
    std::vector<std::array<size_t, kComms>> next(static_cast<size_t>(n));
    size_t left = static_cast<size_t>(n) * kComms * 12;
    while (left > 0) {
      const auto r = static_cast<size_t>(random() % static_cast<uint64_t>(n));
      const size_t c = random() % kComms;
      if (next[r][c] < 12) {
        const size_t i = next[r][c]++;
        lists[c][i]->submit(world, c, static_cast<int>(r), algorithms[c][i]);
        --left;
      }
      if (random() % 4 == 0) world.round();
      if (random() % 16 == 0) world.clock().pass(std::chrono::microseconds(random() % 200));
    }
    INFO("seed " << seed);
    for (const auto& list : lists)
      for (const auto& sum : list) {
        REQUIRE(finish(world, sum->outcomes));
        for (const auto& outcome : sum->outcomes) REQUIRE(outcome->status.ok());
        REQUIRE(sum->exact());
      }
  }
  fmt::print("engine: {} interleaved operations exact\n", operations);
}

// Not a check, a figure: engine_test "[cost]". Every message carries the fingerprint anyway, so a
// call costs what it takes to make one.
TEST_CASE("what it costs to tell calls apart", "[.cost]") {
  Description what;
  what.schedule.size = 8;
  what.piece = 1 << 16;
  constexpr int kCalls = 20'000'000;
  uint32_t all = 0;
  const std::clock_t begin = std::clock();  // of this process: others may be busy
  for (int i = 0; i < kCalls; ++i) {
    what.schedule.count = static_cast<size_t>(i);
    all += what.fingerprint();
  }
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  CHECK(all != 0);
  fmt::print("fingerprint of a call: {:.1f} ns\n", 1e9 * seconds / kCalls);
}
