#include "tools/sim_faults.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "lib/base/base.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

std::optional<Nanoseconds> duration(std::string_view text) {
  const auto seconds = parse_seconds(text);
  if (!seconds || *seconds > 1e9) return std::nullopt;
  return Nanoseconds(std::llround(*seconds * 1e9));
}

// The part before `mark`, which is taken off the text together with it; nothing without a mark.
std::optional<std::string_view> up_to(char mark, std::string_view* text) {
  const size_t end = text->find(mark);
  if (end == std::string_view::npos) return std::nullopt;
  const std::string_view part = text->substr(0, end);
  text->remove_prefix(end + 1);
  return part;
}

std::optional<Peer> rank(std::optional<std::string_view> text, FaultSpec* spec) {
  const auto value = text ? parse_integer(*text) : std::nullopt;
  if (!value || *value < 0 || *value >= 1 << 20) return std::nullopt;
  spec->largest_rank = std::max(spec->largest_rank, static_cast<int>(*value));
  return static_cast<Peer>(*value);
}

bool add_loss(std::string_view text, FaultSpec* spec) {
  const auto who = rank(up_to('@', &text), spec);
  const auto when = duration(text);
  if (!who || !when) return false;
  spec->faults.lost.push_back({*who, *when});
  return true;
}

bool add_stall(std::string_view text, FaultSpec* spec) {
  const auto who = rank(up_to('@', &text), spec);
  const auto limited = up_to('+', &text);
  const auto begin = duration(limited ? *limited : text);
  const auto length = limited ? duration(text) : Nanoseconds::max();
  if (!who || !begin || !length) return false;
  spec->faults.stalled.push_back({*who, *begin, limited ? *begin + *length : *length});
  return true;
}

bool add_slow(std::string_view text, FaultSpec* spec) {
  const auto from = rank(up_to('-', &text), spec);
  const auto to = rank(up_to('*', &text), spec);
  const auto factor = parse_share(text);
  if (!from || !to || !factor || *factor <= 0) return false;
  spec->faults.slow.push_back({*from, *to, *factor});
  return true;
}

bool set(std::string_view text, Nanoseconds* time) {
  const auto value = duration(text);
  if (value) *time = *value;
  return value.has_value();
}

bool add(std::string_view item, FaultSpec* spec) {
  const auto kind = up_to('=', &item);
  if (kind == "jitter") return set(item, &spec->faults.jitter);
  if (kind == "notice") return set(item, &spec->faults.notice);
  if (kind == "deadline") return set(item, &spec->deadline);
  if (kind == "lose") return add_loss(item, spec);
  if (kind == "stall") return add_stall(item, spec);
  return kind == "slow" && add_slow(item, spec);
}

}  // namespace

Result<FaultSpec> parse_faults(std::string_view text) {
  FaultSpec spec;
  while (!text.empty()) {
    const std::string_view whole = text;
    const auto part = up_to(',', &text);
    const std::string_view item = part ? *part : whole;
    if (!part) text = {};
    if (!add(item, &spec))
      return Status(Code::invalid_argument, fmt::format("\"{}\"; accepted: {}", item, kFaultsHelp));
  }
  return spec;
}

}  // namespace ringfold::tools
