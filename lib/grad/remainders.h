// What the compressing hooks share: a bucket as f32, and what rounding has taken away from it.
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "ringfold/gradient_sync.h"

namespace ringfold::grad {

// The elements of a bucket, of any float type, times `factor`, as f32; and back, rounded.
void widen(const Bucket& bucket, double factor, std::span<float> out);
void narrow(std::span<const float> values, const Bucket& bucket);

// What each bucket still owes: zeros at first, and after the buckets were laid out anew.
class Remainders {
 public:
  // `count` numbers, always as many for one bucket of one layout.
  std::span<float> of(const Bucket& bucket, size_t count);

 private:
  int layout_ = 0;
  std::vector<std::vector<float>> buckets_;
};

// What is left of `wanted` when `sent` was sent. Nothing of what is not finite: it would stay for
// ever.
inline float remainder_of(float wanted, float sent) {
  const float left = wanted - sent;
  return std::isfinite(left) ? left : 0;
}

}  // namespace ringfold::grad
