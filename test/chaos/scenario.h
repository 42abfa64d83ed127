// What the ranks of a virtual world call, and what happens to them: all drawn from one number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringfold/model.h"
#include "ringfold/types.h"
#include "test/chaos/virtual_world.h"

namespace ringfold::test::chaos {

struct Call {
  int comm = 0;
  bool message = false;    // from one rank of the communicator to another
  int from = -1, to = -1;  // of a message
  int splits_into = -1;    // the first of the communicators that this call makes; -1: none
  DType type = DType::f32;
  Op op = Op::sum;
  bool in_place = false;
  Schedule schedule;
  size_t piece = 1;  // elements

  [[nodiscard]] bool reduces() const {
    return !message && (schedule.collective == Collective::all_reduce ||
                        schedule.collective == Collective::reduce ||
                        schedule.collective == Collective::reduce_scatter);
  }
};

struct Comm {
  std::vector<int> members;  // ranks of the world
  int made_by = -1;          // the call that splits it off; -1: it is there from the start
};

// What a rank does, in this order.
struct Action {
  enum class Kind : uint8_t { start, wait } kind;
  int call;
};

struct Fault {
  enum class Kind : uint8_t {
    kill,        // the rank is gone, without a word
    pause,       // it stands still for less than the time-out
    stop,        // ... for longer
    silence,     // it calls nothing more on one communicator
    abort,       // it aborts one communicator
    mismatch,    // its next collective on one communicator is another than the others'
    corruption,  // a header of it changes on the way
    reset,       // its connection to another rank breaks
    leave        // it gives everything up and says goodbye
  } kind;
  static constexpr int kKinds = 9;
  int rank = 0, other = 0, comm = 0;
  uint64_t step = 0;     // of the world's turns: when
  Nanoseconds length{};  // of a pause or stop
  uint64_t variant = 0;  // of a mismatch
};

struct Scenario {
  uint64_t seed = 0;
  int ranks = 2;
  NetworkPlan network;
  Nanoseconds slowest_news{}, timeout{};
  std::vector<Comm> comms;
  std::vector<Call> calls;
  std::vector<std::vector<Action>> programs;  // by rank
  std::vector<Fault> faults;

  // A few lines: all that is needed to understand a failure.
  [[nodiscard]] std::string describe() const;
};
[[nodiscard]] Scenario make_scenario(uint64_t seed);
// A collective that differs from `call` in what the variant says.
[[nodiscard]] Call differing(const Call& call, int ranks, uint64_t variant);

[[nodiscard]] std::string_view name(Fault::Kind kind);
// The codes with which a communicator may end because of it.
[[nodiscard]] bool may_end(Fault::Kind kind, Code code);

}  // namespace ringfold::test::chaos
