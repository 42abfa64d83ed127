#include "tools/bench_start.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <thread>
#include <vector>

#include "tools/command.h"
#include "tools/launch.h"

namespace ringfold::tools {
namespace {

int as_threads(const Start& start, const std::function<int(const Rendezvous&)>& rank) {
  if (start.ranks == 0) {
    return fail(kBadArguments,
                start.command + ": --transport loopback needs --ranks N: its ranks are threads");
  }
  const auto id = Rendezvous::unique_id();
  if (!id.ok()) return fail(kFailed, start.command + ": " + id.status().to_string());
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(start.ranks));
  std::vector<int> statuses(static_cast<size_t>(start.ranks), kSuccess);
  for (int r = 0; r < start.ranks; ++r) {
    threads.emplace_back([&, r] {
      const auto where = Rendezvous::from_id(*id, r, start.ranks);
      statuses[static_cast<size_t>(r)] =
          where.ok() ? rank(*where) : fail(kFailed, where.status().to_string());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return *std::max_element(statuses.begin(), statuses.end());
}

std::vector<std::string> own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  words.at(0) = "/proc/self/exe";
  return words;
}

}  // namespace

int start_ranks(const Start& start, const std::function<int(const Rendezvous&)>& rank) {
  if (start.transport == "loopback") return as_threads(start, rank);
  const auto where = Rendezvous::from_environment();
  if (where.ok() && start.ranks > 0 && where->size != start.ranks) {
    return fail(kEnvironment, fmt::format("{}: --ranks {} was asked for, but {} has started {}; "
                                          "leave --ranks out or start as many",
                                          start.command, start.ranks, where->source, where->size));
  }
  if (where.ok()) return rank(*where);
  if (where.status().code() != Code::unsupported) {
    return fail(kEnvironment, start.command + ": " + where.status().message());
  }
  if (start.ranks == 0) {
    return fail(
        kEnvironment,
        start.command +
            ": no ranks: neither --ranks N (starts N here) nor a launcher's environment. "
            "Start with one of\n  ringfold bench --ranks 4\n  ringfold run --ranks 4 -- ringfold "
            "bench\n  mpirun -n 4 ringfold bench\n" +
            where.status().message());
  }
  return launch({start.ranks, false, start.bind, own_command_line()});
}

}  // namespace ringfold::tools
