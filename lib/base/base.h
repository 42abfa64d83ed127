// What every layer may use: the clock, log lines, and the one table of environment settings.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ringfold/status.h"
#include "ringfold/types.h"

namespace ringfold {

// Time is injected so that tests and the simulator can run in virtual time.
class Clock {
 public:
  virtual ~Clock() = default;
  [[nodiscard]] virtual Nanoseconds now() const = 0;  // monotonic; the origin is arbitrary
};
Clock& steady_clock();  // CLOCK_MONOTONIC

enum class LogLevel : uint8_t { off, error, warn, info, debug };
// One line to stderr, with monotonic time and rank; nothing is ever written to stdout. The level is
// RINGFOLD_LOG (off by default: only what the user asked for is printed). Any thread.
void log_line(LogLevel level, std::string_view text);
[[nodiscard]] bool log_enabled(LogLevel level);
void set_log_rank(int rank);  // shown on each line of this process from now on

// Grows in the child when this process is forked: a cheap way to notice that one is such a child.
[[nodiscard]] uint32_t fork_generation();
// A random number of this process alone, another one in a child: the number that the system gives
// it is also that of a process in another container.
[[nodiscard]] uint64_t process_number();

// Every environment variable of the library, in one table.
struct Setting {
  std::string_view name;      // "RINGFOLD_TIMEOUT"
  std::string_view kind;      // "seconds", "size", "integer", "list", "text", or "these|words|only"
  std::string_view fallback;  // what holds when it is not set, in words
  bool must_agree;            // compared between the ranks at start-up
  std::string_view meaning;   // one sentence
};
std::span<const Setting> settings();

// The value of a setting from the environment; empty when unset or set to nothing. REQUIRES that
// the table has it.
std::optional<std::string> setting(std::string_view name);
// Parsed forms; an unusable value is an error naming the variable, the value and what is accepted.
Result<std::optional<Nanoseconds>> setting_duration(
    std::string_view name);                                            // "30", "1.5", "500ms", "2m"
Result<std::optional<uint64_t>> setting_bytes(std::string_view name);  // "64K", "4M", "1.5G"
Result<std::optional<int64_t>> setting_integer(std::string_view name);
// The first setting whose value does not fit its kind, as invalid_argument; else ok.
Status check_settings();
// RINGFOLD_* variables that the table does not know, each with the nearest known name ("" if none).
struct UnknownSetting {
  std::string name, nearest;
};
std::vector<UnknownSetting> unknown_settings();

// "64K" -> 65536: binary suffixes B K M G T, fractions allowed; nothing else.
std::optional<uint64_t> parse_bytes(std::string_view text);
// "500ms" -> half a second: us ms s m h, fractions allowed; a plain number is seconds.
std::optional<Nanoseconds> parse_duration(std::string_view text);
// A whole decimal number and nothing else.
std::optional<int64_t> parse_integer(std::string_view text);

}  // namespace ringfold
