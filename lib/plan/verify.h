// Proof of a schedule by symbolic execution: every rank's steps are carried out with the names of
// the contributors in place of numbers.
//
// Thread-safety: a pure function. Cost: about the elements that all ranks touch; meant for tests.
#pragma once

#include <functional>

#include "ringfold/schedule.h"
#include "ringfold/status.h"

namespace ringfold {

inline constexpr int kMaxVerifiedSize = 64;  // contributors are the bits of one word

using StepFunction = std::function<Step(const Schedule&, int position, int i)>;

// Ok if the steps do what the collective promises, from whatever is in `in_place` memory (send and
// receive buffer the same, see communicator.h) or in separate buffers:
//   - what is sent in step i is received in step i of the other side, of the same length;
//   - no buffer is touched outside its frame(), and the input is never written;
//   - nothing is read before it was written; transit is used exactly once, in the range it was
//   made;
//   - no contribution is added twice, and `mine` and `theirs` tell how many were;
//   - after the last step every result is complete, and made in one order of additions on all ranks
//     (so they agree bit for bit, if op(a, b) == op(b, a)).
// There is no deadlock then even if every rank finishes step i before it starts step i+1: a send
// does not wait for its own step's receive, so by induction all ranks finish every step.
//
// Errors: internal, naming the first violation by step, position and element; invalid_argument if
// the schedule is not legal(), has more than kMaxVerifiedSize ranks, or is an all_to_all in place.
[[nodiscard]] Status verify(const Schedule& schedule, bool in_place,
                            const StepFunction& step_of = step);

}  // namespace ringfold
