// How far a reduction of floats may be from the true value, whatever its order and algorithm.
//
// Every operation rounds to the type once: fl(a op b) = (a op b)(1 + d), |d| <= u, where u is half
// of the last place of a significand of p bits, 2^-p. Small floats are computed in f32 and then
// rounded, fp8 by NCCL in f16 and then rounded: the second rounding adds its own u. An input goes
// through at most N-1 additions of N ranks, and what multiplies it first is one rounding more:
//
//   sum         ((1+u)^(N-1) - 1) * sum |x|
//   premul_sum  ((1+u)^N - 1) * sum |f*x| + N*e
//   avg         ((1+u)^(N+1) - 1) * sum |x| / N + N*e
//               NCCL's rounds 1/N, each x/N, and N-1 sums. Ours divides a sum of f32 or f64 at the
//               end. Its running mean of small floats rounds the mean of k ranks, which then counts
//               k/N; k times that mean is at most sum |x|, so each of N-1 hops adds u * sum |x| /
//               N.
//   prod        ((1+u)^(N-1) - 1) * prod |x|
//
// e is the least subnormal: a product may also be off by half of it. Sums of subnormals are exact.
// Nothing is said where sum |x| or prod |x| leaves the range of the type.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "test/nccl_model.h"

namespace ringfold::test {

// Whether what a case gives depends on order and rounding at all.
inline bool rounds(DType type, Op op) {
  return is_float(type) && op != Op::min && op != Op::max;
}

class RoundingBound {
 public:
  RoundingBound(DType type, Op op, int ranks) : type_(type), op_(op), ranks_(ranks) {}

  struct Counted {
    size_t checked = 0, beyond = 0;
  };
  // `inputs` and `factors`: of every rank. `got`: `count` elements of the result, as bytes.
  [[nodiscard]] Counted check(const std::vector<std::vector<unsigned char>>& inputs,
                              const std::vector<double>& factors, const std::string& got,
                              size_t count) const {
    Counted counted;
    for (size_t i = 0; i < count; ++i) {
      long double exact = op_ == Op::prod ? 1 : 0, size = exact;
      for (size_t r = 0; r < inputs.size(); ++r) {
        long double x = value(inputs[r].data(), i);
        if (op_ == Op::premul_sum) x *= factors[r];
        if (op_ == Op::avg) x /= ranks_;
        exact = op_ == Op::prod ? exact * x : exact + x;
        size = op_ == Op::prod ? size * std::abs(x) : size + std::abs(x);
      }
      const long double bound = relative() * size + absolute();
      if ((size + bound) * (op_ == Op::avg ? ranks_ : 1) > largest()) continue;
      ++counted.checked;
      const long double off =
          std::abs(value(reinterpret_cast<const unsigned char*>(got.data()), i) - exact);
      counted.beyond += !(off <= bound);  // NaN is beyond
    }
    return counted;
  }

 private:
  [[nodiscard]] const SmallFormat* format() const {
    if (type_ == DType::f16) return &kModelF16;
    if (type_ == DType::bf16) return &kModelBF16;
    if (type_ == DType::f8e4m3) return &kModelE4M3;
    return type_ == DType::f8e5m2 ? &kModelE5M2 : nullptr;
  }
  [[nodiscard]] long double value(const unsigned char* bytes, size_t i) const {
    uint64_t raw = 0;
    std::memcpy(&raw, bytes + i * size_of(type_), size_of(type_));
    if (format() != nullptr) return format()->decode(static_cast<uint32_t>(raw));
    return type_ == DType::f64 ? __builtin_bit_cast(double, raw)
                               : __builtin_bit_cast(float, static_cast<uint32_t>(raw));
  }
  // u of one operation.
  [[nodiscard]] long double unit() const {
    if (type_ == DType::f32) return 0x1p-24L;
    if (type_ == DType::f64) return 0x1p-53L;
    const long double own = std::ldexp(1.0L, -format()->mantissa - 1);
    // f16: 2^-11; f32: 2^-24 for each of up to three operations of a mean.
    const long double between = size_of(type_) == 1 ? 0x1p-11L : 3 * 0x1p-24L;
    return own + between + own * between;
  }
  [[nodiscard]] long double relative() const {
    const int roundings = op_ == Op::avg ? ranks_ + 1 : op_ == Op::premul_sum ? ranks_ : ranks_ - 1;
    // The reference itself is off by 2^-64 an operation.
    return std::pow(1 + unit(), static_cast<long double>(roundings)) - 1 + 2 * ranks_ * 0x1p-64L;
  }
  [[nodiscard]] long double absolute() const {
    if (op_ == Op::sum || op_ == Op::prod) return 0;
    const long double least = type_ == DType::f32 ? 0x1p-149L
                              : type_ == DType::f64
                                  ? 0x1p-1074L
                                  : std::ldexp(1.0L, 1 - format()->bias - format()->mantissa);
    return ranks_ * least;
  }
  [[nodiscard]] long double largest() const {
    if (type_ == DType::f32) return std::numeric_limits<float>::max();
    if (type_ == DType::f64) return std::numeric_limits<double>::max();
    return format()->largest;
  }

  const DType type_;
  const Op op_;
  const int ranks_;
};

}  // namespace ringfold::test
