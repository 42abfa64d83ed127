// The loop all SIMD kernels share. Included once per target (Highway's toggle guard).
#if defined(RINGFOLD_KERNELS_LOOP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RINGFOLD_KERNELS_LOOP_INL_H_
#undef RINGFOLD_KERNELS_LOOP_INL_H_
#else
#define RINGFOLD_KERNELS_LOOP_INL_H_
#endif

#include <hwy/cache_control.h>
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

// From this size on a result of its own is written past the caches: it would not stay in them, and
// the memory under it need not be read first.
inline constexpr size_t kStreamBytes = 8 << 20;

// Elements that fill no vector go through a padded copy, so that the same instructions round all.
template <class D, class T, class Kernel>
HWY_INLINE void partial_vector(D d, const T* a, const T* b, T* out, size_t count,
                               const Kernel& kernel) {
  HWY_ALIGN T padded_a[HWY_MAX_BYTES / sizeof(T)] = {};
  HWY_ALIGN T padded_b[HWY_MAX_BYTES / sizeof(T)] = {};
  std::memcpy(padded_a, a, count * sizeof(T));
  std::memcpy(padded_b, b, count * sizeof(T));
  hn::Store(kernel(d, hn::Load(d, padded_a), hn::Load(d, padded_b)), d, padded_a);
  std::memcpy(out, padded_a, count * sizeof(T));
}

// out[i] = kernel(d, a[i], b[i]) with the vectors of tag `d`.
template <class D, class Kernel>
HWY_INLINE void for_each_vector(D d, const ReduceCall& call, const Kernel& kernel) {
  using T = hn::TFromD<D>;
  const auto* a = static_cast<const T*>(call.a);
  const auto* b = static_cast<const T*>(call.b);
  auto* out = static_cast<T*>(call.out);
  const size_t lanes = hn::Lanes(d), count = call.count;
  size_t i = 0;
  if constexpr (hn::MaxLanes(d) * sizeof(T) >= 16) {  // Highway streams no less than 16 bytes
    if (count * sizeof(T) >= kStreamBytes && out != a && out != b) {
      const size_t misaligned = reinterpret_cast<uintptr_t>(out) / sizeof(T) % lanes;
      i = misaligned == 0 ? 0 : lanes - misaligned;
      if (i > 0) partial_vector(d, a, b, out, i, kernel);
      for (; i + lanes <= count; i += lanes) {
        hn::Stream(kernel(d, hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i);
      }
      hwy::FlushStream();  // before whoever is told of the result reads it
    }
  }
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    for (size_t k = i; k < i + 4 * lanes; k += lanes) {
      hn::StoreU(kernel(d, hn::LoadU(d, a + k), hn::LoadU(d, b + k)), d, out + k);
    }
  }
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(kernel(d, hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i);
  }
  if (i < count) partial_vector(d, a + i, b + i, out + i, count - i, kernel);
}

}  // namespace
}  // namespace ringfold::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
