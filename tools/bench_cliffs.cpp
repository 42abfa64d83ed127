#include "tools/bench_cliffs.h"

#include <fmt/format.h>
#include <sched.h>

#include <array>
#include <cstdio>
#include <map>
#include <thread>

#include "ringfold_config.h"
#include "tools/bench_ranks.h"
#include "tools/cliffs.h"
#include "tools/line_latency.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

constexpr double kSeconds = 0.008;  // of calls back to back, about, for one repetition
constexpr int kRepetitions = 5;     // whose median is the time of a line
constexpr int kLooks = 12;          // at a suspect, at most: those with moved cores do not count

// Between this process's first two cores; 0 if it has but one.
double line_between_cores() {
  cpu_set_t allowed;
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 0;
  for (int core = 0; core < CPU_SETSIZE && cores.size() < 2; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  if (cores.size() < 2) return 0;
  struct alignas(128) Word {
    std::atomic<uint64_t> value = 0;
  } first, second;
  const auto side = [&](int core, bool am_first) {
    cpu_set_t mine;
    CPU_ZERO(&mine);
    CPU_SET(core, &mine);
    sched_setaffinity(0, sizeof(mine), &mine);
    return line_latency_ns(first.value, second.value, am_first);
  };
  std::thread other([&] { side(cores[1], false); });
  double best = 0;
  std::thread one([&] { best = side(cores[0], true); });
  one.join();
  other.join();
  return best;
}

class Search {
 public:
  Search(const BenchOptions& options, Communicator& comm)
      : options_(options), comm_(comm), subject_(comm, options, nullptr) {}

  int run() {
    const double start = seconds_now();
    introduce();
    const std::vector<CliffRule> rules = all_rules();
    std::map<CliffLine, CliffTime> times;
    for (const CliffRule& rule : rules) {
      for (const CliffLine& line : {rule.base, rule.subject}) {
        if (!times.contains(line)) times[line] = measure(line);
      }
    }
    int suspects = 0, cliffs = 0;
    for (const CliffRule& rule : rules) {
      if (!suspicious(rule, times[rule.base], times[rule.subject])) continue;
      ++suspects;
      cliffs += confirmed(rule) ? 1 : 0;
    }
    if (prints()) {
      fmt::print("# {} lines, {} rules in {:.0f} s; {} looked like cliffs at first\n", times.size(),
                 rules.size(), seconds_now() - start, suspects);
      fmt::print("# Cliffs : {} {}\n", cliffs, cliffs == 0 ? "OK" : "FAILED");
    }
    return cliffs;
  }

 private:
  [[nodiscard]] bool prints() const { return comm_.rank() == 0; }

  void introduce() {
    if (!prints()) return;
    fmt::print("# ringfold {} bench {} --cliffs\n", RINGFOLD_VERSION, options_.collective);
    fmt::print("# ranks {}, transport {}, {} to {}\n", comm_.size(), comm_.transport(),
               show_size(options_.first_bytes), show_size(options_.last_bytes));
    fmt::print(
        "# cliff: twice the bytes take more than 3 times as long, one element changes the\n"
        "# time by more than 1.5 times, f64 bf16 f16 i8 take more than 1.3 times f32's\n");
    std::fflush(stdout);
  }

  std::vector<CliffRule> all_rules() {
    std::vector<CliffRule> rules;
    const bool divides = options_.kind && has_parts(*options_.kind);
    for (const bool in_place : {false, true}) {
      if (!subject_.offers(in_place)) continue;
      const auto more = cliff_rules(options_.first_bytes, options_.last_bytes,
                                    divides ? comm_.size() : 1, in_place);
      rules.insert(rules.end(), more.begin(), more.end());
    }
    return rules;
  }

  // The same on every rank, as everything that decisions depend on.
  double line_latency() { return largest(comm_, prints() ? line_between_cores() : 0); }

  // Per call, the slowest rank's.
  double timed(const CliffLine& line, int calls) {
    must(comm_.barrier().wait());
    const double start = seconds_now();
    for (int i = 0; i < calls; ++i) subject_.call(line.in_place);
    return largest(comm_, seconds_now() - start) / calls;
  }

  CliffTime measure(const CliffLine& line) {
    CliffTime time;
    time.line_ns = line_latency();
    subject_.set(line.bytes, line.type, options_.ops.front(), std::max(0, options_.root));
    subject_.prepare(line.in_place, options_.seed);
    timed(line, 1);  // the first call pays for what all later ones find ready
    const double once = std::max(1e-8, timed(line, 2));
    const int calls = std::clamp(static_cast<int>(kSeconds / once), 1, 20000);
    std::array<double, kRepetitions> times{};
    for (double& one : times) one = timed(line, calls);
    std::nth_element(times.begin(), times.begin() + kRepetitions / 2, times.end());
    time.us = times[kRepetitions / 2] * 1e6;
    return time;
  }

  // Measures both lines in turns until it is clear. A look during which the cores were moved is
  // worth nothing; if they never lie still nothing is proven.
  bool confirmed(const CliffRule& rule) {
    struct Look {
      double ratio, base_us, subject_us;
      bool operator<(const Look& other) const { return ratio < other.ratio; }
    };
    std::vector<Look> looks;
    std::vector<double> ratios;
    std::optional<bool> cliff;
    for (int i = 0; i < kLooks && !cliff; ++i) {
      const CliffTime base = measure(rule.base), subject = measure(rule.subject);
      const double line_ns = line_latency();
      if (!placed_alike(base.line_ns, subject.line_ns) || !placed_alike(base.line_ns, line_ns)) {
        continue;
      }
      ratios.push_back(subject.us / base.us);
      looks.push_back({ratios.back(), base.us, subject.us});
      cliff = is_cliff(rule, ratios);
    }
    if (!prints()) return cliff.value_or(false);
    if (!cliff) {
      fmt::print("# not clear, the cores keep moving: {}\n", describe(rule));
    } else if (*cliff) {
      std::nth_element(looks.begin(), looks.begin() + looks.size() / 2, looks.end());
      const Look& middle = looks[looks.size() / 2];
      fmt::print("cliff: {}: {:.3g} us after {:.3g} us, {:.2f} times\n", describe(rule),
                 middle.subject_us, middle.base_us, middle.ratio);
    }
    std::fflush(stdout);
    return cliff.value_or(false);
  }

  const BenchOptions& options_;
  Communicator& comm_;
  Subject subject_;
};

}  // namespace

int find_cliffs(const BenchOptions& options, Communicator& comm) {
  return Search(options, comm).run();
}

}  // namespace ringfold::tools
