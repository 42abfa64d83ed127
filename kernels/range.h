// A ReduceCall carried out by many threads, each its share: the loop of all CUDA kernels. Also
// compiled for the host, where one thread does everything.
//
// Where all ranges have the same phase to 16 bytes they are accessed 16 bytes at a time, with
// single elements before and after; otherwise element by element. Loads of a batch are issued
// before its first store, since the compiler may not move them across: `out` may be an input.
#pragma once

#include "kernels/element.h"
#include "kernels/worker.h"

namespace ringfold {

// Which of `count` threads this is.
struct Share {
  size_t thread = 0, threads = 1;
};

struct alignas(16) Words {
  uint64_t low, high;
};

// One of the vectors, as elements.
template <class T>
struct alignas(16) Elements {
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];
};

// The ranges of a call from `bytes` on, in units of elements or vectors.
template <int kInputs, class Unit>
struct Operands {
  const Unit* a;
  const Unit* b;  // equals a if there is but one input
  Unit* out;
  Unit* mirror;  // equals out if there is none
  bool mirrored;
  RINGFOLD_HD explicit Operands(const ReduceCall& call, size_t bytes = 0)
      : a(at(call.a, bytes)),
        b(at(kInputs == 2 ? call.b : call.a, bytes)),
        out(at(call.out, bytes)),
        mirror(at(call.mirror != nullptr ? call.mirror : call.out, bytes)),
        mirrored(call.mirror != nullptr) {}

 private:
  // What a kernel is given lies in global memory (device, peer or mapped host memory): then an
  // access need not find out.
  RINGFOLD_HD static Unit* at(const void* range, size_t bytes) {
    auto* const start = static_cast<char*>(const_cast<void*>(range)) + bytes;
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(start));
#endif
    return reinterpret_cast<Unit*>(start);
  }
};

// out[i] = body(a[i], b[i]); with one input body(a[i], a[i]).
template <int kBatch, int kInputs, class Unit, class Body>
RINGFOLD_HD void sweep(const Operands<kInputs, Unit> at, size_t count, Share share,
                       const Body& body) {
  const size_t stride = share.threads;
  const auto put = [&](size_t i, const Unit& value) {
    at.out[i] = value;
    if (at.mirrored) at.mirror[i] = value;
  };
  size_t i = share.thread;
  for (; i + (kBatch - 1) * stride < count; i += kBatch * stride) {
    Unit x[kBatch], y[kBatch];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int k = 0; k < kBatch; ++k) {
      x[k] = at.a[i + k * stride];
      if constexpr (kInputs == 2) y[k] = at.b[i + k * stride];
    }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int k = 0; k < kBatch; ++k) put(i + k * stride, body(x[k], kInputs == 2 ? y[k] : x[k]));
  }
  for (; i < count; i += stride) put(i, body(at.a[i], at.b[i]));
}

// Elements before the first address at which all ranges are aligned to 16 bytes; `count` if there
// is none.
template <class T>
RINGFOLD_HD size_t unaligned_head(const ReduceCall& call) {
  const auto phase = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; };
  const size_t first = phase(call.a);
  const bool alike = phase(call.out) == first && (call.b == nullptr || phase(call.b) == first) &&
                     (call.mirror == nullptr || phase(call.mirror) == first);
  const size_t head = (16 - first) % 16 / sizeof(T);
  return alike && head < call.count ? head : call.count;
}

template <int kInputs, class T, class Body>
RINGFOLD_HD void for_each_element(const ReduceCall& call, Share share, const Body& body) {
  // Data in flight: 4 vectors an input. Bodies of one-byte types are long, and 16 to a vector.
  constexpr int kBatch = sizeof(T) == 1 ? 2 : 4;
  using Vector = Elements<T>;
  const size_t head = unaligned_head<T>(call);
  const size_t vectors = (call.count - head) / Vector::kCount;
  const size_t done = head + vectors * Vector::kCount;
  const auto vector_body = [&](const Words& a, const Words& b) {
    const auto x = __builtin_bit_cast(Vector, a), y = __builtin_bit_cast(Vector, b);
    Vector z;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int k = 0; k < Vector::kCount; ++k) z.at[k] = body(x.at[k], y.at[k]);
    return __builtin_bit_cast(Words, z);
  };
  sweep<kBatch>(Operands<kInputs, Words>(call, head * sizeof(T)), vectors, share, vector_body);
  // The elements before and after; one body for both, since it is long.
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int part = 0; part < 2; ++part) {
    const size_t begin = part == 0 ? 0 : done, end = part == 0 ? head : call.count;
    if (begin < end)
      sweep<4>(Operands<kInputs, T>(call, begin * sizeof(T)), end - begin, share, body);
  }
}

template <Op op, class T>
RINGFOLD_HD void reduce_share(const ReduceCall& call, Share share) {
  const Constants<T> constants(call);
  for_each_element<2, T>(call, share, [&](T a, T b) { return combine<op>(a, b, constants); });
}

// This thread's share of a command.
template <class T>
RINGFOLD_HD void carry_out(const Command& command, Share share) {
  if (command.b == nullptr) {
    if (command.scale_a == 1.0)
      return for_each_element<1, uint8_t>(command, share, [](uint8_t a, uint8_t) { return a; });
    const auto factor = static_cast<Factor<T>>(command.scale_a);
    return for_each_element<1, T>(command, share, [&](T a, T) { return scale(a, factor); });
  }
  switch (command.op) {
    case Op::sum:
      return reduce_share<Op::sum, T>(command, share);
    case Op::prod:
      return reduce_share<Op::prod, T>(command, share);
    case Op::max:
      return reduce_share<Op::max, T>(command, share);
    case Op::min:
      return reduce_share<Op::min, T>(command, share);
    case Op::avg:
      return reduce_share<Op::avg, T>(command, share);
    case Op::premul_sum:
      return reduce_share<Op::premul_sum, T>(command, share);
  }
}

}  // namespace ringfold
