// All-reduces by several communicators, measured in turns, so that what disturbs the machine or a
// link disturbs all of them: for `doctor --measure` and `bench --audit-choice`.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lib/comm/layout.h"
#include "ringfold/communicator.h"
#include "ringfold/model.h"

namespace ringfold::tools {

// One way to do it.
struct Contestant {
  std::optional<Algorithm> algorithm;  // that it was told; empty: its own choice
  Communicator comm;                   // invalid where this rank takes no part
  std::vector<double> seconds;  // of a call on its slowest rank, one a round; alike on all ranks
  Report report;                // of a call; without an operation where this rank takes no part
};

// A communicator of the same ranks as `base` that has been told the algorithm; all ranks call it.
[[nodiscard]] Result<Communicator> told(Communicator& base, Algorithm algorithm);

// What an all-reduce may be told; two_level only where it is not the ring.
[[nodiscard]] std::vector<Algorithm> ways(bool two_levels);

// The ranks host by host, as the communicator has them. All ranks call it.
[[nodiscard]] Layout layout_of(Communicator& comm);

// Float sums in place of so many bytes, `rounds` times each contestant. `base` has all ranks.
// Throws OperationFailed (bench_subject.h).
void hold(Communicator& base, std::vector<Contestant>& contestants, size_t bytes, int rounds);

[[nodiscard]] double median(std::vector<double> values);
// The lower quartile: a cost, where disturbances only add.
[[nodiscard]] double undisturbed(std::vector<double> values);

// What the model says of such a call on `machine`, with the pieces that it went in.
[[nodiscard]] double predicted(Algorithm algorithm, int ranks, size_t bytes, size_t piece_bytes,
                               const Machine& machine);

// One measured call.
struct Point {
  Algorithm algorithm;
  int ranks = 0;
  size_t bytes = 0, piece_bytes = 0;
  double seconds = 0;
};
// The cost of a link with which the model says what was measured, as nearly as it can: the sum of
// the |logarithms| of measured / predicted is the least. REQUIRES points of several sizes.
[[nodiscard]] LinkCost fit(const std::vector<Point>& points, double gamma);

}  // namespace ringfold::tools
