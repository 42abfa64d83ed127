#include "lib/grad/layout.h"

#include <algorithm>
#include <cstring>

#include "lib/grad/plan.h"

namespace ringfold::grad {
namespace {

constexpr size_t kAlign = 64;  // of bucket storage: whole cache lines

bool one_behind_the_other(std::span<const Slice> slices) {
  const std::byte* next = slices.front().gradient;
  for (const Slice& slice : slices) {
    if (slice.gradient == nullptr || slice.gradient != next) return false;
    next += slice.bytes;
  }
  return true;
}

// False if there is no memory.
bool lay_out(std::span<const Parameter> parameters, std::span<const size_t> members,
             LaidOutBucket* bucket) {
  bucket->type = parameters[members.front()].type;
  for (const size_t i : members) {
    bucket->slices.push_back(
        {i, bytes_of(parameters[i]), nullptr, static_cast<std::byte*>(parameters[i].gradient)});
    bucket->count += parameters[i].count;
  }
  if (one_behind_the_other(bucket->slices)) {
    bucket->data = bucket->slices.front().gradient;
  } else {
    const size_t bytes = bucket->count * size_of(bucket->type);
    const size_t rounded = std::max((bytes + kAlign - 1) / kAlign, size_t{1}) * kAlign;
    bucket->storage.reset(static_cast<std::byte*>(std::aligned_alloc(kAlign, rounded)));
    if (!bucket->storage) return false;
    bucket->data = bucket->storage.get();
    std::memset(bucket->data, 0, rounded);
  }
  std::byte* next = bucket->data;
  for (Slice& slice : bucket->slices) {
    slice.in_bucket = next;
    if (slice.gradient == nullptr) slice.gradient = next;
    next += slice.bytes;
  }
  return true;
}

}  // namespace

void LaidOutBucket::gather(std::span<const char> contributes) const {
  for (const Slice& slice : slices) {
    if (slice.bytes == 0) continue;
    if (contributes.empty() || contributes[slice.parameter] == 0)
      std::memset(slice.in_bucket, 0, slice.bytes);
    else if (slice.in_bucket != slice.gradient)
      std::memcpy(slice.in_bucket, slice.gradient, slice.bytes);
  }
}

void LaidOutBucket::scatter() const {
  for (const Slice& slice : slices)
    if (slice.in_bucket != slice.gradient && slice.bytes != 0)
      std::memcpy(slice.gradient, slice.in_bucket, slice.bytes);
}

size_t LaidOutBucket::copied_bytes() const {
  size_t sum = 0;
  for (const Slice& slice : slices) sum += slice.in_bucket != slice.gradient ? slice.bytes : 0;
  return sum;
}

std::vector<LaidOutBucket> lay_out(std::span<const Parameter> parameters, const BucketPlan& plan) {
  std::vector<LaidOutBucket> buckets(plan.size());
  for (size_t b = 0; b < plan.size(); ++b)
    if (!lay_out(parameters, plan[b], &buckets[b])) return {};
  return buckets;
}

size_t copied_bytes(std::span<const LaidOutBucket> buckets) {
  size_t sum = 0;
  for (const LaidOutBucket& bucket : buckets) sum += bucket.copied_bytes();
  return sum;
}

}  // namespace ringfold::grad
