// What goes wrong in a simulation, as people write it. Pure functions, any thread.
#pragma once

#include <string_view>

#include "ringfold/status.h"
#include "transports/sim.h"

namespace ringfold::tools {

inline constexpr std::string_view kFaultsHelp =
    "any of, with commas: jitter=TIME (each message late by up to that), lose=RANK@TIME, "
    "stall=RANK@TIME or stall=RANK@TIME+TIME (how long), slow=FROM-TO*FACTOR, "
    "notice=TIME (until a loss is known), deadline=TIME (of every rank; 10s)";

struct FaultSpec {
  SimFaults faults;
  Nanoseconds deadline = std::chrono::seconds(10);
  int largest_rank = -1;  // that is named
};
// invalid_argument: what was given and what is accepted.
Result<FaultSpec> parse_faults(std::string_view text);

}  // namespace ringfold::tools
