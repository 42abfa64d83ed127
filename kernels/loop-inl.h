// The loop all SIMD kernels share. Included once per target (Highway's toggle guard).
#if defined(RINGFOLD_KERNELS_LOOP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGFOLD_KERNELS_LOOP_INL_H_
#undef RINGFOLD_KERNELS_LOOP_INL_H_
#else
#define RINGFOLD_KERNELS_LOOP_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>

#include "kernels/element.h"
#include "kernels/reduce.h"

// Highway's targets without vector registers run the element bodies: its one-lane vectors cannot
// express the kernels, and would gain nothing.
#undef RINGFOLD_PLAIN_TARGET
#define RINGFOLD_PLAIN_TARGET (HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128)

HWY_BEFORE_NAMESPACE();
namespace ringfold::HWY_NAMESPACE {
namespace {  // each source file its own copies: names need only be unique within a file

namespace hn = hwy::HWY_NAMESPACE;

// out[i] = kernel(d, a[i], b[i]) with the vectors of tag `d`. The rest that fills no vector passes
// through a padded copy, so that the same instructions round every element.
template <class D, class Kernel>
HWY_INLINE void for_each_vector(D d, const ReduceCall& call, const Kernel& kernel) {
  using T = hn::TFromD<D>;
  const auto* a = static_cast<const T*>(call.a);
  const auto* b = static_cast<const T*>(call.b);
  auto* out = static_cast<T*>(call.out);
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + 4 * lanes <= call.count; i += 4 * lanes) {
    for (size_t k = i; k < i + 4 * lanes; k += lanes) {
      hn::StoreU(kernel(d, hn::LoadU(d, a + k), hn::LoadU(d, b + k)), d, out + k);
    }
  }
  for (; i + lanes <= call.count; i += lanes) {
    hn::StoreU(kernel(d, hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i);
  }
  if (i == call.count) return;
  HWY_ALIGN T rest_a[HWY_MAX_BYTES / sizeof(T)] = {};
  HWY_ALIGN T rest_b[HWY_MAX_BYTES / sizeof(T)] = {};
  const size_t bytes = (call.count - i) * sizeof(T);
  std::memcpy(rest_a, a + i, bytes);
  std::memcpy(rest_b, b + i, bytes);
  hn::Store(kernel(d, hn::Load(d, rest_a), hn::Load(d, rest_b)), d, rest_a);
  std::memcpy(out + i, rest_a, bytes);
}

}  // namespace
}  // namespace ringfold::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
