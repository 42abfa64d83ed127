// Whether all ranks mean the same gradients.
#pragma once

#include <span>

#include "ringfold/gradient_sync.h"

namespace ringfold::grad {

// Ok if every rank calls with the same parameters and options and all of them can be used;
// otherwise every rank gets an error: invalid_argument, with the rank at fault, or mismatch, with
// the words of both sides. Blocks until all ranks have called.
Status agree(Communicator& comm, std::span<const Parameter> parameters, const SyncOptions& options);

}  // namespace ringfold::grad
