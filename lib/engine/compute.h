// Where the bytes of one operation lie, and who folds them. The executor decides what happens when;
// a Compute only knows addresses and arithmetic: host memory, device memory, or (in the simulator)
// nothing but time.
//
// Threads: used by the holder of the engine's turn only.
#pragma once

#include "lib/engine/transport.h"
#include "ringfold/schedule.h"

namespace ringfold {

// One piece of one step: what travels in one message.
struct Piece {
  Range range;               // elements of the collective's frame
  From side = From::work;    // send: where the bytes lie; receive: the operand of the reduction
  From into = From::work;    // receive: where the result goes
  Then then = Then::none;    // receive
  int mine = 1, theirs = 1;  // receive: contributions, see Step
  int mirror = -1;           // consume: a slot that shall hold the result, too; -1: none
};

// Which receives may be answered with a transport's own memory: those whose bytes go elsewhere
// anyway, or all, which needs that no send lies in the work buffer: or two ranks that exchange a
// range would each wait for the other's loan to end.
enum class Loans : uint8_t { none, some, all };

class Compute {
 public:
  virtual ~Compute() = default;

  // Where a receive shall land: its final place (a copy into work), or slot `slot`.
  virtual Buffer landing(const Piece& piece, int slot) = 0;
  // The bytes of a receive lie at `view`: fold or copy them to where they belong, and into the
  // piece's mirror. For a result into transit that is slot `slot`; an operand in transit lies in
  // slot `operand_slot`. Calls completion->done() when finished, possibly before returning.
  virtual void consume(const Piece& piece, int slot, int operand_slot, const void* view,
                       Completion* completion) = 0;
  // Makes the bytes of a send readable by the transport and says where they are: in place, in the
  // transit slot `slot`, or copied (scaled) into slot `slot`. Calls completion->done() when *out is
  // readable, possibly before returning.
  virtual void stage(const Piece& piece, int slot, Buffer* out, Completion* completion) = 0;
  // Whether stage() of a piece from there needs a slot of its own: a factor must be applied, or the
  // transport does not reach it. Not asked of pieces in transit. If work is staged, results that
  // are sent next are mirrored.
  [[nodiscard]] virtual bool stages(From side) const = 0;
  [[nodiscard]] virtual Loans loans() const { return Loans::some; }
  // A local step: work[range] = input[range], scaled.
  virtual void copy_local(Range range, Completion* completion) = 0;
  // True if input and work are the same memory.
  [[nodiscard]] virtual bool in_place() const = 0;
  // False until the memory may be touched: a stream has yet to come to the operation. Nothing else
  // is called before; once true it stays so.
  [[nodiscard]] virtual bool ready() { return true; }
  virtual bool progress() = 0;  // finish asynchronous ones; true if anything moved
  // Whether news must be looked for with ready() and progress(): they ring no bell.
  [[nodiscard]] virtual bool silent() const { return false; }
};

}  // namespace ringfold
