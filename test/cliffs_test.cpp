// What `ringfold bench --cliffs` compares, and when it speaks of a cliff. No clocks here.
#include "tools/cliffs.h"

#include <catch2/catch.hpp>
#include <set>
#include <vector>

using namespace ringfold;
using namespace ringfold::tools;

namespace {

std::vector<CliffRule> of_kind(const std::vector<CliffRule>& rules, CliffKind kind) {
  std::vector<CliffRule> found;
  for (const CliffRule& rule : rules) {
    if (rule.kind == kind) found.push_back(rule);
  }
  return found;
}

CliffRule rule_of(CliffKind kind) {
  return {kind, {64, DType::f32, false}, {128, DType::f32, false}};
}

}  // namespace

TEST_CASE("rules cover every size, its neighbours and all types") {
  const auto rules = cliff_rules(8, 64, 1, true);
  std::set<std::pair<uint64_t, uint64_t>> doublings;
  for (const CliffRule& rule : of_kind(rules, CliffKind::doubling)) {
    CHECK(rule.most() == 3);
    doublings.insert({rule.base.bytes, rule.subject.bytes});
  }
  CHECK(doublings == std::set<std::pair<uint64_t, uint64_t>>{{8, 16}, {16, 32}, {32, 64}});

  std::set<std::pair<uint64_t, uint64_t>> steps;
  for (const CliffRule& rule : of_kind(rules, CliffKind::one_element)) {
    CHECK(rule.most() == 1.5);
    CHECK(rule.base.type == DType::f32);
    steps.insert({rule.base.bytes, rule.subject.bytes});
  }
  CHECK(steps.size() == 16);  // four sizes, both neighbours, both directions
  for (const uint64_t size : {8, 16, 32, 64}) {
    for (const uint64_t other : {size - 4, size + 4}) {
      CHECK(steps.contains({size, other}));
      CHECK(steps.contains({other, size}));
    }
  }

  std::set<std::pair<uint64_t, DType>> types;
  for (const CliffRule& rule : of_kind(rules, CliffKind::type)) {
    CHECK(rule.most() == 1.3);
    CHECK(rule.base == CliffLine{rule.subject.bytes, DType::f32, true});
    types.insert({rule.subject.bytes, rule.subject.type});
  }
  CHECK(types.size() == 16);
  for (const DType type : {DType::f64, DType::bf16, DType::f16, DType::i8}) {
    CHECK(types.contains({64, type}));
  }
  for (const CliffRule& rule : rules) CHECK((rule.base.in_place && rule.subject.in_place));
}

TEST_CASE("rules leave out what has no elements, and divide into parts") {
  for (const CliffRule& rule : cliff_rules(1, 4, 1, false)) {
    CHECK(rule.base.bytes > 0);
    CHECK(rule.subject.bytes > 0);
    CHECK(rule.subject.type != DType::f64);  // 8 bytes are not among 4
  }
  const auto parts = cliff_rules(64, 128, 3, false);
  CHECK_FALSE(parts.empty());
  for (const CliffRule& rule : parts) {
    CHECK(rule.subject.bytes % (3 * size_of(rule.subject.type)) == 0);
  }
  for (const CliffRule& rule : of_kind(parts, CliffKind::one_element)) {
    const auto [low, high] = std::minmax(rule.base.bytes, rule.subject.bytes);
    CHECK(high - low == 12);  // one element in each part
  }
  CHECK(cliff_rules(64, 32, 1, false).empty());
}

TEST_CASE("a first look is suspicious beyond the limit, or when the cores lay differently") {
  const CliffRule rule = rule_of(CliffKind::type);
  CHECK_FALSE(suspicious(rule, {10, 50}, {12.9, 55}));
  CHECK(suspicious(rule, {10, 50}, {13.1, 55}));
  CHECK_FALSE(suspicious(rule, {10, 50}, {1, 50}));  // quicker is no cliff of this rule
  CHECK(suspicious(rule, {10, 50}, {10, 245}));
  CHECK(suspicious(rule, {10, 245}, {10, 50}));
  CHECK_FALSE(suspicious(rule, {10, 0}, {10, 0}));  // one core: nothing to be near to
}

TEST_CASE("several looks decide") {
  const CliffRule rule = rule_of(CliffKind::one_element);  // 1.5
  using Ratios = std::vector<double>;
  CHECK(is_cliff(rule, Ratios{}) == std::nullopt);
  CHECK(is_cliff(rule, Ratios{9, 9}) == std::nullopt);  // two may be a coincidence
  CHECK(is_cliff(rule, Ratios{1.6, 1.7, 1.6}) == true);
  CHECK(is_cliff(rule, Ratios{1.4, 1.5, 0.2}) == false);  // the limit itself is allowed
  CHECK(is_cliff(rule, Ratios{1.4, 1.6, 1.4, 1.6, 1.6, 1.4}) == std::nullopt);
  CHECK(is_cliff(rule, Ratios{1.4, 1.6, 1.4, 1.6, 1.6, 1.4, 9}) == true);
  CHECK(is_cliff(rule, Ratios{1.4, 1.6, 1.4, 9, 9, 1.4, 1}) == false);
  CHECK(is_cliff(rule_of(CliffKind::doubling), Ratios{2.9, 2.9, 2.9}) == false);
}

TEST_CASE("a cliff is told by size, type and place") {
  const CliffRule type{CliffKind::type, {65536, DType::f32, true}, {65536, DType::bf16, true}};
  CHECK(describe(type) == "64 KiB bf16 in place against f32 (allowed: 1.3 times)");
  const CliffRule step{CliffKind::one_element, {64, DType::f32, false}, {68, DType::f32, false}};
  CHECK(describe(step) == "68 B f32 out of place against 64 B (allowed: 1.5 times)");
}
