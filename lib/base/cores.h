// On which cores this process may run, and how to wait on one.
//
// Threads: any; the answers are of the moment.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ringfold {

// The numbers of the cores in the affinity mask, ascending; all that are online where it cannot be
// read.
[[nodiscard]] std::vector<int> allowed_cores();
// Cores that the control group grants, from cgroup 2 or 1; empty: no limit.
[[nodiscard]] std::optional<double> granted_cores();

// One turn of a spinning wait: leaves the core's resources to its other thread for a moment.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The cores of a process in words that travel: "2.5:0,1,2" or "all:0,1".
struct Cores {
  std::vector<int> allowed;
  std::optional<double> granted;

  [[nodiscard]] std::string encode() const;
  [[nodiscard]] static std::optional<Cores> decode(std::string_view text);
};
// Whether so many processes, each with these cores, find no core for each of them.
[[nodiscard]] bool crowded(const std::vector<Cores>& processes);

}  // namespace ringfold
