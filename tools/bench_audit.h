// ringfold bench --audit-choice: is the library's own choice of an algorithm the fastest?
#pragma once

#include "ringfold/communicator.h"
#include "tools/bench_options.h"

namespace ringfold::tools {

// Every algorithm and the library's choice at all sizes of the sweep, measured in turns; the
// model's figures beside them. Rank 0 prints. Returns how many choices are clearly more than 5 %
// slower than the best; alike on all ranks. Throws OperationFailed.
int audit_choice(const BenchOptions& options, Communicator& comm);

}  // namespace ringfold::tools
