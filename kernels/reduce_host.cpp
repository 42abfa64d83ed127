// The entry points: which kernel, on which target, and by which way the result reaches memory.
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/parts.h"
#include "kernels/reduce.h"

namespace ringfold {
namespace {

// A result with a mirror is made in blocks of this size, each copied while L1 still holds it.
constexpr size_t kBlockBytes = 8 << 10;

parts::Reduce reduce_function(DType dtype) {
  if (is_small_float(dtype)) return parts::reduce_small_floats();
  return is_float(dtype) ? parts::reduce_wide_floats() : parts::reduce_integers();
}

// The elements [first, first + count) of a call, without its mirror.
ReduceCall part_of(const ReduceCall& call, size_t first, size_t count) {
  const size_t offset = first * size_of(call.dtype);
  ReduceCall part = call;
  part.a = static_cast<const std::byte*>(call.a) + offset;
  part.b = static_cast<const std::byte*>(call.b) + offset;
  part.out = static_cast<std::byte*>(call.out) + offset;
  part.mirror = nullptr;
  part.count = count;
  return part;
}

void reduce_mirrored(const ReduceCall& call, parts::Reduce reduce) {
  const size_t block = kBlockBytes / size_of(call.dtype);
  for (size_t first = 0; first < call.count; first += block) {
    const ReduceCall part = part_of(call, first, std::min(block, call.count - first));
    reduce(part);
    std::memcpy(static_cast<std::byte*>(call.mirror) + first * size_of(call.dtype), part.out,
                part.count * size_of(call.dtype));
  }
}

// Best first: in Highway the better target has the lower bit. Asked for before any is forced.
const std::vector<int64_t>& usable_targets() {
  static const std::vector<int64_t> kTargets = hwy::SupportedAndGeneratedTargets();
  return kTargets;
}

}  // namespace

void reduce_host(const ReduceCall& call) {
  if (call.count == 0) return;
  const parts::Reduce reduce = reduce_function(call.dtype);
  if (call.mirror != nullptr) {
    reduce_mirrored(call, reduce);
  } else {
    reduce(call);
  }
}

void fold_host(const FoldCall& call) {
  // A vector's worth at most: choosing the vectors' way would take longer.
  constexpr size_t kFew = 32;
  if (call.count <= kFew / size_of(call.dtype)) return fold_reference(call);
  const parts::Fold fold = is_small_float(call.dtype) ? parts::fold_small_floats()
                           : is_float(call.dtype)     ? parts::fold_wide_floats()
                                                      : parts::fold_integers();
  fold(call);
}

void scale_host(DType dtype, const void* in, void* out, size_t count, double scale) {
  if (scale == 1.0 || !is_float(dtype)) return scale_reference(dtype, in, out, count, scale);
  const parts::Scale function =
      is_small_float(dtype) ? parts::scale_small_floats() : parts::scale_wide_floats();
  ReduceCall call;
  call.dtype = dtype;
  call.a = call.b = in;
  call.out = out;
  call.count = count;
  call.scale_a = scale;
  function(call);
}

std::span<const std::string_view> reduce_targets() {
  static const std::vector<std::string_view> kNames = [] {
    std::vector<std::string_view> found;
    for (const int64_t target : usable_targets()) found.emplace_back(hwy::TargetName(target));
    return found;
  }();
  return kNames;
}

bool force_reduce_target(std::string_view name) {
  int64_t chosen = 0;  // no limit
  for (const int64_t target : usable_targets()) {
    if (name == hwy::TargetName(target)) chosen = target;
  }
  if (chosen == 0 && !name.empty()) return false;
  hwy::SetSupportedTargetsForTest(chosen);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return true;
}

}  // namespace ringfold
