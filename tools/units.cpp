#include "tools/units.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>

namespace ringfold::tools {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};

constexpr double kKi = 1024, kMi = kKi * 1024, kGi = kMi * 1024, kTi = kGi * 1024;
constexpr std::array kBytes = {
    Unit{"", 1},     Unit{"B", 1},     Unit{"kB", 1e3},  Unit{"KB", 1e3},  Unit{"MB", 1e6},
    Unit{"GB", 1e9}, Unit{"TB", 1e12}, Unit{"K", kKi},   Unit{"M", kMi},   Unit{"G", kGi},
    Unit{"T", kTi},  Unit{"KiB", kKi}, Unit{"MiB", kMi}, Unit{"GiB", kGi}, Unit{"TiB", kTi},
};
constexpr std::array kBits = {
    Unit{"bit", 1.0 / 8},   Unit{"kbit", 1e3 / 8}, Unit{"Mbit", 1e6 / 8}, Unit{"Gbit", 1e9 / 8},
    Unit{"Tbit", 1e12 / 8}, Unit{"Mb", 1e6 / 8},   Unit{"Gb", 1e9 / 8},   Unit{"Tb", 1e12 / 8},
};
constexpr std::array kTimes = {Unit{"s", 1}, Unit{"ms", 1e-3}, Unit{"us", 1e-6}, Unit{"ns", 1e-9}};

// A number of at least 0 and what follows it.
std::optional<double> number(std::string_view text, std::string_view& rest) {
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed);
  if (error != std::errc{} || !std::isfinite(value) || value < 0) return std::nullopt;
  rest = text.substr(static_cast<size_t>(end - text.data()));
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  return value;
}

template <size_t N>
std::optional<double> with_unit(std::string_view text, const std::array<Unit, N>& units) {
  std::string_view rest;
  const auto value = number(text, rest);
  if (!value) return std::nullopt;
  for (const Unit& unit : units) {
    if (rest == unit.name) return *value * unit.factor;
  }
  return std::nullopt;
}

std::string scaled(double value, double step, std::initializer_list<const char*> units) {
  const auto* unit = units.begin();
  while (value >= step && unit + 1 != units.end()) value /= step, ++unit;
  return fmt::format("{:.6g} {}", value, *unit);
}

}  // namespace

std::optional<double> parse_amount(std::string_view text) {
  return with_unit(text, kBytes);
}

std::optional<double> parse_rate(std::string_view text) {
  if (!text.ends_with("/s")) return std::nullopt;
  text.remove_suffix(2);
  const auto bits = with_unit(text, kBits);
  const auto rate = bits ? bits : with_unit(text, kBytes);
  // "200/s" has no unit, and a rate of 0 never ends.
  return rate && *rate > 0 && text.find_first_not_of("0123456789.") != text.npos ? rate
                                                                                 : std::nullopt;
}

std::optional<double> parse_seconds(std::string_view text) {
  if (text == "0") return 0;
  return with_unit(text, kTimes);
}

std::optional<double> parse_share(std::string_view text) {
  std::string_view rest;
  const auto value = number(text, rest);
  if (!value || (!rest.empty() && rest != "%")) return std::nullopt;
  return rest == "%" ? *value / 100 : *value;
}

std::string show_amount(double bytes) {
  return scaled(bytes, 1000, {"B", "kB", "MB", "GB", "TB"});
}

std::string show_size(uint64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && bytes % 1024 == 0 && unit + 1 < kUnits.size()) bytes /= 1024, ++unit;
  return fmt::format("{} {}", bytes, kUnits[unit]);
}

std::string show_seconds(double seconds) {
  if (seconds >= 1) return fmt::format("{:.6g} s", seconds);
  return scaled(seconds * 1e9, 1000, {"ns", "us", "ms"});
}

std::string listed(std::span<const std::string_view> words) {
  std::string text;
  for (const std::string_view word : words)
    text += fmt::format("{}{}", text.empty() ? "" : ", ", word);
  return text;
}

}  // namespace ringfold::tools
