// A rank that keeps the others waiting: the error on each of them names it and says where everybody
// stands, on every transport; and ranks that would wait for each other for ever find out that they
// differ.
#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>

#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <functional>
#include <thread>
#include <vector>

#include "test/cases.h"
#include "test/processes.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// "apart": UCX between ranks that take each other for another host, because each has a /dev/shm of
// its own. Their records cannot be read, so they are asked.
std::vector<std::string> ways() {
  std::vector<std::string> all = transports();
  if (all.back() == "ucx" && geteuid() == 0) all.emplace_back("apart");
  return all;
}

bool move_apart() {
  return unshare(CLONE_NEWNS) == 0 &&
         mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("none", "/dev/shm", "tmpfs", 0, "size=64m") == 0;
}

Result<Communicator> join(const Rendezvous& where, const std::string& way, Nanoseconds timeout) {
  if (way == "apart" && !move_apart()) return Status(Code::system, "no mount namespace");
  Options options;
  options.timeout = timeout;
  options.transports = way == "apart" ? "ucx" : way;
  return Communicator::create(where, options);
}

Status sum(Communicator& comm, size_t count = 1000) {
  std::vector<float> x(count, 1);
  return comm.all_reduce(x.data(), x.data(), count, DType::f32, Op::sum).wait();
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void contains(const std::string& text, const std::string& part) {
  if (!has(text, part)) rank_fail(fmt::format("\"{}\" is not in: {}", part, text));
}

// Waits, not for ever.
void until(const std::function<bool()>& there) {
  for (int i = 0; i < 10'000 && !there(); ++i) std::this_thread::sleep_for(1ms);
}

double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

}  // namespace

// C22 and C28, in one: it is there, but does not call.
TEST_CASE("a rank that never calls is named on all others, with what it did last") {
  const std::string way = GENERATE(from_range(ways()));
  const int absent = GENERATE(0, 2);
  INFO(way << ", rank " << absent);
  Shared<std::atomic<int>> ended;
  CHECK(run_ranks(4, 30s, [&](const Rendezvous& where) {
          auto comm = join(where, way, 1s);
          if (!rank_ok(comm.status())) return 1;
          rank_ok(sum(*comm, 5000));
          if (comm->rank() == absent) {
            until([&] { return *ended == 3; });
            return 0;
          }
          const auto begun = std::chrono::steady_clock::now();
          const Status late = sum(*comm, 3);
          ++*ended;
          RANK_CHECK(late.code() == Code::timeout);
          RANK_CHECK(seconds_since(begun) > 0.8);
          RANK_CHECK(seconds_since(begun) < 2.5);
          const std::string& text = late.message();
          contains(text, fmt::format("Missing: rank {} (process ", absent));
          contains(text, "did not call it");
          contains(text, "all_reduce f32 sum of 3 elements");
          contains(text, fmt::format("rank {}: in no operation; the last was", absent));
          contains(text, "all_reduce f32 sum of 5000 elements");
          contains(text, absent == 0 ? "rank 1" : "rank 0");
          RANK_CHECK(!has(text, "unknown"));
          return 0;
        }) == "");
}

TEST_CASE("a stopped rank is named on all others, in whatever it was stopped") {
  const std::string way = GENERATE(from_range(ways()));
  const int victim = GENERATE(0, 1);
  INFO(way << ", rank " << victim);
  Shared<std::atomic<int>> rounds, ended;
  Processes ranks(3, [&](const Rendezvous& where) {
    auto comm = join(where, way, 1s);
    if (!rank_ok(comm.status())) return 1;
    Status status;
    while (status.ok()) {
      status = sum(*comm, 20'000);
      ++*rounds;
    }
    if (comm->rank() == victim) return 0;
    ++*ended;
    RANK_CHECK(status.code() == Code::timeout);
    contains(status.message(), fmt::format("Missing: rank {} (process ", victim));
    contains(status.message(), "Where each rank stands: rank ");
    // Ranks of this host are seen to be stopped; others only do not answer.
    contains(status.message(), way == "apart" ? "not heard of" : "stopped");
    return 0;
  });
  until([&] { return *rounds > 100; });
  ranks.stop(victim);
  until([&] { return *ended == 2; });
  CHECK(*ended == 2);
  ranks.resume(victim);
  for (const Outcome& outcome : ranks.wait(20s)) CHECK(outcome.to_string() == "ok");
}

TEST_CASE("ranks that only listen to each other find out within seconds, not at the deadline") {
  const std::string way = GENERATE(from_range(ways()));
  INFO(way);
  CHECK(run_ranks(2, 30s, [&](const Rendezvous& where) {
          auto comm = join(where, way, 20s);
          if (!rank_ok(comm.status())) return 1;
          std::array<float, 2> in{}, out{};
          const auto begun = std::chrono::steady_clock::now();
          const Status status =
              comm->rank() == 0
                  ? comm->gather(in.data(), out.data(), 1, DType::f32, 0).wait()
                  : comm->reduce(in.data(), out.data(), 1, DType::f32, Op::sum, 1).wait();
          RANK_CHECK(status.code() == Code::mismatch);
          RANK_CHECK(seconds_since(begun) < 5);
          contains(status.message(), "rank 0 called gather f32 of 2 elements, root 0");
          contains(status.message(), "rank 1 called reduce f32 sum of 1 elements, root 1");
          return 0;
        }) == "");
}

TEST_CASE("a message whose other half is missing says whose, and where that rank stands") {
  const std::string way = GENERATE(from_range(ways()));
  INFO(way);
  Shared<std::atomic<int>> ended;
  CHECK(run_ranks(2, 30s, [&](const Rendezvous& where) {
          auto comm = join(where, way, 700ms);
          if (!rank_ok(comm.status())) return 1;
          rank_ok(sum(*comm, 9));
          float x = 0;
          if (comm->rank() == 0) {
            const Status late = comm->recv(&x, 1, DType::f32, 1).wait();
            ++*ended;
            RANK_CHECK(late.code() == Code::timeout);
            contains(late.message(), "Missing: the other half, on rank 1");
            contains(late.message(), "rank 1: in no operation");
          }
          until([&] { return *ended == 1; });
          return 0;
        }) == "");
}

// Nobody is left who passes news on.
TEST_CASE("rank 0 dies: all others lose it by name within a second") {
  const std::string way = GENERATE(from_range(ways()));
  const bool large = GENERATE(false, true);
  INFO(way << (large ? ", large" : ", small"));
  Shared<std::atomic<int64_t>> died;
  Shared<std::atomic<int>> rounds;
  Processes ranks(4, [&](const Rendezvous& where) {
    auto comm = join(where, way, 20s);
    if (!rank_ok(comm.status())) return 1;
    Status status;
    while (status.ok()) {
      status = sum(*comm, large ? 1'000'000 : 10);
      ++*rounds;
    }
    const int64_t spent = std::chrono::steady_clock::now().time_since_epoch().count() - *died;
    RANK_CHECK(status.code() == Code::peer_lost);
    contains(status.message(), "rank 0");
    RANK_CHECK(spent < 1'000'000'000);
    return 0;
  });
  until([&] { return *rounds > 40; });
  *died = std::chrono::steady_clock::now().time_since_epoch().count();
  ranks.kill(0);
  const auto outcomes = ranks.wait(20s);
  for (size_t r = 1; r < outcomes.size(); ++r) CHECK(outcomes[r].to_string() == "ok");
}
