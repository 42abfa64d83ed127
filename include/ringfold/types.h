// The values that every part of ringfold speaks of: element types, reductions, memory, streams.
// Everything here is a plain value without ownership.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ringfold {

using Nanoseconds = std::chrono::nanoseconds;

// Element types, numbered as NCCL numbers them so that adapters need no table.
enum class DType : uint8_t {
  i8 = 0,
  u8 = 1,
  i32 = 2,
  u32 = 3,
  i64 = 4,
  u64 = 5,
  f16 = 6,
  f32 = 7,
  f64 = 8,
  bf16 = 9,
  f8e4m3 = 10,
  f8e5m2 = 11,
};
inline constexpr int kDTypes = 12;
inline constexpr std::array<std::string_view, kDTypes> kDTypeNames = {
    "i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"};
inline constexpr std::array<uint8_t, kDTypes> kDTypeBytes = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

// Bytes of one element.
constexpr size_t size_of(DType type) {
  return kDTypeBytes[static_cast<size_t>(type)];
}
constexpr std::string_view name(DType type) {
  return kDTypeNames[static_cast<size_t>(type)];
}
constexpr bool is_float(DType type) {
  return type != DType::i8 && type != DType::u8 && type != DType::i32 && type != DType::u32 &&
         type != DType::i64 && type != DType::u64;
}
// Floats of 16 or 8 bits: added in f32 and rounded to the type once a step.
constexpr bool is_small_float(DType type) {
  return is_float(type) && size_of(type) <= 2;
}

// How contributions are combined.
//   sum, prod   integers wrap; floats as the type rounds.
//   min, max    NaN wins over every number; -0 < +0: one answer whatever the rank and position.
//   avg         the sum over N ranks divided by N. Integers divide the wrapped sum, truncating.
//               16- and 8-bit floats keep a running mean in f32, so that neither the sum overflows
//               nor small values vanish; f32 and f64 divide the sum once at the end.
//   premul_sum  every rank's input is first multiplied by that rank's own factor and rounded to the
//               type, then summed (weighted averages).
enum class Op : uint8_t { sum, prod, max, min, avg, premul_sum };
inline constexpr int kOps = 6;
inline constexpr std::array<std::string_view, kOps> kOpNames = {"sum", "prod", "max",
                                                                "min", "avg",  "premul_sum"};
constexpr std::string_view name(Op op) {
  return kOpNames[static_cast<size_t>(op)];
}

// An operation and this rank's factor, which only premul_sum looks at.
struct Reduction {
  Op op = Op::sum;
  double factor = 1.0;
  // For calls in the order of a stream: if not null, the factor instead. One element of the type of
  // the data, in memory that kernels can use, which is read when the stream has come to the call
  // (64-bit integers as f64 holds them).
  const void* factor_on_stream = nullptr;
  constexpr Reduction(Op o = Op::sum, double f = 1.0, const void* on_stream = nullptr)
      : op(o), factor(f), factor_on_stream(on_stream) {}
};

// What decides the last bits of sums and averages. Alike on all ranks.
//   exact   avg as above: nothing overflows or vanishes on the way.
//   nccl    as NCCL: an avg of floats first multiplies every input by 1/N, both rounded to the
//   type,
//           then sums, rounding at every step; a ring cuts its chunks where NCCL cuts them, and a
//           reduce goes along the chain. With Algorithm::ring every result has NCCL's bits (its
//           ring and Simple protocol on one channel), NaN excepted: there NaN still wins.
enum class Numerics : uint8_t { exact, nccl };

enum class MemoryKind : uint8_t { host, cuda };

// A cudaStream_t as a plain pointer, so that no public header needs CUDA; ignored for host memory.
struct Stream {
  void* handle = nullptr;
  // Calls are in its order whatever their memory: pinned host memory or none, not only that of a
  // device.
  bool orders_all = false;
};

}  // namespace ringfold
