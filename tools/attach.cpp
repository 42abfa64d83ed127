// ringfold doctor --attach PID: where the communicators of a live process stand. It reads memory
// that the process keeps for this, so that one which hangs or is stopped can be asked, too.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string>

#include "lib/record/picture.h"
#include "tools/command.h"

namespace ringfold::tools {
namespace {

using record::CommunicatorView;
using record::OperationView;
using record::ProcessView;

void print(const OperationView& o) {
  const std::string numbers =
      o.first == o.last ? fmt::format("{}", o.first) : fmt::format("{}-{}", o.first, o.last);
  std::string how = o.state == record::State::running  ? "under way"
                    : o.state == record::State::failed ? "failed"
                                                       : "done";
  if (o.state == record::State::done && o.ended > o.began && o.began != Nanoseconds(0))
    how += fmt::format(" in {:.1f} us",
                       std::chrono::duration<double, std::micro>(o.ended - o.began).count());
  fmt::print("    {:>12}  {}: {}\n", numbers, o.text(), how);
}

// Where the ranks of the same communicator stand, as far as they are processes of this host and
// user.
void print_ranks(const CommunicatorView& mine, const std::vector<ProcessView>& all,
                 Nanoseconds now) {
  for (int r = 0; r < mine.size; ++r) {
    bool seen = false;
    for (const ProcessView& process : all)
      for (const CommunicatorView& one : process.communicators) {
        if (one.world != mine.world || one.id != mine.id || one.rank != r) continue;
        seen = true;
        fmt::print("    rank {} (process {}, {}): {}\n", r, process.pid,
                   record::in_words(process.kernel_state), record::standing(one, now));
      }
    if (!seen) fmt::print("    rank {}: no process of this host and user\n", r);
  }
}

// Every process of this host whose record can be read.
std::vector<ProcessView> all_processes() {
  std::vector<ProcessView> all;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    int pid = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (error != std::errc() || end != name.data() + name.size()) continue;
    if (auto one = record::look_at(pid); one.ok()) all.push_back(std::move(*one));
  }
  return all;
}

void print(const CommunicatorView& c, const std::vector<ProcessView>& all, Nanoseconds now) {
  fmt::print("\ncommunicator {}: rank {} of {}, {}\n", c.id, c.rank, c.size, c.transport);
  if (c.code != Code::ok)
    fmt::print("  failed: {}: {}\n", to_string(c.code), c.failure);
  else
    fmt::print("  {}\n", record::standing(c, now));
  fmt::print(
      "  {} operations called, {} finished; {} bytes sent, {} received; {} waits, {:.3f} s\n",
      c.counters.operations, c.counters.finished, c.counters.bytes_sent, c.counters.bytes_received,
      c.counters.waits, c.counters.wait_seconds);
  fmt::print("  ranks\n");
  print_ranks(c, all, now);
  fmt::print("  latest operations\n");
  for (const OperationView& o : c.operations) print(o);
}

}  // namespace

int attach(int pid) {
  const auto process = record::look_at(pid);
  if (!process.ok()) return fail(kEnvironment, "doctor: " + process.status().message());
  const Nanoseconds now = steady_clock().now();
  const auto all = all_processes();
  fmt::print("process {}, {}; ringfold {}\n", process->pid, record::in_words(process->kernel_state),
             process->library);
  if (process->communicators.empty()) fmt::print("it has no communicator of several ranks now\n");
  for (const CommunicatorView& one : process->communicators) print(one, all, now);
  return kSuccess;
}

}  // namespace ringfold::tools
