// Where the gradients of each bucket lie, and how they get into it and out again.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "ringfold/gradient_sync.h"

namespace ringfold::grad {

// One parameter within its bucket.
struct Slice {
  size_t parameter = 0;
  size_t bytes = 0;
  std::byte* in_bucket = nullptr;
  std::byte* gradient = nullptr;  // the same where it is not copied
};

struct LaidOutBucket {
  DType type = DType::f32;
  size_t count = 0;
  std::byte* data = nullptr;
  std::vector<Slice> slices;
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte[], Free> storage;  // null: the gradients lie one behind the other

  // Fills the bucket; parameters that do not contribute are zeros, wherever they lie. One entry for
  // each parameter of the model; empty: none contributes.
  void gather(std::span<const char> contributes) const;
  void scatter() const;
  [[nodiscard]] size_t copied_bytes() const;
};

// Empty if there is no memory. Storage begins as zeros.
std::vector<LaidOutBucket> lay_out(std::span<const Parameter> parameters, const BucketPlan& plan);

size_t copied_bytes(std::span<const LaidOutBucket> buckets);

}  // namespace ringfold::grad
