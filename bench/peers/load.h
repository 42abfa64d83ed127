// Who else used the machine while something was measured.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "bench/peers/team.h"

namespace peers {

// Of this process, its threads and the kernel on their behalf.
inline double cpu_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// From its construction to others(); every rank makes one and asks it.
class Load {
 public:
  explicit Load(Team& team) : team_(team), start_(now()), own_(cpu_seconds()) {}

  struct Share {
    double foreign_percent, steal_percent;  // of all cores
  };
  // Used by other processes, and taken away by the hypervisor.
  [[nodiscard]] Share others() const {
    const double own = team_.sum(cpu_seconds() - own_);
    const Machine end = now();
    const double whole = (end.wall - start_.wall) * team_.cores() / 100;
    return {std::max(0.0, end.busy - start_.busy - own) / whole,
            (end.steal - start_.steal) / whole};
  }

 private:
  struct Machine {  // seconds
    double busy = 0, steal = 0, wall = 0;
  };

  // Without soft interrupts, which whoever measures sockets causes himself.
  static Machine now() {
    unsigned long long user = 0, nice = 0, system = 0, steal = 0;
    if (FILE* const file = std::fopen("/proc/stat", "r")) {
      if (std::fscanf(file, "cpu %llu %llu %llu %*u %*u %*u %*u %llu", &user, &nice, &system,
                      &steal) != 4) {
        user = nice = system = steal = 0;
      }
      std::fclose(file);
    }
    const auto per_second = static_cast<double>(sysconf(_SC_CLK_TCK));
    return {static_cast<double>(user + nice + system) / per_second,
            static_cast<double>(steal) / per_second, now_us() * 1e-6};
  }

  Team& team_;
  Machine start_;
  double own_;
};

}  // namespace peers
