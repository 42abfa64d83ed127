// The thin call on top: one gradient average over all ranks.
#pragma once

#include <span>

#include "ringfold/communicator.h"

namespace ringfold {

// One gradient tensor: `count` elements of a float type at `data`, averaged in place.
struct Gradient {
  void* data = nullptr;
  size_t count = 0;
  DType type = DType::f32;
};

// Replaces every gradient by its average over the ranks: the mean for equal weights, and
// sum_r(weight_r * gradient_r) / sum_r(weight_r) otherwise. With a rank's number of samples as its
// weight the result equals the gradient of the union batch, also for unequal shards; a rank without
// data joins with weight 0 (its gradients are then ignored). All ranks give the same tensors in the
// same order, and either all give weights or none does.
//
// Errors: invalid_argument for a type that is not a float, a negative or non-finite weight, or if
// all weights are 0. Blocks until the averages are there. Sends 2(N-1)/N of the bytes (see
// model.h), and 8 bytes more when weights are given. Thread-safety: as Communicator.
[[nodiscard]] Status average_gradients(Communicator& comm, std::span<const Gradient> gradients);
[[nodiscard]] Status average_gradients(Communicator& comm, std::span<const Gradient> gradients,
                                       double weight);

}  // namespace ringfold
