#include "lib/base/base.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sodium.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <numeric>

namespace ringfold {
namespace {

class SteadyClock final : public Clock {
 public:
  [[nodiscard]] Nanoseconds now() const override {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
};

constexpr std::array<std::string_view, 5> kLevelNames = {"off", "error", "warn", "info", "debug"};
std::atomic<int> log_rank{-1};

LogLevel level_asked_for() {
  const auto word = setting("RINGFOLD_LOG");
  if (!word) return LogLevel::off;
  const auto* const at = std::find(kLevelNames.begin(), kLevelNames.end(), *word);
  // A word that is no level is reported by check_settings(), not here.
  return at == kLevelNames.end() ? LogLevel::off : static_cast<LogLevel>(at - kLevelNames.begin());
}

constexpr std::string_view kAlgorithmWords =
    "auto|ring|halving_doubling|recursive_doubling|two_level|chain|tree|direct";

constexpr std::array kSettings = {
    Setting{"RINGFOLD_RANK", "integer", "the launcher's", false, "This process's rank, from 0."},
    Setting{"RINGFOLD_SIZE", "integer", "the launcher's", false, "How many ranks there are."},
    Setting{"RINGFOLD_LOCAL_RANK", "integer", "the launcher's", false,
            "This process's number among those of its host, from 0; chooses the device."},
    Setting{"RINGFOLD_COORDINATOR", "text", "the launcher's", false,
            "host:port where rank 0 listens at start-up; several, comma-separated, are tried in "
            "turn."},
    Setting{"RINGFOLD_SECRET", "text", "none: start-up is not authenticated", false,
            "Shared secret that every rank must prove to know at start-up."},
    Setting{"RINGFOLD_SECRET_FILE", "text", "none", false,
            "File whose contents are the shared secret; RINGFOLD_SECRET wins."},
    Setting{"RINGFOLD_TIMEOUT", "seconds", "10m", false,
            "Deadline of start-up and of every operation (30, 1.5, 500ms, 2m)."},
    Setting{"RINGFOLD_TRANSPORTS", "list", "all", true,
            "Transports that may be used, comma-separated: loopback, region, shm, ucx."},
    Setting{"RINGFOLD_CUDA_PATH", "auto|direct|ucx|staged", "auto", true,
            "How device memory travels: read by the peer's device, by a CUDA-aware UCX, or through "
            "pinned host memory."},
    Setting{"RINGFOLD_ALGORITHM", kAlgorithmWords, "auto", true,
            "Algorithm of every collective that offers it; auto asks the cost model."},
    Setting{"RINGFOLD_PIECE", "size", "the cost model's choice", true,
            "Bytes that travel in one message (64K, 4M)."},
    Setting{"RINGFOLD_SPIN", "seconds", "100us, 0 when ranks outnumber cores", false,
            "How long an idle thread polls before it sleeps."},
    Setting{"RINGFOLD_INTERFACES", "list", "all, loopback last", false,
            "Network interfaces to use: names or prefixes (eth), ^name to exclude, addresses, "
            "networks (10.0.0.0/8). Between hosts, several that are named share the messages."},
    Setting{"RINGFOLD_LOG", "off|error|warn|info|debug", "off", false,
            "Which log lines go to stderr."},
    Setting{"RINGFOLD_RECORD", "text", "none: nothing is written", false,
            "Folder where a communicator that fails leaves its latest operations, as JSON."},
    Setting{"RINGFOLD_TRACE", "text", "none", false,
            "File for a Chrome trace of the operations and their steps; %r becomes the rank, or "
            ".rankR is put behind."},
    Setting{"RINGFOLD_MACHINE", "text", "built-in figures", false,
            "JSON file of measured costs, for the choice of algorithm; alike on all ranks."},
    Setting{"RINGFOLD_VERIFY", "0|1", "0", true,
            "1: whatever crosses a transport or the region carries a checksum that is verified."},
    Setting{"RINGFOLD_NUMERICS", "exact|nccl", "exact", true,
            "How sums and averages round: nothing lost on the way, or as NCCL rounds."},
    Setting{"RINGFOLD_NCCL_VERSION", "integer", "that of the newest header it follows", false,
            "libnccl.so.2: what ncclGetVersion says (22809 is 2.28.9)."},
};

Status unusable(std::string_view name, std::string_view value, std::string_view accepted) {
  return {Code::invalid_argument, fmt::format("{}=\"{}\": expected {}", name, value, accepted)};
}

// A number of at least 0 at the front of `text`, which is shortened to what follows it.
std::optional<double> take_number(std::string_view& text) {
  if (text.empty() || (text[0] != '.' && (text[0] < '0' || text[0] > '9'))) return std::nullopt;
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc{} || !std::isfinite(value)) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row[b.size()];
}

// A typing mistake touches a few letters; anything further away would be a misleading hint.
std::string_view nearest_setting(std::string_view name) {
  std::string_view best;
  size_t best_distance = 4;
  for (const Setting& known : kSettings) {
    const size_t distance = edit_distance(name, known.name);
    if (distance < best_distance) best = known.name, best_distance = distance;
  }
  return best;
}

bool is_one_of(std::string_view value, std::string_view words) {
  while (true) {
    const size_t bar = words.find('|');
    if (words.substr(0, bar) == value) return true;
    if (bar == std::string_view::npos) return false;
    words.remove_prefix(bar + 1);
  }
}

Status check(const Setting& known) {
  if (known.kind == "seconds") return setting_duration(known.name).status();
  if (known.kind == "size") return setting_bytes(known.name).status();
  if (known.kind == "integer") return setting_integer(known.name).status();
  const auto value = setting(known.name);
  if (!value || known.kind.find('|') == std::string_view::npos) return {};
  if (is_one_of(*value, known.kind)) return {};
  return unusable(known.name, *value, fmt::format("one of {}", known.kind));
}

}  // namespace

uint32_t fork_generation() {
  static std::atomic<uint32_t> generation{0};
  [[maybe_unused]] static const int kRegistered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  return generation.load(std::memory_order_relaxed);
}

uint64_t process_number() {
  static std::mutex lock;
  static uint32_t generation = 0;
  static uint64_t number = 0;
  const std::lock_guard guard(lock);
  const uint32_t now = fork_generation();
  if (number == 0 || generation != now) randombytes_buf(&number, sizeof number);
  generation = now;
  return number;
}

Clock& steady_clock() {
  static SteadyClock clock;
  return clock;
}

bool log_enabled(LogLevel level) {
  static const LogLevel kAskedFor = level_asked_for();
  return level != LogLevel::off && level <= kAskedFor;
}

void log_line(LogLevel level, std::string_view text) {
  if (!log_enabled(level)) return;
  const double seconds = std::chrono::duration<double>(steady_clock().now()).count();
  const int rank = log_rank.load(std::memory_order_relaxed);
  const std::string who = rank < 0 ? "" : fmt::format(" rank {}", rank);
  const std::string line = fmt::format("ringfold {:.6f}{} {}: {}\n", seconds, who,
                                       kLevelNames[static_cast<size_t>(level)], text);
  // One write, so that lines of several processes do not mix. There is nobody to tell if it fails.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

void set_log_rank(int rank) {
  log_rank.store(rank, std::memory_order_relaxed);
}

std::span<const Setting> settings() {
  return kSettings;
}

std::optional<std::string> setting(std::string_view name) {
  assert(std::any_of(kSettings.begin(), kSettings.end(),
                     [&](const Setting& known) { return known.name == name; }));
  const char* const value = std::getenv(std::string(name).c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

Result<std::optional<Nanoseconds>> setting_duration(std::string_view name) {
  const auto text = setting(name);
  if (!text) return std::optional<Nanoseconds>{};
  const auto value = parse_duration(*text);
  if (!value) return unusable(name, *text, "a duration such as 30, 1.5, 500ms, 20us, 2m or 1h");
  return value;
}

Result<std::optional<uint64_t>> setting_bytes(std::string_view name) {
  const auto text = setting(name);
  if (!text) return std::optional<uint64_t>{};
  const auto value = parse_bytes(*text);
  if (!value) return unusable(name, *text, "a size such as 65536, 64K, 1.5M or 2G");
  return value;
}

Result<std::optional<int64_t>> setting_integer(std::string_view name) {
  const auto text = setting(name);
  if (!text) return std::optional<int64_t>{};
  const auto value = parse_integer(*text);
  if (!value) return unusable(name, *text, "a whole number");
  return value;
}

Status check_settings() {
  for (const Setting& known : kSettings) {
    if (Status status = check(known); !status.ok()) return status;
  }
  return {};
}

std::vector<UnknownSetting> unknown_settings() {
  std::vector<UnknownSetting> unknown;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (!name.starts_with("RINGFOLD_")) continue;
    const auto same = [&](const Setting& known) { return known.name == name; };
    if (std::any_of(kSettings.begin(), kSettings.end(), same)) continue;
    unknown.push_back({std::string(name), std::string(nearest_setting(name))});
  }
  return unknown;
}

std::optional<uint64_t> parse_bytes(std::string_view text) {
  constexpr std::string_view kSuffixes = "BKMGT";
  size_t power = 0;
  const bool has_suffix = !text.empty() && kSuffixes.find(text.back()) != std::string_view::npos;
  if (has_suffix) {
    power = kSuffixes.find(text.back());
    text.remove_suffix(1);
  }
  const uint64_t unit = uint64_t{1} << (10 * power);
  uint64_t whole = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), whole);
  if (error == std::errc{} && end == text.data() + text.size()) {
    if (whole > UINT64_MAX / unit) return std::nullopt;
    return whole * unit;
  }
  const auto fraction = take_number(text);
  if (!fraction || !text.empty() || power == 0) return std::nullopt;
  const double bytes = *fraction * static_cast<double>(unit);
  if (bytes >= 0x1p64) return std::nullopt;
  return static_cast<uint64_t>(bytes);
}

std::optional<Nanoseconds> parse_duration(std::string_view text) {
  const auto number = take_number(text);
  if (!number) return std::nullopt;
  double unit = 0;
  if (text.empty() || text == "s") unit = 1e9;
  if (text == "ms") unit = 1e6;
  if (text == "us") unit = 1e3;
  if (text == "m") unit = 60e9;
  if (text == "h") unit = 3600e9;
  const double nanoseconds = *number * unit;
  if (unit == 0 || nanoseconds >= 0x1p63) return std::nullopt;
  return Nanoseconds(std::llround(nanoseconds));
}

std::optional<int64_t> parse_integer(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace ringfold
