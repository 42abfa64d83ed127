// The kernels by element type, as an X-macro over (suffix of the entry's name, type): the CUDA
// sources make entries of it, and the tests' emulated driver the same names.
#pragma once

#define RINGFOLD_KERNEL_TYPES(X) \
  X(i8, int8_t)                  \
  X(u8, uint8_t)                 \
  X(i32, int32_t)                \
  X(u32, uint32_t)               \
  X(i64, int64_t)                \
  X(u64, uint64_t)               \
  X(f16, F16)                    \
  X(f32, float)                  \
  X(f64, double)                 \
  X(bf16, BF16)                  \
  X(f8e4m3, F8E4M3)              \
  X(f8e5m2, F8E5M2)
