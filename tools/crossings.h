// Where one algorithm of an all-reduce becomes faster than another, for the table that
// `ringfold sim --crossings` prints.
#pragma once

#include <optional>
#include <vector>

#include "ringfold/model.h"

namespace ringfold::tools {

struct Crossing {
  Algorithm before, after;
  size_t bytes;  // from here on `after` is the model's choice
  // What the simulator says of both there: after / before; 1: as fast. Empty: not simulated.
  std::optional<double> simulated;
};

// From 64 B to 4 GiB, to a sixteenth of a size. Simulates both sides up to so many ranks.
[[nodiscard]] std::vector<Crossing> crossings(int ranks, const Machine& machine,
                                              int simulate_up_to);

// The whole table, for such a latency of a message between hosts.
void print_crossings(double latency);

}  // namespace ringfold::tools
