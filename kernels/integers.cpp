// i8 to u64: everything wraps.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/integers.cpp"
#include <hwy/foreach_target.h>  // must come before the -inl.h files
#include <hwy/highway.h>

#include "kernels/fold-inl.h"
#include "kernels/loop-inl.h"
#include "kernels/parts.h"

HWY_BEFORE_NAMESPACE();
namespace ringfold::HWY_NAMESPACE {
namespace {

#if RINGFOLD_PLAIN_TARGET

void reduce_integer(const ReduceCall& call) {
  reduce_reference(call);
}

void fold_integer(const FoldCall& call) {
  fold_reference(call);
}

#else

struct Sum {
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return hn::Add(a, b);
  }
};

struct Lesser {
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return hn::Min(a, b);
  }
};

struct Greater {
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return hn::Max(a, b);
  }
};

// The low half of a product is the same for signed and unsigned factors; no target multiplies
// bytes, and few 64-bit lanes.
struct Product {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    if constexpr (sizeof(hn::TFromD<D>) == 1) {
      const hn::Repartition<uint16_t, D> pairs;
      const auto even = hn::Mul(hn::BitCast(pairs, a), hn::BitCast(pairs, b));
      const auto odd = hn::Mul(hn::ShiftRight<8>(hn::BitCast(pairs, a)),
                               hn::ShiftRight<8>(hn::BitCast(pairs, b)));
      const auto low = hn::And(even, hn::Set(pairs, uint16_t{0xff}));
      return hn::BitCast(d, hn::Or(low, hn::ShiftLeft<8>(odd)));
    } else if constexpr (sizeof(hn::TFromD<D>) == 8) {
      const hn::RebindToUnsigned<D> lanes;
      const hn::Repartition<uint32_t, D> halves;
      const auto x = hn::BitCast(lanes, a), y = hn::BitCast(lanes, b);
      const auto low_x = hn::BitCast(halves, x), low_y = hn::BitCast(halves, y);
      const auto high_x = hn::BitCast(halves, hn::ShiftRight<32>(x));
      const auto high_y = hn::BitCast(halves, hn::ShiftRight<32>(y));
      const auto cross = hn::Add(hn::MulEven(high_x, low_y), hn::MulEven(low_x, high_y));
      return hn::BitCast(d, hn::Add(hn::MulEven(low_x, low_y), hn::ShiftLeft<32>(cross)));
    } else {
      return hn::Mul(a, b);
    }
  }
};

// The last step of an average of bytes: f32 holds sum and quotient closely enough that cutting the
// rounded quotient gives the truncated one (two quotients differ by 2^-8 of themselves at least).
struct DividedBytes {
  float divisor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return (*this)(d, hn::Add(a, b));
  }
  template <class D, class V>
  HWY_INLINE V operator()(D d, V sum) const {
    const hn::Rebind<int32_t, D> di32;
    const hn::Rebind<float, D> df32;
    const auto wide = hn::ConvertTo(df32, hn::PromoteTo(di32, sum));
    return hn::DemoteTo(d, hn::ConvertTo(di32, hn::Div(wide, hn::Set(df32, divisor))));
  }
};

// Integers of 32 bits or less in f64. There is no conversion of u32: it takes the range of i32 and
// comes back by adding 2^31.
template <class D>
HWY_INLINE auto widen(D, hn::Vec<D> x) {
  const hn::Rebind<int32_t, D> di32;
  const hn::Rebind<double, D> df64;
  if constexpr (sizeof(hn::TFromD<D>) == 1) {
    return hn::PromoteTo(df64, hn::PromoteTo(di32, x));
  } else if constexpr (std::is_signed_v<hn::TFromD<D>>) {
    return hn::PromoteTo(df64, x);
  } else {
    const auto moved = hn::Xor(hn::BitCast(di32, x), hn::Set(di32, INT32_MIN));
    return hn::Add(hn::PromoteTo(df64, moved), hn::Set(df64, 2147483648.0));
  }
}

// The last step of an average of 32-bit integers, likewise in f64. The quotient of u32 fits into
// i32, as the divisor is 2 at least.
struct DividedWords {
  double divisor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return (*this)(d, hn::Add(a, b));
  }
  template <class D, class V>
  HWY_INLINE V operator()(D d, V sum) const {
    const hn::Rebind<int32_t, D> di32;
    const hn::Rebind<double, D> df64;
    const auto quotient = hn::Div(widen(d, sum), hn::Set(df64, divisor));
    return hn::BitCast(d, hn::DemoteTo(di32, quotient));
  }
};

// Below 2^51 the low bits of product + 1.5 * 2^52 are the wrapped integer. A vector with a larger
// product, or NaN, takes the slow way.
struct Scaled {
  DType dtype;
  double factor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    const hn::Rebind<double, D> df64;
    const hn::Rebind<uint64_t, D> du64;
    if (factor == 1) return x;
    const auto product = hn::Trunc(hn::Mul(widen(d, x), hn::Set(df64, factor)));
    if (HWY_UNLIKELY(!hn::AllTrue(df64, hn::Lt(hn::Abs(product), hn::Set(df64, 0x1p51))))) {
      HWY_ALIGN hn::TFromD<D> lanes[HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
      hn::Store(x, d, lanes);
      scale_reference(dtype, lanes, lanes, hn::Lanes(d), factor);
      return hn::Load(d, lanes);
    }
    const auto shifted = hn::BitCast(du64, hn::Add(product, hn::Set(df64, 0x1.8p52)));
    return hn::BitCast(d, hn::TruncateTo(hn::RebindToUnsigned<D>(), shifted));
  }
};

struct ScaledSum {
  Scaled scaled_a, scaled_b;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return hn::Add(scaled_a(d, a), scaled_b(d, b));
  }
};

// 64-bit division has no vector instruction.
template <class T>
void divide_sum(const ReduceCall& call, int divisor) {
  if constexpr (sizeof(T) == 1) {
    const hn::Rebind<T, hn::ScalableTag<float>> d;
    for_each_vector(d, call, DividedBytes{static_cast<float>(divisor)});
  } else if constexpr (sizeof(T) == 4) {
    const hn::Rebind<T, hn::ScalableTag<double>> d;
    for_each_vector(d, call, DividedWords{static_cast<double>(divisor)});
  } else {
    reduce_reference(call);
  }
}

// Nor has the conversion of 64-bit integers, on most targets.
template <class T>
void scale_sum(const ReduceCall& call) {
  if constexpr (sizeof(T) == 8) {
    reduce_reference(call);
  } else {
    const hn::Rebind<T, hn::ScalableTag<double>> d;
    for_each_vector(d, call, ScaledSum{{call.dtype, call.scale_a}, {call.dtype, call.scale_b}});
  }
}

template <class T>
void reduce_as(const ReduceCall& call) {
  const hn::ScalableTag<T> d;
  const Constants<T> constants(call);
  switch (call.op) {
    case Op::sum:
      return for_each_vector(d, call, Sum());
    case Op::prod:
      return for_each_vector(d, call, Product());
    case Op::max:
      return for_each_vector(d, call, Greater());
    case Op::min:
      return for_each_vector(d, call, Lesser());
    case Op::avg:
      if (constants.divisor == 1) return for_each_vector(d, call, Sum());
      return divide_sum<T>(call, constants.divisor);
    case Op::premul_sum:
      if (call.scale_a == 1 && call.scale_b == 1) return for_each_vector(d, call, Sum());
      return scale_sum<T>(call);
  }
}

void reduce_integer(const ReduceCall& call) {
  switch (size_of(call.dtype)) {
    case 1:
      return call.dtype == DType::i8 ? reduce_as<int8_t>(call) : reduce_as<uint8_t>(call);
    case 4:
      return call.dtype == DType::i32 ? reduce_as<int32_t>(call) : reduce_as<uint32_t>(call);
    default:
      return call.dtype == DType::i64 ? reduce_as<int64_t>(call) : reduce_as<uint64_t>(call);
  }
}

// ---- folds ------------------------------------------------------------------------------------

template <class T>
void fold_average(const FoldCall& call) {
  if constexpr (sizeof(T) == 1) {
    const hn::Rebind<T, hn::ScalableTag<float>> d;
    const DividedBytes divided{static_cast<float>(call.ranks)};
    fold_vectors<0>(d, call, InType<Sum, DividedBytes>{{}, divided, {}});
  } else if constexpr (sizeof(T) == 4) {
    const hn::Rebind<T, hn::ScalableTag<double>> d;
    const DividedWords divided{static_cast<double>(call.ranks)};
    fold_vectors<0>(d, call, InType<Sum, DividedWords>{{}, divided, {}});
  } else {
    fold_reference(call);
  }
}

template <class T>
void fold_scaled(const FoldCall& call) {
  if constexpr (sizeof(T) == 8) {
    fold_reference(call);
  } else {
    const hn::Rebind<T, hn::ScalableTag<double>> d;
    fold_vectors<0>(d, call, InType<Sum, AsIs, Scaled>{{}, {}, {call.dtype, call.factor}});
  }
}

template <class T>
void fold_as(const FoldCall& call) {
  const hn::ScalableTag<T> d;
  switch (call.op) {
    case Op::sum:
      return fold_ranks(d, call, InType<Sum>());
    case Op::prod:
      return fold_vectors<0>(d, call, InType<Product>());
    case Op::max:
      return fold_ranks(d, call, InType<Greater>());
    case Op::min:
      return fold_ranks(d, call, InType<Lesser>());
    case Op::avg:
      return fold_average<T>(call);
    case Op::premul_sum:
      if (FoldConstants<T>(call).own < 0) return fold_ranks(d, call, InType<Sum>());
      return fold_scaled<T>(call);
  }
}

void fold_integer(const FoldCall& call) {
  switch (size_of(call.dtype)) {
    case 1:
      return call.dtype == DType::i8 ? fold_as<int8_t>(call) : fold_as<uint8_t>(call);
    case 4:
      return call.dtype == DType::i32 ? fold_as<int32_t>(call) : fold_as<uint32_t>(call);
    default:
      return call.dtype == DType::i64 ? fold_as<int64_t>(call) : fold_as<uint64_t>(call);
  }
}

#endif  // RINGFOLD_PLAIN_TARGET

}  // namespace
}  // namespace ringfold::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringfold {
HWY_EXPORT(reduce_integer);
HWY_EXPORT(fold_integer);

namespace parts {
Reduce reduce_integers() {
  return &HWY_DYNAMIC_DISPATCH(reduce_integer);
}
Fold fold_integers() {
  return &HWY_DYNAMIC_DISPATCH(fold_integer);
}
}  // namespace parts
}  // namespace ringfold
#endif  // HWY_ONCE
