// The asynchronous parameter server, with the staleness of what it adds up.
#pragma once

#include "ringfold/communicator.h"
#include "tools/bench_options.h"

namespace ringfold::tools {

// To be called on every rank. Rank 0 holds the parameters; the others push a gradient and pull the
// parameters, -n times for each size, and nobody waits for the others. The staleness of a push is
// the number of pushes that were added between the pull before it and itself: 0 in a synchronous
// server, where each step's gradients belong to the parameters they are added to. Rank 0 prints
// the table and writes --json. False, on rank 0, if a sum was wrong or the file could not be
// written; throws OperationFailed.
bool serve_asynchronously(const BenchOptions& options, Communicator& comm);

}  // namespace ringfold::tools
