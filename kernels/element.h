// What a collective does to one pair of elements: the bodies that the reference loop and the CUDA
// kernels run, and that the SIMD kernels must equal bit for bit.
//
// Every body gives the same bits for (a, b) and (b, a), and turns every NaN into the canonical one
// (floats.h): x86 and CUDA differ in whose payload and sign survives an addition. Build without
// contraction into fused multiply-adds (-ffp-contract=off, -fmad=false): they round differently.
//
// Plain functions for host and device. Thread-safe.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/conversions.h"
#include "kernels/reduce.h"

namespace ringfold {

template <class T>
inline constexpr bool kIsSmallFloat = std::is_class_v<T>;

// The type a factor of premul_sum is applied in.
template <class T>
using Factor = std::conditional_t<kIsSmallFloat<T>, float,
                                  std::conditional_t<std::is_same_v<T, float>, float, double>>;

RINGFOLD_HD constexpr float canonical(float x) {
  return x == x ? x : f32_of(kF32Nan);
}
RINGFOLD_HD constexpr double canonical(double x) {
  return x == x ? x : f64_of(kF64Nan);
}

template <class T>
RINGFOLD_HD constexpr T add(T a, T b) {
  if constexpr (kIsSmallFloat<T>) {
    return narrow<T>(widen(a) + widen(b));
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;  // wraps without undefined behaviour
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return canonical(a + b);
  }
}

template <class T>
RINGFOLD_HD constexpr T multiply(T a, T b) {
  if constexpr (kIsSmallFloat<T>) {
    return narrow<T>(widen(a) * widen(b));
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  } else {
    return canonical(a * b);
  }
}

// A number that orders floats of one type as min and max do: by value, -0 before +0. The magnitude
// of NaN lies above that of every number, see is_nan.
template <class T>
RINGFOLD_HD constexpr auto order_of(T x) {
  if constexpr (kIsSmallFloat<T>) {
    const auto magnitude = static_cast<int32_t>(x.bits & T::kNan);
    return x.bits == magnitude ? magnitude : ~magnitude;
  } else if constexpr (std::is_same_v<T, float>) {
    const auto bits = static_cast<int32_t>(bits_of(x));
    return bits >= 0 ? bits : ~(bits & INT32_MAX);
  } else {
    const auto bits = static_cast<int64_t>(bits_of(x));
    return bits >= 0 ? bits : ~(bits & INT64_MAX);
  }
}

template <class T>
RINGFOLD_HD constexpr bool is_nan(T x) {
  if constexpr (kIsSmallFloat<T>) {
    return (x.bits & T::kNan) > T::kTop;
  } else {
    return x != x;
  }
}

template <class T>
RINGFOLD_HD constexpr T canonical_nan() {
  if constexpr (kIsSmallFloat<T>) {
    return T{T::kNan};
  } else if constexpr (std::is_same_v<T, float>) {
    return f32_of(kF32Nan);
  } else {
    return f64_of(kF64Nan);
  }
}

template <class T>
RINGFOLD_HD constexpr T lesser(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a < b ? a : b;
  } else {
    if (is_nan(a) || is_nan(b)) return canonical_nan<T>();
    return order_of(a) < order_of(b) ? a : b;
  }
}

template <class T>
RINGFOLD_HD constexpr T greater(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a > b ? a : b;
  } else {
    if (is_nan(a) || is_nan(b)) return canonical_nan<T>();
    return order_of(a) > order_of(b) ? a : b;
  }
}

// x cut toward zero and taken modulo 2^64; 0 for NaN and infinities. A cast would be undefined
// outside the range of the type.
RINGFOLD_HD constexpr uint64_t wrapped(double x) {
  const uint64_t bits = bits_of(x);
  const int field = static_cast<int>((bits >> 52) & 0x7ff);
  const int shift = field - 1075;  // |x| = significand * 2^shift
  if (shift >= 64 || shift <= -53) return 0;
  const uint64_t significand = (bits & 0x000fffffffffffff) | 0x0010000000000000;
  const uint64_t magnitude = shift >= 0 ? significand << shift : significand >> -shift;
  return bits >> 63 != 0 ? 0 - magnitude : magnitude;
}

// x times a factor other than 1, rounded to the type. A whole factor multiplies integers exactly,
// modulo the type; f64 would lose the low bits of a product that wraps.
template <class T>
RINGFOLD_HD constexpr T scale(T x, Factor<T> factor) {
  if constexpr (kIsSmallFloat<T>) {
    return narrow<T>(widen(x) * factor);
  } else if constexpr (std::is_integral_v<T>) {
    const uint64_t whole = wrapped(factor);
    if (static_cast<double>(static_cast<int64_t>(whole)) == factor)
      return static_cast<T>(static_cast<uint64_t>(x) * whole);
    return static_cast<T>(wrapped(static_cast<double>(x) * factor));
  } else {
    return canonical(x * factor);
  }
}

// The weights of a running mean of small floats.
struct Mean {
  float count_a, count_b, total;
  float share_a, share_b;  // count / total
  RINGFOLD_HD constexpr Mean(int a, int b)
      : count_a(static_cast<float>(a)),
        count_b(static_cast<float>(b)),
        total(static_cast<float>(a + b)),
        share_a(count_a / total),
        share_b(count_b / total) {}
};

// The mean in f32. The weighted sum of small floats is exact or nearly so, and one division rounds
// it; only bf16 is wide enough for that sum to overflow, and then the shares do not.
RINGFOLD_HD constexpr float mean(float a, float b, const Mean& weights) {
  const float sum = a * weights.count_a + b * weights.count_b;
  if ((bits_of(sum) & kF32Nan) == kF32Infinity) return a * weights.share_a + b * weights.share_b;
  return sum / weights.total;
}

template <class T>
RINGFOLD_HD constexpr T divide(T sum, int total) {
  if constexpr (std::is_integral_v<T>) {
    // In 64 bits, of the type's signedness: `total` need not fit into an 8-bit type.
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<T>(static_cast<Wide>(sum) / static_cast<Wide>(total));
  } else {
    return canonical(sum / static_cast<T>(total));
  }
}

// What a call knows besides the elements, in the types the bodies want.
template <class T>
struct Constants {
  Factor<T> scale_a, scale_b;
  Mean weights;
  int divisor;  // of the completing call of an average, else 1; small floats do not look at it
  RINGFOLD_HD explicit constexpr Constants(const ReduceCall& call)
      : scale_a(static_cast<Factor<T>>(call.scale_a)),
        scale_b(static_cast<Factor<T>>(call.scale_b)),
        weights(call.count_a, call.count_b),
        divisor(call.count_a + call.count_b == call.total ? call.total : 1) {}
};

// One element of a ReduceCall.
template <Op op, class T>
RINGFOLD_HD constexpr T combine(T a, T b, const Constants<T>& constants) {
  if constexpr (op == Op::sum) {
    return add(a, b);
  } else if constexpr (op == Op::prod) {
    return multiply(a, b);
  } else if constexpr (op == Op::max) {
    return greater(a, b);
  } else if constexpr (op == Op::min) {
    return lesser(a, b);
  } else if constexpr (op == Op::premul_sum) {
    // A factor of 1 must leave integers alone that f64 cannot hold.
    return add(constants.scale_a == 1 ? a : scale(a, constants.scale_a),
               constants.scale_b == 1 ? b : scale(b, constants.scale_b));
  } else if constexpr (kIsSmallFloat<T>) {
    return narrow<T>(mean(widen(a), widen(b), constants.weights));
  } else {
    const T sum = add(a, b);
    return constants.divisor == 1 ? sum : divide(sum, constants.divisor);
  }
}

// What a fold knows besides the elements.
template <class T>
struct FoldConstants {
  int ranks;
  int own;  // the source to be scaled, or -1
  Factor<T> factor;
  RINGFOLD_HD explicit constexpr FoldConstants(const FoldCall& call)
      : ranks(call.ranks),
        own(call.op == Op::premul_sum && call.factor != 1 ? call.own : -1),
        factor(static_cast<Factor<T>>(call.factor)) {}
};

// The f32 sum of bf16 alone may overflow where the mean does not. Then it is formed again of this
// share of every element, which is exact for all that count, and small enough for kMostSources.
inline constexpr float kShare = 0x1p-6f;
static_assert(kShare * kMostSources <= 1);

template <class T>
RINGFOLD_HD constexpr T contribution(const void* const* sources, int rank, size_t i,
                                     const FoldConstants<T>& constants) {
  const T x = static_cast<const T*>(sources[rank])[i];
  return rank == constants.own ? scale(x, constants.factor) : x;
}

template <Op op, class T>
RINGFOLD_HD constexpr T fold_small(const void* const* sources, size_t i,
                                   const FoldConstants<T>& constants) {
  float all = to_f32(contribution(sources, 0, i, constants));
  for (int r = 1; r < constants.ranks; ++r) {
    const float x = to_f32(contribution(sources, r, i, constants));
    all = op == Op::prod ? all * x : all + x;
  }
  if constexpr (op == Op::avg) {
    float divisor = static_cast<float>(constants.ranks);
    if (std::is_same_v<T, BF16> && (bits_of(all) & kF32Infinity) == kF32Infinity) {
      all = 0;
      for (int r = 0; r < constants.ranks; ++r)
        all += to_f32(contribution(sources, r, i, constants)) * kShare;
      divisor *= kShare;
    }
    all /= divisor;
  }
  return from_f32<T>(all);
}

// Element i of a FoldCall.
template <Op op, class T>
RINGFOLD_HD constexpr T fold(const void* const* sources, size_t i,
                             const FoldConstants<T>& constants) {
  if constexpr (kIsSmallFloat<T> && op != Op::max && op != Op::min) {
    return fold_small<op>(sources, i, constants);
  } else {
    T all = contribution(sources, 0, i, constants);
    for (int r = 1; r < constants.ranks; ++r) {
      const T x = contribution(sources, r, i, constants);
      if constexpr (op == Op::prod) {
        all = multiply(all, x);
      } else if constexpr (op == Op::max) {
        all = greater(all, x);
      } else if constexpr (op == Op::min) {
        all = lesser(all, x);
      } else {
        all = add(all, x);
      }
    }
    if constexpr (op == Op::avg) return divide(all, constants.ranks);
    return all;
  }
}

}  // namespace ringfold
