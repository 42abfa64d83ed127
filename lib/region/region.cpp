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

namespace ringfold::region {
namespace {

// A wait longer than this is no ordinary one: the engine then looks after failures.
constexpr Nanoseconds kOrdinary = std::chrono::milliseconds(2);
// A sleeper looks around so often.
constexpr Nanoseconds kLookAround = std::chrono::milliseconds(50);
// Phases that the engine's thread works through before it looks at something else.
constexpr int kPhasesATurn = 16;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Phases count on for ever and wrap round.
bool at_or_after(uint32_t phase, uint32_t other) {
  return static_cast<int32_t>(phase - other) >= 0;
}

long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), operation, value, timeout,
                 nullptr, 0);
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
  ~Turn() { end(); }
  explicit operator bool() const { return mine_; }
  void end() {
    if (std::exchange(mine_, false)) taken_.store(false, std::memory_order_release);
  }

 private:
  std::atomic<bool>& taken_;
  bool mine_;
};

Region::Region(Segment segment, const Channel& channel, Engine& engine, Patience patience,
               std::function<void(int)> ring)
    : segment_(std::move(segment)),
      channel_(channel.id),
      rank_(channel.rank),
      size_(static_cast<int>(channel.peers.size())),
      peers_(channel.peers),
      engine_(engine),
      patience_(patience),
      ring_(std::move(ring)),
      ring_a_(0, segment_.pool_bytes() / 4 * 3),
      ring_b_(segment_.pool_bytes() / 4 * 3, segment_.pool_bytes() / 4) {}

Region::~Region() = default;

// ---- flags ------------------------------------------------------------------------------------

bool Region::reached(int rank, uint32_t phase) const {
  return at_or_after(segment_.flag(rank, phase).phase.load(std::memory_order_acquire), phase);
}

bool Region::all_reached(uint32_t phase) {
  if (at_or_after(all_at_, phase)) return true;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || reached(r, phase)) continue;
    await(r, phase);
    return false;
  }
  all_at_ = phase;
  return true;
}

// Whether all that `whom` names have shown the phase, and of the same operation.
bool Region::shown(Moves::Whom whom, int root, uint32_t phase, uint32_t fingerprint, int spins) {
  if (whom == Moves::Whom::nobody) return true;
  const bool all = whom == Moves::Whom::everybody;
  for (int r = all ? 0 : root; r < (all ? size_ : root + 1); ++r) {
    if (r == rank_) continue;
    for (int spun = 0; !reached(r, phase); ++spun) {
      if (spun >= spins) {
        await(r, phase);
        return false;
      }
      relax();
    }
    if (!agrees(r, phase, fingerprint)) return false;
  }
  if (all && at_or_after(phase, all_at_)) all_at_ = phase;
  return true;
}

// REQUIRES reached(rank, phase): and that rank cannot have gone on to use this flag again, since it
// waits for us before it does.
bool Region::agrees(int rank, uint32_t phase, uint32_t fingerprint) {
  if (segment_.flag(rank, phase).fingerprint == fingerprint) return true;
  if (!contradicted_.exchange(true))
    engine_.contradicted(channel_, peers_[static_cast<size_t>(rank)],
                         running_ ? running_->operation->id.seq : next_seq_ - 1);
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

void Region::remember(uint32_t seq, const Description& what) {
  history_[seq % history_.size()] = {seq, what};
}

void Region::start_next() {
  std::unique_ptr<Operation> next;
  {
    const std::lock_guard lock(queue_lock_);
    if (queue_.empty()) return;
    next = std::move(queue_.front());
    queue_.pop_front();
  }
  next->id.seq = next_seq_++;
  next->id.fingerprint = next->what.fingerprint();
  remember(next->id.seq, next->what);
  Moves moves(segment_, ring_a_, ring_b_, *next, rank_);
  const uint32_t base = next_phase_;
  next_phase_ += static_cast<uint32_t>(moves.phases());
  running_.emplace(Running{std::move(next), std::move(moves), base});
}

// Goes on with the running operation as far as the others have come; true when it is over.
bool Region::advance_running(int spins) {
  Running& r = *running_;
  const uint32_t fingerprint = r.operation->id.fingerprint;
  const int root = r.operation->what.schedule.root;
  const uint32_t last = r.base + static_cast<uint32_t>(r.step) - 1;
  const bool over = r.step == r.moves.phases();
  if (!over) {
    const uint32_t phase = last + 1;
    if (!r.reserved) {
      r.free_at = r.moves.reserve(r.step, r.base, phase - kDepth + 1);
      r.reserved = true;
    }
    if (!r.copied) {
      if (!all_reached(r.free_at)) return false;
      r.moves.copy_in(r.step, segment_.flag(rank_, phase));
      r.copied = true;
    }
  }
  if (!shown(r.moves.needs(r.step), root, last, fingerprint, spins)) return false;
  r.moves.consume(r.step, r.base);
  if (over) return true;
  show(last + 1, fingerprint);
  if (r.step == 0) greet(last + 1, fingerprint);
  ++r.step;
  r.reserved = r.copied = false;
  return false;
}

// Works until nothing moves, or for a while. True if anything moved.
bool Region::advance(int spins) {
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
    if (!running_) start_next();
    if (!running_) return moved;
    const int before = running_->step;
    if (advance_running(spins)) {
      const Moves& moves = running_->moves;
      const Operation& done = *running_->operation;
      bytes_.fetch_add(
          region::bytes_written(done.what.schedule, moves.shape(), rank_, size_of(done.what.type)),
          std::memory_order_relaxed);
      finished_.push_back({std::move(running_->operation), Status()});
      running_.reset();
    } else if (running_->step == before) {
      return moved;
    }
    moved = true;
  }
  return moved;
}

// Takes the turn and works. What is over is completed outside of it.
bool Region::work(int spins, bool in_turn) {
  bool moved = false;
  do {
    std::vector<Finished> finished;
    {
      const Turn turn(turn_);
      if (!turn) return moved;
      moved |= advance(spins);
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
  work(0, false);
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

Region::Quick Region::quick(const Description& what, const Operation::Memory& memory,
                            bool waited_for,
                            const std::function<std::unique_ptr<Operation>()>& make) {
  const Turn turn(turn_);
  if (!turn || running_ || pending() || failed()) return Quick::none;
  const uint32_t phase = next_phase_;
  if (!all_reached(phase - kDepth + 1)) return Quick::none;
  if (what.schedule.count != quick_what_.schedule.count || what.type != quick_what_.type ||
      what.op != quick_what_.op || quick_fingerprint_ == 0) {
    quick_what_ = what;
    quick_fingerprint_ = what.fingerprint();
  }
  const uint32_t fingerprint = quick_fingerprint_;
  const uint32_t seq = next_seq_++;
  remember(seq, what);
  ++next_phase_;
  const size_t element = size_of(what.type);
  Flag& flag = segment_.flag(rank_, phase);
  const bool scales = memory.reduction.op == Op::premul_sum && memory.reduction.factor != 1.0;
  if (scales)
    scale_host(what.type, memory.send, flag.payload, what.schedule.count, memory.reduction.factor);
  else if (what.schedule.count != 0)
    std::memcpy(flag.payload, memory.send, what.schedule.count * element);
  show(phase, fingerprint);
  if (shown(Moves::Whom::everybody, 0, phase, fingerprint, waited_for ? patience_.spins : 0)) {
    fold_payloads(phase, what, memory.recv);
    bytes_.store(bytes_.load(std::memory_order_relaxed) + what.schedule.count * element,
                 std::memory_order_relaxed);
    return Quick::done;
  }
  auto operation = make();
  operation->id.seq = seq;
  operation->id.fingerprint = fingerprint;
  Moves moves(segment_, ring_a_, ring_b_, *operation, rank_);
  moves.reserve(0, phase, phase);
  engine_.adopt();
  pending_.fetch_add(1);
  running_.emplace(Running{std::move(operation), std::move(moves), phase, 1});
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
  int yields = 0;
  Nanoseconds most = kOrdinary;
  for (;;) {
    const bool moved = work(yields == 0 ? patience_.spins : 0, false);
    if (done.load(std::memory_order_acquire)) break;
    if (moved) {
      yields = 0;
      continue;
    }
    if (yields++ < patience_.yields) {
      sched_yield();
      continue;
    }
    const Nanoseconds now = engine_.clock().now();
    if (now >= until) break;
    if (now - begun >= kOrdinary) {
      look_after();
      most = kLookAround;
    }
    sleep(done, std::min(most, until - now));
  }
  attended_.fetch_sub(1);
  look_after();
  return true;
}

void Region::sleep(const std::atomic<bool>& done, Nanoseconds most) {
  if (contradicted_) {  // the flag is there, but not what it ought to say: the failure will come
    std::this_thread::sleep_for(std::min<Nanoseconds>(most, std::chrono::milliseconds(1)));
    return;
  }
  const Awaited next = awaited();
  std::atomic<uint32_t>& word = segment_.flag(next.rank, next.phase).phase;
  std::atomic<uint32_t>& sleepers = segment_.desk(next.rank).sleepers;
  sleepers.fetch_add(1);
  const uint32_t seen = word.load();
  if (!at_or_after(seen, next.phase) && !failed() && !done.load()) {
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
  return work(0, true);
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
        missing += (missing.empty() ? "" : ", ") + std::to_string(r);
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
    const Channel::Past& past = history_[seq % history_.size()];
    const std::string who = "rank " + std::to_string(rank_);
    if (past.seq != seq) return who + " has not called operation " + std::to_string(seq);
    return who + " called " + past.what.text() + " as operation " + std::to_string(seq);
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
