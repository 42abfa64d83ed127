// What lies behind plan_buckets. Pure functions.
#pragma once

#include <span>

#include "ringfold/gradient_sync.h"

namespace ringfold::grad {

inline size_t bytes_of(const Parameter& parameter) {
  return parameter.count * size_of(parameter.type);
}

// How long a plan makes its buckets wait if parameters become ready in `order`, counted in bytes of
// gradients: each byte waits until its bucket, and all before it, are full. Less is better; only
// numbers for the same parameters can be compared.
double waiting(std::span<const Parameter> parameters, const BucketPlan& plan,
               std::span<const size_t> order);

}  // namespace ringfold::grad
