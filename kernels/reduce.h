// The arithmetic of a collective: one call reduces two ranges of one element type, or folds those
// of all ranks.
//
// Thread-safety: pure functions of their arguments; any number may run at once on disjoint outputs.
// Depends on include/ringfold/types.h only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "ringfold/types.h"

namespace ringfold {

// out[i] = a[i] op b[i] for i in [0, count). All pointers are aligned to the element size at least;
// out may equal a or b exactly, no other overlap is allowed.
//
//   premul_sum  x is first multiplied by its scale (in f32 for 16- and 8-bit floats, otherwise in
//               the type) and rounded to the type; then sum. Integers are multiplied exactly if the
//               scale is a whole number, else in f64 and truncated; both wrap.
//   avg         `a` already holds the contributions of `count_a` ranks and `b` those of `count_b`.
//               Small floats hold the mean so far: out = (a*count_a + b*count_b) /
//               (count_a+count_b) in f32, rounded once. Other types hold the sum so far, and it is
//               divided by `total` in the call that completes it (count_a + count_b == total).
struct ReduceCall {
  DType dtype = DType::f32;
  Op op = Op::sum;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
  void* mirror = nullptr;  // second destination of the result, or null; overlaps nothing
  size_t count = 0;        // elements
  double scale_a = 1.0, scale_b = 1.0;
  int count_a = 1, count_b = 1, total = 0;
};

// SIMD, chosen once at run time for this processor; bit-equal to reduce_reference on every target.
void reduce_host(const ReduceCall& call);

// The element bodies in a plain loop: the same bodies that the CUDA kernels run. For tests.
void reduce_reference(const ReduceCall& call);

// out[i] = sources[0][i] op sources[1][i] op ... in this order, each source read once. All pointers
// are aligned to the element size at least; out may be exactly one of the sources, no other overlap
// is allowed.
//
//   f16, bf16, fp8  sum, premul_sum, prod and avg are formed in f32 and rounded once, at the end.
//   other types     the same bits as a chain of ReduceCalls in rank order.
//   premul_sum      the source `own` is still to be multiplied by `factor`, as scale_host does it;
//                   the others are already.
//   avg             the sum over `ranks`; integers wrap in the sum, then truncate.
struct FoldCall {
  DType dtype = DType::f32;
  Op op = Op::sum;
  const void* const* sources = nullptr;
  int ranks = 0;  // sources: 2 to kMostSources
  int own = -1;   // -1: none
  double factor = 1.0;
  void* out = nullptr;
  void* mirror = nullptr;  // second destination of the result, or null; overlaps nothing
  size_t count = 0;        // elements
  bool stream = false;     // write `out` past the caches; the mirror stays in them
};
inline constexpr int kMostSources = 64;

// As reduce_host and reduce_reference.
void fold_host(const FoldCall& call);
void fold_reference(const FoldCall& call);

// out[i] = in[i] * scale rounded to the type, by the rule of premul_sum. out may equal in.
// scale == 1 is a plain copy of the bits (nothing at all if out == in).
void scale_host(DType dtype, const void* in, void* out, size_t count, double scale);
void scale_reference(DType dtype, const void* in, void* out, size_t count, double scale);

// The SIMD targets compiled in and usable here, best first, and a way for tests and benchmarks to
// force one by name; an empty name goes back to the best. Returns false for a name not available.
std::span<const std::string_view> reduce_targets();
bool force_reduce_target(std::string_view name);

// As memcpy, by vectors whatever the size: the C library turns to string instructions, which are
// slow to take lines from another core's cache.
void copy_host(void* out, const void* in, size_t bytes);

// Copies without filling the caches (streaming stores) where that helps; bit-exact like memcpy.
void copy_streaming(void* out, const void* in, size_t bytes);

}  // namespace ringfold
