// ringfold bench --cliffs: looks for jumps in the time of one collective.
#pragma once

#include "ringfold/communicator.h"
#include "tools/bench_options.h"

namespace ringfold::tools {

// To be called on every rank. Measures every line once, then each that looks like a cliff
// (cliffs.h) side by side with its neighbour. Rank 0 prints the offenders. The number of cliffs,
// the same on every rank; throws OperationFailed.
int find_cliffs(const BenchOptions& options, Communicator& comm);

}  // namespace ringfold::tools
