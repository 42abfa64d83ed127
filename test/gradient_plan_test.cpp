// Buckets as a pure function of parameters, limits and order.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <random>

#include "lib/grad/plan.h"
#include "ringfold/gradient_sync.h"

using namespace ringfold;

namespace {

constexpr size_t kMiB = size_t{1} << 20;

std::vector<Parameter> of_floats(const std::vector<size_t>& counts) {
  std::vector<Parameter> parameters;
  for (const size_t count : counts) parameters.push_back({"", count, DType::f32, nullptr});
  return parameters;
}

size_t bytes_of(const std::vector<Parameter>& parameters, const std::vector<size_t>& bucket) {
  size_t sum = 0;
  for (const size_t i : bucket) sum += grad::bytes_of(parameters[i]);
  return sum;
}

}  // namespace

TEST_CASE("buckets go from the last parameter to the first, the first of them small") {
  const auto parameters = of_floats({10, 20, 30, 40, 50});  // 40 to 200 bytes
  CHECK(plan_buckets(parameters, 200, 300) == BucketPlan{{4}, {2, 3}, {0, 1}});
  CHECK(plan_buckets(parameters, 199, 10000) == BucketPlan{{4}, {0, 1, 2, 3}});
  CHECK(plan_buckets(parameters, 10000, 300) == BucketPlan{{0, 1, 2, 3, 4}});
  CHECK(plan_buckets({}, 1, 1).empty());
}

TEST_CASE("the limits hold to the byte, and a larger parameter goes alone") {
  CHECK(plan_buckets(of_floats({5, 5}), 40, 40) == BucketPlan{{0, 1}});
  CHECK(plan_buckets(of_floats({5, 5}), 39, 40) == BucketPlan{{1}, {0}});
  CHECK(plan_buckets(of_floats({1, 1000, 1}), 8, 8) == BucketPlan{{2}, {1}, {0}});
  // By default 1 MiB, then 25 MiB.
  const SyncOptions options;
  CHECK(plan_buckets(of_floats({kMiB, 25 * kMiB / 4 - 10, 10, kMiB / 4}), options.first_bytes,
                     options.bucket_bytes) == BucketPlan{{3}, {1, 2}, {0}});
}

TEST_CASE("a bucket has one type, and buckets leave in the order in which they are full") {
  auto parameters = of_floats({10, 10, 10, 10, 10});
  parameters[1].type = parameters[3].type = DType::bf16;
  // f32: 4, 2, 0; bf16: 3, 1, which is full before parameter 0 is ready.
  CHECK(plan_buckets(parameters, 1000, 1000) == BucketPlan{{1, 3}, {0, 2, 4}});
}

TEST_CASE("another order of readiness makes another plan, and waiting() tells which is better") {
  const auto parameters = of_floats({10, 10, 10, 10});
  const std::vector<size_t> forwards = {0, 1, 2, 3}, backwards = {3, 2, 1, 0};
  const BucketPlan usual = plan_buckets(parameters, 80, 80);
  const BucketPlan other = plan_buckets(parameters, 80, 80, forwards);
  CHECK(usual == BucketPlan{{2, 3}, {0, 1}});
  CHECK(other == BucketPlan{{0, 1}, {2, 3}});
  CHECK(grad::waiting(parameters, other, forwards) < grad::waiting(parameters, usual, forwards));
  CHECK(grad::waiting(parameters, usual, backwards) < grad::waiting(parameters, other, backwards));
  // 80 bytes after 80, 80 after 160; in the other case all wait for the last.
  CHECK(grad::waiting(parameters, usual, backwards) == 80 * 80 + 80 * 160);
  CHECK(grad::waiting(parameters, usual, forwards) == 2 * 80 * 160);
}

TEST_CASE("any plan holds every parameter once, within the limits, in the order of fullness") {
  std::mt19937 random(4711);
  for (int round = 0; round < 200; ++round) {
    INFO("round " << round << " of seed 4711");
    std::vector<size_t> counts(random() % 40);
    for (size_t& count : counts) count = random() % 100;
    auto parameters = of_floats(counts);
    for (Parameter& p : parameters)
      p.type = std::array{DType::f32, DType::f16, DType::f64}[random() % 3];
    std::vector<size_t> order(counts.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    const size_t first = 1 + random() % 300, other = 1 + random() % 900;

    const BucketPlan plan = plan_buckets(parameters, first, other, order);
    std::vector<int> held(counts.size());
    ptrdiff_t full_before = -1;
    for (const auto& bucket : plan) {
      REQUIRE_FALSE(bucket.empty());
      CHECK(std::ranges::is_sorted(bucket));
      CHECK((bucket.size() == 1 || bytes_of(parameters, bucket) <= std::max(first, other)));
      ptrdiff_t full = 0;
      for (const size_t i : bucket) {
        ++held[i];
        CHECK(parameters[i].type == parameters[bucket[0]].type);
        full = std::max(full, std::ranges::find(order, i) - order.begin());
      }
      CHECK(full > full_before);
      full_before = full;
    }
    CHECK(std::ranges::all_of(held, [](int times) { return times == 1; }));
  }
}
