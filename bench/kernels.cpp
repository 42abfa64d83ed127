// Reductions on host memory, in GB/s of result (two operands are read for every byte written).
//
//   reduce/<target>/<dtype>/<op>/<bytes>   reduce_host with one target forced
//   reference/<dtype>/<op>/<bytes>         the element bodies in a plain loop
//   plain_add/<bytes>                      f32 addition as the compiler vectorises it
//   fold/<dtype>/<op>/<ranks>/<bytes>      fold_host, in GB/s of all that is read and written
//   fold_stream/..., fold_mirror/...       the same past the caches; with a second destination
//   chain/..., copy/...                    the same reduced two by two; each source copied to `out`
//
// The sizes are those of one operand: 32 KiB stays in the caches, 64 MiB does not.
#include <benchmark/benchmark.h>
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernels/element.h"
#include "kernels/reduce.h"

namespace {

using namespace ringfold;

// Operands at equal offsets in their pages: nearly equal ones make stores and loads collide.
constexpr std::align_val_t kPage{4096};
constexpr size_t kInCache = 32 << 10, kInMemory = 64 << 20;

struct Free {
  void operator()(std::byte* memory) const { ::operator delete(memory, kPage); }
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
  Buffer memory(static_cast<std::byte*>(::operator new(bytes, kPage)));
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

// ---- folds ------------------------------------------------------------------------------------

// The largest: of 8 ranks in the second cache. And the least that a fold is worth.
constexpr size_t kInSecondCache = 64 << 10, kApart = 32 << 20, kTiny = 16;

struct FoldOperands {
  std::vector<Buffer> memory;
  std::vector<const void*> sources;
  Buffer out, mirror;
  FoldCall call;
  FoldOperands(DType dtype, Op op, int ranks, size_t bytes)
      : out(buffer(dtype, bytes)), mirror(buffer(dtype, bytes)) {
    for (int r = 0; r < ranks; ++r) {
      memory.push_back(buffer(dtype, bytes));
      sources.push_back(memory.back().get());
    }
    call.dtype = dtype;
    call.op = op;
    call.sources = sources.data();
    call.ranks = ranks;
    call.out = out.get();
    call.count = bytes / size_of(dtype);
  }
};

// Two by two, in blocks that the first cache holds.
void chain(const FoldCall& fold) {
  constexpr size_t kBlock = 8 << 10;
  alignas(64) std::array<std::byte, kBlock> sum;
  const size_t element = size_of(fold.dtype), bytes = fold.count * element;
  ReduceCall call;
  call.dtype = fold.dtype;
  call.op = fold.op;
  call.total = fold.ranks;
  for (size_t first = 0; first < bytes; first += kBlock) {
    call.count = std::min(kBlock, bytes - first) / element;
    for (int r = 1; r < fold.ranks; ++r) {
      const bool last = r == fold.ranks - 1;
      call.a = r == 1 ? static_cast<const std::byte*>(fold.sources[0]) + first : sum.data();
      call.b = static_cast<const std::byte*>(fold.sources[r]) + first;
      call.out = last ? static_cast<std::byte*>(fold.out) + first : sum.data();
      call.count_a = r;
      reduce_host(call);
    }
  }
}

void copy_each(const FoldCall& call) {
  for (int r = 0; r < call.ranks; ++r)
    std::memcpy(call.out, call.sources[r], call.count * size_of(call.dtype));
}

void register_folds(DType dtype, Op op, int ranks, size_t bytes) {
  const auto add = [=](const char* label, int moved, auto run) {
    benchmark::RegisterBenchmark(
        fmt::format("{}/{}/{}/{}/{}", label, name(dtype), name(op), ranks, bytes).c_str(),
        [=](benchmark::State& state) {
          FoldOperands operands(dtype, op, ranks, bytes);
          for (auto _ : state) {
            run(operands);
            benchmark::ClobberMemory();
          }
          state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * bytes) * moved);
        });
  };
  add("fold", ranks + 1, [](FoldOperands& operands) { fold_host(operands.call); });
  add("fold_stream", ranks + 1, [](FoldOperands& operands) {
    operands.call.stream = true;
    fold_host(operands.call);
  });
  add("fold_mirror", ranks + 2, [](FoldOperands& operands) {
    operands.call.mirror = operands.mirror.get();
    fold_host(operands.call);
  });
  add("chain", ranks + 1, [](FoldOperands& operands) { chain(operands.call); });
  add("copy", ranks * 2, [](FoldOperands& operands) { copy_each(operands.call); });
}

void register_all_folds() {
  for (const size_t bytes : {kTiny, 4 * kTiny, kInSecondCache, kApart}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i8, DType::f64}) {
      for (const int ranks : {2, 4, 8}) register_folds(dtype, Op::sum, ranks, bytes);
    }
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
  register_all_folds();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
