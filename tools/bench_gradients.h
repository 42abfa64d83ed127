// ringfold bench gradients: how much of the averaging hides behind backward.
#pragma once

#include "tools/command.h"

namespace ringfold::tools {

// Adds it below `bench`; REQUIRES that its command runs before that of `bench`.
Command add_bench_gradients(CLI::App& bench);

}  // namespace ringfold::tools
