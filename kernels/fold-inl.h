// The loops of a fold of many sources. Included once per target (Highway's toggle guard).
//
// A kernel knows the arithmetic of a vector at a time:
//   first(d, x)         the accumulator that holds the vector x of source 0
//   join(d, sum, x)     the accumulator with one source more
//   finish(d, sum)      the result
//   own(d, x)           the vector of the call's own source scaled, if kScales
//   kAnyWidth           takes shorter vectors than those it is made for
//   kOverflows          overflowed(sum) says that the result is to be mended(sum, shares), where
//                       `shares` is the accumulator of the kernel shares()
#if defined(RINGFOLD_KERNELS_FOLD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGFOLD_KERNELS_FOLD_INL_H_
#undef RINGFOLD_KERNELS_FOLD_INL_H_
#else
#define RINGFOLD_KERNELS_FOLD_INL_H_
#endif

#include <array>

#include "kernels/loop-inl.h"

#if !RINGFOLD_PLAIN_TARGET

HWY_BEFORE_NAMESPACE();
namespace ringfold::HWY_NAMESPACE {
namespace {

struct AsIs {
  template <class D, class V>
  HWY_INLINE V operator()(D, V x) const {
    return x;
  }
};

// Accumulates in the type itself.
template <class Join, class Finish = AsIs, class Own = AsIs>
struct InType {
  static constexpr bool kScales = !std::is_same_v<Own, AsIs>;
  static constexpr bool kAnyWidth = true, kOverflows = false;
  Join join_two;
  Finish finish;
  Own own;
  template <class D, class V>
  HWY_INLINE V first(D, V x) const {
    return x;
  }
  template <class D, class V>
  HWY_INLINE V join(D d, V sum, V x) const {
    return join_two(d, sum, x);
  }
};

// A call in vectors of tag `d`, with as many sources as the compiler knows, or any number (0).
template <int kRanks, class D, class Kernel>
class Folding {
  using T = hn::TFromD<D>;
  using V = hn::Vec<D>;

 public:
  HWY_INLINE Folding(const FoldCall& call, const Kernel& kernel)
      : call_(call),
        kernel_(kernel),
        out_(static_cast<T*>(call.out)),
        mirror_(static_cast<T*>(call.mirror)) {
    for (size_t r = 0; r < kRanks; ++r) sources_[r] = static_cast<const T*>(call.sources[r]);
  }

  // The result's vector at element i.
  HWY_INLINE V at(size_t i) const { return finish(accumulate(kernel_, i), i); }

  HWY_INLINE void write(size_t i, V result, bool past_caches) const {
    const D d;
    if constexpr (kStreams) {
      past_caches ? hn::Stream(result, d, out_ + i) : hn::StoreU(result, d, out_ + i);
    } else {
      hn::StoreU(result, d, out_ + i);
    }
    if (mirror_ != nullptr) hn::StoreU(result, d, mirror_ + i);
  }

  // One vector after another may wait for its sums; four at a time hide that.
  HWY_INLINE void write_four(size_t i, bool past_caches) const {
    const D d;
    const size_t n = hn::Lanes(d), j = i + n, k = j + n, l = k + n;
    auto at_i = kernel_.first(d, load(0, i)), at_j = kernel_.first(d, load(0, j));
    auto at_k = kernel_.first(d, load(0, k)), at_l = kernel_.first(d, load(0, l));
    for (int r = 1; r < ranks(); ++r) {
      at_i = kernel_.join(d, at_i, load(r, i));
      at_j = kernel_.join(d, at_j, load(r, j));
      at_k = kernel_.join(d, at_k, load(r, k));
      at_l = kernel_.join(d, at_l, load(r, l));
    }
    // All are read before one is written: out may be a source.
    const V result_i = finish(at_i, i), result_j = finish(at_j, j);
    const V result_k = finish(at_k, k), result_l = finish(at_l, l);
    write(i, result_i, past_caches);
    write(j, result_j, past_caches);
    write(k, result_k, past_caches);
    write(l, result_l, past_caches);
  }

  // Writes from element `begin` on all vectors but the last; that one may be ragged.
  HWY_INLINE void write_from(size_t begin, bool past_caches) const {
    const size_t n = hn::Lanes(D()), count = call_.count;
    size_t i = begin;
    for (; i + 4 * n < count; i += 4 * n) write_four(i, past_caches);
    for (; i + n < count; i += n) write(i, at(i), past_caches);
  }

  HWY_INLINE bool streams() const {
    return kStreams && call_.stream && call_.count * sizeof(T) >= kWorthStreaming;
  }
  // Elements before the first whole vector of `out`.
  HWY_INLINE size_t misaligned() const {
    return (0 - reinterpret_cast<uintptr_t>(out_) / sizeof(T)) % hn::Lanes(D());
  }

 private:
  static constexpr bool kStreams = hn::MaxLanes(D()) * sizeof(T) >= 16;  // Highway's least
  // Below, the fence costs more than the lines saved.
  static constexpr size_t kWorthStreaming = 4096;

  HWY_INLINE int ranks() const { return kRanks == 0 ? call_.ranks : kRanks; }

  HWY_INLINE V load(int r, size_t i) const {
    const D d;
    const T* source = static_cast<const T*>(kRanks == 0 ? call_.sources[r] : sources_[r]);
    const V x = hn::LoadU(d, source + i);
    if constexpr (Kernel::kScales) {
      if (r == call_.own) return kernel_.own(d, x);
    }
    return x;
  }

  template <class K>
  HWY_INLINE auto accumulate(const K& kernel, size_t i) const {
    const D d;
    auto sum = kernel.first(d, load(0, i));
    for (int r = 1; r < ranks(); ++r) sum = kernel.join(d, sum, load(r, i));
    return sum;
  }

  template <class Sum>
  HWY_INLINE V finish(const Sum& sum, size_t i) const {
    if constexpr (Kernel::kOverflows) {
      if (HWY_UNLIKELY(kernel_.overflowed(sum)))
        return kernel_.mended(sum, accumulate(kernel_.shares(), i));
    }
    return kernel_.finish(D(), sum);
  }

  const FoldCall& call_;
  const Kernel kernel_;
  T* const out_;
  T* const mirror_;
  std::array<const T*, kRanks> sources_;  // a copy that no store can change
};

// Fewer elements than a vector has: two shorter vectors that overlap.
template <class D, class Kernel>
HWY_INLINE void fold_short(D, const FoldCall& call, const Kernel& kernel) {
  using T = hn::TFromD<D>;
  if constexpr (Kernel::kAnyWidth && hn::MaxLanes(D()) > 1 && hn::MaxLanes(D()) * sizeof(T) >= 8) {
    const hn::Half<D> half;
    if (call.count < hn::Lanes(half)) return fold_short(half, call, kernel);
    const Folding<0, hn::Half<D>, Kernel> fold(call, kernel);
    const size_t last = call.count - hn::Lanes(half);
    const auto front = fold.at(0), back = fold.at(last);
    fold.write(0, front, false);
    fold.write(last, back, false);
  } else {
    fold_reference(call);
  }
}

// The vectors at the ends overlap their neighbours rather than be ragged. They are read before
// anything is written, as out may be a source, and written last, with the bits that lie there.
template <int kRanks, class D, class Kernel>
void fold_vectors(D d, const FoldCall& call, const Kernel& kernel) {
  if (call.count < hn::Lanes(d)) return fold_short(d, call, kernel);
  const Folding<kRanks, D, Kernel> fold(call, kernel);
  const size_t last = call.count - hn::Lanes(d);
  const auto back = fold.at(last);
  if (fold.streams()) {
    const auto front = fold.at(0);
    fold.write_from(fold.misaligned(), true);
    fold.write(0, front, false);
    hwy::FlushStream();  // before whoever is told of the result reads it
  } else {
    fold.write_from(0, false);
  }
  fold.write(last, back, false);
}

// With the usual numbers of ranks known to the compiler.
template <class D, class Kernel>
void fold_ranks(D d, const FoldCall& call, const Kernel& kernel) {
  switch (call.ranks) {
    case 2:
      return fold_vectors<2>(d, call, kernel);
    case 3:
      return fold_vectors<3>(d, call, kernel);
    case 4:
      return fold_vectors<4>(d, call, kernel);
    case 8:
      return fold_vectors<8>(d, call, kernel);
    default:
      return fold_vectors<0>(d, call, kernel);
  }
}

}  // namespace
}  // namespace ringfold::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // !RINGFOLD_PLAIN_TARGET
#endif  // include guard per target
