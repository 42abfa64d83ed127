// f16, bf16 and fp8: computed in f32 and rounded once; min and max on the bits alone.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/small_floats.cpp"
#include <hwy/foreach_target.h>  // must come before the -inl.h files
#include <hwy/highway.h>

#include "kernels/fold-inl.h"
#include "kernels/parts.h"
#include "kernels/small_floats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ringfold::HWY_NAMESPACE {
namespace {

#if RINGFOLD_PLAIN_TARGET

void reduce_small(const ReduceCall& call) {
  reduce_reference(call);
}
void scale_small(const ReduceCall& call) {
  scale_reference(call.dtype, call.a, call.out, call.count, call.scale_a);
}

void fold_small(const FoldCall& call) {
  fold_reference(call);
}

#else

// Operations on f32 vectors, before the result is rounded. `Format` knows the rounding between.

struct Sum {
  template <class Format>
  HWY_INLINE VF32 operator()(VF32 a, VF32 b) const {
    return hn::Add(a, b);
  }
};

struct Product {
  template <class Format>
  HWY_INLINE VF32 operator()(VF32 a, VF32 b) const {
    return hn::Mul(a, b);
  }
};

struct Average {
  Mean weights;
  template <class Format>
  HWY_INLINE VF32 operator()(VF32 a, VF32 b) const {
    const VF32 sum =
        hn::Add(hn::Mul(a, set_f32(weights.count_a)), hn::Mul(b, set_f32(weights.count_b)));
    const VF32 mean = hn::Div(sum, set_f32(weights.total));
    if constexpr (std::is_same_v<Format, PairedBF16>) {  // the only one whose sum may overflow
      const VF32 shares =
          hn::Add(hn::Mul(a, set_f32(weights.share_a)), hn::Mul(b, set_f32(weights.share_b)));
      const auto overflow = hn::Eq(hn::Abs(sum), as_f32(set_bits(kF32Infinity)));
      return hn::IfThenElse(overflow, shares, mean);
    }
    return mean;
  }
};

struct ScaledSum {
  float scale_a, scale_b;
  template <class Format>
  HWY_INLINE VF32 operator()(VF32 a, VF32 b) const {
    return hn::Add(scaled<Format>(a, scale_a), scaled<Format>(b, scale_b));
  }
  // A factor of 1 does not round: it would saturate the infinities of f8e5m2.
  template <class Format>
  static HWY_INLINE VF32 scaled(VF32 x, float factor) {
    return factor == 1 ? x : Format::round(hn::Mul(x, set_f32(factor)));
  }
};

struct Scaled {
  float factor;
  template <class Format>
  HWY_INLINE VF32 operator()(VF32 a, VF32) const {
    return hn::Mul(a, set_f32(factor));
  }
};

template <class Format, class Op>
struct Rounded {
  Op op;
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return Format::apply(op, a, b);
  }
};

// Min and max as signed integers: the bits of a negative float but the sign are inverted, and the
// same once more brings them back.
template <class Small, bool kLesser>
struct Extreme {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    const V largest = hn::Set(d, static_cast<hn::TFromD<D>>(Small::kNan));
    const V top = hn::Set(d, static_cast<hn::TFromD<D>>(Small::kTop));
    const V x = order(a, largest), y = order(b, largest);
    const V extreme = order(kLesser ? hn::Min(x, y) : hn::Max(x, y), largest);
    const V magnitude = hn::Max(hn::And(a, largest), hn::And(b, largest));
    return hn::IfThenElse(hn::Gt(magnitude, top), largest, extreme);
  }
  template <class V>
  static HWY_INLINE V order(V x, V largest) {
    return hn::Xor(x, hn::And(hn::BroadcastSignBit(x), largest));
  }
};

template <class Small, class Op>
void run(const ReduceCall& call, const Op& op) {
  using Format = typename FormatOf<Small>::Type;
  for_each_vector(typename Format::D(), call, Rounded<Format, Op>{op});
}

template <class Small>
void reduce_as(const ReduceCall& call) {
  const hn::ScalableTag<std::make_signed_t<typename Small::Bits>> bits;
  const Constants<Small> constants(call);
  switch (call.op) {
    case Op::sum:
      return run<Small>(call, Sum());
    case Op::prod:
      return run<Small>(call, Product());
    case Op::max:
      return for_each_vector(bits, call, Extreme<Small, false>());
    case Op::min:
      return for_each_vector(bits, call, Extreme<Small, true>());
    case Op::avg:
      return run<Small>(call, Average{constants.weights});
    case Op::premul_sum:
      if (constants.scale_a == 1 && constants.scale_b == 1) return run<Small>(call, Sum());
      return run<Small>(call, ScaledSum{constants.scale_a, constants.scale_b});
  }
}

void reduce_small(const ReduceCall& call) {
  if (call.dtype == DType::f16) return reduce_as<F16>(call);
  if (call.dtype == DType::bf16) return reduce_as<BF16>(call);
  if (call.dtype == DType::f8e4m3) return reduce_as<F8E4M3>(call);
  reduce_as<F8E5M2>(call);
}

void scale_small(const ReduceCall& call) {
  const Scaled scaled{static_cast<float>(call.scale_a)};
  if (call.dtype == DType::f16) return run<F16>(call, scaled);
  if (call.dtype == DType::bf16) return run<BF16>(call, scaled);
  if (call.dtype == DType::f8e4m3) return run<F8E4M3>(call, scaled);
  run<F8E5M2>(call, scaled);
}

// ---- folds: accumulated in f32, in one vector or in the two of a pair --------------------------

using Pair = PairedBF16::Pair;

struct Add {
  HWY_INLINE VF32 operator()(VF32 a, VF32 b) const { return hn::Add(a, b); }
  HWY_INLINE Pair operator()(Pair a, Pair b) const {
    return {hn::Add(a.high, b.high), hn::Add(a.low, b.low)};
  }
};

struct Multiply {
  HWY_INLINE VF32 operator()(VF32 a, VF32 b) const { return hn::Mul(a, b); }
  HWY_INLINE Pair operator()(Pair a, Pair b) const {
    return {hn::Mul(a.high, b.high), hn::Mul(a.low, b.low)};
  }
};

// `own` is a factor: float, or AsIs for none.
template <class Format, class Join, class Own = AsIs>
struct InF32 {
  static constexpr bool kScales = !std::is_same_v<Own, AsIs>;
  static constexpr bool kAnyWidth = false, kOverflows = false;
  using V = typename Format::V;
  Join join_two;
  Own factor;
  template <class D>
  HWY_INLINE auto first(D, V x) const {
    return Format::widen(x);
  }
  template <class D, class Sum>
  HWY_INLINE Sum join(D, Sum sum, V x) const {
    return join_two(sum, Format::widen(x));
  }
  template <class D, class Sum>
  HWY_INLINE V finish(D, Sum sum) const {
    return Format::narrow(sum);
  }
  template <class D>
  HWY_INLINE V own(D, V x) const {
    return Format::apply(Scaled{factor}, x, x);
  }
};

template <class Format>
struct Mean32 : InF32<Format, Add> {
  float ranks;
  explicit Mean32(int count) : ranks(static_cast<float>(count)) {}
  template <class D>
  HWY_INLINE typename Format::V finish(D, VF32 sum) const {
    return Format::narrow(hn::Div(sum, set_f32(ranks)));
  }
};

// The means of bf16 whose f32 sum overflows are made of shares, see kShare.
struct Shares : InF32<PairedBF16, Add> {
  template <class D>
  HWY_INLINE Pair first(D, V x) const {
    const Pair wide = PairedBF16::widen(x);
    return {hn::Mul(wide.high, set_f32(kShare)), hn::Mul(wide.low, set_f32(kShare))};
  }
  template <class D>
  HWY_INLINE Pair join(D d, Pair sum, V x) const {
    return join_two(sum, first(d, x));
  }
};

template <>
struct Mean32<PairedBF16> : InF32<PairedBF16, Add> {
  static constexpr bool kOverflows = true;
  float ranks;
  explicit Mean32(int count) : ranks(static_cast<float>(count)) {}
  template <class D>
  HWY_INLINE V finish(D, Pair sum) const {
    return PairedBF16::narrow({mean(sum.high), mean(sum.low)});
  }
  HWY_INLINE bool overflowed(Pair sum) const {
    return !hn::AllTrue(F32(), hn::And(finite(sum.high), finite(sum.low)));
  }
  HWY_INLINE V mended(Pair sum, Pair shares) const {
    return PairedBF16::narrow({mended(sum.high, shares.high), mended(sum.low, shares.low)});
  }
  static Shares shares() { return {}; }

 private:
  static HWY_INLINE hn::Mask<F32> finite(VF32 x) {
    return hn::Lt(hn::Abs(x), as_f32(set_bits(kF32Infinity)));
  }
  HWY_INLINE VF32 mean(VF32 sum) const { return hn::Div(sum, set_f32(ranks)); }
  HWY_INLINE VF32 mended(VF32 sum, VF32 shares) const {
    return hn::IfThenElse(finite(sum), mean(sum), hn::Div(shares, set_f32(ranks * kShare)));
  }
};

template <class Small>
void fold_as(const FoldCall& call) {
  using Format = typename FormatOf<Small>::Type;
  const typename Format::D d;
  const hn::ScalableTag<std::make_signed_t<typename Small::Bits>> bits;
  const FoldConstants<Small> constants(call);
  switch (call.op) {
    case Op::sum:
      return fold_ranks(d, call, InF32<Format, Add>());
    case Op::prod:
      return fold_vectors<0>(d, call, InF32<Format, Multiply>());
    case Op::max:
      return fold_ranks(bits, call, InType<Extreme<Small, false>>());
    case Op::min:
      return fold_ranks(bits, call, InType<Extreme<Small, true>>());
    case Op::avg:
      return fold_ranks(d, call, Mean32<Format>(call.ranks));
    case Op::premul_sum:
      if (constants.own < 0) return fold_ranks(d, call, InF32<Format, Add>());
      return fold_vectors<0>(d, call, InF32<Format, Add, float>{{}, constants.factor});
  }
}

void fold_small(const FoldCall& call) {
  if (call.dtype == DType::f16) return fold_as<F16>(call);
  if (call.dtype == DType::bf16) return fold_as<BF16>(call);
  if (call.dtype == DType::f8e4m3) return fold_as<F8E4M3>(call);
  fold_as<F8E5M2>(call);
}

#endif  // RINGFOLD_PLAIN_TARGET

}  // namespace
}  // namespace ringfold::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringfold {
HWY_EXPORT(reduce_small);
HWY_EXPORT(scale_small);
HWY_EXPORT(fold_small);

namespace parts {
Reduce reduce_small_floats() {
  return &HWY_DYNAMIC_DISPATCH(reduce_small);
}
Scale scale_small_floats() {
  return &HWY_DYNAMIC_DISPATCH(scale_small);
}
Fold fold_small_floats() {
  return &HWY_DYNAMIC_DISPATCH(fold_small);
}
}  // namespace parts
}  // namespace ringfold
#endif  // HWY_ONCE
