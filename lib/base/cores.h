// On which cores this process may run, and how to wait on one.
//
// Threads: any; the answers are of the moment.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/base.h"

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

// For a thread that sleeps between short pieces of work: asks the scheduler to run it soon when it
// is woken beside threads that compute, at the price of shorter runs. A wish: where the kernel
// knows no such thing (Linux before 6.12) nothing changes.
void run_soon_when_woken();

// Offers the core to others between the turns of a waiting loop, as long as that is cheap. Among
// threads that wait for each other it is: they take over for microseconds. Who offers it to one
// that computes gets it back when that one's slice is over, milliseconds later, whereas who sleeps
// is run soon after it is woken. So where an offer has taken long, there are none for a while. One
// thread at a time.
class Courtesy {
 public:
  // Up to `times`, until done(); false: not done.
  template <class Done>
  bool offer(int times, Done done) {
    const Nanoseconds begun = steady_clock().now();
    if (begun < none_until_) return false;
    bool is_done = false;
    for (int i = 0; i < times && !is_done; ++i) {
      yield();
      is_done = done();
    }
    note(begun);
    return is_done;
  }
  // Once; false: not the time for it.
  bool offer() {
    const Nanoseconds begun = steady_clock().now();
    if (begun < none_until_) return false;
    yield();
    note(begun);
    return true;
  }

 private:
  static void yield();
  void note(Nanoseconds begun);
  int dear_ = 0;  // offers until one that took long is forgotten
  Nanoseconds none_until_{};
};

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
