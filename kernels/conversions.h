// Small floats to f32 and back as the element bodies want them: the integer functions of floats.h
// on the host, one hardware instruction on a device that has it, with the same bits.
//
// Why the same: the instructions round to nearest even and keep subnormals; those to fp8 are
// `satfinite`; their NaN is the canonical one of floats.h. A NaN that is widened on a device may
// keep its payload in f32, but no body looks at that, and narrow() makes it canonical.
#pragma once

#include <type_traits>

#include "kernels/floats.h"

namespace ringfold {

#if defined(__CUDA_ARCH__)

__device__ inline float f32_of_half(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

template <class Small>
__device__ inline float widen(Small x) {
  if constexpr (std::is_same_v<Small, F16>) {
    return f32_of_half(x.bits);
  } else if constexpr (std::is_same_v<Small, BF16>) {
    return f32_of(static_cast<uint32_t>(x.bits) << 16);
  } else if constexpr (std::is_same_v<Small, F8E5M2>) {
    return f32_of_half(static_cast<uint16_t>(x.bits << 8));  // it is the upper half of an f16
  } else {
    // The f16 of the same fields is smaller by the difference of the biases, subnormals included.
    const auto fields = static_cast<uint16_t>((x.bits & 0x80) << 8 | (x.bits & F8E4M3::kNan) << 7);
    const float value = f32_of_half(fields) * 256.0f;
    return (x.bits & F8E4M3::kNan) == F8E4M3::kNan ? f32_of(kF32Nan) : value;
  }
}

template <class Small>
__device__ inline Small narrow(float x) {
  uint16_t bits;
  if constexpr (std::is_same_v<Small, F16>) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return {bits};
  } else if constexpr (std::is_same_v<Small, BF16>) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return {bits};
  } else {
#if __CUDA_ARCH__ >= 890
    if constexpr (std::is_same_v<Small, F8E4M3>)
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(x));
    else
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(x));
    return {static_cast<uint8_t>(bits)};
#else
    return from_f32<Small>(x);
#endif
  }
}

#else

template <class Small>
RINGFOLD_HD constexpr float widen(Small x) {
  return to_f32(x);
}
template <class Small>
RINGFOLD_HD constexpr Small narrow(float x) {
  return from_f32<Small>(x);
}

#endif

}  // namespace ringfold
