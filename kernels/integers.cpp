// i8 to u64: everything wraps.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/integers.cpp"
#include <hwy/foreach_target.h>  // must come before loop-inl.h
#include <hwy/highway.h>

#include "kernels/loop-inl.h"
#include "kernels/parts.h"

HWY_BEFORE_NAMESPACE();
namespace ringfold::HWY_NAMESPACE {
namespace {

#if RINGFOLD_PLAIN_TARGET

void reduce_integer(const ReduceCall& call) {
  reduce_reference(call);
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
    const hn::Rebind<int32_t, D> di32;
    const hn::Rebind<float, D> df32;
    const auto sum = hn::ConvertTo(df32, hn::PromoteTo(di32, hn::Add(a, b)));
    return hn::DemoteTo(d, hn::ConvertTo(di32, hn::Div(sum, hn::Set(df32, divisor))));
  }
};

// Likewise 32 bits in f64. There is no conversion of u32: it takes the range of i32 and comes back
// by adding 2^31. Its quotient fits into i32, as the divisor is 2 at least.
struct DividedWords {
  double divisor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    using T = hn::TFromD<D>;
    const hn::Rebind<int32_t, D> di32;
    const hn::Rebind<double, D> df64;
    auto sum = hn::BitCast(di32, hn::Add(a, b));
    if constexpr (std::is_unsigned_v<T>) sum = hn::Xor(sum, hn::Set(di32, INT32_MIN));
    auto wide = hn::PromoteTo(df64, sum);
    if constexpr (std::is_unsigned_v<T>) wide = hn::Add(wide, hn::Set(df64, 2147483648.0));
    return hn::BitCast(d, hn::DemoteTo(di32, hn::Div(wide, hn::Set(df64, divisor))));
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
      return reduce_reference(call);  // wraps by shifts that differ by element
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

#endif  // RINGFOLD_PLAIN_TARGET

}  // namespace
}  // namespace ringfold::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringfold {
HWY_EXPORT(reduce_integer);

namespace parts {
Reduce reduce_integers() {
  return &HWY_DYNAMIC_DISPATCH(reduce_integer);
}
}  // namespace parts
}  // namespace ringfold
#endif  // HWY_ONCE
