// Ranks that train the digits network together, with whatever averages their gradients.
#pragma once

#include <sodium.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <vector>

#include "ringfold/communicator.h"
#include "test/digits.h"
#include "test/processes.h"

namespace ringfold::test {

inline constexpr uint32_t kDigitsSeed = 20260801;

struct Curve {
  static constexpr int kMostSteps = 400;
  std::array<double, kMostSteps> loss;  // mean over all samples, before each step
  double final_loss, accuracy;          // after the last one
  uint64_t bytes_sent;                  // by rank 0, while averaging
};

inline std::span<const Digit> shard(const std::vector<Digit>& digits,
                                    const std::vector<size_t>& shards, int rank) {
  const auto mine = shards.begin() + rank;
  return std::span(digits).subspan(std::accumulate(shards.begin(), mine, size_t{0}), *mine);
}

// Sums over all ranks; both in double, so that every rank's samples count alike.
inline bool add_up(Communicator& comm, Evaluation local, double* loss_sum, double* correct) {
  std::array<double, 2> sums = {local.loss_sum, static_cast<double>(local.correct)};
  const Status status = comm.all_reduce(sums.data(), sums.data(), 2, DType::f64, Op::sum).wait();
  *loss_sum = sums[0];
  *correct = sums[1];
  return rank_ok(status);
}

// True if the parameters have the same bits on every rank.
inline bool identical(Communicator& comm, const DigitsNetwork& network) {
  using Hash = std::array<unsigned char, crypto_generichash_BYTES>;
  const auto bytes = std::as_bytes(network.parameters());
  Hash mine{};
  crypto_generichash(mine.data(), mine.size(), reinterpret_cast<const unsigned char*>(bytes.data()),
                     bytes.size(), nullptr, 0);
  std::vector<Hash> all(static_cast<size_t>(comm.size()));
  if (!rank_ok(comm.all_gather(&mine, all.data(), mine.size(), DType::u8).wait())) return false;
  return std::ranges::all_of(all, [&](const Hash& hash) { return hash == mine; });
}

// Averages the gradients of the network that it was made for; `samples` of them are this rank's.
using AverageStep = std::function<Status(double samples)>;
using MakeAverage = std::function<AverageStep(Communicator&, DigitsNetwork&)>;

// What each rank runs. Rank 0 notes the curve. Parameters must have the same bits on all ranks at
// every step.
inline int train(const Rendezvous& me, const Options& options, std::span<const Digit> samples,
                 int steps, const MakeAverage& make, Curve* curve) {
  Result<Communicator> comm = Communicator::create(me, options);
  if (!rank_ok(comm.status())) return 1;
  DigitsNetwork network(kDigitsSeed);
  const AverageStep average = make(*comm, network);
  double loss_sum = 0, correct = 0;
  uint64_t sent = 0;
  for (int step = 0; step < steps; ++step) {
    if (!add_up(*comm, network.compute_gradients(samples), &loss_sum, &correct)) return 1;
    if (me.rank == 0) curve->loss[static_cast<size_t>(step)] = loss_sum / kDigits;
    const uint64_t before = comm->bytes_sent();
    if (!rank_ok(average(static_cast<double>(samples.size())))) return 1;
    sent += comm->bytes_sent() - before;
    network.step();
    if (!RANK_CHECK(identical(*comm, network))) return 1;
  }
  if (!add_up(*comm, network.evaluate(samples), &loss_sum, &correct)) return 1;
  if (me.rank == 0) {
    curve->final_loss = loss_sum / kDigits;
    curve->accuracy = correct / kDigits;
    curve->bytes_sent = sent;
  }
  return 0;
}

}  // namespace ringfold::test
