#include "lib/grad/plan.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace ringfold {
namespace {

struct Open {
  std::vector<size_t> members;
  size_t bytes = 0, limit = 0;
  size_t last = 0;  // position in the order at which it is full
};

}  // namespace

BucketPlan plan_buckets(std::span<const Parameter> parameters, size_t first_bytes,
                        size_t bucket_bytes, std::span<const size_t> order) {
  std::vector<size_t> backwards(order.empty() ? parameters.size() : 0);
  std::iota(backwards.rbegin(), backwards.rend(), size_t{0});
  if (order.empty()) order = backwards;

  std::vector<Open> done;
  std::array<Open, kDTypes> open;
  bool any = false;
  for (size_t position = 0; position < order.size(); ++position) {
    const Parameter& parameter = parameters[order[position]];
    Open& bucket = open[static_cast<size_t>(parameter.type)];
    const size_t bytes = grad::bytes_of(parameter);
    if (!bucket.members.empty() && bucket.bytes + bytes > bucket.limit) {
      done.push_back(std::move(bucket));
      bucket = {};
    }
    if (bucket.members.empty()) bucket.limit = any ? bucket_bytes : first_bytes;
    any = true;
    bucket.members.push_back(order[position]);
    bucket.bytes += bytes;
    bucket.last = position;
  }
  for (Open& bucket : open)
    if (!bucket.members.empty()) done.push_back(std::move(bucket));

  std::ranges::sort(done, {}, &Open::last);
  BucketPlan plan;
  for (Open& bucket : done) {
    std::ranges::sort(bucket.members);
    plan.push_back(std::move(bucket.members));
  }
  return plan;
}

namespace grad {

double waiting(std::span<const Parameter> parameters, const BucketPlan& plan,
               std::span<const size_t> order) {
  std::vector<double> ready_at(parameters.size());  // bytes that are ready by then
  double ready = 0;
  for (const size_t parameter : order)
    ready_at[parameter] = ready += static_cast<double>(bytes_of(parameters[parameter]));
  double start = 0, sum = 0;
  for (const auto& bucket : plan) {
    double bytes = 0;
    for (const size_t parameter : bucket) {
      start = std::max(start, ready_at[parameter]);
      bytes += static_cast<double>(bytes_of(parameters[parameter]));
    }
    sum += bytes * start;
  }
  return sum;
}

}  // namespace grad
}  // namespace ringfold
