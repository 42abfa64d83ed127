#include "ringfold/average.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace ringfold {
namespace {

Status check(std::span<const Gradient> gradients) {
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (static_cast<size_t>(gradients[i].type) >= kDTypes)
      return {Code::invalid_argument,
              fmt::format("gradient {} is of type number {}: expected 0 to {}", i,
                          static_cast<int>(gradients[i].type), kDTypes - 1)};
    if (!is_float(gradients[i].type))
      return {Code::invalid_argument,
              fmt::format("gradient {} is of type {}: expected a float type", i,
                          name(gradients[i].type))};
    if (gradients[i].data == nullptr && gradients[i].count != 0)
      return {Code::invalid_argument, fmt::format("gradient {} is null, but {} elements were given",
                                                  i, gradients[i].count)};
  }
  return {};
}

// Starts them all, so that one travels while the next is added up, and waits for the last.
Status reduce_all(Communicator& comm, std::span<const Gradient> gradients, Reduction reduction) {
  std::vector<Work> works;
  works.reserve(gradients.size());
  for (const Gradient& g : gradients)
    works.push_back(comm.all_reduce(g.data, g.data, g.count, g.type, reduction));
  Status first;
  for (Work& work : works) {
    const Status status = work.wait();
    if (first.ok()) first = status;
  }
  return first;
}

}  // namespace

Status average_gradients(Communicator& comm, std::span<const Gradient> gradients) {
  if (Status status = check(gradients); !status.ok()) return status;
  return reduce_all(comm, gradients, Op::avg);
}

// sum_r(w_r g_r) / sum_r(w_r) as sum_r((w_r / sum w) g_r): no intermediate is larger than the
// gradients themselves, so 16-bit types cannot overflow.
Status average_gradients(Communicator& comm, std::span<const Gradient> gradients, double weight) {
  if (Status status = check(gradients); !status.ok()) return status;
  // A weight that cannot be goes into the sum as NaN, so that all ranks refuse and none waits.
  const bool usable = std::isfinite(weight) && weight >= 0;
  double sum = usable ? weight : std::numeric_limits<double>::quiet_NaN();
  if (Status status = comm.all_reduce(&sum, &sum, 1, DType::f64, Op::sum).wait(); !status.ok())
    return status;
  if (!usable)
    return {Code::invalid_argument,
            fmt::format("weight {}: expected a finite number that is not negative", weight)};
  if (!std::isfinite(sum))
    return {Code::invalid_argument, "a rank gave a weight that is not finite or negative"};
  if (sum == 0) return {Code::invalid_argument, "the weights of all ranks are 0"};
  if (weight == 0)  // whatever lies there, NaN included, does not count
    for (const Gradient& g : gradients)
      if (g.count != 0) std::memset(g.data, 0, g.count * size_of(g.type));
  return reduce_all(comm, gradients, Reduction(Op::premul_sum, weight / sum));
}

}  // namespace ringfold
