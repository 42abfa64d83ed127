#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringfold {

enum class Collective : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  all_to_all,
  gather,
  scatter,
};
inline constexpr int kCollectives = 8;

enum class Algorithm : uint8_t {
  ring,
  halving_doubling,
  recursive_doubling,
  two_level,
  chain,
  tree,
  direct
};
inline constexpr int kAlgorithms = 7;

struct Range {  // elements [begin, begin + count) of the collective's full frame
  size_t begin = 0, count = 0;
  constexpr size_t end() const { return begin + count; }
  constexpr bool empty() const { return count == 0; }
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

enum class From : uint8_t {
  input,    // the user's input: this rank's own contribution, not yet reduced
  work,     // the user's output
  transit,  // what the latest earlier step of this rank that ended `into` transit produced; it is
            // used exactly once, piece by piece, and never lies in the user's memory
};
enum class Then : uint8_t { none, copy, reduce };

// What one rank does in one step. The send never depends on the receive of the same step.
struct Step {
  int to = -1, from = -1;  // positions; -1: does not send / does not receive
  Range send, recv;
  From send_from = From::work;
  Then then = Then::none;     // what happens to the bytes received
  From operand = From::work;  // reduce: into[recv] = operand[recv] op received
  From into = From::work;     // work or transit
  int mine = 1, theirs = 1;   // reduce: ranks that have contributed to the operand / the received
  // A step with to == from == -1 and then == copy is local: work[recv] = input[recv].
};

struct Schedule {
  Collective collective = Collective::all_reduce;
  Algorithm algorithm = Algorithm::ring;
  int size = 1, per_host = 1, root = 0;
  size_t count = 0;    // elements of the full frame (all ranks' parts together)
  size_t grain = 1;    // boundaries of parts are multiples of this many elements
  size_t segment = 0;  // the steps repeat over segments of this many elements of the frame; 0: one
};

}  // namespace ringfold
