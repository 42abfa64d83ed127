// One element as a number.
//
// Pure functions.
#pragma once

#include <cstring>

#include "kernels/floats.h"
#include "ringfold/types.h"

namespace ringfold {

template <class T>
T read_scalar(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// The element at `at` as a factor of premul_sum. Integers are multiplied modulo the type, so an
// unsigned one is read as signed, that it may count down; 64-bit ones are rounded to f64.
inline double scalar_as_factor(DType type, const void* at) {
  switch (type) {
    case DType::i8:
    case DType::u8:
      return read_scalar<int8_t>(at);
    case DType::i32:
    case DType::u32:
      return read_scalar<int32_t>(at);
    case DType::i64:
    case DType::u64:
      return static_cast<double>(read_scalar<int64_t>(at));
    case DType::f16:
      return to_f32(read_scalar<F16>(at));
    case DType::bf16:
      return to_f32(read_scalar<BF16>(at));
    case DType::f8e4m3:
      return to_f32(read_scalar<F8E4M3>(at));
    case DType::f8e5m2:
      return to_f32(read_scalar<F8E5M2>(at));
    case DType::f32:
      return read_scalar<float>(at);
    case DType::f64:
      return read_scalar<double>(at);
  }
  return 1.0;
}

}  // namespace ringfold
