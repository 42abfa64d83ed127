// ringfold doctor --measure: the costs of this machine's links and of adding up.
#pragma once

#include "ringfold/bootstrap.h"
#include "tools/probes.h"

namespace ringfold::tools {

// Together with the other ranks of `where`. `out`: on rank 0, MACHINE.json and under "fit" what was
// measured beside what the model says with it. Returns the exit status, has complained if bad.
int measure_machine(const Rendezvous& where, Json* out);

}  // namespace ringfold::tools
