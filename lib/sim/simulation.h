// One collective on N simulated ranks: the library's own schedule and executor, on the network of
// transports/sim.h and in its time.
//
// Memory: an Execution and a transport, about 16 KiB a rank, and 12 bytes a pair of ranks for the
// routes.
//
// Threads: everything happens in the caller's; calls share nothing.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lib/engine/compute.h"
#include "transports/sim.h"

namespace ringfold {

struct SimulatedCall {
  Schedule schedule;
  size_t element_bytes = 4;
  size_t piece = 1;  // elements
  Nanoseconds timeout = std::chrono::minutes(10);
  // Where the bytes lie, by position. Unset: nowhere, only time passes; then a piece is added up
  // (or a part copied to its place) in its bytes * gamma.
  std::function<std::unique_ptr<Compute>(int position)> compute;
};

// How the call ended on one rank.
struct SimulatedEnd {
  Status status;
  double seconds = 0;
  uint64_t bytes_sent = 0;
};

struct Simulated {
  double seconds = 0;  // when the last rank ended
  uint64_t events = 0;
  uint64_t bytes_per_rank = 0;  // the most that one has sent
  std::vector<SimulatedEnd> ranks;
};

// All ranks call at time 0. A lost rank ends when it dies; the others when they are told of it, or
// at their time-out. REQUIRES legal(schedule), and that its messages fit the piece.
[[nodiscard]] Simulated simulate(const SimulatedCall& call, const SimOptions& options,
                                 std::vector<SimSpan>* trace = nullptr);

}  // namespace ringfold
