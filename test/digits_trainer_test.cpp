// The trainer of the averaging experiment, alone: its gradient is right, it learns, and the
// experiment can tell a right average from a wrong one. digits_test.cpp then puts the library in.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "test/digits.h"

using namespace ringfold::test;

namespace {

constexpr uint32_t kSeed = 20260801;
constexpr int kSteps = 40;

// Trains as `shards.size()` ranks would, in one thread. The average is taken in f32, as a library
// does it: the gradient of each rank times its share (rounded), added up rank by rank (rounded).
std::vector<double> train(const std::vector<Digit>& digits, const std::vector<size_t>& shards,
                          bool weighted) {
  DigitsNetwork network(kSeed);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<float> average(DigitsNetwork::kParameters);
    double loss_sum = 0;
    size_t begin = 0;
    for (const size_t count : shards) {
      const auto samples = std::span(digits).subspan(begin, count);
      begin += count;
      loss_sum += network.compute_gradients(samples).loss_sum;
      const float share =
          weighted ? static_cast<float>(count) / kDigits : 1.0f / static_cast<float>(shards.size());
      for (size_t i = 0; i < average.size(); ++i) average[i] += network.gradients()[i] * share;
    }
    std::ranges::copy(average, network.gradients().begin());
    network.step();
    losses.push_back(loss_sum / kDigits);
  }
  return losses;
}

double max_relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]) / b[i]);
  return worst;
}

}  // namespace

TEST_CASE("the digits are the 1,797 of the UCI test set") {
  const std::vector<Digit> digits = load_digits();
  REQUIRE(digits.size() == kDigits);
  std::array<int, kClasses> per_class{};
  double ink = 0;
  for (const Digit& digit : digits) {
    ++per_class[static_cast<size_t>(digit.label)];
    ink = std::accumulate(digit.pixels.begin(), digit.pixels.end(), ink);
  }
  CHECK(per_class == std::array<int, kClasses>{178, 182, 177, 183, 181, 182, 181, 179, 174, 180});
  CHECK(ink * 16 == 561718);
}

TEST_CASE("a file that is not the data is refused") {
  CHECK_THROWS_AS(load_digits(RINGFOLD_TEST_DATA "/none"), std::runtime_error);
  CHECK_THROWS_AS(load_digits(RINGFOLD_TEST_DATA "/README.md"), std::runtime_error);
}

TEST_CASE("every element of the gradient agrees with finite differences") {
  const std::vector<Digit> digits = load_digits();
  const auto samples = std::span(digits).first(30);
  DigitsNetwork network(kSeed);
  network.compute_gradients(samples);
  network.step();  // away from the start, where all biases are 0
  network.compute_gradients(samples);
  double largest = 0, worst = 0;
  for (size_t i = 0; i < DigitsNetwork::kParameters; ++i) {
    float& parameter = network.parameters()[i];
    const float kept = parameter;
    const float above = kept + 1e-3f, below = kept - 1e-3f;
    parameter = above;
    const double loss_above = network.evaluate(samples).loss_sum;
    parameter = below;
    const double loss_below = network.evaluate(samples).loss_sum;
    parameter = kept;
    const double difference = (loss_above - loss_below) / (double{above} - double{below}) / 30;
    worst = std::max(worst, std::abs(difference - double{network.gradients()[i]}));
    largest = std::max(largest, std::abs(difference));
  }
  INFO("largest element " << largest << ", worst difference " << worst);
  CHECK(largest > 0.01);
  CHECK(worst < 1e-5 * largest);
}

TEST_CASE("the tensors are views of one buffer, without gap or overlap") {
  DigitsNetwork network(kSeed);
  const float* next = network.gradients().data();
  for (int tensor = 0; tensor < DigitsNetwork::kTensors; ++tensor) {
    CHECK(network.gradient(tensor).data() == next);
    next += network.gradient(tensor).size();
  }
  CHECK(next == network.gradients().data() + DigitsNetwork::kParameters);
}

TEST_CASE("the gradient of no samples is NaN everywhere") {
  DigitsNetwork network(kSeed);
  CHECK(network.compute_gradients({}).loss_sum == 0);
  CHECK(std::ranges::all_of(network.gradients(), [](float g) { return std::isnan(g); }));
}

TEST_CASE("the loss decreases at every step, and the digits are learnt") {
  const std::vector<Digit> digits = load_digits();
  DigitsNetwork network(kSeed), same(kSeed), other(kSeed + 1);
  CHECK(std::ranges::equal(network.parameters(), same.parameters()));
  CHECK_FALSE(std::ranges::equal(network.parameters(), other.parameters()));

  double before = network.evaluate(digits).loss_sum / kDigits;
  CHECK(before > 2.0);  // near ln 10: nothing is known yet
  for (int step = 0; step < kSteps; ++step) {
    const double loss = network.compute_gradients(digits).loss_sum / kDigits;
    CHECK(loss <= before);
    before = loss;
    network.step();
  }
  const Evaluation final = network.evaluate(digits);
  const double accuracy = double(final.correct) / kDigits;
  fmt::print("one process: loss {:.4f}, accuracy {:.2f} %\n", final.loss_sum / kDigits,
             100 * accuracy);
  CHECK(accuracy > 0.9);
}

TEST_CASE("the experiment tells a right average from a wrong one") {
  const std::vector<Digit> digits = load_digits();
  const std::vector<double> whole = train(digits, {kDigits}, true);
  const auto difference = [&](const std::vector<size_t>& shards, bool weighted) {
    const double worst = max_relative_difference(train(digits, shards, weighted), whole);
    std::string shape;
    for (const size_t count : shards) shape += fmt::format("{}{}", shape.empty() ? "" : "+", count);
    fmt::print("{:>18}  {:10}  {:.1e}\n", shape, weighted ? "weighted" : "unweighted", worst);
    return worst;
  };
  CHECK(difference({899, 898}, true) < 1e-6);
  CHECK(difference({1000, 797}, true) < 1e-6);
  CHECK(difference({100, 597, 1100}, true) < 1e-6);
  CHECK(difference({1, 2, 794, 1000}, true) < 1e-6);
  CHECK(difference({1000, 797}, false) > 1e-3);
  CHECK(difference({100, 597, 1100}, false) > 1e-3);
  CHECK(difference({1, 2, 794, 1000}, false) > 1e-3);
}
