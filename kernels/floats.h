// The small floats (f16, bf16, fp8) and their conversion from and to f32, by integer arithmetic
// alone: the same bits on every processor, compiler and device, whatever the rounding mode.
//
//   rounding   to nearest, ties to even, subnormals included.
//   NaN        every NaN becomes the canonical one: all bits but the sign. That is the NaN of
//   CUDA's
//              own conversions and the only one f8e4m3 has, and it needs no table of types.
//   overflow   f16 and bf16 go to infinity. Both fp8 types saturate at their largest finite value
//              (f8e4m3 448, f8e5m2 57344), infinity itself included, as CUDA's conversion
//              instructions (satfinite) and so NCCL do. f8e4m3 is the OCP "fn" type: no infinity,
//              NaN 0x7f and 0xff. f8e5m2 has infinities; they are read as such.
//
// Plain constexpr functions for host and device. Thread-safe.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define RINGFOLD_HD __host__ __device__
#else
#define RINGFOLD_HD
#endif

namespace ringfold {

// The layout of each small float:
//   kTop       the largest magnitude that is no NaN
//   kOverflow  the magnitude that stands for everything too large
struct F16 {
  using Bits = uint16_t;
  static constexpr int kBits = 16, kMantissaBits = 10, kBias = 15;
  static constexpr bool kHasInfinity = true;
  static constexpr Bits kTop = 0x7c00, kOverflow = 0x7c00, kNan = 0x7fff;
  Bits bits;
};
struct BF16 {
  using Bits = uint16_t;
  static constexpr int kBits = 16, kMantissaBits = 7, kBias = 127;
  static constexpr bool kHasInfinity = true;
  static constexpr Bits kTop = 0x7f80, kOverflow = 0x7f80, kNan = 0x7fff;
  Bits bits;
};
struct F8E4M3 {
  using Bits = uint8_t;
  static constexpr int kBits = 8, kMantissaBits = 3, kBias = 7;
  static constexpr bool kHasInfinity = false;
  static constexpr Bits kTop = 0x7e, kOverflow = 0x7e, kNan = 0x7f;
  Bits bits;
};
struct F8E5M2 {
  using Bits = uint8_t;
  static constexpr int kBits = 8, kMantissaBits = 2, kBias = 15;
  static constexpr bool kHasInfinity = true;
  static constexpr Bits kTop = 0x7c, kOverflow = 0x7b, kNan = 0x7f;
  Bits bits;
};

inline constexpr uint32_t kF32Infinity = 0x7f800000;
inline constexpr uint32_t kF32Nan = 0x7fffffff;
inline constexpr uint64_t kF64Nan = 0x7fffffffffffffff;

// The builtin rather than std::bit_cast: device code may call it.
RINGFOLD_HD constexpr uint32_t bits_of(float x) {
  return __builtin_bit_cast(uint32_t, x);
}
RINGFOLD_HD constexpr uint64_t bits_of(double x) {
  return __builtin_bit_cast(uint64_t, x);
}
RINGFOLD_HD constexpr float f32_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
RINGFOLD_HD constexpr double f64_of(uint64_t bits) {
  return __builtin_bit_cast(double, bits);
}

// The value of a small float; exact.
template <class Small>
RINGFOLD_HD constexpr float to_f32(Small x) {
  constexpr int kDrop = 23 - Small::kMantissaBits;
  constexpr uint32_t kImplicit = 1u << Small::kMantissaBits;
  const uint32_t magnitude = x.bits & Small::kNan;
  const uint32_t sign = static_cast<uint32_t>(x.bits ^ magnitude) << (32 - Small::kBits);
  if (magnitude > Small::kTop) return f32_of(kF32Nan);
  if (Small::kHasInfinity && magnitude == Small::kTop) return f32_of(sign | kF32Infinity);
  if (magnitude >= kImplicit) {
    return f32_of(sign | ((magnitude << kDrop) + ((127u - Small::kBias) << 23)));
  }
  if (magnitude == 0) return f32_of(sign);
  // Subnormal here, normal in f32: bring the highest bit to the implicit place.
  uint32_t significand = magnitude, exponent = 127u - Small::kBias + 1;
  while (significand < kImplicit) {
    significand <<= 1;
    --exponent;
  }
  return f32_of(sign | (exponent << 23) | ((significand - kImplicit) << kDrop));
}

// bf16 is the upper half of an f32.
template <>
RINGFOLD_HD constexpr float to_f32(BF16 x) {
  if ((x.bits & BF16::kNan) > BF16::kTop) return f32_of(kF32Nan);
  return f32_of(static_cast<uint32_t>(x.bits) << 16);
}

// The small float nearest to x, by the rules at the top.
template <class Small>
RINGFOLD_HD constexpr Small from_f32(float x) {
  using Bits = typename Small::Bits;
  const uint32_t magnitude = bits_of(x) & kF32Nan;
  const auto sign = static_cast<Bits>((bits_of(x) ^ magnitude) >> (32 - Small::kBits));
  if (magnitude > kF32Infinity) return {Small::kNan};
  // The significand with its implicit bit, to be cut by `drop` bits: more for a subnormal result.
  // (f32 subnormals lack the implicit bit, but are far below anything that could be told from 0.)
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + Small::kBias;
  const uint32_t significand = (magnitude & 0x007fffff) | 0x00800000;
  const int drop = 23 - Small::kMantissaBits + (exponent > 0 ? 0 : 1 - exponent);
  if (drop > 24) return {sign};  // below half of the smallest subnormal
  uint32_t kept = significand >> drop;
  const uint32_t rest = significand & ((1u << drop) - 1), half = 1u << (drop - 1);
  kept += (rest > half || (rest == half && (kept & 1) != 0)) ? 1 : 0;
  // `kept` carries the implicit bit, which counts as one in the exponent; so does rounding up.
  const uint32_t field = exponent > 0 ? static_cast<uint32_t>(exponent - 1) : 0;
  const uint32_t code = (field << Small::kMantissaBits) + kept;
  return {static_cast<Bits>(sign | (code < Small::kOverflow ? code : Small::kOverflow))};
}

template <>
RINGFOLD_HD constexpr BF16 from_f32<BF16>(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & kF32Nan) > kF32Infinity) return {BF16::kNan};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace ringfold
