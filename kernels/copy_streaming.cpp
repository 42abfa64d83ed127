// Copies past the caches.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/copy_streaming.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"

HWY_BEFORE_NAMESPACE();
namespace ringfold::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Whole cache lines at a time, so that each leaves the core as one write; the ragged ends go the
// usual way.
void stream(void* out, const void* in, size_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  constexpr size_t kLine = 64;
  auto* to = static_cast<uint8_t*>(out);
  const auto* from = static_cast<const uint8_t*>(in);
  const size_t head = std::min(bytes, (0 - reinterpret_cast<uintptr_t>(to)) % kLine);
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    for (size_t k = 0; k < kLine; k += hn::Lanes(d)) {
      hn::Stream(hn::LoadU(d, from + i + k), d, to + i + k);
    }
  }
  std::memcpy(to + i, from + i, bytes - i);
  hwy::FlushStream();  // before whoever is told of the copy reads it
}

void copy(void* out, const void* in, size_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  const size_t lanes = hn::Lanes(d);
  auto* to = static_cast<uint8_t*>(out);
  const auto* from = static_cast<const uint8_t*>(in);
  size_t i = 0;
  for (; i + 4 * lanes <= bytes; i += 4 * lanes) {
    const auto a = hn::LoadU(d, from + i), b = hn::LoadU(d, from + i + lanes);
    const auto c = hn::LoadU(d, from + i + 2 * lanes), e = hn::LoadU(d, from + i + 3 * lanes);
    hn::StoreU(a, d, to + i);
    hn::StoreU(b, d, to + i + lanes);
    hn::StoreU(c, d, to + i + 2 * lanes);
    hn::StoreU(e, d, to + i + 3 * lanes);
  }
  std::memcpy(to + i, from + i, bytes - i);
}

}  // namespace
}  // namespace ringfold::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ringfold {
HWY_EXPORT(stream);
HWY_EXPORT(copy);

void copy_host(void* out, const void* in, size_t bytes) {
  constexpr size_t kWorthIt = 512;
  if (bytes >= kWorthIt)
    HWY_DYNAMIC_DISPATCH(copy)(out, in, bytes);
  else if (bytes > 0)
    std::memcpy(out, in, bytes);
}

void copy_streaming(void* out, const void* in, size_t bytes) {
  constexpr size_t kWorthIt = 4096;  // below, the fence costs more than the lines saved
  if (bytes >= kWorthIt) {
    HWY_DYNAMIC_DISPATCH(stream)(out, in, bytes);
  } else if (bytes > 0) {
    std::memcpy(out, in, bytes);
  }
}
}  // namespace ringfold
#endif  // HWY_ONCE
