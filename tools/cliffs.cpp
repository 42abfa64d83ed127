#include "tools/cliffs.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/units.h"

namespace ringfold::tools {
namespace {

constexpr DType kOtherTypes[] = {DType::f64, DType::bf16, DType::f16, DType::i8};
constexpr double kMoved = 1.6;   // line latencies further apart are those of another placement
constexpr size_t kAgreeing = 3;  // looks on one side of the limit that settle it

}  // namespace

double CliffRule::most() const {
  switch (kind) {
    case CliffKind::doubling:
      return 3;
    case CliffKind::one_element:
      return 1.5;
    case CliffKind::type:
      return 1.3;
  }
  return 1;
}

std::vector<CliffRule> cliff_rules(uint64_t first, uint64_t last, int parts, bool in_place) {
  std::vector<CliffRule> rules;
  const auto unit = [&](DType type) { return size_of(type) * static_cast<uint64_t>(parts); };
  const uint64_t element = unit(DType::f32);
  for (uint64_t size = std::max<uint64_t>(first, 1); size <= last; size *= 2) {
    const uint64_t bytes = size / element * element;
    if (bytes == 0) continue;
    const CliffLine base{bytes, DType::f32, in_place};
    if (2 * size <= last) {
      const CliffLine twice{2 * size / element * element, DType::f32, in_place};
      rules.push_back({CliffKind::doubling, base, twice});
    }
    for (const uint64_t other : {bytes - element, bytes + element}) {
      if (other == 0) continue;  // nothing to do is quicker than anything
      const CliffLine neighbour{other, DType::f32, in_place};
      rules.push_back({CliffKind::one_element, base, neighbour});
      rules.push_back({CliffKind::one_element, neighbour, base});
    }
    for (const DType type : kOtherTypes) {
      const uint64_t whole = size / unit(type) * unit(type);
      if (whole > 0) rules.push_back({CliffKind::type, base, {whole, type, in_place}});
    }
  }
  return rules;
}

bool placed_alike(double line_ns, double other_ns) {
  const auto [low, high] = std::minmax(line_ns, other_ns);
  return low == 0 || high <= kMoved * low;
}

bool suspicious(const CliffRule& rule, const CliffTime& base, const CliffTime& subject) {
  return subject.us > rule.most() * base.us || !placed_alike(base.line_ns, subject.line_ns);
}

std::optional<bool> is_cliff(const CliffRule& rule, std::span<const double> ratios) {
  const auto above = static_cast<size_t>(std::count_if(
      ratios.begin(), ratios.end(), [&](double ratio) { return ratio > rule.most(); }));
  const bool agree = above == 0 || above == ratios.size();
  if (ratios.size() >= kAgreeing && agree) return above > 0;
  if (ratios.size() >= kCliffLooks) return 2 * above > ratios.size();
  return std::nullopt;
}

std::string describe(const CliffRule& rule) {
  const CliffLine &base = rule.base, &subject = rule.subject;
  const char* const place = subject.in_place ? "in place" : "out of place";
  const std::string than =
      rule.kind == CliffKind::type ? std::string(name(base.type)) : show_size(base.bytes);
  return fmt::format("{} {} {} against {} (allowed: {:g} times)", show_size(subject.bytes),
                     name(subject.type), place, than, rule.most());
}

}  // namespace ringfold::tools
