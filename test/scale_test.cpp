// Very many ranks on one host: that they start, reduce and end in time, and what each holds of the
// machine, against the formulas in lib/README.md.
#include <fmt/core.h>
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <sstream>

#include "test/tool_runs.h"

using namespace ringfold::test;

namespace {

struct Held {
  int rank, descriptors, threads, rings;
  long own_kib, ring_kib, region_kib;
};

std::vector<Held> ranks_of(const Outcome& run) {
  std::vector<Held> all;
  std::istringstream lines(run.out);
  for (std::string line; std::getline(lines, line);) {
    const auto j = nlohmann::json::parse(line);
    all.push_back({j["rank"], j["descriptors"], j["threads"], j["rings"], j["own_kib"],
                   j["ring_kib"], j["region_kib"]});
  }
  std::ranges::sort(all, {}, &Held::rank);
  return all;
}

// Of all children that have ended, and theirs.
double processor_seconds() {
  rusage used{};
  getrusage(RUSAGE_CHILDREN, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

Outcome reduce_4_bytes(int ranks) {
  return tool({"run", "--no-prefix", "--ranks", std::to_string(ranks), "--", RINGFOLD_SCALE_RANK});
}

// Beside what the process itself holds. Rings: one to and one from every rank with which messages
// were exchanged; recursive doubling does that with log2(n).
void check_holdings(const std::vector<Held>& all, int n) {
  REQUIRE(all.size() == static_cast<size_t>(n));
  for (const Held& held : all) {
    CAPTURE(held.rank, held.own_kib, held.rings);
    CHECK(held.descriptors == (held.rank == 0 ? 2 * n + 7 : n + 9));
    CHECK(held.threads == 2);
    CHECK(held.own_kib <= 4096 + (held.rank == 0 ? 32 : 16) * n);
    CHECK(held.ring_kib <= 2.1 * 1024);
    CHECK(held.rings <= 2 * static_cast<int>(std::bit_width(static_cast<unsigned>(n))));
    CHECK((held.region_kib > 0) == (n <= 64));
    CHECK(held.region_kib <= 20 * 1024);
  }
}

}  // namespace

TEST_CASE("64 ranks on one host, and what each of them holds") {
  const Outcome run = reduce_4_bytes(64);
  INFO(run.err);
  REQUIRE(run.status == 0);
  check_holdings(ranks_of(run), 64);
}

// Hidden: the slow suite names it. Twenty seconds of one core, which others cannot lengthen.
TEST_CASE("256 ranks on one host start, reduce 4 bytes and end within 20 s of a core", "[.]") {
  const double before = processor_seconds();
  const Outcome run = reduce_4_bytes(256);
  const double spent = processor_seconds() - before;
  INFO(run.err);
  REQUIRE(run.status == 0);
  fmt::print("256 ranks: {:.1f} s, {:.1f} s of processor time\n", run.seconds, spent);
  CHECK(spent < 20);
  check_holdings(ranks_of(run), 256);
}

namespace {

// The model and the simulator of an all-reduce on 4,096 ranks agree within a percent.
void simulate_4096(const std::string& algorithm, const std::string& bytes) {
  const Folder folder;
  const std::string json = folder.file("sim.json");
  const double before = processor_seconds();
  const Outcome run = tool({"sim", "--ranks", "4096", "--bytes", bytes, "--bandwidth", "100Gbit/s",
                            "--latency", "2us", "--algorithm", algorithm, "--json", json});
  INFO(run.err);
  REQUIRE(run.status == 0);
  const auto j = read_json(json);
  rusage used{};
  getrusage(RUSAGE_CHILDREN, &used);
  fmt::print("{} of {}: {} events, {:.1f} s, {:.1f} s of processor time, {} MiB\n", algorithm,
             bytes, j["events"].get<uint64_t>(), run.seconds, processor_seconds() - before,
             used.ru_maxrss / 1024);
  CHECK(j["ok"] == true);
  CHECK(j["algorithm"] == algorithm);
  CHECK(j["ratio"].get<double>() == Approx(1).epsilon(0.01));
  CHECK(used.ru_maxrss < (6L << 20));  // KiB; of the largest child
}

}  // namespace

TEST_CASE("4,096 simulated ranks: few steps") {
  simulate_4096("recursive_doubling", "4KiB");
  simulate_4096("halving_doubling", "64KiB");
}

TEST_CASE("4,096 simulated ranks: a ring", "[.]") {
  simulate_4096("ring", "64MiB");
}
