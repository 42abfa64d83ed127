// The small floats against slow references that share nothing with them: values from the
// definition of the formats, rounding by search among all values of the type.
#include "kernels/floats.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

#include "test/elements.h"

using namespace ringfold;

namespace {

template <class Small>
constexpr uint32_t kCodes = 1u << Small::kBits;

template <class Small>
Small small(uint32_t code) {
  return Small{static_cast<typename Small::Bits>(code)};
}

// The layout of a format as its standard states it, not as the code under test does.
struct Layout {
  int exponent_bits, mantissa_bits;
  bool infinity;
};
template <class Small>
constexpr Layout kLayout = {};
template <>
constexpr Layout kLayout<F16> = {5, 10, true};
template <>
constexpr Layout kLayout<BF16> = {8, 7, true};
template <>
constexpr Layout kLayout<F8E4M3> = {4, 3, false};
template <>
constexpr Layout kLayout<F8E5M2> = {5, 2, true};

template <class Small>
double value_of(uint32_t code) {
  const auto [exponent_bits, mantissa_bits, infinity] = kLayout<Small>;
  const int exponents = 1 << exponent_bits, mantissas = 1 << mantissa_bits;
  const int mantissa = static_cast<int>(code) & (mantissas - 1);
  const int exponent = static_cast<int>(code >> mantissa_bits) & (exponents - 1);
  const double sign = (code >> (exponent_bits + mantissa_bits)) != 0 ? -1 : 1;
  const int bias = exponents / 2 - 1;
  if (exponent == exponents - 1 && infinity) {
    return mantissa == 0 ? sign * INFINITY : std::nan("");
  }
  if (exponent == exponents - 1 && mantissa == mantissas - 1) return std::nan("");
  const double fraction = static_cast<double>(mantissa) / mantissas;
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1 + fraction, exponent - bias);
}

// All finite values from 0 up; the position is the code.
template <class Small>
std::vector<double> finite_values() {
  std::vector<double> values;
  for (uint32_t code = 0; std::isfinite(value_of<Small>(code)); ++code) {
    values.push_back(value_of<Small>(code));
  }
  return values;
}

// The code that x rounds to, by search.
template <class Small>
class Search {
 public:
  uint32_t operator()(float x) const {
    const uint32_t sign = std::signbit(x) ? kCodes<Small> / 2 : 0;
    if (std::isnan(x)) return kCodes<Small> / 2 - 1;
    return sign | magnitude(std::fabs(static_cast<double>(x)));
  }

 private:
  uint32_t magnitude(double x) const {
    const auto last = static_cast<uint32_t>(values_.size() - 1);
    const bool saturates = sizeof(Small) == 1;
    if (x >= values_[last]) {
      // Past the largest value the next step would be as long as the last one.
      const double tie = values_[last] + (values_[last] - values_[last - 1]) / 2;
      return x < tie || saturates ? last : last + 1;
    }
    const auto above = std::upper_bound(values_.begin(), values_.end(), x);
    const auto upper = static_cast<uint32_t>(above - values_.begin()), lower = upper - 1;
    const double to_lower = x - values_[lower], to_upper = values_[upper] - x;
    if (to_lower == to_upper) return lower % 2 == 0 ? lower : upper;
    return to_lower < to_upper ? lower : upper;
  }

  std::vector<double> values_ = finite_values<Small>();
};

template <class Small>
void check_rounding(const Search<Small>& search, float x) {
  const uint32_t got = from_f32<Small>(x).bits, expected = search(x);
  if (got == expected) return;
  INFO("f32 bits " << std::hex << bits_of(x) << " got " << got << " expected " << expected);
  FAIL("rounding differs");
}

template <class Small>
void check_both_signs(const Search<Small>& search, float x) {
  check_rounding(search, x);
  check_rounding(search, -x);
}

}  // namespace

TEMPLATE_TEST_CASE("every code has the value of its format", "", F16, BF16, F8E4M3, F8E5M2) {
  uint32_t numbers = 0;
  for (uint32_t code = 0; code < kCodes<TestType>; ++code) {
    const double expected = value_of<TestType>(code);
    const float got = to_f32(small<TestType>(code));
    const bool equal = std::isnan(expected) ? bits_of(got) == kF32Nan
                                            : static_cast<double>(got) == expected &&
                                                  std::signbit(got) == std::signbit(expected);
    if (!equal) FAIL("code " << code << " reads " << got << ", not " << expected);
    numbers += std::isnan(expected) ? 0 : 1;
  }
  CHECK(numbers == 2u * TestType::kTop + 2);
}

TEMPLATE_TEST_CASE("every number survives the way to f32 and back", "", F16, BF16, F8E4M3, F8E5M2) {
  for (uint32_t code = 0; code < kCodes<TestType>; ++code) {
    const double value = value_of<TestType>(code);
    const uint32_t back = from_f32<TestType>(to_f32(small<TestType>(code))).bits;
    uint32_t expected = code;
    if (std::isnan(value)) expected = kCodes<TestType> / 2 - 1;           // all bits but the sign
    if (std::isinf(value) && sizeof(TestType) == 1) expected = code - 1;  // saturates
    if (back != expected) FAIL("code " << code << " came back as " << back);
  }
}

TEMPLATE_TEST_CASE("rounding around every boundary", "", F16, BF16, F8E4M3, F8E5M2) {
  const Search<TestType> search;
  const std::vector<double> values = finite_values<TestType>();
  for (size_t i = 0; i < values.size(); ++i) {
    const double next = i + 1 < values.size() ? values[i + 1] : 2 * values[i] - values[i - 1];
    for (const double point : {values[i], (values[i] + next) / 2}) {
      const auto x = static_cast<float>(point);
      if (std::isinf(x)) continue;
      REQUIRE(static_cast<double>(x) == point);
      check_both_signs(search, x);
      check_both_signs(search, std::nextafterf(x, INFINITY));
      check_both_signs(search, std::nextafterf(x, -INFINITY));
    }
  }
}

TEMPLATE_TEST_CASE("rounding of hashed bit patterns", "", F16, BF16, F8E4M3, F8E5M2) {
  const Search<TestType> search;
  for (uint64_t i = 0; i < 500'000; ++i) {
    const uint64_t word = test::hashed(17, i);
    check_rounding(search, f32_of(static_cast<uint32_t>(word)));
    // And again with an exponent near the range of the narrower types.
    const uint32_t exponent = 127 - 32 + static_cast<uint32_t>(word >> 32) % 64;
    check_rounding(search, f32_of((static_cast<uint32_t>(word) & 0x807fffff) | exponent << 23));
  }
}

TEST_CASE("overflow, infinities and NaN") {
  CHECK(from_f32<F16>(65519.0f).bits == 0x7bff);
  CHECK(from_f32<F16>(65520.0f).bits == 0x7c00);
  CHECK(from_f32<F16>(-INFINITY).bits == 0xfc00);
  CHECK(from_f32<BF16>(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(from_f32<F8E4M3>(1e9f).bits == 0x7e);
  CHECK(from_f32<F8E4M3>(-INFINITY).bits == 0xfe);
  CHECK(from_f32<F8E5M2>(1e9f).bits == 0x7b);
  CHECK(from_f32<F8E5M2>(-INFINITY).bits == 0xfb);
  const float negative_nan = f32_of(0xffc12345);
  CHECK(from_f32<F16>(negative_nan).bits == 0x7fff);
  CHECK(from_f32<BF16>(negative_nan).bits == 0x7fff);
  CHECK(from_f32<F8E4M3>(negative_nan).bits == 0x7f);
  CHECK(from_f32<F8E5M2>(negative_nan).bits == 0x7f);
}

// The conversions are constant expressions.
static_assert(from_f32<F16>(1.0f).bits == 0x3c00 && to_f32(F16{0x0001}) == 0x1p-24f);
static_assert(from_f32<F8E4M3>(448.0f).bits == 0x7e && to_f32(F8E5M2{0x7b}) == 57344.0f);
