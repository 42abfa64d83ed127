// RINGFOLD_VERIFY: bytes that change on their way become an error that names the ranks, not a wrong
// result.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "test/cases.h"
#include "test/processes.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// Changes a bit of the first run of `pattern` bytes in memory of this process that is called
// `name`; false if there is none.
bool damage(const std::string& name, unsigned char pattern) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:" + name + " ") == std::string::npos) continue;
    if (line.find("rw-s") == std::string::npos) continue;
    const size_t dash = line.find('-');
    auto* const begin =
        reinterpret_cast<unsigned char*>(std::stoull(line.substr(0, dash), nullptr, 16));
    auto* const end =
        reinterpret_cast<unsigned char*>(std::stoull(line.substr(dash + 1), nullptr, 16));
    const std::vector<unsigned char> wanted(24, pattern);
    auto* const found = std::search(begin, end, wanted.begin(), wanted.end());
    if (found == end) continue;
    found[5] ^= 4;
    return true;
  }
  return false;
}

// Rank 1 starts an all-reduce while rank 0 stands still, and what it has shown is damaged before
// rank 0 reads it.
std::string damaged_sum(const std::string& transport, const std::string& memory, size_t count) {
  Shared<std::atomic<int>> ready, go, shown;
  Options options;
  options.timeout = 10s;
  options.transports = transport;
  const auto until = [](const std::atomic<int>& value, int wanted) {
    for (int i = 0; i < 20'000 && value < wanted; ++i) std::this_thread::sleep_for(1ms);
  };
  setenv("RINGFOLD_VERIFY", "1", 1);
  Processes ranks(2, [&](const Rendezvous& where) {
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    constexpr unsigned char kPattern = 0x3e;
    std::vector<float> x(count), out(count);
    for (int i = 0; i < 20; ++i)  // and it does no harm to what is right
      rank_ok(comm->all_reduce(x.data(), x.data(), count, DType::f32, Op::sum).wait());
    std::memset(x.data(), comm->rank() == 1 ? kPattern : 0, count * sizeof(float));
    ++*ready;
    until(comm->rank() == 1 ? *go : *shown, 1);
    Work work = comm->all_reduce(x.data(), out.data(), count, DType::f32, Op::sum);
    if (comm->rank() == 1) {
      std::this_thread::sleep_for(50ms);
      RANK_CHECK(damage(memory, kPattern));
      ++*shown;
    }
    // Rank 1 may have all it needs: then its result is right.
    if (const Status status = work.wait(); status.ok()) {
      RANK_CHECK(comm->rank() == 1);
      RANK_CHECK(out == x);
    }
    for (int i = 0; i < 5'000 && comm->health().ok(); ++i) std::this_thread::sleep_for(1ms);
    const Status status = comm->health();
    RANK_CHECK(status.code() == Code::system);
    RANK_CHECK(status.message().find("checksum differs") != std::string::npos);
    RANK_CHECK(status.message().find("rank 0") != std::string::npos);
    RANK_CHECK(status.message().find("rank 1") != std::string::npos);
    return 0;
  });
  unsetenv("RINGFOLD_VERIFY");
  until(*ready, 2);
  ranks.stop(0);
  ++*go;
  until(*shown, 1);
  ranks.resume(0);
  std::string failed;
  for (const Outcome& outcome : ranks.wait(20s))
    if (!outcome.ok()) failed += outcome.to_string() + "\n";
  return failed;
}

}  // namespace

TEST_CASE("verify: damage in shared memory, on every path of the region") {
  for (const size_t count : {10, 1000, 3000, 50'000, 400'000}) {
    INFO(count << " elements");
    CHECK(damaged_sum("region", "ringfold-region", count) == "");
  }
}

TEST_CASE("verify: damage in the rings of the shared-memory transport") {
  CHECK(damaged_sum("shm", "ringfold", 1000) == "");
}

TEST_CASE("verify: every collective still gives the right result") {
  const std::string transport = GENERATE(from_range(transports()));
  setenv("RINGFOLD_VERIFY", "1", 1);
  CHECK(on_transport(3, transport, {}, [](Communicator& comm) {
          const auto rank = static_cast<size_t>(comm.rank());
          for (const size_t each : {size_t{1}, size_t{500}, size_t{70'000}}) {
            std::vector<int32_t> mine(3 * each), all(3 * each), out(each);
            for (size_t i = 0; i < mine.size(); ++i)
              mine[i] = static_cast<int32_t>(i + 1000 * rank);
            const auto sum = [](size_t i) { return static_cast<int32_t>(3 * i + 3000); };
            rank_ok(comm.all_reduce(mine.data(), all.data(), 3 * each, DType::i32, Op::sum).wait());
            RANK_CHECK(all[3 * each - 1] == sum(3 * each - 1));
            rank_ok(comm.reduce_scatter(mine.data(), out.data(), each, DType::i32, Op::sum).wait());
            RANK_CHECK(out[each - 1] == sum((rank + 1) * each - 1));
            rank_ok(comm.all_gather(mine.data(), all.data(), each, DType::i32).wait());
            RANK_CHECK(all[3 * each - 1] == static_cast<int32_t>(each - 1 + 2000));
            rank_ok(comm.all_to_all(mine.data(), all.data(), each, DType::i32).wait());
            RANK_CHECK(all[3 * each - 1] == static_cast<int32_t>((rank + 1) * each - 1 + 2000));
            rank_ok(comm.gather(mine.data(), all.data(), each, DType::i32, 1).wait());
            if (rank == 1) RANK_CHECK(all[each] == 1000);
            rank_ok(comm.scatter(mine.data(), out.data(), each, DType::i32, 2).wait());
            RANK_CHECK(out[0] == static_cast<int32_t>(rank * each + 2000));
            rank_ok(comm.reduce(mine.data(), all.data(), each, DType::i32, Op::sum, 0).wait());
            if (rank == 0) RANK_CHECK(all[each - 1] == sum(each - 1));
            rank_ok(comm.broadcast(out.data(), each, DType::i32, 1).wait());
            RANK_CHECK(out[0] == static_cast<int32_t>(each + 2000));
          }
        }) == "");
  unsetenv("RINGFOLD_VERIFY");
}

TEST_CASE("verify: ranks that differ in the setting do not start") {
  CHECK(run_ranks(2, 20s, [](const Rendezvous& where) {
          if (where.rank == 1) setenv("RINGFOLD_VERIFY", "1", 1);
          const auto comm = Communicator::create(where);
          RANK_CHECK(comm.status().code() == Code::mismatch);
          RANK_CHECK(comm.status().message().find("RINGFOLD_VERIFY") != std::string::npos);
          return 0;
        }) == "");
}
