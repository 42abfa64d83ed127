// Inputs on which order and rounding show: full significands over a moderate range, no NaN, no
// infinity, no -0.
#pragma once

#include <vector>

#include "test/elements.h"
#include "test/nccl_model.h"

namespace ringfold::test {

// One element, of a rank's own making.
inline uint64_t nccl_input(DType type, Op op, uint64_t word) {
  if (!is_float(type)) return word;
  // Products stay finite on many ranks: near 1; sums may cancel and lose their low bits.
  const int range = op == Op::prod ? 1 : 6;
  const double fraction = 1 + static_cast<double>(word >> 12) * 0x1p-52;
  const double magnitude = std::ldexp(fraction, static_cast<int>(word % 5) % range - range / 2);
  const double x = (word >> 11 & 1) != 0 ? -magnitude : magnitude;
  switch (type) {
    case DType::f16:
      return kModelF16.encode(kModelF16.round(x));
    case DType::bf16:
      return kModelBF16.encode(kModelBF16.round(x));
    case DType::f8e4m3:
      return kModelE4M3.encode(kModelE4M3.round(x * 16));  // some sums saturate
    case DType::f8e5m2:
      return kModelE5M2.encode(kModelE5M2.round(x * 2048));
    case DType::f32:
      return __builtin_bit_cast(uint32_t, static_cast<float>(x));
    case DType::f64:
    case DType::i8:
    case DType::u8:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64:
      break;
  }
  return __builtin_bit_cast(uint64_t, x);
}

// Making them is slow: they repeat.
inline constexpr size_t kInputPeriod = 4099;

// The inputs of all ranks, as bytes.
inline std::vector<std::vector<unsigned char>> nccl_inputs(DType type, Op op, int ranks,
                                                           size_t count, uint64_t seed) {
  std::vector<std::vector<unsigned char>> inputs(static_cast<size_t>(ranks));
  for (size_t r = 0; r < inputs.size(); ++r) {
    inputs[r].resize(count * size_of(type));
    for (size_t i = 0; i < count; ++i) {
      if (i >= kInputPeriod) {
        std::memcpy(&inputs[r][i * size_of(type)], &inputs[r][(i - kInputPeriod) * size_of(type)],
                    size_of(type));
        continue;
      }
      const uint64_t bits = nccl_input(type, op, hashed(seed * 1000 + r, i));
      std::memcpy(&inputs[r][i * size_of(type)], &bits, size_of(type));
    }
  }
  return inputs;
}

// Each rank's factor of premul_sum: one that the type holds, odd for integers.
inline std::vector<double> nccl_factors(DType type, int ranks) {
  std::vector<double> factors;
  for (int r = 0; r < ranks; ++r) factors.push_back(is_float(type) ? 0.25 * (r + 3) : 2.0 * r - 3);
  return factors;
}

}  // namespace ringfold::test
