// One rank of launcher_test: meets the others as the environment says, and prints what it found.
#include <fmt/format.h>

#include <cstdio>
#include <set>

#include "lib/comm/control.h"
#include "ringfold/bootstrap.h"

using namespace ringfold;

int main() {
  auto where = Rendezvous::from_environment();
  if (!where.ok()) {
    fmt::print("error {}\n", where.status().to_string());
    return 3;
  }
  where->timeout = std::chrono::seconds(20);
  auto met = bootstrap(*where, this_process(), {});
  if (!met.ok()) {
    fmt::print("error {}\n", met.status().to_string());
    return 1;
  }
  std::set<int64_t> processes;
  std::set<std::string> hosts;
  for (const Member& member : met->members) {
    processes.insert(member.pid);
    hosts.insert(member.host);
  }
  fmt::print("{}: rank {} of {}, local {}, {} processes on {}, {}\n", where->source, where->rank,
             where->size, where->local_rank.value_or(-1), processes.size(), hosts.size(),
             where->secret.empty() ? "open" : "secret");
  std::fflush(stdout);
  if (met->control) met->control->leave();
  return 0;
}
