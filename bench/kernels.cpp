// Reductions on host memory, in GB/s of result (two operands are read for every byte written).
//
//   reduce/<target>/<dtype>/<op>/<bytes>   reduce_host with one target forced
//   reference/<dtype>/<op>/<bytes>         the element bodies in a plain loop
//   plain_add/<bytes>                      f32 addition as the compiler vectorises it
//
// The sizes are those of one operand: 32 KiB stays in the caches, 64 MiB does not.
#include <benchmark/benchmark.h>
#include <fmt/core.h>

#include <cstring>
#include <memory>
#include <new>

#include "kernels/element.h"
#include "kernels/reduce.h"

namespace {

using namespace ringfold;

constexpr size_t kInCache = 32 << 10, kInMemory = 64 << 20;

struct Free {
  void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t(64)); }
};
using Buffer = std::unique_ptr<std::byte, Free>;

// Numbers between 1 and 2 of the type, so that no special case flatters or slows a run.
template <class T>
void fill(std::byte* memory, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(T); ++i) {
    const float value = 1 + static_cast<float>(i * 2654435761u % 251) / 256;
    T element;
    if constexpr (kIsSmallFloat<T>) {
      element = from_f32<T>(value);
    } else {
      element = static_cast<T>(std::is_integral_v<T> ? value * 50 : value);
    }
    std::memcpy(memory + i * sizeof(T), &element, sizeof(T));
  }
}

Buffer buffer(DType dtype, size_t bytes) {
  Buffer memory(static_cast<std::byte*>(::operator new(bytes, std::align_val_t(64))));
  switch (dtype) {
    case DType::i8:
      fill<int8_t>(memory.get(), bytes);
      break;
    case DType::u8:
      fill<uint8_t>(memory.get(), bytes);
      break;
    case DType::i32:
      fill<int32_t>(memory.get(), bytes);
      break;
    case DType::u32:
      fill<uint32_t>(memory.get(), bytes);
      break;
    case DType::i64:
      fill<int64_t>(memory.get(), bytes);
      break;
    case DType::u64:
      fill<uint64_t>(memory.get(), bytes);
      break;
    case DType::f16:
      fill<F16>(memory.get(), bytes);
      break;
    case DType::f32:
      fill<float>(memory.get(), bytes);
      break;
    case DType::f64:
      fill<double>(memory.get(), bytes);
      break;
    case DType::bf16:
      fill<BF16>(memory.get(), bytes);
      break;
    case DType::f8e4m3:
      fill<F8E4M3>(memory.get(), bytes);
      break;
    case DType::f8e5m2:
      fill<F8E5M2>(memory.get(), bytes);
      break;
  }
  return memory;
}

// Operands and result of one measurement.
struct Operands {
  Buffer a, b, out;
  ReduceCall call;
  Operands(DType dtype, Op op, size_t bytes)
      : a(buffer(dtype, bytes)), b(buffer(dtype, bytes)), out(buffer(dtype, bytes)) {
    call.dtype = dtype;
    call.op = op;
    call.a = a.get();
    call.b = b.get();
    call.out = out.get();
    call.count = bytes / size_of(dtype);
    call.count_a = 3;
    call.total = 4;  // an average's last step, the dearer one
    if (op == Op::premul_sum) call.scale_a = 0.5, call.scale_b = 0.25;
  }
};

template <class Run>
void measure(benchmark::State& state, DType dtype, Op op, size_t bytes, const Run& run) {
  const Operands operands(dtype, op, bytes);
  for (auto _ : state) {
    run(operands.call);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes));
}

void plain_add(const ReduceCall& call) {
  const auto* __restrict a = static_cast<const float*>(call.a);
  const auto* __restrict b = static_cast<const float*>(call.b);
  auto* __restrict out = static_cast<float*>(call.out);
  for (size_t i = 0; i < call.count; ++i) out[i] = a[i] + b[i];
}

#if defined(__x86_64__)
// The same with the widest vectors the compiler may use, so that no target has an unfair start.
__attribute__((target("avx2"))) void plain_add_avx2(const ReduceCall& call) {
  const auto* __restrict a = static_cast<const float*>(call.a);
  const auto* __restrict b = static_cast<const float*>(call.b);
  auto* __restrict out = static_cast<float*>(call.out);
  for (size_t i = 0; i < call.count; ++i) out[i] = a[i] + b[i];
}

using Vector = float __attribute__((vector_size(16)));
// And past the caches, as reduce_host writes large results.
void plain_add_streaming(const ReduceCall& call) {
  const auto* a = static_cast<const Vector*>(call.a);
  const auto* b = static_cast<const Vector*>(call.b);
  auto* out = static_cast<Vector*>(call.out);
  for (size_t i = 0; i < call.count / 4; ++i) {
    __builtin_ia32_movntps(reinterpret_cast<float*>(out + i), a[i] + b[i]);
  }
  __builtin_ia32_sfence();
}
#endif

void register_plain(size_t bytes) {
  const auto add = [bytes](const char* label, void (*function)(const ReduceCall&)) {
    benchmark::RegisterBenchmark(
        fmt::format("{}/{}", label, bytes).c_str(),
        [=](benchmark::State& state) { measure(state, DType::f32, Op::sum, bytes, function); });
  };
  add("plain_add", plain_add);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) add("plain_add_avx2", plain_add_avx2);
  add("plain_add_streaming", plain_add_streaming);
#endif
}

void register_reductions(DType dtype, Op op, size_t bytes) {
  const std::string what = fmt::format("{}/{}/{}", name(dtype), name(op), bytes);
  benchmark::RegisterBenchmark(
      fmt::format("reference/{}", what).c_str(), [=](benchmark::State& state) {
        measure(state, dtype, op, bytes, [](const ReduceCall& call) { reduce_reference(call); });
      });
  for (const std::string_view target : reduce_targets()) {
    benchmark::RegisterBenchmark(
        fmt::format("reduce/{}/{}", target, what).c_str(), [=](benchmark::State& state) {
          force_reduce_target(target);
          measure(state, dtype, op, bytes, [](const ReduceCall& call) { reduce_host(call); });
          force_reduce_target("");
        });
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const size_t bytes : {kInCache, kInMemory}) {
    register_plain(bytes);
    for (int dtype = 0; dtype < kDTypes; ++dtype) {
      for (int op = 0; op < kOps; ++op) {
        register_reductions(static_cast<DType>(dtype), static_cast<Op>(op), bytes);
      }
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
