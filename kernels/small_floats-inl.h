// Small floats in vectors: how each type widens to f32 and rounds back, on every target to the bits
// of floats.h. Highway's own conversions are used only where they are exact or one instruction that
// rounds to nearest even; the others truncate. Included once per target (Highway's toggle guard).
#if defined(RINGFOLD_KERNELS_SMALL_FLOATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGFOLD_KERNELS_SMALL_FLOATS_INL_H_
#undef RINGFOLD_KERNELS_SMALL_FLOATS_INL_H_
#else
#define RINGFOLD_KERNELS_SMALL_FLOATS_INL_H_
#endif

#include "kernels/loop-inl.h"

#if !RINGFOLD_PLAIN_TARGET

HWY_BEFORE_NAMESPACE();
namespace ringfold::HWY_NAMESPACE {
namespace {

// Whether the target converts f16 in one instruction (F16C and later).
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
inline constexpr bool kConvertsF16 = true;
#else
inline constexpr bool kConvertsF16 = false;
#endif

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<uint32_t>;
using VF32 = hn::Vec<F32>;
using VU32 = hn::Vec<U32>;

HWY_INLINE VF32 as_f32(VU32 bits) {
  return hn::BitCast(F32(), bits);
}
HWY_INLINE VU32 as_bits(VF32 x) {
  return hn::BitCast(U32(), x);
}
HWY_INLINE VU32 set_bits(uint32_t bits) {
  return hn::Set(U32(), bits);
}
HWY_INLINE VF32 set_f32(float x) {
  return hn::Set(F32(), x);
}

// The values of small floats whose bits lie in 32-bit lanes.
template <class Small>
HWY_INLINE VF32 widen_bits(VU32 bits) {
  constexpr int kDrop = 23 - Small::kMantissaBits;
  constexpr uint32_t kRebias = (127u - Small::kBias) << 23;
  const VU32 magnitude = hn::And(bits, set_bits(Small::kNan));
  const VU32 sign = hn::ShiftLeft<32 - Small::kBits>(hn::Xor(bits, magnitude));
  const VU32 normal = hn::Add(hn::ShiftLeft<kDrop>(magnitude), set_bits(kRebias));
  // A subnormal has no implicit bit: read it as if it had one in the lowest exponent, and subtract.
  constexpr uint32_t kOne = 1u << 23;
  const VU32 subnormal =
      as_bits(hn::Sub(as_f32(hn::Add(normal, set_bits(kOne))), as_f32(set_bits(kRebias + kOne))));
  const VU32 kImplicit = set_bits(1u << Small::kMantissaBits);
  VU32 finite = hn::IfThenElse(hn::Lt(magnitude, kImplicit), subnormal, normal);
  if (Small::kHasInfinity) {
    // Infinity, and something above it for NaN.
    const VU32 high = hn::Or(normal, set_bits(kF32Infinity));
    finite = hn::IfThenElse(hn::Lt(magnitude, set_bits(Small::kTop)), finite, high);
  } else {
    finite = hn::IfThenElse(hn::Gt(magnitude, set_bits(Small::kTop)), set_bits(kF32Nan), finite);
  }
  return as_f32(hn::Or(finite, sign));
}

// Rounds to a small float, its bits in 32-bit lanes. Not for bf16.
template <class Small>
HWY_INLINE VU32 narrow_bits(VF32 x) {
  constexpr int kDrop = 23 - Small::kMantissaBits;
  constexpr uint32_t kLeastExponent = (128u - Small::kBias) << 23;  // of normal numbers
  constexpr uint32_t kExponentMask = kF32Infinity;
  // Everything that overflows rounds like the least power of two above the range, or saturates.
  constexpr float kLimit =
      Small::kOverflow == Small::kTop && Small::kHasInfinity
          ? f32_of(((Small::kTop >> Small::kMantissaBits) + 127u - Small::kBias) << 23)
          : to_f32(Small{Small::kOverflow});
  const VF32 magnitude = hn::Abs(x);
  const VF32 clamped = hn::Min(magnitude, set_f32(kLimit));
  // Adding a power of two whose last place is the last place of the result lets the adder round to
  // nearest even; what it leaves in the low bits is the significand with its implicit bit.
  const VU32 exponent = as_bits(hn::Max(as_f32(hn::And(as_bits(clamped), set_bits(kExponentMask))),
                                        as_f32(set_bits(kLeastExponent))));
  const VU32 anchor = hn::Add(exponent, set_bits(uint32_t{kDrop} << 23));
  const VU32 significand = hn::Sub(as_bits(hn::Add(clamped, as_f32(anchor))), anchor);
  const VU32 field = hn::ShiftRight<kDrop>(hn::Sub(exponent, set_bits(kLeastExponent)));
  const VU32 sign =
      hn::And(hn::ShiftRight<32 - Small::kBits>(as_bits(x)), set_bits(1u << (Small::kBits - 1)));
  const VU32 code = hn::Or(hn::Add(field, significand), sign);
  const auto is_nan = hn::RebindMask(U32(), hn::IsNaN(x));
  return hn::IfThenElse(is_nan, set_bits(Small::kNan), code);
}

// A type whose bits are spread to 32-bit lanes and back: `D` loads as many as there are f32 lanes.
template <class Small>
struct Spread {
  using D = hn::Rebind<typename Small::Bits, F32>;
  using V = hn::Vec<D>;
  static HWY_INLINE VF32 widen(V x) { return widen_bits<Small>(hn::PromoteTo(U32(), x)); }
  static HWY_INLINE V narrow(VF32 x) { return hn::TruncateTo(D(), narrow_bits<Small>(x)); }

  // `x` rounded to the type, still in f32.
  static HWY_INLINE VF32 round(VF32 x) { return widen(narrow(x)); }

  template <class Op>
  static HWY_INLINE V apply(const Op& op, V a, V b) {
    return narrow(op.template operator()<Spread>(widen(a), widen(b)));
  }
};

// The same with the conversion instructions.
struct ConvertedF16 {
  using D = hn::Rebind<uint16_t, F32>;
  using V = hn::Vec<D>;
  using DF16 = hn::Rebind<hwy::float16_t, F32>;
  static HWY_INLINE VF32 widen(V x) { return hn::PromoteTo(F32(), hn::BitCast(DF16(), x)); }
  static HWY_INLINE V narrow(VF32 x) {
    const VF32 number = hn::IfThenElse(hn::IsNaN(x), as_f32(set_bits(kF32Nan)), x);
    return hn::BitCast(D(), hn::DemoteTo(DF16(), number));
  }
  static HWY_INLINE VF32 round(VF32 x) { return widen(narrow(x)); }

  template <class Op>
  static HWY_INLINE V apply(const Op& op, V a, V b) {
    return narrow(op.template operator()<ConvertedF16>(widen(a), widen(b)));
  }
};

// f8e5m2 is the upper half of an f16.
struct ConvertedF8E5M2 {
  using D = hn::Rebind<uint8_t, F32>;
  using V = hn::Vec<D>;
  static HWY_INLINE VF32 widen(V x) {
    const hn::Rebind<uint16_t, F32> du16;
    return ConvertedF16::widen(hn::ShiftLeft<8>(hn::PromoteTo(du16, x)));
  }
  static HWY_INLINE V narrow(VF32 x) { return hn::TruncateTo(D(), narrow_bits<F8E5M2>(x)); }
  static HWY_INLINE VF32 round(VF32 x) { return widen(narrow(x)); }

  template <class Op>
  static HWY_INLINE V apply(const Op& op, V a, V b) {
    return narrow(op.template operator()<ConvertedF8E5M2>(widen(a), widen(b)));
  }
};

// f8e4m3 has the layout of an f16 without its highest exponent bit: moved there it reads as 2^-8 of
// its value.
struct ConvertedF8E4M3 {
  using D = hn::Rebind<uint8_t, F32>;
  using V = hn::Vec<D>;
  static HWY_INLINE VF32 widen(V x) {
    const hn::Rebind<int8_t, F32> di8;
    const hn::Rebind<int16_t, F32> di16;
    const auto moved = hn::ShiftLeft<7>(hn::PromoteTo(di16, hn::BitCast(di8, x)));
    const auto nan = hn::Set(di16, int16_t{F8E4M3::kNan << 7});
    const auto is_nan = hn::VecFromMask(di16, hn::Eq(hn::And(moved, nan), nan));
    const auto number =
        hn::And(moved, hn::Set(di16, static_cast<int16_t>(0x8000 | F8E4M3::kNan << 7)));
    const auto half = hn::Or(number, is_nan);
    return hn::Mul(ConvertedF16::widen(hn::BitCast(ConvertedF16::D(), half)), set_f32(256.0f));
  }
  static HWY_INLINE V narrow(VF32 x) { return hn::TruncateTo(D(), narrow_bits<F8E4M3>(x)); }
  static HWY_INLINE VF32 round(VF32 x) { return widen(narrow(x)); }

  template <class Op>
  static HWY_INLINE V apply(const Op& op, V a, V b) {
    return narrow(op.template operator()<ConvertedF8E4M3>(widen(a), widen(b)));
  }
};

// bf16: every 32-bit lane holds two elements, the upper one an f32 but for its low half.
struct PairedBF16 {
  using D = hn::ScalableTag<uint16_t>;
  using V = hn::Vec<D>;

  // Rounded to the upper half; the lower half is left over.
  static HWY_INLINE VU32 rounded_bits(VF32 x) {
    const VU32 bits = as_bits(x);
    const VU32 odd = hn::And(hn::ShiftRight<16>(bits), set_bits(1));
    const VU32 rounded = hn::Add(hn::Add(bits, set_bits(0x7fff)), odd);
    const auto is_nan = hn::RebindMask(U32(), hn::IsNaN(x));
    return hn::IfThenElse(is_nan, set_bits(uint32_t{BF16::kNan} << 16), rounded);
  }
  static HWY_INLINE VU32 upper(VU32 bits) { return hn::And(bits, set_bits(0xffff0000)); }
  static HWY_INLINE VF32 round(VF32 x) { return as_f32(upper(rounded_bits(x))); }

  struct Pair {
    VF32 high, low;
  };
  static HWY_INLINE Pair widen(V x) {
    const VU32 bits = hn::BitCast(U32(), x);
    return {as_f32(upper(bits)), as_f32(hn::ShiftLeft<16>(bits))};
  }
  static HWY_INLINE V narrow(Pair x) {
    return hn::BitCast(
        D(), hn::Or(upper(rounded_bits(x.high)), hn::ShiftRight<16>(rounded_bits(x.low))));
  }

  template <class Op>
  static HWY_INLINE V apply(const Op& op, V a, V b) {
    const Pair x = widen(a), y = widen(b);
    return narrow({op.template operator()<PairedBF16>(x.high, y.high),
                   op.template operator()<PairedBF16>(x.low, y.low)});
  }
};

template <class Small>
struct FormatOf {
  using Type = Spread<Small>;
};
template <>
struct FormatOf<F16> {
  using Type = std::conditional_t<kConvertsF16, ConvertedF16, Spread<F16>>;
};
template <>
struct FormatOf<F8E5M2> {
  using Type = std::conditional_t<kConvertsF16, ConvertedF8E5M2, Spread<F8E5M2>>;
};
template <>
struct FormatOf<F8E4M3> {
  using Type = std::conditional_t<kConvertsF16, ConvertedF8E4M3, Spread<F8E4M3>>;
};
template <>
struct FormatOf<BF16> {
  using Type = PairedBF16;
};

}  // namespace
}  // namespace ringfold::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // !RINGFOLD_PLAIN_TARGET
#endif  // include guard per target
