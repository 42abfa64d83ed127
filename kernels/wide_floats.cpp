// f32 and f64: one vector in, one operation, NaN made canonical.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/wide_floats.cpp"
#include <hwy/foreach_target.h>  // must come before the -inl.h files
#include <hwy/highway.h>

#include "kernels/fold-inl.h"
#include "kernels/loop-inl.h"
#include "kernels/parts.h"

HWY_BEFORE_NAMESPACE();
namespace ringfold::HWY_NAMESPACE {
namespace {

#if RINGFOLD_PLAIN_TARGET

void reduce_wide(const ReduceCall& call) {
  reduce_reference(call);
}
void scale_wide(const ReduceCall& call) {
  scale_reference(call.dtype, call.a, call.out, call.count, call.scale_a);
}

void fold_wide(const FoldCall& call) {
  fold_reference(call);
}

#else

template <class D>
HWY_INLINE hn::Vec<D> nan_of(D d) {
  return hn::Set(d, canonical_nan<hn::TFromD<D>>());
}

template <class D, class V>
HWY_INLINE V canonical(D d, V x) {
  return hn::IfThenElse(hn::IsNaN(x), nan_of(d), x);
}

struct Sum {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return canonical(d, hn::Add(a, b));
  }
};

struct Product {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return canonical(d, hn::Mul(a, b));
  }
};

// Where neither is less the two are equal bits, or zeros of either sign, or one is NaN.
struct Lesser {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    const V tie = hn::IfThenElse(hn::Eq(a, b), hn::Or(a, b), nan_of(d));
    return hn::IfThenElse(hn::Lt(a, b), a, hn::IfThenElse(hn::Lt(b, a), b, tie));
  }
};

struct Greater {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    const V tie = hn::IfThenElse(hn::Eq(a, b), hn::And(a, b), nan_of(d));
    return hn::IfThenElse(hn::Lt(b, a), a, hn::IfThenElse(hn::Lt(a, b), b, tie));
  }
};

template <class T>
struct DividedSum {
  T divisor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return canonical(d, hn::Div(hn::Add(a, b), hn::Set(d, divisor)));
  }
};

template <class T>
struct ScaledSum {
  T scale_a, scale_b;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V b) const {
    return canonical(d, hn::Add(hn::Mul(a, hn::Set(d, scale_a)), hn::Mul(b, hn::Set(d, scale_b))));
  }
};

template <class T>
struct Scaled {
  T factor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V a, V) const {
    return canonical(d, hn::Mul(a, hn::Set(d, factor)));
  }
};

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
      return for_each_vector(d, call, DividedSum<T>{static_cast<T>(constants.divisor)});
    case Op::premul_sum:
      return for_each_vector(d, call, ScaledSum<T>{constants.scale_a, constants.scale_b});
  }
}

void reduce_wide(const ReduceCall& call) {
  call.dtype == DType::f32 ? reduce_as<float>(call) : reduce_as<double>(call);
}

template <class T>
void scale_as(const ReduceCall& call) {
  for_each_vector(hn::ScalableTag<T>(), call, Scaled<T>{static_cast<T>(call.scale_a)});
}

void scale_wide(const ReduceCall& call) {
  call.dtype == DType::f32 ? scale_as<float>(call) : scale_as<double>(call);
}

// ---- folds: NaN stays NaN, so it is enough to make the result canonical ------------------------

struct PlainSum {
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return hn::Add(a, b);
  }
};

struct PlainProduct {
  template <class D, class V>
  HWY_INLINE V operator()(D, V a, V b) const {
    return hn::Mul(a, b);
  }
};

struct Canonical {
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return canonical(d, x);
  }
};

template <class T>
struct Quotient {
  T divisor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V sum) const {
    return canonical(d, hn::Div(sum, hn::Set(d, divisor)));
  }
};

template <class T>
struct OwnScaled {
  T factor;
  template <class D, class V>
  HWY_INLINE V operator()(D d, V x) const {
    return hn::Mul(x, hn::Set(d, factor));
  }
};

template <class T>
void fold_as(const FoldCall& call) {
  const hn::ScalableTag<T> d;
  const FoldConstants<T> constants(call);
  switch (call.op) {
    case Op::sum:
      return fold_ranks(d, call, InType<PlainSum, Canonical>());
    case Op::prod:
      return fold_vectors<0>(d, call, InType<PlainProduct, Canonical>());
    case Op::max:
      return fold_ranks(d, call, InType<Greater>());
    case Op::min:
      return fold_ranks(d, call, InType<Lesser>());
    case Op::avg:
      return fold_ranks(d, call,
                        InType<PlainSum, Quotient<T>>{{}, {static_cast<T>(call.ranks)}, {}});
    case Op::premul_sum:
      if (constants.own < 0) return fold_ranks(d, call, InType<PlainSum, Canonical>());
      return fold_vectors<0>(d, call,
                             InType<PlainSum, Canonical, OwnScaled<T>>{{}, {}, {constants.factor}});
  }
}

void fold_wide(const FoldCall& call) {
  call.dtype == DType::f32 ? fold_as<float>(call) : fold_as<double>(call);
}

#endif  // RINGFOLD_PLAIN_TARGET

}  // namespace
}  // namespace ringfold::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringfold {
HWY_EXPORT(reduce_wide);
HWY_EXPORT(scale_wide);
HWY_EXPORT(fold_wide);

namespace parts {
Reduce reduce_wide_floats() {
  return &HWY_DYNAMIC_DISPATCH(reduce_wide);
}
Scale scale_wide_floats() {
  return &HWY_DYNAMIC_DISPATCH(scale_wide);
}
Fold fold_wide_floats() {
  return &HWY_DYNAMIC_DISPATCH(fold_wide);
}
}  // namespace parts
}  // namespace ringfold
#endif  // HWY_ONCE
