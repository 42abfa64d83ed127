// Runs a scenario and holds against it what must always hold:
//   every call ends on every living rank, by its deadline and a little grace;
//   what ends well has the right result, bit for bit, and touches nothing else;
//   what fails, fails with the same code on every living rank of its communicator, and with one
//   that the fault explains (of two faults: with one of the two's, as ranks may hear of either
//   first); communicators that a fault does not concern go on; buffers are the caller's own again
//   at once: nobody writes or reads them any more; afterwards, those that are left make a new
//   communicator and go on; nothing stays pending.
#pragma once

#include <array>
#include <string>

#include "test/chaos/scenario.h"

namespace ringfold::test::chaos {

struct Tally {
  uint64_t scenarios = 0, calls = 0, right = 0, failed = 0, recovered = 0;
  std::array<uint64_t, Fault::kKinds> faults{}, struck{};  // struck: a communicator ended by it
};

// Empty, or what did not hold.
[[nodiscard]] std::string play(const Scenario& scenario, Tally& tally);

}  // namespace ringfold::test::chaos
