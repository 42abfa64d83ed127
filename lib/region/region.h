// The collectives of ranks that share memory: a second executor beside messages, because a message
// copies what a neighbour could read, and matching costs more than a small all-reduce may take.
//
// The protocol. Every rank counts phases, the same for all. In phase p a rank
//   1. reads what the others have shown in phase p - 1, as far as its operation wants it,
//   2. writes what it has to show, into memory that nobody reads any more,
//   3. sets its flag to p, with the fingerprint of its operation beside it.
// So a flag that says p also says that its rank has done with everything of phase p - 2 and has
// read what it wanted of phase p - 1. Memory shown in phase p is read in step 1 of phase p + 1 and
// may be written again by those who see all flags at p + 1 or beyond. There are kDepth flags a rank
// used in turn; flag p lies where flag p - kDepth was, so a rank waits for all others to reach
// p - kDepth + 1 before it sets it. No rank is ever more than kDepth phases ahead of another.
//
// Memory order. A flag is set by a releasing store and read by an acquiring load: who sees the flag
// sees all that was written before it, and earlier reads stay before it, so that who sees it may
// overwrite what was read. Two more pairs need a total order, in each of which at least one side
// must see the other; so a sequentially consistent fence stands behind the store, and before the
// other accesses are such themselves:
//   - flag set, then sleepers read  |  sleeper counted, then flag read: nobody sleeps past a flag;
//   - my flag set, then yours read  |  the same on your side: of two ranks whose operations differ
//     one will notice, even where neither waits for the other.
// test/region_model_test.cpp runs this protocol through every interleaving.
//
// Threads: any may call; whoever takes the turn works, the others return at once.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/cores.h"
#include "lib/engine/engine.h"
#include "lib/region/direct.h"
#include "lib/region/moves.h"
#include "lib/region/segment.h"

namespace ringfold::region {

// How a thread waits for a flag before it sleeps.
struct Patience {
  int spins = 0;  // 0 where ranks outnumber cores
  int yields = 0;
};

class Region final : public Companion {
 public:
  // `channel` gives id, rank, peers and record, and outlives the region's operations.
  Region(Segment segment, const Channel& channel, Engine& engine, Patience patience, bool crowded,
         std::unique_ptr<Neighbours> neighbours);
  ~Region() override;

  // Hands an operation over and starts it if it is its turn. `waited_for`: the caller is about to
  // wait for it, so nobody else need be woken to look after it.
  void submit(std::unique_ptr<Operation> operation, bool waited_for);
  // The same without an operation, if it can be over before the call returns. `none`: this is not
  // the moment, submit() it. `done_directly`: and nothing was copied (direct.h). `started`: it
  // takes longer; `make` was called for its operation.
  enum class Quick : uint8_t { none, done, done_directly, started };
  // Makes the operation of a call that takes longer. A reference: it allocates nothing.
  class Make {
   public:
    template <class F>
    Make(const F& make)
        : object_(&make), call_([](const void* o) { return (*static_cast<const F*>(o))(); }) {}
    std::unique_ptr<Operation> operator()() const { return call_(object_); }

   private:
    const void* object_;
    std::unique_ptr<Operation> (*call_)(const void*);
  };
  // `begun`: when it was called, Nanoseconds::min() if nobody looked at the clock.
  Quick run(const Description& what, const Operation::Memory& memory, const Make& make,
            Nanoseconds begun);
  // The same for an all_reduce, of which nobody made a description yet; and for one of at most
  // inline_bytes().
  Quick run(size_t count, DType type, const Operation::Memory& memory, const Make& make);
  Quick run_small(size_t count, DType type, const Operation::Memory& memory, bool waited_for,
                  const Make& make);
  // Works on the operations until `done`, or the clock passes `until`, or another thread is at it
  // already: then the caller shall sleep until it is told. Returns whether it worked.
  bool wait(const std::atomic<bool>& done, Nanoseconds until);
  // Works for a moment, if nobody else does.
  void poll() { work(Wait::no, false); }

  // For the engine's turn.
  bool progress();
  // Fails what is over its deadline, and asks about what has waited for long; returns when it wants
  // to be called again.
  Nanoseconds check_deadline(Nanoseconds now);
  // Asks for a bell at the next news. False: there is some already.
  [[nodiscard]] bool arm();
  [[nodiscard]] bool pending() const override { return pending_.load() != 0; }
  void fail(const Status& why) override;
  [[nodiscard]] std::string recall(uint32_t seq) override;
  [[nodiscard]] uint32_t called() const override;
  [[nodiscard]] bool waits_for(int rank) override;

  [[nodiscard]] uint64_t bytes_written() const { return record::get(lane_.sent); }
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
  [[nodiscard]] const Room& room() const { return room_; }

 private:
  // How an operation goes: through the pools, or directly (direct.h). Open until the others' offers
  // are there: this rank has none, or one.
  enum class Way : uint8_t { plain, open, offered, direct };
  // What follows from a description alone: kept, since the next call is mostly a like one.
  struct Plan {
    Description what;
    uint32_t fingerprint = 0;  // 0: no plan yet
    Shape shape;
    bool may_be_direct = false;
    uint64_t bytes_written = 0, bytes_read = 0;
  };
  // The operation under way, by plan_.
  struct Running {
    // By the plan of `region`. In place: a copy would be a good part of a small operation.
    Running(Region& region, const Operation::Memory& buffers, uint32_t number, uint32_t first)
        : memory(buffers),
          seq(number),
          moves(region.segment_, region.ring_a_, region.ring_b_, region.plan_.what, buffers,
                region.rank_, region.plan_.shape, region.choice_),
          base(first) {}
    std::unique_ptr<Operation> operation;  // null inside run()
    Operation::Memory memory;
    uint32_t seq;
    Moves moves;
    uint32_t base;  // its first phase
    int step = 0;   // phases shown
    bool reserved = false, copied = false, timed = false;
    uint32_t free_at = 0;
    Way way = Way::plain;
    Offered mine = {};     // not with Way::plain
    bool inside = false;   // Desk::inside is set
    Nanoseconds ask_at{};  // when to ask whether the others called the same; 0: not known yet
  };
  enum class Progress : uint8_t { waits, moved, over };
  struct Finished {
    std::unique_ptr<Operation> operation;
    Status status;
  };
  // A flag that is waited for.
  struct Awaited {
    int rank;
    uint32_t phase;
  };
  class Turn;
  // What to do if a flag is not there: nothing, or wait for it with the turn, some microseconds or
  // a little while.
  enum class Wait : uint8_t { no, briefly, ordinary };

  [[nodiscard]] bool reached(int rank, uint32_t phase) const;
  bool came(int rank, uint32_t phase, Wait wait);
  bool wait_for(int rank, uint32_t phase, Wait wait);
  bool all_reached(uint32_t phase, Wait wait);
  bool shown(Moves::Whom whom, int root, uint32_t phase, uint32_t fingerprint, Wait wait);
  bool agrees(int rank, uint32_t phase, uint32_t fingerprint);
  void show(uint32_t phase, uint32_t fingerprint);
  void greet(uint32_t phase, uint32_t fingerprint);
  uint32_t take_seq();
  void take(std::unique_ptr<Operation> operation);
  void make_plan(const Description& what);
  Running& start(const Description& what, const Operation::Memory& memory, Nanoseconds called);
  void start_next();
  bool advance(Wait wait);
  Progress advance_running(Wait wait);
  void end_running(const Status& status);
  bool intact(int rank, bool right, uint32_t seq);
  bool all_intact(const Running& r);
  bool payloads_intact(uint32_t phase, size_t bytes, uint32_t seq);
  void record_quick(uint32_t seq, const Description& what, uint32_t fingerprint);
  void make_offer(Running& running);
  bool decide(Running& running);
  Progress advance_direct(Wait wait);
  bool enter(uint32_t phase);
  [[nodiscard]] bool somebody_inside() const;
  void withdraw(Running& running);
  bool work(Wait wait, bool in_turn);
  void fold_payloads(uint32_t phase, const Description& what, void* out) const;
  [[nodiscard]] bool at_rest() const {
    return !running_ && !pending() && !failed() && !contradicted_;
  }
  Quick run_in_turn(const Description& what, const Operation::Memory& memory, const Make& make,
                    Nanoseconds begun);
  void describe(size_t count, DType type, Op op);
  void remember(uint32_t seq, const Description& what, uint32_t fingerprint);
  void look_after();
  Nanoseconds ask(const Engine::Question& question, Nanoseconds now);
  void sleep(int rank, uint32_t phase, Nanoseconds most);
  void await(int rank, uint32_t phase);
  [[nodiscard]] Awaited awaited() const;

  const Segment segment_;
  const uint32_t channel_;
  const int rank_, size_;
  const std::vector<Peer> peers_;
  const std::vector<int> names_;  // by rank: what the user calls it
  Engine& engine_;
  const Patience patience_;
  const Room room_;
  const std::unique_ptr<Neighbours> neighbours_;
  const bool verify_;
  const std::shared_ptr<record::Record> record_;
  record::Lane& lane_;

  std::mutex queue_lock_;  // guards queue_
  std::deque<std::unique_ptr<Operation>> queue_;
  std::atomic<uint32_t> queued_{0};  // in queue_, and no number taken
  std::atomic<int> pending_{0};      // submitted and not over
  std::atomic<int> attended_{0};     // threads inside wait()
  std::mutex attendant_;

  std::mutex failure_lock_;  // guards failure_
  Status failure_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> contradicted_{false};  // another rank differs; the failure is on its way

  std::atomic<bool> turn_{false};  // taken; guards what follows
  Ring ring_a_, ring_b_;
  WriteChoice choice_;
  Courtesy courtesy_;
  Plan plan_;
  std::optional<Running> running_;
  bool stalled_ = false;  // and the engine knows
  Direct direct_;         // of running_, where it goes that way
  std::vector<Offer> offers_;
  // Operations for which no offer shall be made, and how many there were the last time. The same
  // on all ranks, or their offers would never meet.
  int reluctance_ = 0, longest_reluctance_ = 0;
  std::vector<Finished> finished_;
  uint32_t next_phase_ = 1;
  uint32_t all_at_ = 0;                // all others are known to have reached this phase
  std::atomic<uint32_t> next_seq_{0};  // read by any thread
  Description all_reduce_;             // the latest that describe() made
  uint32_t all_reduce_fingerprint_ = 0;
  std::array<Channel::Past, 64> history_;
  size_t latest_ = 0;
  uint32_t latest_fingerprint_ = 0;
  record::Entry* entry_ = nullptr;  // of the latest operation
  uint32_t row_ = 0;                // the fingerprint of its row, if it is quick; else 0
};

}  // namespace ringfold::region
