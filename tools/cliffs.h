// Where a collective's time jumps. A cliff is a line of a sweep that takes out of proportion longer
// than its neighbour: twice the bytes, one element more or less, another type of the same size.
// Pure functions, any thread; bench_cliffs.cpp measures.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "ringfold/types.h"

namespace ringfold::tools {

struct CliffLine {
  uint64_t bytes = 0;  // of the largest buffer of a rank
  DType type = DType::f32;
  bool in_place = false;
  bool operator==(const CliffLine&) const = default;
  bool operator<(const CliffLine& other) const {
    return std::tie(bytes, type, in_place) < std::tie(other.bytes, other.type, other.in_place);
  }
};

enum class CliffKind : uint8_t { doubling, one_element, type };

// `subject` may take at most `most` times as long as `base`.
struct CliffRule {
  CliffKind kind = CliffKind::doubling;
  CliffLine base, subject;
  [[nodiscard]] double most() const;
};

// The rules for sizes from `first` to `last` bytes (below 2^62), each twice the one before.
// `parts`: into how many equal parts the collective divides the largest buffer; one element more
// then means one in each. An element that changes the time is a cliff in whichever direction, so
// that rule is there twice.
std::vector<CliffRule> cliff_rules(uint64_t first, uint64_t last, int parts, bool in_place);

struct CliffTime {
  double us = 0;
  double line_ns = 0;  // how near the cores were, 0: not known; see line_latency.h
};

// Were the cores placed alike? Times are comparable only then.
bool placed_alike(double line_ns, double other_ns);

// Whether a first look gives reason to measure both lines again, side by side.
bool suspicious(const CliffRule& rule, const CliffTime& base, const CliffTime& subject);

// What several measurements side by side say, each the subject's time over the base's: a cliff,
// none, or not yet clear. Three that agree are enough; of kCliffLooks the median decides.
constexpr size_t kCliffLooks = 7;
std::optional<bool> is_cliff(const CliffRule& rule, std::span<const double> ratios);

// "64 KiB bf16 in place against f32 (allowed: 1.3 times)".
std::string describe(const CliffRule& rule);

}  // namespace ringfold::tools
