#include "tools/bench_audit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "ringfold_config.h"
#include "tools/bench_ranks.h"
#include "tools/contest.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

constexpr double kAllowed = 1.05;  // times the best
constexpr int kRounds = 7;
constexpr int kMoreRounds = 21;  // where the first say that the choice is too slow

class Audit {
 public:
  Audit(const BenchOptions& options, Communicator& comm) : options_(options), comm_(comm) {
    const Layout layout = layout_of(comm);
    const size_t hosts = layout.hosts.size();
    const bool two_levels = hosts > 1 && hosts < static_cast<size_t>(comm.size());
    all_.push_back({{}, comm, {}, {}});
    for (const Algorithm algorithm : ways(two_levels)) {
      auto made = told(comm, algorithm);
      must(made.status());
      all_.push_back({algorithm, std::move(*made), {}, {}});
    }
    if (!prints()) return;
    fmt::print("# ringfold {} bench --audit-choice, ranks {} on {} host{}, transport {}\n",
               RINGFOLD_VERSION, comm.size(), hosts, hosts == 1 ? "" : "s", comm.transport());
    fmt::print("# medians of {} rounds in turns; ratio: measured / predicted\n", kRounds);
    fmt::print("{:>12}  {:<19} {:>9} {:>12} {:>12} {:>6}\n", "bytes", "algorithm", "piece", "us",
               "model us", "ratio");
  }

  int run() {
    int bad = 0;
    for (const uint64_t bytes : sizes(options_, DType::f32)) {
      if (bytes == 0) continue;
      hold(comm_, all_, bytes, kRounds);
      if (too_slow()) hold(comm_, all_, bytes, kMoreRounds);
      const bool slow = too_slow();
      bad += slow ? 1 : 0;
      if (prints()) print(bytes, slow);
    }
    if (prints()) fmt::print("# Choices : {} {}\n", bad, bad == 0 ? "OK" : "FAILED");
    return bad;
  }

 private:
  [[nodiscard]] bool prints() const { return comm_.rank() == 0; }

  [[nodiscard]] const Contestant& choice() const { return all_.front(); }

  // The choice is one of the others with the same pieces: then a difference is nothing but noise.
  [[nodiscard]] bool is_the_choice(const Contestant& other) const {
    return choice().report.algorithm == other.report.algorithm &&
           choice().report.transport == other.report.transport &&
           choice().report.piece_bytes == other.report.piece_bytes;
  }

  // Clearly, more than allowed: in the median of the rounds, each compared with its neighbour, and
  // in three of four of them.
  [[nodiscard]] bool slower_than(const Contestant& other) const {
    std::vector<double> ratios;
    for (size_t i = 0; i < other.seconds.size(); ++i)
      ratios.push_back(choice().seconds[i] / other.seconds[i]);
    std::ranges::sort(ratios);
    return ratios[ratios.size() / 4] > kAllowed;
  }

  // Reports are the same on all ranks as far as this goes, and times are.
  [[nodiscard]] bool too_slow() const {
    return std::any_of(all_.begin() + 1, all_.end(), [&](const Contestant& other) {
      return !is_the_choice(other) && slower_than(other);
    });
  }

  void print(uint64_t bytes, bool slow) const {
    for (const Contestant& one : all_) {
      const double measured = median(one.seconds), model = one.report.predicted_seconds;
      const std::string who = one.algorithm ? std::string(name(*one.algorithm))
                                            : fmt::format("= {}", name(one.report.algorithm));
      fmt::print("{:>12}  {:<19} {:>9} {:>12.1f} {:>12.1f} {:>6.2f}{}\n", bytes, who,
                 show_size(one.report.piece_bytes), measured * 1e6, model * 1e6,
                 model > 0 ? measured / model : 0,
                 !one.algorithm && slow ? "  SLOWER THAN THE BEST" : "");
    }
    std::fflush(stdout);
  }

  const BenchOptions& options_;
  Communicator& comm_;
  std::vector<Contestant> all_;  // the first is the library's choice
};

}  // namespace

int audit_choice(const BenchOptions& options, Communicator& comm) {
  return Audit(options, comm).run();
}

}  // namespace ringfold::tools
