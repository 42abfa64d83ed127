#include "lib/region/region.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <thread>
#include <utility>

#include "kernels/reduce.h"
#include "lib/base/cores.h"

namespace ringfold::region {
namespace {

// A wait longer than this is no ordinary one: the engine then looks after failures.
constexpr Nanoseconds kOrdinary = std::chrono::milliseconds(2);
// A sleeper looks around so often.
constexpr Nanoseconds kLookAround = std::chrono::milliseconds(50);
// Phases that the engine's thread works through before it looks at something else.
constexpr int kPhasesATurn = 16;

// Phases count on for ever and wrap round.
bool at_or_after(uint32_t phase, uint32_t other) {
  return static_cast<int32_t>(phase - other) >= 0;
}

long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), operation, value, timeout,
                 nullptr, 0);
}

std::vector<int> names_of(const Channel& channel) {
  std::vector<int> names;
  for (size_t r = 0; r < channel.peers.size(); ++r)
    names.push_back(channel.named(static_cast<int>(r)));
  return names;
}

}  // namespace

// The turn, if it was free.
class Region::Turn {
 public:
  explicit Turn(std::atomic<bool>& taken)
      : taken_(taken),
        mine_(!taken.load(std::memory_order_relaxed) &&
              !taken.exchange(true, std::memory_order_acquire)) {}
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (mine_) taken_.store(false, std::memory_order_release);
  }
  explicit operator bool() const { return mine_; }

 private:
  std::atomic<bool>& taken_;
  const bool mine_;
};

Region::Region(Segment segment, const Channel& channel, Engine& engine, Patience patience,
               bool crowded, std::function<void(int)> ring)
    : segment_(std::move(segment)),
      channel_(channel.id),
      rank_(channel.rank),
      size_(static_cast<int>(channel.peers.size())),
      peers_(channel.peers),
      names_(names_of(channel)),
      engine_(engine),
      patience_(patience),
      room_{segment_.pool_bytes(), crowded},
      ring_(std::move(ring)),
      ring_a_(0, segment_.pool_bytes() / 4 * 3),
      ring_b_(segment_.pool_bytes() / 4 * 3, segment_.pool_bytes() / 4) {}

Region::~Region() = default;

// ---- flags ------------------------------------------------------------------------------------

inline bool Region::reached(int rank, uint32_t phase) const {
  return at_or_after(segment_.flag(rank, phase).phase.load(std::memory_order_acquire), phase);
}

inline bool Region::came(int rank, uint32_t phase, Wait wait) {
  if (reached(rank, phase) || (wait == Wait::ordinary && wait_for(rank, phase))) return true;
  await(rank, phase);
  return false;
}

// Spins, offers the core to others, then sleeps; but not for ever, since nothing else goes on here
// while we have the turn.
bool Region::wait_for(int rank, uint32_t phase) {
  for (int i = 0; i < patience_.spins; ++i) {
    relax();
    if (reached(rank, phase)) return true;
  }
  for (int i = 0; i < patience_.yields; ++i) {
    sched_yield();
    if (reached(rank, phase)) return true;
  }
  const Nanoseconds give_up = engine_.clock().now() + kOrdinary;
  do {
    sleep(rank, phase, kOrdinary);
    if (reached(rank, phase)) return true;
  } while (!failed() && engine_.clock().now() < give_up);
  return false;
}

bool Region::all_reached(uint32_t phase, Wait wait) {
  if (at_or_after(all_at_, phase)) return true;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && !came(r, phase, wait)) return false;
  all_at_ = phase;
  return true;
}

// Whether all that `whom` names have shown the phase, and of the same operation.
bool Region::shown(Moves::Whom whom, int root, uint32_t phase, uint32_t fingerprint, Wait wait) {
  if (whom == Moves::Whom::nobody) return true;
  const bool all = whom == Moves::Whom::everybody;
  for (int r = all ? 0 : root; r < (all ? size_ : root + 1); ++r)
    if (r != rank_ && (!came(r, phase, wait) || !agrees(r, phase, fingerprint))) return false;
  if (all && at_or_after(phase, all_at_)) all_at_ = phase;
  return true;
}

// REQUIRES reached(rank, phase): and that rank cannot have gone on to use this flag again, since it
// waits for us before it does.
inline bool Region::agrees(int rank, uint32_t phase, uint32_t fingerprint) {
  if (segment_.flag(rank, phase).fingerprint == fingerprint) return true;
  if (!contradicted_.exchange(true))
    engine_.contradicted(channel_, peers_[static_cast<size_t>(rank)],
                         running_ ? running_->seq : next_seq_ - 1);
  await(rank, phase);
  return false;
}

void Region::show(uint32_t phase, uint32_t fingerprint) {
  Flag& flag = segment_.flag(rank_, phase);
  flag.fingerprint = fingerprint;
  flag.phase.exchange(phase);
  const Desk& desk = segment_.desk(rank_);
  if (desk.sleepers.load() != 0) futex(flag.phase, FUTEX_WAKE, INT_MAX, nullptr);
  if (desk.bells.load() == 0) return;
  uint64_t bells = segment_.desk(rank_).bells.exchange(0);
  for (; bells != 0; bells &= bells - 1) ring_(__builtin_ctzll(bells));
}

// Those who are in this phase already must be in the same operation, wanted by ours or not.
void Region::greet(uint32_t phase, uint32_t fingerprint) {
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && segment_.flag(r, phase).phase.load() == phase) agrees(r, phase, fingerprint);
}

void Region::await(int rank, uint32_t phase) {
  awaited_.store(static_cast<uint64_t>(rank) << 32 | phase, std::memory_order_relaxed);
}

Region::Awaited Region::awaited() const {
  const uint64_t both = awaited_.load(std::memory_order_relaxed);
  return {static_cast<int>(both >> 32), static_cast<uint32_t>(both)};
}

// ---- operations -------------------------------------------------------------------------------

// Of like operations in a row only the first is noted.
void Region::remember(uint32_t seq, const Description& what, uint32_t fingerprint) {
  if (fingerprint == latest_fingerprint_) return;
  latest_fingerprint_ = fingerprint;
  latest_ = (latest_ + 1) % history_.size();
  history_[latest_] = {seq, what};
}

Region::Running& Region::start(const Description& what, const Shape& shape,
                               const Operation::Memory& memory) {
  const uint32_t seq = next_seq_++;
  const uint32_t fingerprint = what.fingerprint();
  remember(seq, what, fingerprint);
  Running& r = running_.emplace(
      Running{nullptr, what.schedule, size_of(what.type), seq, fingerprint,
              Moves(segment_, ring_a_, ring_b_, what, memory, rank_, shape, choice_), next_phase_});
  next_phase_ += static_cast<uint32_t>(r.moves.phases());
  return r;
}

void Region::start_next() {
  std::unique_ptr<Operation> next;
  {
    const std::lock_guard lock(queue_lock_);
    if (queue_.empty()) return;
    next = std::move(queue_.front());
    queue_.pop_front();
  }
  const Shape shape = shape_of(next->what.schedule, size_of(next->what.type), room_);
  Running& r = start(next->what, shape, next->memory);
  next->id.seq = r.seq;
  r.operation = std::move(next);
}

// Goes on with the running operation as far as the others have come; true when it is over.
bool Region::advance_running(Wait wait) {
  Running& r = *running_;
  const uint32_t fingerprint = r.fingerprint;
  const uint32_t last = r.base + static_cast<uint32_t>(r.step) - 1;
  const bool over = r.step == r.moves.phases();
  if (!over) {
    const uint32_t phase = last + 1;
    if (!r.reserved) {
      r.free_at = r.moves.reserve(r.step, r.base, phase - kDepth + 1);
      r.reserved = true;
    }
    if (!r.copied) {
      if (!all_reached(r.free_at, wait)) return false;
      r.moves.copy_in(r.step, segment_.flag(rank_, phase));
      r.copied = true;
    }
  }
  if (!shown(r.moves.needs(r.step), r.what.root, last, fingerprint, wait)) return false;
  r.moves.consume(r.step, r.base);
  if (over) return true;
  show(last + 1, fingerprint);
  if (r.step == 0) greet(last + 1, fingerprint);
  ++r.step;
  r.reserved = r.copied = false;
  return false;
}

// Works until nothing moves, or for a while. True if anything moved.
bool Region::advance(Wait wait) {
  bool moved = false;
  for (int phases = 0; phases < kPhasesATurn; ++phases) {
    if (failed()) {
      Status why;
      {
        const std::lock_guard lock(failure_lock_);
        why = failure_;
      }
      if (running_) finished_.push_back({std::move(running_->operation), why});
      running_.reset();
      const std::lock_guard lock(queue_lock_);
      for (auto& operation : queue_) finished_.push_back({std::move(operation), why});
      queue_.clear();
      return true;
    }
    if (contradicted_) return moved;  // nothing is over any more until the failure is here
    if (!running_) start_next();
    if (!running_) return moved;
    const int before = running_->step;
    if (advance_running(wait)) {
      account();
      finished_.push_back({std::move(running_->operation), Status()});
      running_.reset();
    } else if (running_->step == before) {
      return moved;
    }
    moved = true;
  }
  return moved;
}

void Region::account() {
  bytes_.fetch_add(region::bytes_written(running_->what, running_->moves.shape(), rank_,
                                         running_->element_bytes),
                   std::memory_order_relaxed);
}

// Takes the turn and works. What is over is completed outside of it.
bool Region::work(Wait wait, bool in_turn) {
  bool moved = false;
  do {
    std::vector<Finished> finished;
    {
      const Turn turn(turn_);
      if (!turn) return moved;
      moved |= advance(wait);
      finished.swap(finished_);
    }
    for (Finished& f : finished) {
      pending_.fetch_sub(1);
      if (in_turn) {
        engine_.finish(std::move(f.operation), f.status);
        continue;
      }
      f.operation->completed(f.status);
      f.operation.reset();
      engine_.release();
    }
  } while (failed() && pending());  // it may have failed while we had the turn
  return moved;
}

void Region::submit(std::unique_ptr<Operation> operation, bool waited_for) {
  engine_.adopt();
  pending_.fetch_add(1);
  {
    const std::lock_guard lock(queue_lock_);
    queue_.push_back(std::move(operation));
  }
  work(Wait::no, false);
  if (!waited_for) look_after();
}

// All ranks' payloads of the phase, which their ranks have scaled.
void Region::fold_payloads(uint32_t phase, const Description& what, void* out) const {
  std::array<const void*, kMaxRanks> sources;
  for (int r = 0; r < size_; ++r) sources[static_cast<size_t>(r)] = segment_.flag(r, phase).payload;
  FoldCall call;
  call.dtype = what.type;
  call.op = what.op;
  call.sources = sources.data();
  call.ranks = size_;
  call.out = out;
  call.count = what.schedule.count;
  fold_host(call);
}

// Everything between the call and the result happens here, in the caller's thread.
Region::Quick Region::run(const Description& what, const Shape& shape,
                          const Operation::Memory& memory, const Make& make) {
  const Turn turn(turn_);
  if (!turn || running_ || pending() || failed() || contradicted_) return Quick::none;
  start(what, shape, memory);
  while (!contradicted_ && !failed()) {
    const int before = running_->step;
    if (advance_running(Wait::ordinary)) {
      account();
      running_.reset();
      return Quick::done;
    }
    if (running_->step == before) break;
  }
  running_->operation = make();
  running_->operation->id.seq = running_->seq;
  engine_.adopt();
  pending_.fetch_add(1);
  return Quick::started;
}

// What run_small() is asked for, if it is not the same as the last time.
void Region::describe_small(size_t count, DType type, Op op) {
  if (small_fingerprint_ != 0 && small_.schedule.count == count && small_.type == type &&
      small_.op == op)
    return;
  small_ = {};
  small_.schedule.collective = Collective::all_reduce;
  small_.schedule.algorithm = Algorithm::region;
  small_.schedule.size = size_;
  small_.schedule.count = count;
  small_.type = type;
  small_.op = op;
  small_fingerprint_ = small_.fingerprint();
}

Region::Quick Region::run_small(size_t count, DType type, const Operation::Memory& memory,
                                bool waited_for, const Make& make) {
  const Turn turn(turn_);
  if (!turn || running_ || pending() || failed() || contradicted_) return Quick::none;
  const uint32_t phase = next_phase_;
  if (!all_reached(phase - kDepth + 1, Wait::no)) return Quick::none;
  describe_small(count, type, memory.reduction.op);
  const Description& what = small_;
  const uint32_t fingerprint = small_fingerprint_;
  const uint32_t seq = next_seq_++;
  remember(seq, what, fingerprint);
  ++next_phase_;
  const size_t element = size_of(type);
  Flag& flag = segment_.flag(rank_, phase);
  const bool scales = memory.reduction.op == Op::premul_sum && memory.reduction.factor != 1.0;
  if (scales)
    scale_host(type, memory.send, flag.payload, count, memory.reduction.factor);
  else if (what.schedule.count != 0)
    std::memcpy(flag.payload, memory.send, count * element);
  show(phase, fingerprint);
  if (shown(Moves::Whom::everybody, 0, phase, fingerprint,
            waited_for ? Wait::ordinary : Wait::no)) {
    fold_payloads(phase, what, memory.recv);
    // The next call writes there: the line may come while the caller does something else.
    __builtin_prefetch(&segment_.flag(rank_, phase + 1), 1);
    bytes_.store(bytes_.load(std::memory_order_relaxed) + count * element,
                 std::memory_order_relaxed);
    return Quick::done;
  }
  Moves moves(segment_, ring_a_, ring_b_, what, memory, rank_,
              shape_of(what.schedule, element, room_), choice_);
  moves.reserve(0, phase, phase);
  running_.emplace(
      Running{make(), what.schedule, element, seq, fingerprint, std::move(moves), phase, 1});
  running_->operation->id.seq = seq;
  engine_.adopt();
  pending_.fetch_add(1);
  if (!waited_for) look_after();
  return Quick::started;
}

// ---- waiting ----------------------------------------------------------------------------------

// Wakes the engine's thread to do what nobody here will do.
void Region::look_after() {
  if (pending()) engine_.nudge();
}

bool Region::wait(const std::atomic<bool>& done, Nanoseconds until) {
  const std::unique_lock attendant(attendant_, std::try_to_lock);
  if (!attendant.owns_lock()) return false;
  attended_.fetch_add(1);
  const Nanoseconds begun = engine_.clock().now();
  for (;;) {
    const bool moved = work(Wait::ordinary, false);
    if (done.load(std::memory_order_acquire)) break;
    if (moved) continue;
    const Nanoseconds now = engine_.clock().now();
    if (now >= until) break;
    const bool long_ago = now - begun >= kOrdinary;
    if (long_ago) look_after();
    const Awaited next = awaited();
    sleep(next.rank, next.phase, std::min(long_ago ? kLookAround : kOrdinary, until - now));
  }
  attended_.fetch_sub(1);
  look_after();
  return true;
}

void Region::sleep(int rank, uint32_t phase, Nanoseconds most) {
  if (contradicted_) {  // the flag is there, but not what it ought to say: the failure will come
    std::this_thread::sleep_for(std::min<Nanoseconds>(most, std::chrono::milliseconds(1)));
    return;
  }
  std::atomic<uint32_t>& word = segment_.flag(rank, phase).phase;
  std::atomic<uint32_t>& sleepers = segment_.desk(rank).sleepers;
  sleepers.fetch_add(1);
  const uint32_t seen = word.load();
  if (!at_or_after(seen, phase) && !failed()) {
    const timespec timeout{static_cast<time_t>(most.count() / 1'000'000'000),
                           static_cast<long>(most.count() % 1'000'000'000)};
    futex(word, FUTEX_WAIT, seen, &timeout);
  }
  sleepers.fetch_sub(1);
}

// ---- in the engine's turn ---------------------------------------------------------------------

bool Region::progress() {
  if (!pending()) return false;
  // A thread that waits here does it itself, unless it must be told of a failure.
  if (attended_.load() != 0 && !failed()) return false;
  return work(Wait::no, true);
}

Nanoseconds Region::check_deadline(Nanoseconds now) {
  if (!pending() || failed()) return Nanoseconds::max();
  std::string text;
  {
    const Turn turn(turn_);
    if (!turn) return now + kOrdinary;
    if (!running_) return Nanoseconds::max();
    if (now < running_->operation->deadline) return running_->operation->deadline;
    std::string missing;
    const Awaited next = awaited();
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && !reached(r, next.phase))
        missing += (missing.empty() ? "" : ", ") + std::to_string(names_[static_cast<size_t>(r)]);
    text = running_->operation->text() + ": not done at its deadline; waiting in step " +
           std::to_string(running_->step) + " of " + std::to_string(running_->moves.phases()) +
           " for rank " + missing;
  }
  engine_.fail(channel_, Status(Code::timeout, text), true);
  return Nanoseconds::max();
}

bool Region::arm() {
  if (!pending() || attended_.load() != 0 || contradicted_) return true;
  const Awaited next = awaited();
  segment_.desk(next.rank).bells.fetch_or(uint64_t{1} << rank_);
  const Turn turn(turn_);
  return turn && running_ &&
         !at_or_after(segment_.flag(next.rank, next.phase).phase.load(), next.phase);
}

void Region::fail(const Status& why) {
  {
    const std::lock_guard lock(failure_lock_);
    if (!failure_.ok()) return;
    failure_ = why;
  }
  failed_.store(true);
  const Awaited next = awaited();
  futex(segment_.flag(next.rank, next.phase).phase, FUTEX_WAKE, INT_MAX, nullptr);
  engine_.nudge();
}

std::string Region::recall(uint32_t seq) {
  for (;;) {
    const Turn turn(turn_);
    if (!turn) {
      sched_yield();
      continue;
    }
    const std::string who = "rank " + std::to_string(names_[static_cast<size_t>(rank_)]);
    for (size_t back = 0; back < history_.size() && seq < next_seq_; ++back) {
      const Channel::Past& past = history_[(latest_ + history_.size() - back) % history_.size()];
      if (past.seq != ~0u && past.seq <= seq)
        return who + " called " + past.what.text() + " as operation " + std::to_string(seq);
    }
    return who + " has not called operation " + std::to_string(seq);
  }
}

bool Region::waits_for(int rank) {
  const Turn turn(turn_);
  if (!turn || !running_) return false;
  const Awaited next = awaited();
  return !at_or_after(segment_.flag(next.rank, next.phase).phase.load(), next.phase) &&
         !reached(rank, next.phase);
}

}  // namespace ringfold::region
