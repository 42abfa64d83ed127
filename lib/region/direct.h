// An operation whose buffers everybody has mapped: nothing is copied into pools or out of them.
//
// In its first phase every rank offers its buffers, if they lie in memory that all others have
// mapped (memory.h). Who has seen all offers knows what everybody does:
//   all offered   the ranks read each other's inputs; in an all_reduce the owner of a part reads it
//                 from all and writes the result to all. The second and last phase says: I am done
//                 with your memory.
//   some          nobody who offered has copied anything yet, so all begin anew in the next phase.
//   none          the operation is under way already, as any other.
// In a broadcast the root's offer alone decides.
//
// Writing into the memory of a rank that has given up must not happen: its owner may do with it
// what it likes once its Work is done. Desk::inside and Desk::withdrawn see to that. A rank says
// that it is inside, then looks whether anybody has withdrawn; who fails withdraws, then looks
// whether anybody is inside. All four accesses are sequentially consistent, so one of the two
// notices. If somebody stays inside (a stopped process) the memory is parted from its copies.
// test/region_withdraw_model_test.cpp runs this through every interleaving.
//
// Threads: one at a time.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "lib/engine/engine.h"
#include "lib/region/memory.h"
#include "lib/region/moves.h"

namespace ringfold::region {

// What a region asks of whoever exchanges memory between the ranks of a host.
class Neighbours {
 public:
  Neighbours() = default;
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;
  virtual ~Neighbours() = default;
  // Wakes the engine of a rank that went to sleep.
  virtual void ring(int rank) = 0;
  // Whether all others have mapped it. If not, they are asked to.
  [[nodiscard]] virtual bool have(const Memory& memory) = 0;
  // The allocation of a rank, mapped here; null: it is not.
  [[nodiscard]] virtual std::shared_ptr<const Mapping> mapping(int rank, uint32_t id) = 0;
};

// Where the buffers of a rank lie: allocation and offset. Travels as the payload of a flag.
struct Offer {
  struct Place {
    uint32_t id = 0;  // 0: nowhere that others reach
    uint64_t offset = 0;
  };
  uint32_t made = 0;  // 1: everything that the operation needs of this rank is offered
  uint32_t send_id = 0, recv_id = 0, unused = 0;
  uint64_t send_offset = 0, recv_offset = 0;

  [[nodiscard]] Place send() const { return {send_id, send_offset}; }
  [[nodiscard]] Place recv() const { return {recv_id, recv_offset}; }
};
static_assert(sizeof(Offer) == 32);  // so it lies in the flag's own cache line

// My buffers of one operation as an offer, and what keeps them.
struct Offered {
  Offer offer;
  std::shared_ptr<Memory> send, recv;
};

class Direct {
 public:
  // Whether offers are exchanged for such an operation. The same on all ranks.
  [[nodiscard]] static bool suits(const Schedule& what, const Shape& shape, const Room& room);
  [[nodiscard]] static Offered offer(const Description& what, const Operation::Memory& memory,
                                     int rank, Neighbours& neighbours);
  static constexpr int kPhases = 2;
  // Whose word a rank waits for before it goes on after `step` of its phases.
  [[nodiscard]] static Moves::Whom needs(const Schedule& what, int rank, int step);
  // What a rank writes into others' memory; see Report::bytes_model.
  [[nodiscard]] static uint64_t bytes_written(const Schedule& what, int rank, size_t element_bytes);
  [[nodiscard]] static Report report_of(const Schedule& what, size_t element_bytes, int rank,
                                        const Room& room);

  // An operation that all have offered; `offers` by rank. internal: an offer names what was never
  // mapped here.
  [[nodiscard]] Status begin(const Description& what, const Operation::Memory& memory, int rank,
                             const std::vector<Offer>& offers, Neighbours& neighbours);
  // Whether it writes into others' memory.
  [[nodiscard]] bool writes() const { return collective_ == Collective::all_reduce; }
  // Does a part of what lies between the phases; false: not all of it is done yet.
  [[nodiscard]] bool work();
  // Forgets the operation and lets go of others' memory.
  void end();

 private:
  [[nodiscard]] Result<std::byte*> resolve(int rank, Offer::Place place, size_t bytes,
                                           Neighbours& neighbours);
  void fold(size_t first, size_t count) const;
  void fold_into(std::byte* out, std::byte* mirror, size_t first, size_t count) const;
  void copy(std::byte* to, const std::byte* from, size_t bytes) const;

  Collective collective_ = Collective::all_reduce;
  DType type_ = DType::f32;
  Op op_ = Op::sum;
  int rank_ = 0, size_ = 0, root_ = 0;
  size_t element_ = 0, each_ = 0;
  bool stream_ = false;
  std::byte* recv_ = nullptr;
  size_t next_ = 0, last_ = 0;  // elements left to do, of the frame or of one part
  // By rank; they keep their memory from operation to operation.
  std::vector<const std::byte*> inputs_;
  std::vector<std::byte*> outputs_;
  std::vector<std::shared_ptr<const Mapping>> held_;
};

}  // namespace ringfold::region
