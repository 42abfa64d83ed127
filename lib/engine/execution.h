// Drives one rank's part of one schedule: the only executor of messages, for host, CUDA and
// simulator.
//
// One rule orders everything: accesses to overlapping ranges of the work buffer take effect in step
// order. Pipelining, in-place operation and every hazard follow from it; no algorithm carries lists
// of dependencies. A step's range is cut into pieces of at most `piece` elements, by both sides
// alike; a piece is one message.
//
//   slots      Memory for pieces that cannot land at their final place: `kSlots` for receives that
//              will be reduced and for results in transit, `kStagingSlots` more for sends whose
//              bytes must be scaled first (separate, so that staged sends can never starve the
//              receives that the peers' sends wait for).
//   mirrors    A result that is sent next, and would be staged for that, goes into one of
//              `kMirrorSlots` slots as well, if one is free, and is sent from there.
//   transit    A result that is only forwarded stays in the slot where it was formed until its send
//              has completed. A schedule with transit has at most kSlots / 2 pieces a chunk: half
//              the slots can be in transit while the other half receives, so the ring never locks.
//
// Passive: moves only inside advance(). Threads: the holder of the engine's turn.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "lib/engine/compute.h"
#include "lib/engine/transport.h"
#include "ringfold/model.h"
#include "ringfold/schedule.h"

namespace ringfold {

class Execution {
 public:
  static constexpr int kSlots = ringfold::kSlots;  // that choose() counts on
  static constexpr int kStagingSlots = 4;
  static constexpr int kMirrorSlots = 12;
  static constexpr int kAllSlots = kSlots + kStagingSlots + kMirrorSlots;  // in this order
  static constexpr int kWindow = 16;  // receives posted, and sends in flight, at once
  static constexpr int kLead = 64;    // steps by which sends may run ahead of the receives

  // Where the members of the communicator are: by position of the schedule.
  struct Route {
    std::span<Transport* const> transport;
    std::span<const Peer> peer;
  };

  // `id.index` is ignored. `piece`: elements a message, at least 1. The route's spans and `compute`
  // outlive the execution. `verify`: behind each piece goes its checksum, as a message of its own;
  // one that differs makes it fail as Code::system. REQUIRES messages_fit(schedule, piece).
  Execution(const Schedule& schedule, int position, const MessageId& id, const Route& route,
            Compute& compute, size_t piece, size_t element_bytes, bool verify = false);
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // Whether step and piece numbers of this schedule fit the 32 bits of MessageId::index.
  [[nodiscard]] static bool messages_fit(const Schedule& schedule, size_t piece);

  // Does everything that can be done now; true if anything moved.
  bool advance();
  // True once a completion has come in since the last advance().
  [[nodiscard]] bool woken() const { return woken_; }
  // Nothing is left to do and nobody can touch the buffers any more.
  [[nodiscard]] bool finished() const;
  // Stops: nothing new is posted. finished() follows when what is outstanding has come back, for
  // which the caller cancels the communicator in the transports.
  void fail(const Status& why);
  [[nodiscard]] const Status& status() const { return status_; }
  // The peer whose message made it fail by itself; -1 if it was told to.
  [[nodiscard]] Peer failed_peer() const { return failed_peer_; }

  // What it waits for.
  struct Awaited {
    int step = 0;       // all before are through
    int position = -1;  // nobody
    uint32_t piece = 0;
    bool sends = false;  // it waits until that position takes what it sends
  };
  [[nodiscard]] Awaited awaited() const;
  // The same for people: "step 5 of 14, piece 3 from position 2".
  [[nodiscard]] std::string waiting_for() const;
  // Whether a message from or to this peer is posted and has not come through.
  [[nodiscard]] bool waits_for(Peer peer) const;
  [[nodiscard]] int steps() const { return steps_; }
  [[nodiscard]] uint64_t bytes_sent() const { return bytes_sent_; }
  [[nodiscard]] uint64_t bytes_received() const { return bytes_received_; }

 private:
  enum class State : uint8_t { idle, posted, arrived, consuming, done };

  // Completions come back as pointers into these records.
  struct Receive {
    Completion arrival, check, consumed;
    uint64_t sum = 0;  // that its sender gave
    int to_come = 0;   // messages: the piece, and its checksum
    Execution* owner = nullptr;
    Piece piece;
    int step = 0, from = -1, slot = -1, operand_slot = -1;
    uint32_t number = 0;  // of the piece within its step
    int operand_step = -1;
    State state = State::idle;
    bool local = false;
  };
  struct Send {
    Completion staged, sent, check;
    uint64_t sum = 0;
    int to_go = 0;  // messages: the piece, and its checksum
    Execution* owner = nullptr;
    Piece piece;
    Buffer buffer;
    int step = 0, to = -1, slot = -1;
    uint32_t number = 0;
    State state =
        State::idle;  // idle, posted (being staged), arrived (staged), consuming (sent), done
  };
  // A place in the schedule: the next piece of the next step of interest.
  struct Cursor {
    int index = 0;
    uint32_t piece = 0, pieces = 0;
    int transit_step = -1;  // the latest earlier step into transit
    Step step;
  };
  struct Transit {  // a result waiting in its slot, or mirrored there
    int step = -1;
    uint32_t piece = 0;
    int slot = -1;
  };

  const Step& step_at(int index) const;
  [[nodiscard]] uint32_t pieces_of(const Range& range) const;
  [[nodiscard]] Range piece_range(const Range& range, uint32_t piece) const;
  [[nodiscard]] MessageId id_of(int step, uint32_t piece) const;
  [[nodiscard]] MessageId check_id_of(int step, uint32_t piece) const;
  void enter(Cursor& cursor, int index, bool receiving);
  void next_piece(Cursor& cursor, bool receiving);

  bool post_receive();
  bool post_send();
  bool issue_sends();
  [[nodiscard]] bool checks(const Range& range) const { return verify_ && !range.empty(); }
  bool intact(const Receive& receive);
  bool consume_next();
  bool retire();

  [[nodiscard]] bool reads_work(From from) const;
  [[nodiscard]] bool touches_work(const Receive& receive) const;
  [[nodiscard]] bool touches_work(const Send& send) const;
  [[nodiscard]] bool forwarded(int step) const;
  [[nodiscard]] bool may_read(const Range& range, int step) const;
  [[nodiscard]] bool may_write(const Range& range, int step, uint32_t before_receive) const;
  static int take(uint32_t& free);
  void free_slot(int slot);
  static int take_result(std::span<Transit> results, int step, uint32_t piece);
  static void keep_result(std::span<Transit> results, const Transit& result);

  void fail_with(int position, const Status& why);
  void came(Receive& receive, const Status& status);
  void went(Send& send, const Status& status);

  static void on_arrival(Completion* completion, const Status& status) noexcept;
  static void on_check(Completion* completion, const Status& status) noexcept;
  static void on_consumed(Completion* completion, const Status& status) noexcept;
  static void on_staged(Completion* completion, const Status& status) noexcept;
  static void on_sent(Completion* completion, const Status& status) noexcept;
  static void on_check_sent(Completion* completion, const Status& status) noexcept;

  const Schedule schedule_;
  const int position_;
  const int steps_;
  const MessageId id_;
  const Route route_;
  Compute& compute_;
  const size_t piece_, element_bytes_;
  const int piece_bits_;
  const bool verify_;

  std::array<Receive, kWindow> receives_;
  uint32_t retired_ = 0, consumed_ = 0, received_ = 0;  // retired <= consumed <= received (posted)
  std::array<Send, kWindow> sends_;
  uint32_t sends_retired_ = 0, sends_issued_ = 0, sends_posted_ = 0;
  Cursor next_receive_, next_send_;
  std::array<Transit, kSlots> transit_;
  std::array<Transit, kMirrorSlots> mirrors_;
  uint32_t free_slots_ = (1u << kSlots) - 1;
  uint32_t free_staging_ = (1u << kStagingSlots) - 1;
  uint32_t free_mirrors_ = (1u << kMirrorSlots) - 1;
  int outstanding_ = 0;  // completions that have not come back
  bool woken_ = true;
  Status status_;
  Peer failed_peer_ = -1;
  uint64_t bytes_sent_ = 0, bytes_received_ = 0;
  struct Cached {
    int index = -1;
    Step step;
  };
  // Of the pure function step(): as many as the two cursors may look at, where a step is one piece.
  mutable std::array<Cached, 2 * kWindow> cache_;
};

}  // namespace ringfold
