#include "lib/region/region.h"

#include <linux/futex.h>

#include <climits>
#include <cstring>
#include <utility>

#include "kernels/reduce.h"
#include "lib/base/checksum.h"
#include "lib/region/waiting.h"

namespace ringfold::region {
namespace {

// An operation of so many bytes may be over before the engine's thread could be awake to look after
// it: its call waits for that, briefly.
constexpr size_t kBriefBytes = 64 << 10;
// Phases that the engine's thread works through before it looks at something else.
constexpr int kPhasesATurn = 16;

std::vector<int> names_of(const Channel& channel) {
  std::vector<int> names;
  for (size_t r = 0; r < channel.peers.size(); ++r)
    names.push_back(channel.named(static_cast<int>(r)));
  return names;
}

}  // namespace

Region::Region(Segment segment, const Channel& channel, Engine& engine, Patience patience,
               bool crowded, std::unique_ptr<Neighbours> neighbours)
    : segment_(std::move(segment)),
      channel_(channel.id),
      rank_(channel.rank),
      size_(static_cast<int>(channel.peers.size())),
      peers_(channel.peers),
      names_(names_of(channel)),
      engine_(engine),
      patience_(patience),
      room_{segment_.pool_bytes(), crowded},
      neighbours_(std::move(neighbours)),
      verify_(channel.verify),
      record_(channel.record),
      lane_(record_->region()),
      ring_a_(0, segment_.pool_bytes() / 4 * 3),
      ring_b_(segment_.pool_bytes() / 4 * 3, segment_.pool_bytes() / 4) {}

Region::~Region() = default;

// ---- flags ------------------------------------------------------------------------------------

inline bool Region::came(int rank, uint32_t phase, Wait wait) {
  if (reached(rank, phase) || (wait != Wait::no && wait_for(rank, phase, wait))) return true;
  await(rank, phase);
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
                         running_ ? running_->seq : next_seq_.load() - 1);
  await(rank, phase);
  return false;
}

void Region::show(uint32_t phase, uint32_t fingerprint) {
  Flag& flag = segment_.flag(rank_, phase);
  flag.fingerprint = fingerprint;
#if defined(__SANITIZE_THREAD__)  // which knows no fences
  flag.phase.exchange(phase);
#else
  // Not one exchange: the fence lets the reads of others' flags begin before this line is ours.
  flag.phase.store(phase, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  const Desk& desk = segment_.desk(rank_);
  if (desk.sleepers.load() != 0) futex(flag.phase, FUTEX_WAKE, INT_MAX, nullptr);
  if (desk.bells.load() == 0) return;
  uint64_t bells = segment_.desk(rank_).bells.exchange(0);
  for (; bells != 0; bells &= bells - 1) neighbours_->ring(__builtin_ctzll(bells));
}

// Those who are in this phase already must be in the same operation, also if ours does not wait for
// them. Where it waits for all it compares with all.
void Region::greet(uint32_t phase, uint32_t fingerprint) {
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && segment_.flag(r, phase).phase.load() == phase) agrees(r, phase, fingerprint);
}

void Region::await(int rank, uint32_t phase) {
  record::put(lane_.awaited, record::both(phase, static_cast<uint32_t>(rank)));
}

Region::Awaited Region::awaited() const {
  const uint64_t both = record::get(lane_.awaited);
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

void Region::make_plan(const Description& what) {
  const Schedule& known = plan_.what.schedule;
  const Schedule& asked = what.schedule;
  if (plan_.fingerprint != 0 && known.collective == asked.collective &&
      known.count == asked.count && known.root == asked.root && plan_.what.type == what.type &&
      plan_.what.op == what.op && plan_.what.stands_for == what.stands_for &&
      plan_.what.part == what.part)
    return;
  plan_.what = what;
  plan_.fingerprint = what.fingerprint();
  const size_t element = size_of(what.type);
  plan_.shape = shape_of(asked, element, room_);
  plan_.may_be_direct = !verify_ && Direct::suits(asked, plan_.shape, room_);
  plan_.bytes_written = region::bytes_written(asked, plan_.shape, rank_, element);
  plan_.bytes_read = region::bytes_read(asked, plan_.shape, rank_, element);
}

// Like operations in a row share an entry: the next one costs a store.
inline void Region::record_quick(uint32_t seq, const Description& what, uint32_t fingerprint) {
  if (fingerprint == row_) return record::again(*entry_, seq);
  record::What recorded = what.recorded();
  recorded.fingerprint = row_ = fingerprint;
  recorded.steps = 1;
  entry_ = &record::begin(lane_, recorded, seq, record::State::quick, Nanoseconds(0));
}

// A single writer: no locked instruction.
inline uint32_t Region::take_seq() {
  const uint32_t seq = next_seq_.load(std::memory_order_relaxed);
  next_seq_.store(seq + 1, std::memory_order_release);
  return seq;
}

Region::Running& Region::start(const Description& what, const Operation::Memory& memory,
                               Nanoseconds called) {
  make_plan(what);
  const uint32_t seq = take_seq();
  remember(seq, what, plan_.fingerprint);
  Running& r = running_.emplace(*this, memory, seq, next_phase_);
  r.timed = called != Nanoseconds::min();
  if (plan_.may_be_direct) make_offer(r);
  record::What recorded = what.recorded();
  recorded.fingerprint = plan_.fingerprint;
  recorded.steps = r.moves.phases();
  entry_ = &record::begin(lane_, recorded, seq, record::State::running, called);
  row_ = 0;
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
  Running& r = start(next->what, next->memory, next->called);
  queued_.fetch_sub(1);
  next->id.seq = r.seq;
  r.operation = std::move(next);
}

// With RINGFOLD_VERIFY: what a rank has shown is not what it wrote. The failure is on its way then.
bool Region::intact(int rank, bool right, uint32_t seq) {
  if (right) return true;
  const auto named = [&](int r) {
    return "rank " + std::to_string(names_[static_cast<size_t>(r)]);
  };
  if (!contradicted_.exchange(true))
    engine_.fail(channel_,
                 Status(Code::system, named(rank_) + ", operation " + std::to_string(seq) +
                                          ": what " + named(rank) +
                                          " wrote into shared memory was damaged there: its "
                                          "checksum differs"),
                 true);
  await(rank, next_phase_);
  return false;
}

bool Region::all_intact(const Running& r) {
  const Moves::Whom whom = r.moves.needs(r.step);
  if (whom == Moves::Whom::nobody) return true;
  const bool all = whom == Moves::Whom::everybody;
  const int root = plan_.what.schedule.root;
  for (int rank = all ? 0 : root; rank < (all ? size_ : root + 1); ++rank)
    if (rank != rank_ && !intact(rank, r.moves.intact(r.step, r.base, rank), r.seq)) return false;
  return true;
}

// Takes the running operation a step further, if the others have come far enough.
Region::Progress Region::advance_running(Wait wait) {
  Running& r = *running_;
  if (r.way == Way::direct) return advance_direct(wait);
  const uint32_t fingerprint = plan_.fingerprint;
  const uint32_t last = r.base + static_cast<uint32_t>(r.step) - 1;
  const bool over = r.step == r.moves.phases();
  const bool undecided = r.way != Way::plain;
  if (!over) {
    const uint32_t phase = last + 1;
    if (!r.reserved) {
      r.free_at = r.moves.reserve(r.step, r.base, phase - kDepth + 1);
      r.reserved = true;
    }
    if (!r.copied) {
      if (!all_reached(r.free_at, wait)) return Progress::waits;
      Flag& flag = segment_.flag(rank_, phase);
      if (undecided && r.step == 0)
        std::memcpy(flag.payload(sizeof(Offer)), &r.mine.offer, sizeof(Offer));
      if (r.way != Way::offered) r.moves.copy_in(r.step, flag);
      r.copied = true;
    }
  }
  if (!shown(r.moves.needs(r.step), plan_.what.schedule.root, last, fingerprint, wait))
    return Progress::waits;
  if (undecided && r.step == 1 && decide(r)) return Progress::moved;
  if (verify_ && !all_intact(r)) return Progress::waits;
  r.moves.consume(r.step, r.base);
  if (over) return Progress::over;
  if (verify_) r.moves.seal(r.step, segment_.flag(rank_, last + 1));
  show(last + 1, fingerprint);
  ++r.step;
  if (r.step == 1 && r.moves.needs(1) != Moves::Whom::everybody) greet(last + 1, fingerprint);
  record::progress(*entry_, r.step, r.moves.phases());
  if (r.operation && r.operation->channel->trace) r.operation->mark(r.step, engine_.clock().now());
  r.reserved = r.copied = false;
  return Progress::moved;
}

// What is over, or has failed.
void Region::end_running(const Status& status) {
  Running& r = *running_;
  next_phase_ = r.base + static_cast<uint32_t>(r.step);
  if (status.ok()) {
    const bool direct = r.way == Way::direct;
    const Description& what = plan_.what;
    record::add(lane_.sent, direct ? Direct::bytes_written(what.schedule, rank_, size_of(what.type))
                                   : plan_.bytes_written);
    record::add(lane_.received, plan_.bytes_read);
    record::over(lane_, r.seq);
    if (r.operation) r.operation->direct = direct;
  } else {
    withdraw(r);
  }
  const bool timed = r.operation || r.timed;
  const Nanoseconds now = timed ? engine_.clock().now() : Nanoseconds(0);
  record::end(lane_, *entry_, status.ok(), now);
  if (r.operation) r.operation->ended = now;
  if (r.operation) finished_.push_back({std::move(r.operation), status});
  running_.reset();
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
      if (running_) end_running(why);
      const std::lock_guard lock(queue_lock_);
      for (auto& operation : queue_) finished_.push_back({std::move(operation), why});
      queue_.clear();
      return true;
    }
    if (contradicted_) return moved;  // nothing is over any more until the failure is here
    if (!running_) start_next();
    if (!running_) return moved;
    const Progress progress = advance_running(wait);
    if (progress == Progress::waits) return moved;
    if (progress == Progress::over) end_running(Status());
    moved = true;
  }
  return moved;
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
  operation->beside = operation->channel->called;
  const Description& what = operation->what;
  const bool brief = what.schedule.count * size_of(what.type) <= kBriefBytes;
  engine_.adopt();
  const bool alone = pending_.fetch_add(1) == 0;
  {
    const std::lock_guard lock(queue_lock_);
    queued_.fetch_add(1);
    queue_.push_back(std::move(operation));
  }
  work(brief && alone ? Wait::briefly : Wait::no, false);
  if (!waited_for) look_after();
}

bool Region::payloads_intact(uint32_t phase, size_t bytes, uint32_t seq) {
  for (int r = 0; r < size_; ++r) {
    const Flag& flag = segment_.flag(r, phase);
    if (r != rank_ && !intact(r, flag.check == checksum(flag.payload(bytes), bytes), seq))
      return false;
  }
  return true;
}

// All ranks' payloads of the phase, which their ranks have scaled.
void Region::fold_payloads(uint32_t phase, const Description& what, void* out) const {
  std::array<const void*, kMaxRanks> sources;
  const size_t bytes = what.schedule.count * size_of(what.type);
  for (int r = 0; r < size_; ++r)
    sources[static_cast<size_t>(r)] = segment_.flag(r, phase).payload(bytes);
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
Region::Quick Region::run(const Description& what, const Operation::Memory& memory,
                          const Make& make, Nanoseconds begun) {
  const Turn turn(turn_);
  return turn && at_rest() ? run_in_turn(what, memory, make, begun) : Quick::none;
}

Region::Quick Region::run(size_t count, DType type, const Operation::Memory& memory,
                          const Make& make) {
  const Turn turn(turn_);
  if (!turn || !at_rest()) return Quick::none;
  describe(count, type, memory.reduction.op);
  return run_in_turn(all_reduce_, memory, make, Nanoseconds::min());
}

Region::Quick Region::run_in_turn(const Description& what, const Operation::Memory& memory,
                                  const Make& make, Nanoseconds begun) {
  start(what, memory, begun);
  while (!contradicted_ && !failed()) {
    const Progress progress = advance_running(Wait::ordinary);
    if (progress == Progress::waits) break;
    if (progress == Progress::moved) continue;
    const bool direct = running_->way == Way::direct;
    end_running(Status());
    return direct ? Quick::done_directly : Quick::done;
  }
  take(make());
  return Quick::started;
}

// The operation of what is running, which takes longer than its call.
void Region::take(std::unique_ptr<Operation> operation) {
  operation->id.seq = running_->seq;
  operation->beside = operation->channel->called;
  running_->operation = std::move(operation);
  engine_.adopt();
  pending_.fetch_add(1);
}

// An all_reduce that is asked for, if it is not the same as the last time.
void Region::describe(size_t count, DType type, Op op) {
  if (all_reduce_fingerprint_ != 0 && all_reduce_.schedule.count == count &&
      all_reduce_.type == type && all_reduce_.op == op)
    return;
  all_reduce_ = {};
  all_reduce_.schedule.collective = Collective::all_reduce;
  all_reduce_.schedule.algorithm = Algorithm::region;
  all_reduce_.schedule.size = size_;
  all_reduce_.schedule.count = count;
  all_reduce_.type = type;
  all_reduce_.op = op;
  all_reduce_fingerprint_ = all_reduce_.fingerprint();
}

Region::Quick Region::run_small(size_t count, DType type, const Operation::Memory& memory,
                                bool waited_for, const Make& make) {
  const Turn turn(turn_);
  if (!turn || !at_rest()) return Quick::none;
  const uint32_t phase = next_phase_;
  if (!all_reached(phase - kDepth + 1, Wait::no)) return Quick::none;
  describe(count, type, memory.reduction.op);
  const Description& what = all_reduce_;
  const uint32_t fingerprint = all_reduce_fingerprint_;
  const uint32_t seq = take_seq();
  remember(seq, what, fingerprint);
  record_quick(seq, what, fingerprint);
  ++next_phase_;
  const size_t element = size_of(type);
  Flag& flag = segment_.flag(rank_, phase);
  std::byte* const payload = flag.payload(count * element);
  const bool scales = memory.reduction.op == Op::premul_sum && memory.reduction.factor != 1.0;
  if (scales)
    scale_host(type, memory.send, payload, count, memory.reduction.factor);
  else if (what.schedule.count != 0)
    std::memcpy(payload, memory.send, count * element);
  if (verify_) flag.check = checksum(payload, count * element);
  show(phase, fingerprint);
  if (shown(Moves::Whom::everybody, 0, phase, fingerprint,
            waited_for ? Wait::ordinary : Wait::briefly) &&
      (!verify_ || payloads_intact(phase, count * element, seq))) {
    fold_payloads(phase, what, memory.recv);
    record::over(lane_, seq);
    record::add(lane_.sent, count * element);
    record::add(lane_.received, count * element * static_cast<size_t>(size_ - 1));
    return Quick::done;
  }
  make_plan(what);
  Running& r = running_.emplace(*this, memory, seq, phase);
  r.moves.reserve(0, phase, phase);
  r.step = 1;
  entry_ = &record::slow(lane_, *entry_, seq, r.moves.phases(), engine_.clock().now());
  row_ = 0;
  take(make());
  if (!waited_for) look_after();
  return Quick::started;
}

}  // namespace ringfold::region
