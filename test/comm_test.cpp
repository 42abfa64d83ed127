// Communicators between real processes and between threads, on every transport.
#include <fmt/core.h>

#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

#include "ringfold/communicator.h"
#include "test/cases.h"
#include "test/processes.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// Everything once, with the results checked: what any communicator must do.
void exercise(Communicator& comm, size_t count) {
  const int n = comm.size(), rank = comm.rank();
  const auto ranks = static_cast<size_t>(n);
  std::vector<int32_t> mine(count), out(count);
  for (size_t i = 0; i < count; ++i)
    mine[i] = static_cast<int32_t>(i * 3 + static_cast<size_t>(rank));
  const auto sum_at = [&](size_t i) {
    return static_cast<int32_t>(i * 3 * ranks + ranks * (ranks - 1) / 2);
  };
  const auto wrong = [&](const std::vector<int32_t>& data, auto expected) {
    size_t bad = 0;
    for (size_t i = 0; i < data.size(); ++i) bad += data[i] != expected(i) ? 1 : 0;
    return bad;
  };

  rank_ok(comm.all_reduce(mine.data(), out.data(), count, DType::i32, Op::sum).wait());
  RANK_CHECK(wrong(out, sum_at) == 0);
  out = mine;
  rank_ok(comm.all_reduce(out.data(), out.data(), count, DType::i32, Op::max).wait());
  RANK_CHECK(wrong(out, [&](size_t i) { return static_cast<int32_t>(i * 3) + n - 1; }) == 0);

  std::vector<int32_t> all(count * ranks), part(count);
  rank_ok(comm.all_gather(mine.data(), all.data(), count, DType::i32).wait());
  RANK_CHECK(
      wrong(all, [&](size_t i) { return static_cast<int32_t>(i % count * 3 + i / count); }) == 0);
  rank_ok(comm.reduce_scatter(all.data(), part.data(), count, DType::i32, Op::sum).wait());
  RANK_CHECK(wrong(part, [&](size_t i) {
               return n * static_cast<int32_t>(i * 3 + static_cast<size_t>(rank));
             }) == 0);
  std::vector<int32_t> exchanged(count * ranks);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i) + rank * 1000;
  rank_ok(comm.all_to_all(all.data(), exchanged.data(), count, DType::i32).wait());
  RANK_CHECK(wrong(exchanged, [&](size_t i) {
               return static_cast<int32_t>(static_cast<size_t>(rank) * count + i % count +
                                           i / count * 1000);
             }) == 0);

  for (int root = 0; root < n; ++root) {
    out = mine;
    rank_ok(comm.broadcast(out.data(), count, DType::i32, root).wait());
    RANK_CHECK(wrong(out, [&](size_t i) { return static_cast<int32_t>(i * 3) + root; }) == 0);
    std::ranges::fill(out, -1);
    int32_t* const at_root = rank == root ? out.data() : nullptr;
    rank_ok(comm.reduce(mine.data(), at_root, count, DType::i32, Op::sum, root).wait());
    if (rank == root) RANK_CHECK(wrong(out, sum_at) == 0);
    std::ranges::fill(all, -1);
    rank_ok(comm.gather(mine.data(), rank == root ? all.data() : nullptr, count, DType::i32, root)
                .wait());
    if (rank == root)
      RANK_CHECK(wrong(all, [&](size_t i) {
                   return static_cast<int32_t>(i % count * 3 + i / count);
                 }) == 0);
    rank_ok(comm.scatter(rank == root ? all.data() : nullptr, part.data(), count, DType::i32, root)
                .wait());
    RANK_CHECK(part == mine);
  }

  const int right = (rank + 1) % n, left = (rank + n - 1) % n;
  std::ranges::fill(part, -1);
  Group group;
  comm.send(mine.data(), count, DType::i32, right);
  comm.recv(part.data(), count, DType::i32, left);
  rank_ok(group.submit().wait());
  RANK_CHECK(wrong(part, [&](size_t i) { return static_cast<int32_t>(i * 3) + left; }) == 0);
  rank_ok(comm.barrier().wait());
}

}  // namespace

TEST_CASE("every collective between processes, on every transport, at every size") {
  if (transports().size() == 1) skip("ucx: built without it");
  const std::string transport = GENERATE(from_range(transports("")));
  for (const int n : {1, 2, 3, 5}) {
    INFO("transport " << transport << ", " << n << " ranks");
    CHECK(run_ranks(n, 60s, [&](const Rendezvous& where) {
            Options options;
            options.transports = transport;
            auto comm = Communicator::create(where, options);
            if (!rank_ok(comm.status())) return 1;
            RANK_CHECK(comm->rank() == where.rank);
            if (n > 1 && !transport.empty()) RANK_CHECK(comm->transport() == transport);
            for (const size_t count : {size_t{1}, size_t{7}, size_t{1000}, size_t{100'003}})
              exercise(*comm, count);
            return 0;
          }) == "");
  }
}

TEST_CASE("ranks as threads of one process, by region and over loopback") {
  const std::string transport = GENERATE(std::string("region"), std::string("loopback"));
  const auto id = Rendezvous::unique_id();
  REQUIRE(id.ok());
  std::vector<std::thread> ranks;
  std::vector<Status> statuses(4);
  for (int r = 0; r < 4; ++r)
    ranks.emplace_back([&, r] {
      Options options;
      if (transport == "loopback") options.transports = transport;
      auto comm = Communicator::create(*Rendezvous::from_id(*id, r, 4), options);
      statuses[static_cast<size_t>(r)] = comm.status();
      if (!comm.ok()) return;
      if (comm->transport() != transport)
        statuses[static_cast<size_t>(r)] = Status(Code::internal, comm->transport());
      std::vector<float> x(1000, static_cast<float>(r));
      Status status = comm->all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::avg).wait();
      if (status.ok() && x != std::vector<float>(1000, 1.5F)) status = {Code::internal, "wrong"};
      if (statuses[static_cast<size_t>(r)].ok()) statuses[static_cast<size_t>(r)] = status;
    });
  for (auto& rank : ranks) rank.join();
  for (const Status& status : statuses) CHECK(status.to_string() == "ok");
}

TEST_CASE("split makes communicators that work at once and beside each other") {
  CHECK(run_ranks(5, 30s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          auto half = comm->split(where.rank % 2, -where.rank);
          auto none = comm->split(where.rank == 3 ? 0 : -1, 0);
          if (!rank_ok(half.status()) || !rank_ok(none.status())) return 1;
          const int members = where.rank % 2 == 0 ? 3 : 2;
          RANK_CHECK(half->size() == members);
          RANK_CHECK(half->rank() ==
                     members - 1 - where.rank / 2);  // the keys turn the order round
          RANK_CHECK(none->valid() == (where.rank == 3));
          std::vector<int64_t> a(999, where.rank), b(10'000, 1);
          Work first = comm->all_reduce(a.data(), a.data(), a.size(), DType::i64, Op::sum);
          Work second = half->all_reduce(b.data(), b.data(), b.size(), DType::i64, Op::sum);
          rank_ok(second.wait());
          rank_ok(first.wait());
          RANK_CHECK(a == std::vector<int64_t>(999, 10));
          RANK_CHECK(b == std::vector<int64_t>(10'000, members));
          exercise(*half, 500);
          auto quarter = half->split(0, 0);
          if (!rank_ok(quarter.status())) return 1;
          exercise(*quarter, 5);
          return 0;
        }) == "");
}

TEST_CASE("a barrier, and a collective of nothing, hold everybody until the last has come") {
  const std::string transport = GENERATE(from_range(transports()));
  const int n = GENERATE(2, 3, 4, 6);
  Shared<std::atomic<int>> arrived;
  CHECK(run_ranks(n, 60s, [&](const Rendezvous& where) {
          Options options;
          options.transports = transport;
          auto comm = Communicator::create(where, options);
          if (!rank_ok(comm.status())) return 1;
          for (int round = 1; round <= 12; ++round) {
            if (round % n == where.rank) std::this_thread::sleep_for(20ms);
            arrived->fetch_add(1);
            rank_ok(round % 2 == 0
                        ? comm->barrier().wait()
                        : comm->all_reduce(nullptr, nullptr, 0, DType::f32, Op::sum).wait());
            RANK_CHECK(arrived->load() >= round * n);
          }
          return 0;
        }) == "");
}

TEST_CASE("a rank that is through and leaves does not fail those who still wait for another") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(run_ranks(4, 60s, [&](const Rendezvous& where) {
          Options options;
          options.transports = transport;
          auto comm = Communicator::create(where, options);
          if (!rank_ok(comm.status())) return 1;
          std::vector<int64_t> x(5000, where.rank);
          if (where.rank == 2) std::this_thread::sleep_for(2s);  // longer than the moment of grace
          rank_ok(comm->reduce(x.data(), where.rank == 0 ? x.data() : nullptr, x.size(), DType::i64,
                               Op::sum, 0)
                      .wait());
          if (where.rank == 0) RANK_CHECK(x == std::vector<int64_t>(5000, 6));
          return 0;
        }) == "");
}

TEST_CASE("a rank that leaves although it is needed is an error soon after") {
  CHECK(run_ranks(3, 60s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          if (where.rank == 1) return 0;  // without the call that the others make
          const auto start = std::chrono::steady_clock::now();
          const Status status = comm->barrier().wait();
          RANK_CHECK(status.code() == Code::peer_lost);
          RANK_CHECK(status.message().find("rank 1") != std::string::npos);
          RANK_CHECK(std::chrono::steady_clock::now() - start < 4s);
          return 0;
        }) == "");
}

TEST_CASE("a communicator ends at once, whatever others of the same ranks still do") {
  CHECK(run_ranks(2, 60s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          int64_t x = 1;
          Work slow;
          {
            auto other = comm->split(0, 0);
            if (!rank_ok(other.status())) return 1;
            if (where.rank == 1) std::this_thread::sleep_for(1s);
            slow = comm->all_reduce(&x, &x, 1, DType::i64, Op::sum);
            const auto start = std::chrono::steady_clock::now();
            *other = Communicator();
            RANK_CHECK(std::chrono::steady_clock::now() - start < 500ms);
          }
          rank_ok(slow.wait());
          RANK_CHECK(x == 2);
          return 0;
        }) == "");
}

TEST_CASE("what the transports count is what the model says: 2(N-1)/N of the bytes") {
  const std::string transport = GENERATE(from_range(transports()));
  const int n = GENERATE(2, 3, 4, 5);
  CHECK(on_transport(n, transport, forced(Algorithm::ring), [](Communicator& comm) {
          const auto ranks = static_cast<size_t>(comm.size());
          for (const size_t count : {size_t{1}, size_t{1000}, size_t{16 * 60}, size_t{1} << 20}) {
            std::vector<float> x(count, 1.0F);
            const uint64_t before = comm.bytes_sent();
            Work work = comm.all_reduce(x.data(), x.data(), count, DType::f32, Op::sum);
            rank_ok(work.wait());
            const Report report = work.report();
            const uint64_t sent = comm.bytes_sent() - before;
            RANK_CHECK(sent == report.bytes_sent);
            RANK_CHECK(sent == report.bytes_model);
            RANK_CHECK(report.bus_factor ==
                       2.0 * static_cast<double>(ranks - 1) / static_cast<double>(ranks));
            // Chunks are whole cache lines: at most one more than 1/N of the data each.
            const double ideal = report.bus_factor * static_cast<double>(count * sizeof(float));
            const double rounding = 2.0 * static_cast<double>(ranks - 1) * 64;
            RANK_CHECK(std::abs(static_cast<double>(sent) - ideal) <= rounding);
            if (count % (16 * ranks) == 0) RANK_CHECK(static_cast<double>(sent) == ideal);
          }
        }) == "");
}

TEST_CASE("a rank that leaves at once does not fail the others' start") {
  const std::string transport = GENERATE(from_range(transports()));
  for (int i = 0; i < 5; ++i)
    CHECK(run_ranks(4, 30s, [&](const Rendezvous& where) {
            Options options;
            options.transports = transport;
            auto comm = Communicator::create(where, options);
            rank_ok(comm.status());
            if (comm.ok() && where.rank != 2)
              std::this_thread::sleep_for(std::chrono::milliseconds(where.rank));
            return 0;
          }) == "");
}
