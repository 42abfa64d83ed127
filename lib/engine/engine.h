// The engine: queues of operations, deadlines, and the one path of failure. It is passive: it moves
// only inside poll(), with an injected clock, so that one thread can drive thousands of them in a
// test or a simulation. Threads exist at the edge only, see engine_thread.h.
//
// Threads: submit(), fail(), open() and close() from any thread. poll() from any thread, but
// whoever holds the turn works and the others return at once. All other state belongs to the turn's
// holder.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "lib/base/base.h"
#include "lib/engine/execution.h"
#include "lib/record/record.h"
#include "lib/record/trace.h"

namespace ringfold {

// What a rank believes an operation to be. Ranks that differ in it have a mismatch.
struct Description {
  Schedule schedule;
  DType type = DType::f32;
  Op op = Op::sum;
  size_t piece = 0;  // elements
  bool point_to_point = false;
  size_t stands_for = 0;   // not 0: part of an all_reduce of so many elements, host by host
  bool on_device = false;  // what travels are not the bytes of host memory
  size_t part = 0;         // which one, so that parts in another order never add up

  [[nodiscard]] uint32_t fingerprint() const;
  // "all_reduce f32 sum of 1024 elements" with root, algorithm and piece where they matter.
  [[nodiscard]] std::string text() const;
  // As the flight recorder takes it, but for the fingerprint and the number of steps.
  [[nodiscard]] record::What recorded() const;
};

// The channel of an operation that was captured in a graph has this bit in its id.
inline constexpr uint32_t kCapturedChannel = 1u << 30;

// Runs the collectives of a channel in the engine's place: the shared region of one host. It fails
// with the channel.
class Companion {
 public:
  Companion() = default;
  Companion(const Companion&) = delete;
  Companion& operator=(const Companion&) = delete;
  virtual ~Companion() = default;
  // Called in the engine's turn. What is pending ends with `why`, later.
  virtual void fail(const Status& why) = 0;
  // As Engine::recall().
  [[nodiscard]] virtual std::string recall(uint32_t seq) = 0;
  // Collectives handed to it so far. Any thread.
  [[nodiscard]] virtual uint32_t called() const = 0;
  [[nodiscard]] virtual bool pending() const = 0;
  [[nodiscard]] virtual bool waits_for(int rank) = 0;
};

// A communicator as the engine sees it.
struct Channel {
  static constexpr uint32_t kAlone = ~0u;

  uint32_t id = 0;           // of its messages; | kPointToPoint for point to point
  uint32_t family = kAlone;  // channels of one communicator fail together
  int rank = 0;              // mine
  // What the user calls its ranks: they are numbered otherwise in a part of a communicator. Empty:
  // as here.
  std::vector<int> names;
  std::vector<Transport*> transports;      // by rank; null for myself
  std::vector<Peer> peers;                 // by rank
  std::shared_ptr<record::Record> record;  // null: none is kept
  std::shared_ptr<record::Trace> trace;    // null: none is written
  bool verify = false;                     // messages of host memory carry checksums

  std::atomic<uint32_t> called{0};  // collectives by messages so far; the next one's number

  // Guarded by the engine's queue lock:
  std::vector<uint32_t> next_to, next_from;  // point to point, by rank

  // The turn's holder only:
  std::shared_ptr<Companion> companion;  // null: none
  struct Past {
    uint32_t seq = ~0u;
    Description what;
  };
  std::deque<std::unique_ptr<class Operation>> waiting;
  int running = 0;
  std::vector<uint32_t> gone_to;  // point to point, by rank: messages that were sent to the end
  Status failed;
  bool closing = false;  // its owner gave it up: no failure of its own
  bool stalled = false;  // it is being found out who keeps it waiting
  Peer suspected = -1;   // a mismatch is being cleared up with this one
  uint32_t suspected_seq = 0;
  std::array<Past, 64> history;  // what this rank called, to say so when another differs

  [[nodiscard]] int named(int r) const { return names.empty() ? r : names[static_cast<size_t>(r)]; }

  // `failed`, for any thread.
  [[nodiscard]] Status health() const {
    const std::lock_guard lock(health_lock);
    return public_health;
  }
  // The first failure stays.
  void mark_failed(const Status& why) {
    const std::lock_guard lock(health_lock);
    if (public_health.ok()) public_health = why;
  }
  mutable std::mutex health_lock;
  Status public_health;
};

// One call, from submit() to completed(). Derived classes know whom to tell.
class Operation {
 public:
  virtual ~Operation() = default;
  // Called once, outside the turn: nobody touches the buffers any more.
  virtual void completed(const Status& status) noexcept = 0;

  std::shared_ptr<Channel> channel;
  Description what;
  int position = 0;                    // in the schedule
  int partner = -1;                    // point to point: the other rank
  std::vector<Transport*> transports;  // by position; empty: the channel's, positions are ranks
  std::vector<Peer> peers;
  std::unique_ptr<Compute> compute;
  // In place of `compute`, for a companion: the user's buffers.
  struct Memory {
    const void* send = nullptr;
    void* recv = nullptr;
    Reduction reduction;
  } memory;
  Nanoseconds deadline{};  // on the engine's clock
  Nanoseconds patience{};  // not 0: the deadline is that long after its memory is ready
  Nanoseconds called{};    // on the engine's clock
  // Collectives of its communicator that were called before and go the other way: through the
  // region, or by messages.
  uint32_t beside = 0;

  // The rank at a position of the schedule; -1 of -1.
  [[nodiscard]] int rank_at(int at) const;
  // Notes for the trace, if there is one, that all steps before this one are through.
  void mark(int step, Nanoseconds now) {
    if (channel->trace && marks.size() < record::kMostMarks) marks.push_back({step, now});
  }

  bool direct = false;  // set by a companion: it used the buffers where they lie

  // Set by the engine.
  std::vector<record::Mark> marks;
  bool ready = false;  // its compute said so
  Nanoseconds ended{};
  record::Entry* entry = nullptr;  // null: it is not recorded
  Nanoseconds quiet_at{};          // when it will have waited long
  Nanoseconds starved{};  // since when it is seen waiting for a peer that has left; 0: it is not
  MessageId id;
  std::optional<Execution> execution;
  [[nodiscard]] std::string text() const;  // "rank 1, operation 17: all_reduce f32 ..."
};

// Anything else that must be looked after between the messages: the control connections, the
// companions.
class Source {
 public:
  virtual ~Source() = default;
  virtual bool progress() = 0;
  virtual int arm() = 0;  // as Transport::arm()
  // When it wants to be looked at, whatever happens.
  [[nodiscard]] virtual Nanoseconds deadline() const { return Nanoseconds::max(); }
};

class Engine {
 public:
  // Operations of one communicator that run at once; the others wait in order.
  static constexpr int kRunning = 4;
  // How long data that a peer sent before it left may take to arrive.
  static constexpr Nanoseconds kGraceLeft = std::chrono::seconds(1);
  // How long the goodbye of a peer that has gone may take to arrive.
  static constexpr Nanoseconds kGraceLost = std::chrono::milliseconds(200);

  // Which operation other ranks are asked about.
  struct Question {
    uint32_t seq = 0, fingerprint = 0;
    bool region = false;  // a companion's, which has numbers of its own
    uint32_t beside = 0;  // Operation::beside
  };
  // An operation that is not over at its deadline.
  struct Stalled {
    Status why;
    Question question;
    int partner = -1;  // of a message
  };

  explicit Engine(Clock& clock) : clock_(clock) {}
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void add(Transport& transport);  // before any poll(); outlives the engine
  void add(Source& source);
  void open(const std::shared_ptr<Channel>& channel);
  // Forgets the channel; what is pending on it ends as `aborted`, on the other ranks, too.
  void close(const std::shared_ptr<Channel>& channel);

  // Hands the operations over, in this order, and gives them their sequence numbers.
  void submit(std::vector<std::unique_ptr<Operation>> operations);
  void submit(std::unique_ptr<Operation> operation);
  // Everything pending on the channel with this id, and everything later, ends with `why`. `tell`:
  // whether on_failed shall pass it on to the other ranks.
  void fail(uint32_t channel, const Status& why, bool tell);
  // The peer said goodbye: operations that still need it get a moment for what is under way.
  void left(Peer peer);
  // The peer is dead.
  void lost(Peer peer, const Status& why);

  // From now on `companion` runs the channel's collectives and fails with it.
  void accompany(const std::shared_ptr<Channel>& channel, std::shared_ptr<Companion> companion);
  // For companions. An operation counts as unfinished from adopt() to finish() or release();
  // finish() only in the turn, which completes it afterwards, release() by whoever completed it.
  void adopt() { unfinished_.fetch_add(1, std::memory_order_release); }
  void finish(std::unique_ptr<Operation> operation, const Status& status);
  void release() { unfinished_.fetch_sub(1, std::memory_order_release); }
  // Wakes whoever shall poll.
  void nudge() {
    if (on_request) on_request();
  }
  // As if an operation of the engine were over its deadline.
  void stalled(uint32_t channel, const Stalled& what);
  // As if an operation of the engine waited for `peer`. Only in the turn.
  void quiet(uint32_t channel, const Question& question, Peer peer) const;
  // As if the engine had met a contradicting arrival itself.
  void contradicted(uint32_t channel, Peer peer, uint32_t seq);

  bool poll();  // one turn; true if anything moved
  // True while operations are unfinished or requests queued. Any thread.
  [[nodiscard]] bool busy() const { return unfinished_.load(std::memory_order_acquire) != 0; }

  struct Sleep {
    std::vector<int> fds;  // wake when one of them is readable
    Nanoseconds until{};   // or at this time of the clock
    bool now = false;      // do not sleep: poll again
  };
  void arm(Sleep* sleep);
  [[nodiscard]] Clock& clock() const { return clock_; }

  // Set before the first poll(). Called inside the turn: they may tell() but not call the engine,
  // except fail().
  std::function<void(const Channel&, const Status&)> on_failed;
  // An operation is not over at its deadline. Called once a channel; whoever takes it sees to it
  // that the channel fails, soon, with a text that says where everybody stands. Unset: it fails at
  // once.
  std::function<void(const Channel&, const Stalled&)> on_stalled;
  // A collective waits for `peer` for so long that it is time to ask whether that one called the
  // same thing. May be unset.
  std::function<void(const Channel&, const Question&, Peer)> on_quiet;
  // When to ask for the first time about an operation that was called then, in a communicator of so
  // many ranks (all questions go through rank 0); and when again, after `now`.
  [[nodiscard]] static Nanoseconds first_question(Nanoseconds called, size_t ranks);
  [[nodiscard]] static Nanoseconds next_question(Nanoseconds called, Nanoseconds now);
  // An arrival from `peer` contradicts what this rank called as operation `seq`. Called once a
  // channel; whoever takes it sees to it that the channel fails, with a text that names both sides.
  // Unset: it fails at once.
  std::function<void(const Channel&, Peer, uint32_t seq)> on_mismatch;
  // A request came in from another thread than the one that polls.
  std::function<void()> on_request;

  // What this rank called as operation `seq`, if it is remembered. Inside the turn.
  [[nodiscard]] static std::string recall(const Channel& channel, uint32_t seq);
  [[nodiscard]] std::shared_ptr<Channel> find(uint32_t id) const;

 private:
  struct Request {
    enum class Kind : uint8_t {
      submit,
      fail,
      open,
      close,
      left,
      lost,
      contradicted,
      stalled,
      accompany
    } kind = Kind::submit;
    std::unique_ptr<Operation> operation;
    std::shared_ptr<Channel> channel;
    std::shared_ptr<Companion> companion;
    uint32_t id = 0, seq = 0;
    Peer peer = -1;
    Status why;
    Stalled stalled;
    bool tell = false;
  };
  struct Departure {
    Nanoseconds when{};
    Status why;
    bool orderly = false;
  };
  struct Finished {
    std::unique_ptr<Operation> operation;
    Status status;
  };

  void request(Request request);
  bool take_requests();
  void handle(Request& request);
  void start(std::unique_ptr<Operation> operation);
  void start_waiting(Channel& channel);
  void end(size_t running, const Status& status);
  static void note_progress(Operation& operation);
  [[nodiscard]] bool ready(Operation& operation);
  [[nodiscard]] static bool has_its_turn(const Operation& operation);
  bool advance_all();
  [[nodiscard]] bool pending(const Channel& channel) const;
  void fail_channel(Channel& channel, const Status& why, bool tell);
  void failed_by_itself(Operation& operation);
  void suspect(Channel& channel, Peer peer, uint32_t seq);
  void stall(Channel& channel, const Stalled& what);
  [[nodiscard]] static Question question_of(const Operation& operation);
  void check_deadlines();
  void check_quiet(Nanoseconds now);
  void check_departures();

  Clock& clock_;
  std::vector<Transport*> transports_;
  std::vector<Source*> sources_;

  std::mutex queue_lock_;  // guards queue_ and the sequence numbers of channels
  std::vector<Request> queue_;
  std::atomic<bool> queued_{false};
  std::atomic<int> unfinished_{0};

  std::mutex turn_;  // everything below
  std::vector<Request> taken_;
  std::vector<std::shared_ptr<Channel>> channels_;
  std::vector<std::unique_ptr<Operation>> running_;
  std::vector<Finished> finished_;
  std::map<Peer, Departure> departures_;
  std::map<uint32_t, Status> unborn_;    // failures heard of before their channel was opened here
  std::unordered_set<uint32_t> closed_;  // ids of channels that were here: never used again
  Nanoseconds next_deadline_ = Nanoseconds::max();
  bool failed_any_ = false;                      // a channel, in this turn
  Nanoseconds next_quiet_ = Nanoseconds::max();  // when to ask about some operation
  Nanoseconds nap_{};                            // while something silent is waited for
};

}  // namespace ringfold
