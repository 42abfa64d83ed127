// The acceptance experiment of average_gradients: a network trained on one process with the whole
// batch, and by 2, 3 and 4 processes with equal and unequal shards of it, learns the same: the loss
// curves agree to 1e-6, and the parameters of all ranks are bit-identical at every step. The same
// experiment with a wrong average must fail, or it would prove nothing.
#include "test/digits.h"

#include <sodium.h>

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <numeric>
#include <optional>

#include "ringfold/average.h"
#include "ringfold/communicator.h"
#include "test/processes.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr uint32_t kSeed = 20260801;
constexpr int kSteps = 40;
constexpr double kSame = 1e-6;   // relative difference of the losses
constexpr double kWrong = 1e-3;  // what a wrong average must exceed

enum class Average : uint8_t { weighted, unweighted };

struct Curve {
  std::array<double, kSteps> loss;  // mean over all samples, before each step
  double final_loss, accuracy;      // after the last one
};

std::span<const Digit> shard(const std::vector<Digit>& digits, const std::vector<size_t>& shards,
                             int rank) {
  const auto mine = shards.begin() + rank;
  return std::span(digits).subspan(std::accumulate(shards.begin(), mine, size_t{0}), *mine);
}

// Sums over all ranks; both in double, so that every rank's samples count alike.
bool add_up(Communicator& comm, Evaluation local, double* loss_sum, double* correct) {
  std::array<double, 2> sums = {local.loss_sum, static_cast<double>(local.correct)};
  const Status status = comm.all_reduce(sums.data(), sums.data(), 2, DType::f64, Op::sum).wait();
  *loss_sum = sums[0];
  *correct = sums[1];
  return rank_ok(status);
}

// True if the parameters have the same bits on every rank.
bool identical(Communicator& comm, const DigitsNetwork& network) {
  using Hash = std::array<unsigned char, crypto_generichash_BYTES>;
  const auto bytes = std::as_bytes(network.parameters());
  Hash mine{};
  crypto_generichash(mine.data(), mine.size(), reinterpret_cast<const unsigned char*>(bytes.data()),
                     bytes.size(), nullptr, 0);
  std::vector<Hash> all(static_cast<size_t>(comm.size()));
  if (!rank_ok(comm.all_gather(&mine, all.data(), mine.size(), DType::u8).wait())) return false;
  return std::ranges::all_of(all, [&](const Hash& hash) { return hash == mine; });
}

Status average(Communicator& comm, DigitsNetwork& network, double weight, Average how) {
  std::vector<Gradient> gradients;
  for (int tensor = 0; tensor < DigitsNetwork::kTensors; ++tensor) {
    const std::span<float> values = network.gradient(tensor);
    gradients.push_back({values.data(), values.size(), DType::f32});
  }
  switch (how) {
    case Average::weighted:
      return average_gradients(comm, gradients, weight);
    case Average::unweighted:
      return average_gradients(comm, gradients);
  }
  return Status(Code::internal, "no such average");
}

// What each rank runs. Rank 0 notes the curve.
int train(const Rendezvous& me, std::span<const Digit> samples, Average how, Curve* curve) {
  Result<Communicator> comm = Communicator::create(me);
  if (!rank_ok(comm.status())) return 1;
  DigitsNetwork network(kSeed);
  double loss_sum = 0, correct = 0;
  for (int step = 0; step < kSteps; ++step) {
    if (!add_up(*comm, network.compute_gradients(samples), &loss_sum, &correct)) return 1;
    if (me.rank == 0) curve->loss[static_cast<size_t>(step)] = loss_sum / kDigits;
    const double weight = static_cast<double>(samples.size());
    if (!rank_ok(average(*comm, network, weight, how))) return 1;
    network.step();
    if (!RANK_CHECK(identical(*comm, network))) return 1;
  }
  if (!add_up(*comm, network.evaluate(samples), &loss_sum, &correct)) return 1;
  if (me.rank == 0) {
    curve->final_loss = loss_sum / kDigits;
    curve->accuracy = correct / kDigits;
  }
  return 0;
}

Curve train_ranks(const std::vector<Digit>& digits, const std::vector<size_t>& shards,
                  Average how) {
  REQUIRE(std::accumulate(shards.begin(), shards.end(), size_t{0}) == kDigits);
  const Shared<Curve> curve;
  CHECK(run_ranks(static_cast<int>(shards.size()), 60s, [&](const Rendezvous& me) {
          return train(me, shard(digits, shards, me.rank), how, &*curve);
        }) == "");
  return *curve;
}

// The curve of one process without any library.
Curve train_alone(const std::vector<Digit>& digits) {
  DigitsNetwork network(kSeed);
  Curve curve{};
  for (double& loss : curve.loss) {
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
  fmt::print("| {:9} | {:22} | {:10} | {:14.1e} | {:10.6f} | {:8.2f} % |\n", shards.size(), samples,
             how == Average::weighted ? "weighted" : "unweighted", worst, curve.final_loss,
             100 * curve.accuracy);
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
      {{1000, 797}, Average::unweighted, false},
      {{1, 2, 794, 1000}, Average::unweighted, false},
  };
  fmt::print(
      "| processes | samples of each        | average    | max difference | final loss | accuracy  "
      " |\n"
      "| --------- | ---------------------- | ---------- | -------------- | ---------- | "
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
