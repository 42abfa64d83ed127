// The acceptance experiment of gradient averaging: a network trained on one process with the whole
// batch, and by 2, 3 and 4 processes with equal and unequal shards of it, learns the same: the loss
// curves agree to 1e-6, and the parameters of all ranks are bit-identical at every step. Through
// average_gradients and through the synchroniser. The same experiment with a wrong average must
// fail, or it would prove nothing.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <memory>
#include <numeric>

#include "ringfold/average.h"
#include "ringfold/gradient_sync.h"
#include "test/digits_ranks.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr int kSteps = 40;
constexpr double kSame = 1e-6;   // relative difference of the losses
constexpr double kWrong = 1e-3;  // what a wrong average must exceed

enum class Average : uint8_t { weighted, unweighted, synchronised };

std::vector<Gradient> gradients_of(DigitsNetwork& network) {
  std::vector<Gradient> gradients;
  for (int tensor = 0; tensor < DigitsNetwork::kTensors; ++tensor) {
    const std::span<float> values = network.gradient(tensor);
    gradients.push_back({values.data(), values.size(), DType::f32});
  }
  return gradients;
}

// Two buckets, and the tensors in the order in which backward has them. A rank without samples
// finishes at once.
AverageStep synchronise(Communicator& comm, DigitsNetwork& network) {
  std::vector<Parameter> parameters;
  for (const Gradient& g : gradients_of(network))
    parameters.push_back({"tensor", g.count, g.type, g.data});
  SyncOptions options;
  options.first_bytes = 2048;
  auto made = GradientSync::create(comm, parameters, options);
  if (!made.ok()) return [why = made.status()](double) { return why; };
  auto sync = std::make_shared<GradientSync>(std::move(*made));
  return [sync](double samples) {
    if (Status status = sync->begin(samples); !status.ok()) return status;
    for (size_t i = DigitsNetwork::kTensors; i-- > 0 && samples > 0;)
      if (Status status = sync->ready(i); !status.ok()) return status;
    return sync->finish();
  };
}

AverageStep averaging(Communicator& comm, DigitsNetwork& network, Average how) {
  const auto gradients = gradients_of(network);
  switch (how) {
    case Average::weighted:
      return [&comm, gradients](double samples) {
        return average_gradients(comm, gradients, samples);
      };
    case Average::unweighted:
      return [&comm, gradients](double) { return average_gradients(comm, gradients); };
    case Average::synchronised:
      return synchronise(comm, network);
  }
  return {};
}

const char* name(Average how) {
  switch (how) {
    case Average::weighted:
      return "weighted";
    case Average::unweighted:
      return "unweighted";
    case Average::synchronised:
      return "synchronised";
  }
  return "";
}

Curve train_ranks(const std::vector<Digit>& digits, const std::vector<size_t>& shards,
                  Average how) {
  REQUIRE(std::accumulate(shards.begin(), shards.end(), size_t{0}) == kDigits);
  const Shared<Curve> curve;
  CHECK(run_ranks(static_cast<int>(shards.size()), 60s, [&](const Rendezvous& me) {
          return train(
              me, {}, shard(digits, shards, me.rank), kSteps,
              [how](Communicator& comm, DigitsNetwork& network) {
                return averaging(comm, network, how);
              },
              &*curve);
        }) == "");
  return *curve;
}

// The curve of one process without any library.
Curve train_alone(const std::vector<Digit>& digits) {
  DigitsNetwork network(kDigitsSeed);
  Curve curve{};
  for (double& loss : std::span(curve.loss).first(kSteps)) {
    loss = network.compute_gradients(digits).loss_sum / kDigits;
    network.step();
  }
  const Evaluation final = network.evaluate(digits);
  curve.final_loss = final.loss_sum / kDigits;
  curve.accuracy = static_cast<double>(final.correct) / kDigits;
  return curve;
}

double difference(const Curve& curve, const Curve& reference) {
  double worst = std::abs(curve.final_loss - reference.final_loss) / reference.final_loss;
  for (size_t i = 0; i < kSteps; ++i) {
    worst = std::max(worst, std::abs(curve.loss[i] - reference.loss[i]) / reference.loss[i]);
  }
  return worst;
}

void print_row(const std::vector<size_t>& shards, Average how, const Curve& curve, double worst) {
  std::string samples;
  for (const size_t count : shards)
    samples += fmt::format("{}{}", samples.empty() ? "" : " + ", count);
  fmt::print("| {:9} | {:22} | {:12} | {:14.1e} | {:10.6f} | {:8.2f} % |\n", shards.size(), samples,
             name(how), worst, curve.final_loss, 100 * curve.accuracy);
}

}  // namespace

TEST_CASE("ranks with any shards learn what one process learns from the whole batch") {
  const std::vector<Digit> digits = load_digits();
  const Curve reference = train_alone(digits);
  CHECK(reference.accuracy > 0.9);

  struct Case {
    std::vector<size_t> shards;
    Average how;
    bool right;  // the union batch is to be met, or to be missed clearly
  };
  const std::vector<Case> cases = {
      {{1797}, Average::weighted, true},
      {{1797}, Average::unweighted, true},
      {{599, 599, 599}, Average::unweighted, true},
      {{599, 599, 599}, Average::weighted, true},
      {{899, 898}, Average::weighted, true},
      {{450, 449, 449, 449}, Average::weighted, true},
      {{1000, 797}, Average::weighted, true},
      {{100, 597, 1100}, Average::weighted, true},
      {{1, 2, 794, 1000}, Average::weighted, true},
      {{900, 0, 897}, Average::weighted, true},  // the gradients of rank 1 are NaN
      {{0, 1797}, Average::weighted, true},
      {{1797}, Average::synchronised, true},
      {{899, 898}, Average::synchronised, true},
      {{100, 597, 1100}, Average::synchronised, true},
      {{900, 0, 897}, Average::synchronised, true},
      {{1, 2, 794, 1000}, Average::synchronised, true},
      {{1000, 797}, Average::unweighted, false},
      {{1, 2, 794, 1000}, Average::unweighted, false},
  };
  fmt::print(
      "| processes | samples of each        | average      | max difference | final loss | "
      "accuracy  "
      " |\n"
      "| --------- | ---------------------- | ------------ | -------------- | ---------- | "
      "---------- |\n");
  for (const Case& one : cases) {
    INFO("case " << &one - cases.data());
    const Curve curve = train_ranks(digits, one.shards, one.how);
    const double worst = difference(curve, reference);
    print_row(one.shards, one.how, curve, worst);
    if (one.right) {
      CHECK(worst < kSame);
      CHECK(curve.accuracy > 0.9);
    } else {
      CHECK(worst > kWrong);
    }
  }
}
