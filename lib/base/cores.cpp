#include "lib/base/cores.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <set>

namespace ringfold {
namespace {

// Offers that took so long went to somebody who computes; ranks work on a block for less. One may
// be a disturbance.
constexpr Nanoseconds kDear = std::chrono::milliseconds(1);
constexpr int kRemembered = 64;  // offers
constexpr int kRest = 20;        // times what it took, until the next offer

}  // namespace

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  } else {  // more cores than the set can hold
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    for (int core = 0; core < online; ++core) cores.push_back(core);
  }
  return cores;
}

std::optional<double> granted_cores() {
  std::string group;
  std::ifstream list("/proc/self/cgroup");
  for (std::string line; std::getline(list, line);)
    if (line.starts_with("0::")) group = line.substr(3);
  for (const std::string& path :
       {"/sys/fs/cgroup" + group + "/cpu.max", std::string("/sys/fs/cgroup/cpu.max")}) {
    std::ifstream file(path);
    double quota = 0, period = 0;
    if (file >> quota >> period && period > 0) return quota / period;
  }
  double quota = 0, period = 0;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  if (quota > 0 && period > 0) return quota / period;
  return std::nullopt;
}

void run_soon_when_woken() {
  // As the kernel has it: no header offers it together with <sched.h>.
  struct Attributes {
    uint32_t size = sizeof(Attributes), policy = 0;
    uint64_t flags = 0;
    int32_t nice = 0;
    uint32_t priority = 0;
    uint64_t runtime = 0, deadline = 0, period = 0;
  } attributes;
  constexpr uint64_t kShortestSlice = 100'000;  // nanoseconds
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return;
  attributes.runtime = kShortestSlice;
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
}

void Courtesy::yield() {
  sched_yield();
}

void Courtesy::note(Nanoseconds begun) {
  const Nanoseconds now = steady_clock().now();
  const bool dear_before = dear_ > 0;
  if (now - begun < kDear) {
    if (dear_before) --dear_;
    return;
  }
  dear_ = kRemembered;
  if (dear_before) none_until_ = now + kRest * (now - begun);
}

std::string Cores::encode() const {
  std::string text = (granted ? fmt::format("{}", *granted) : "all") + ":";
  for (size_t i = 0; i < allowed.size(); ++i)
    text += (i == 0 ? "" : ",") + std::to_string(allowed[i]);
  return text;
}

std::optional<Cores> Cores::decode(std::string_view text) {
  Cores cores;
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  if (const std::string_view granted = text.substr(0, colon); granted != "all") {
    double value = 0;
    const auto [end, error] =
        std::from_chars(granted.data(), granted.data() + granted.size(), value);
    if (error != std::errc() || end != granted.data() + granted.size() || !(value > 0))
      return std::nullopt;
    cores.granted = value;
  }
  const char* at = text.data() + colon + 1;
  const char* const all = text.data() + text.size();
  while (at < all) {
    int core = 0;
    const auto [end, error] = std::from_chars(at, all, core);
    if (error != std::errc() || core < 0 || (end < all && *end != ',')) return std::nullopt;
    cores.allowed.push_back(core);
    at = end < all ? end + 1 : end;
  }
  return cores;
}

bool crowded(const std::vector<Cores>& processes) {
  std::set<int> cores;
  double granted = static_cast<double>(processes.size());
  for (const Cores& process : processes) {
    cores.insert(process.allowed.begin(), process.allowed.end());
    if (process.granted) granted = std::min(granted, *process.granted);
  }
  return processes.size() > cores.size() || static_cast<double>(processes.size()) > granted;
}

}  // namespace ringfold
