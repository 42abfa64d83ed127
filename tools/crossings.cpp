#include "tools/crossings.h"

#include <fmt/format.h>

#include <array>

#include "lib/sim/simulation.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

constexpr size_t kElement = 4;
constexpr size_t kSmallest = 64, kLargest = size_t{4} << 30;
// A ring of 4,096 ranks takes 33 million messages; one of 512, half a million.
constexpr int kSimulated = 512;
// Hosts with several ranks: as many, and links inside that are four times as fast.
constexpr int kPerHost = 8;
constexpr double kInside = 4;

std::optional<Choice> choice_of(int ranks, size_t bytes, const Machine& machine,
                                std::optional<Algorithm> algorithm = {}) {
  Constraints only;
  only.algorithm = algorithm;
  return choose(Collective::all_reduce, ranks, bytes / kElement, kElement, machine, only);
}

double simulated_seconds(const Choice& choice, const Machine& machine) {
  SimOptions options;
  options.machine = machine;
  SimulatedCall call;
  call.schedule = choice.schedule;
  call.element_bytes = kElement;
  call.piece = choice.piece_bytes / kElement;
  return simulate(call, options).seconds;
}

std::string line_of(int ranks, const std::vector<Crossing>& all, Algorithm first) {
  std::string text = fmt::format("{:>6}  {}", ranks, name(first));
  for (const Crossing& c : all) {
    text += fmt::format(", {} from {}", name(c.after), show_size(c.bytes));
    if (c.simulated) text += fmt::format(" ({:.2f})", *c.simulated);
  }
  return text;
}

}  // namespace

std::vector<Crossing> crossings(int ranks, const Machine& machine, int simulate_up_to) {
  std::vector<Crossing> all;
  std::optional<Algorithm> before;
  for (size_t power = kSmallest; power < kLargest; power *= 2) {
    for (size_t bytes = power; bytes < 2 * power; bytes += power / 16) {
      const auto choice = choice_of(ranks, bytes, machine);
      if (!choice) continue;
      const Algorithm now = choice->schedule.algorithm;
      if (before && *before != now) {
        Crossing crossing{*before, now, bytes, {}};
        const auto other = choice_of(ranks, bytes, machine, *before);
        if (ranks <= simulate_up_to && other && other->schedule.algorithm == *before)
          crossing.simulated =
              simulated_seconds(*choice, machine) / simulated_seconds(*other, machine);
        all.push_back(crossing);
      }
      before = now;
    }
  }
  return all;
}

void print_crossings(double latency) {
  fmt::print(
      "all_reduce: the model's choice by size, {} a message between hosts. In brackets what the\n"
      "simulator makes of it there, up to {} ranks: time of the new choice / of the one before.\n",
      show_seconds(latency), kSimulated);
  constexpr std::array<double, 2> kRates = {12.5e9, 50e9};
  for (const double rate : kRates) {
    for (const int per_host : {1, kPerHost}) {
      const LinkCost remote{latency, 1 / rate};
      const LinkCost local{latency / 2, 1 / (kInside * rate)};
      const Machine machine{per_host == 1 ? remote : local, remote, 0, per_host};
      fmt::print("\n{:.0f} Gbit/s, {}\n", rate * 8e-9,
                 per_host == 1 ? "a rank on each host"
                               : fmt::format("{} ranks on each host, linked {} times as fast, at "
                                             "half the latency",
                                             per_host, kInside));
      for (const int ranks : {8, 64, 512, 4096}) {
        if (ranks == per_host) continue;
        const auto first = choice_of(ranks, kSmallest, machine);
        if (first)
          fmt::print("{}\n", line_of(ranks, crossings(ranks, machine, kSimulated),
                                     first->schedule.algorithm));
      }
    }
  }
}

}  // namespace ringfold::tools
