// Random worlds in virtual time, each from a number of its own:
//   chaos_virtual_test                  some thousands
//   CHAOS_SCENARIOS=100000 ...          as many
//   CHAOS_SEED=17 ...                   that one alone, with all that its ranks do
#include <fmt/core.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>

#include "lib/base/base.h"
#include "test/chaos/play.h"
#include "test/processes.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

std::optional<uint64_t> number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  const auto number = text == nullptr ? std::nullopt : parse_integer(text);
  return number ? std::optional(static_cast<uint64_t>(*number)) : std::nullopt;
}

void add(chaos::Tally& all, const chaos::Tally& some) {
  all.scenarios += some.scenarios, all.calls += some.calls, all.right += some.right;
  all.failed += some.failed, all.recovered += some.recovered;
  for (size_t i = 0; i < all.faults.size(); ++i)
    all.faults[i] += some.faults[i], all.struck[i] += some.struck[i];
}

void print(const chaos::Tally& all) {
  fmt::print("chaos: {} scenarios, {} calls: {} right, {} failed; {} worlds went on\n",
             all.scenarios, all.calls, all.right, all.failed, all.recovered);
  for (size_t i = 0; i < all.faults.size(); ++i)
    fmt::print("  {:<10} {:>6} times, {:>6} communicators ended so\n",
               chaos::name(static_cast<chaos::Fault::Kind>(i)), all.faults[i], all.struck[i]);
}

}  // namespace

TEST_CASE("whatever happens: the right result, or the same error on all, in time") {
  if (const auto seed = number_in("CHAOS_SEED")) {
    const chaos::Scenario scenario = chaos::make_scenario(*seed);
    fmt::print("scenario {}: {}", *seed, scenario.describe());
    chaos::Tally tally;
    CHECK(chaos::play(scenario, tally) == "");
    return;
  }
  const uint64_t scenarios = number_in("CHAOS_SCENARIOS").value_or(3000);
  constexpr int kMostShards = 8;
  cpu_set_t cores;
  sched_getaffinity(0, sizeof cores, &cores);
  const int shards = std::min(CPU_COUNT(&cores), kMostShards);
  Shared<std::array<chaos::Tally, kMostShards>> tallies;
  CHECK(run_ranks(shards, 900s, [&](const Rendezvous& me) {
          chaos::Tally tally;
          int broken = 0;
          for (auto seed = static_cast<uint64_t>(me.rank); seed < scenarios && broken < 3;
               seed += static_cast<uint64_t>(shards)) {
            const chaos::Scenario scenario = chaos::make_scenario(seed);
            const std::string wrong = chaos::play(scenario, tally);
            if (wrong.empty()) continue;
            rank_fail(fmt::format("{}\nCHAOS_SEED={} runs it alone: {}", wrong, seed,
                                  scenario.describe()));
            ++broken;
          }
          (*tallies)[static_cast<size_t>(me.rank)] = tally;
          return 0;
        }) == "");
  chaos::Tally all;
  for (const chaos::Tally& tally : *tallies) add(all, tally);
  print(all);
  CHECK(all.scenarios >= scenarios);
}
