// Collectives over shared memory: every one exact, and every failure the same as with messages.
#include <fmt/core.h>
#include <sys/syscall.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <fstream>
#include <numeric>
#include <thread>
#include <vector>

#include "lib/region/moves.h"
#include "ringfold/communicator.h"
#include "test/cases.h"
#include "test/confined.h"
#include "test/exact.h"
#include "test/processes.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr uint64_t kSeed = 20261129;

std::string on_region(int ranks, const std::function<void(Communicator&)>& body,
                      Options options = {}) {
  return on_transport(ranks, "region", options, [&](Communicator& comm) {
    if (comm.size() > 1) RANK_CHECK(comm.transport() == "region");
    body(comm);
  });
}

// One all_reduce of every type and operation, checked against what it must be.
void all_reduce_exact(Communicator& comm, DType type, Op op, size_t count, bool in_place) {
  const Exact exact(kSeed, comm.size(), type, op);
  Guarded send(count, type), recv(count, type), expected(count, type);
  exact.fill(send.data(), comm.rank(), 0, count);
  exact.expect(expected.data(), 0, count);
  unsigned char* const out = in_place ? send.data() : recv.data();
  const Reduction reduction(op, op == Op::premul_sum ? premul_factor(comm.rank()) : 1.0);
  rank_ok(comm.all_reduce(send.data(), out, count, type, reduction).wait());
  if (std::memcmp(out, expected.data(), count * size_of(type)) != 0 || !send.guards_intact() ||
      !recv.guards_intact())
    rank_fail(fmt::format("{} {} of {} on {} ranks{}", name(type), name(op), count, comm.size(),
                          in_place ? ", in place" : ""));
}

}  // namespace

TEST_CASE("region: all_reduce of every type and operation is exact") {
  const int ranks = GENERATE(2, 3, 4, 7);
  CHECK(on_region(ranks, [](Communicator& comm) {
          for (int t = 0; t < static_cast<int>(kDTypes); ++t)
            for (int o = 0; o < static_cast<int>(kOps); ++o)
              for (const size_t count : {0, 1, 5, 1000, 4097, 20'011, 150'001})
                all_reduce_exact(comm, static_cast<DType>(t), static_cast<Op>(o), count,
                                 o % 2 == 0);
        }) == "");
}

TEST_CASE("region: sizes around every border of its paths are exact") {
  const int ranks = GENERATE(2, 3, 5);
  CHECK(on_region(ranks, [](Communicator& comm) {
          for (size_t border = 1024; border <= (4u << 20); border *= 2)
            for (const size_t count : {border / 4 - 1, border / 4, border / 4 + 1})
              all_reduce_exact(comm, DType::f32, Op::sum, count, count % 2 == 0);
        }) == "");
}

TEST_CASE("region: what its operations write is what the report says") {
  CHECK(on_region(4, [](Communicator& comm) {
          for (const size_t count : {size_t{10}, size_t{3'000}, size_t{1'000'003}}) {
            std::vector<float> x(count, 1);
            const uint64_t before = comm.bytes_sent();
            Work work = comm.all_reduce(x.data(), x.data(), count, DType::f32, Op::sum);
            rank_ok(work.wait());
            const Report report = work.report();
            RANK_CHECK(report.bytes_sent == report.bytes_model);
            RANK_CHECK(report.bytes_sent == count * 4);
            RANK_CHECK(comm.bytes_sent() - before == report.bytes_sent);
            RANK_CHECK(report.transport == "region");
            RANK_CHECK(report.algorithm == Algorithm::region);
            RANK_CHECK(report.bus_factor == 1.5);
          }
        }) == "");
}

// C51, and more than one communicator of the same ranks in flight.
TEST_CASE("region: many operations on many communicators, waited for in any order") {
  CHECK(on_region(3, [](Communicator& comm) {
          auto second = comm.split(0, 0);
          auto third = comm.split(0, -comm.rank());
          if (!rank_ok(second.status()) || !rank_ok(third.status())) return;
          RANK_CHECK(second->transport() == "region");
          const std::vector<Communicator*> all = {&comm, &*second, &*third};
          constexpr size_t kFlying = 16;
          std::vector<std::vector<int32_t>> data;
          std::vector<Work> works;
          for (size_t i = 0; i < kFlying * all.size(); ++i)
            data.emplace_back(1 + i * i * 37, static_cast<int32_t>(i) + comm.rank());
          for (size_t i = 0; i < data.size(); ++i)
            works.push_back(all[i % all.size()]->all_reduce(data[i].data(), data[i].data(),
                                                            data[i].size(), DType::i32, Op::sum));
          for (size_t i = works.size(); i-- > 0;) {
            rank_ok(works[i].wait());
            const std::vector<int32_t> expected(data[i].size(), static_cast<int32_t>(3 * i + 3));
            RANK_CHECK(data[i] == expected);
          }
        }) == "");
}

TEST_CASE("region: operations that nobody waits for go on by themselves") {
  CHECK(on_region(3, [](Communicator& comm) {
          std::vector<float> x(300'000, 1), tiny(4, 1);
          std::atomic<int> called{0};
          Work large = comm.all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::sum);
          Work small = comm.all_reduce(tiny.data(), tiny.data(), 4, DType::f32, Op::sum);
          large.then([&](const Status& status) { called += status.ok() ? 1 : 100; });
          small.then([&](const Status& status) { called += status.ok() ? 1 : 100; });
          for (int i = 0; i < 2000 && called != 2; ++i) std::this_thread::sleep_for(1ms);
          RANK_CHECK(called == 2);
          RANK_CHECK(large.done());
          RANK_CHECK(x == std::vector<float>(x.size(), 3));
          rank_ok(comm.barrier().wait());
        }) == "");
}

TEST_CASE("region: whoever asks done() again and again sees it happen") {
  CHECK(on_region(2, [](Communicator& comm) {
          std::vector<float> x(300'000, 1);
          Work work = comm.all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::sum);
          while (!work.done()) std::this_thread::yield();
          RANK_CHECK(x == std::vector<float>(x.size(), 2));
        }) == "");
}

TEST_CASE("region: threads may share a communicator, and each have their own") {
  CHECK(on_region(2, [](Communicator& comm) {
          std::vector<Communicator> own;
          for (int t = 0; t < 4; ++t) {
            auto made = comm.split(0, 0);
            if (!rank_ok(made.status())) return;
            own.push_back(*made);
          }
          std::vector<std::thread> threads;
          for (int t = 0; t < 4; ++t)
            threads.emplace_back([&, t] {
              for (int i = 0; i < 50; ++i) {
                std::vector<int64_t> x(static_cast<size_t>(1 + i * 997 * t), t + i);
                rank_ok(own[static_cast<size_t>(t)]
                            .all_reduce(x.data(), x.data(), x.size(), DType::i64, Op::sum)
                            .wait());
                RANK_CHECK(x == std::vector<int64_t>(x.size(), 2 * (t + i)));
              }
            });
          for (auto& thread : threads) thread.join();
        }) == "");
}

// ---- failures ---------------------------------------------------------------------------------

TEST_CASE(
    "region: ranks that call different things are told at once, all of them, in both's words") {
  struct Pair {
    const char* what;
    std::function<Work(Communicator&, float*, float*)> most, last;
  };
  const auto sum = [](Communicator& c, float* a, float* b, size_t n, Op op) {
    return c.all_reduce(a, b, n, DType::f32, op);
  };
  const std::vector<Pair> pairs = {
      {"count", [&](auto& c, auto* a, auto* b) { return sum(c, a, b, 2, Op::sum); },
       [&](auto& c, auto* a, auto* b) { return sum(c, a, b, 3, Op::sum); }},
      {"tiny against large", [&](auto& c, auto* a, auto* b) { return sum(c, a, b, 2, Op::sum); },
       [&](auto& c, auto* a, auto* b) { return sum(c, a, b, 60'000, Op::sum); }},
      {"operation", [&](auto& c, auto* a, auto* b) { return sum(c, a, b, 60'000, Op::sum); },
       [&](auto& c, auto* a, auto* b) { return sum(c, a, b, 60'000, Op::max); }},
      // Here nobody waits for what contradicts it.
      {"gather against scatter",
       [](auto& c, auto* a, auto* b) { return c.gather(a, b, 1000, DType::f32, 0); },
       [](auto& c, auto* a, auto* b) { return c.scatter(a, b, 1000, DType::f32, 0); }},
      {"root", [](auto& c, auto* a, auto*) { return c.broadcast(a, 1000, DType::f32, 0); },
       [](auto& c, auto* a, auto*) { return c.broadcast(a, 1000, DType::f32, 2); }}};
  for (const Pair& pair : pairs) {
    INFO(pair.what);
    CHECK(on_region(3, [&](Communicator& comm) {
            std::vector<float> a(60'000), b(60'000);
            const bool odd = comm.rank() == 2;
            const auto begun = std::chrono::steady_clock::now();
            Status status = (odd ? pair.last : pair.most)(comm, a.data(), b.data()).wait();
            // A rank that only shows something learns of it in its next call.
            if (status.ok()) status = comm.barrier().wait();
            const auto took = std::chrono::steady_clock::now() - begun;
            RANK_CHECK(status.code() == Code::mismatch);
            RANK_CHECK(status.message().find("; rank 2 called") != std::string::npos);
            RANK_CHECK(took < 5s);
          }) == "");
  }
}

TEST_CASE("region: a rank that never comes is named at the deadline, everybody that is missing") {
  Options options;
  options.timeout = 2s;  // of the start, too
  CHECK(on_region(
            4,
            [](Communicator& comm) {
              if (comm.rank() >= 2) {
                const auto limit = std::chrono::steady_clock::now() + 30s;
                while (comm.health().ok() && std::chrono::steady_clock::now() < limit)
                  std::this_thread::sleep_for(10ms);
                RANK_CHECK(comm.health().code() == Code::timeout);
                return;
              }
              std::vector<float> x(100'000);
              const Status status =
                  comm.all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::sum).wait();
              RANK_CHECK(status.code() == Code::timeout);
              RANK_CHECK(status.message().find("for rank 2, 3") != std::string::npos);
            },
            options) == "");
}

TEST_CASE(
    "region: a killed rank is lost to all others, wherever it was, and they are told its name") {
  const size_t count = GENERATE(size_t{4}, size_t{400'000});
  Processes ranks(3, [&](const Rendezvous& where) {
    Options options;
    options.transports = "region";
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    std::vector<float> x(count);
    for (int i = 0;; ++i) {
      if (where.rank == 1 && i == 100) raise(SIGKILL);
      const auto begun = std::chrono::steady_clock::now();
      const Status status = comm->all_reduce(x.data(), x.data(), count, DType::f32, Op::sum).wait();
      if (status.ok() && i < 1000) continue;
      RANK_CHECK(status.code() == Code::peer_lost);
      RANK_CHECK(status.message().find("rank 1") != std::string::npos);
      RANK_CHECK(std::chrono::steady_clock::now() - begun < 2s);
      return 0;
    }
  });
  const auto outcomes = ranks.wait(30s);
  CHECK(outcomes[0].to_string() == "ok");
  CHECK(outcomes[1].signal == SIGKILL);
  CHECK(outcomes[2].to_string() == "ok");
}

TEST_CASE("region: abort() from another thread ends a wait on every rank") {
  CHECK(on_region(2, [](Communicator& comm) {
          std::vector<float> x(10);
          if (comm.rank() == 1) {
            std::this_thread::sleep_for(200ms);
            comm.abort("enough");
            RANK_CHECK(comm.all_reduce(x.data(), x.data(), 10, DType::f32, Op::sum).wait().code() ==
                       Code::aborted);
            return;
          }
          const Status status = comm.all_reduce(x.data(), x.data(), 10, DType::f32, Op::sum).wait();
          RANK_CHECK(status.code() == Code::aborted);
          RANK_CHECK(status.message().find("enough") != std::string::npos);
        }) == "");
}

// ---- where there is none ----------------------------------------------------------------------

TEST_CASE("region: where memory may not be made, or not be read, UCX is used instead") {
#ifdef RINGFOLD_TEST_UCX
  const long refused = GENERATE(SYS_memfd_create, SYS_pread64);
  CHECK(run_ranks(3, 30s, [&](const Rendezvous& where) {
          refuse_call(refused);
          Options options;
          options.transports = "region,ucx";
          auto comm = Communicator::create(where, options);
          if (!rank_ok(comm.status())) return 1;
          RANK_CHECK(comm->transport() == "ucx");
          all_reduce_exact(*comm, DType::f32, Op::sum, 100'003, true);
          return 0;
        }) == "");
#else
  skip("ucx: built without it");
#endif
}

TEST_CASE("region: its memory is what is promised") {
  for (const int ranks : {2, 4, 8, 16, 64}) {
    const size_t pool = region::Segment::pool_bytes_for(ranks);
    CHECK(pool <= 4u << 20);
    CHECK(pool * static_cast<size_t>(ranks) <= 16u << 20);
    CHECK(region::Segment::bytes_for(ranks) <= (20u << 20));
  }
}

namespace {

// Bytes of all mappings of regions in this process.
size_t mapped_regions() {
  size_t bytes = 0;
  std::string line;
  for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);) {
    if (line.find("memfd:ringfold-region") == std::string::npos) continue;
    const size_t dash = line.find('-');
    bytes += std::stoull(line.substr(dash + 1), nullptr, 16) - std::stoull(line, nullptr, 16);
  }
  return bytes;
}

}  // namespace

TEST_CASE("region: a communicator maps one segment, and no more than is promised") {
  CHECK(on_region(3, [](Communicator& comm) {
          const size_t each = region::Segment::bytes_for(3);
          RANK_CHECK(mapped_regions() == each);
          {
            auto second = comm.split(0, 0);
            if (!rank_ok(second.status())) return;
            all_reduce_exact(*second, DType::f32, Op::sum, 3'000'000, true);
            RANK_CHECK(mapped_regions() == 2 * each);
          }
          // The engine's thread may be the last to let go of it.
          for (int i = 0; i < 2000 && mapped_regions() != each; ++i)
            std::this_thread::sleep_for(1ms);
          RANK_CHECK(mapped_regions() == each);
        }) == "");
}

// C60: bits depend neither on how a payload is cut nor on timing.
TEST_CASE("region: the same data gives the same bits, whole or in pieces, again and again") {
  const DType type = GENERATE(DType::f32, DType::bf16);
  CHECK(on_region(5, [&](Communicator& comm) {
          constexpr size_t kCount = 1'000'003;
          const size_t element = size_of(type);
          std::vector<unsigned char> input(kCount * element), whole(input.size());
          for (size_t i = 0; i < kCount; ++i) {  // of any size between 2^-3 and 2^4, any sign
            const auto hash = exact_hash(kSeed, static_cast<uint64_t>(comm.rank()), i);
            const auto bits = static_cast<uint32_t>((hash & 0x83ffffffU) | 0x3e000000U);
            std::memcpy(&input[i * element], reinterpret_cast<const char*>(&bits) + 4 - element,
                        element);
          }
          rank_ok(comm.all_reduce(input.data(), whole.data(), kCount, type, Op::sum).wait());
          std::vector<unsigned char> first = whole;
          rank_ok(comm.broadcast(first.data(), first.size(), DType::u8, 0).wait());
          RANK_CHECK(first == whole);
          constexpr size_t kCuts[] = {0, 1, 1000, 9'999, 200'000, 200'001, 777'777, kCount};
          for (int again = 0; again < 5; ++again) {
            std::vector<unsigned char> pieces(input.size());
            for (size_t p = 0; p + 1 < std::size(kCuts); ++p)
              rank_ok(comm.all_reduce(&input[kCuts[p] * element], &pieces[kCuts[p] * element],
                                      kCuts[p + 1] - kCuts[p], type, Op::sum)
                          .wait());
            RANK_CHECK(pieces == whole);
          }
        }) == "");
}
