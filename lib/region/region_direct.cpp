// The part of a region that lets operations use their buffers where they lie; see direct.h.
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "lib/region/region.h"
#include "lib/region/waiting.h"

namespace ringfold::region {
namespace {

// After operations for which only some made offers nobody makes any for a while, since beginning
// anew costs a phase: for one operation, then for two, and so on up to so many.
constexpr int kMostReluctance = 64;
// Who is inside is gone after this, or stopped.
constexpr Nanoseconds kStaysInside = std::chrono::milliseconds(20);

}  // namespace

void Region::make_offer(Running& r) {
  r.way = Way::open;
  if (reluctance_ > 0) {
    --reluctance_;
    return;
  }
  r.mine = Direct::offer(plan_.what, r.memory, rank_, *neighbours_);
  if (r.mine.offer.made != 0) r.way = Way::offered;
}

// All offers that matter are there. True if the operation goes on otherwise than it began.
bool Region::decide(Running& r) {
  const bool only_root = plan_.what.schedule.collective == Collective::broadcast;
  offers_.resize(static_cast<size_t>(size_));
  int made = 0;
  for (int rank = 0; rank < size_; ++rank) {
    if (only_root && rank != plan_.what.schedule.root) continue;
    Offer& offer = offers_[static_cast<size_t>(rank)];
    std::memcpy(&offer, segment_.flag(rank, r.base).payload(sizeof(Offer)), sizeof(Offer));
    made += offer.made != 0 ? 1 : 0;
  }
  if (made == (only_root ? 1 : size_)) {
    r.way = Way::direct;
    reluctance_ = longest_reluctance_ = 0;
    const Status status = direct_.begin(plan_.what, r.memory, rank_, offers_, *neighbours_);
    if (!status.ok()) {
      contradicted_ = true;
      engine_.fail(channel_, status, true);
    }
    return true;
  }
  r.way = Way::plain;
  if (made == 0) return false;
  longest_reluctance_ = std::clamp(2 * longest_reluctance_, 1, kMostReluctance);
  reluctance_ = longest_reluctance_;
  r.mine = {};
  ++r.base;
  r.step = 0;
  r.reserved = r.copied = false;
  return true;
}

Region::Progress Region::advance_direct(Wait wait) {
  Running& r = *running_;
  const Schedule& what = plan_.what.schedule;
  const uint32_t phase = r.base + 1;
  if (r.step == Direct::kPhases)
    return shown(Direct::needs(what, rank_, r.step), what.root, phase, plan_.fingerprint, wait)
               ? Progress::over
               : Progress::waits;
  if (!all_reached(phase - kDepth + 1, wait)) return Progress::waits;
  if (direct_.writes() && !r.inside && !enter(phase)) return Progress::waits;
  if (!direct_.work()) return Progress::moved;
  if (r.inside) segment_.desk(rank_).inside.store(0, std::memory_order_release);
  r.inside = false;
  direct_.end();
  show(phase, plan_.fingerprint);
  ++r.step;
  return Progress::moved;
}

// False if somebody has withdrawn: then there will be a failure, and this phase is never reached.
bool Region::enter(uint32_t phase) {
  segment_.desk(rank_).inside.store(1);
  running_->inside = true;
  for (int r = 0; r < size_; ++r) {
    if (segment_.desk(r).withdrawn.load() == 0) continue;
    segment_.desk(rank_).inside.store(0, std::memory_order_release);
    running_->inside = false;
    await(r, phase);
    return false;
  }
  return true;
}

bool Region::somebody_inside() const {
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && segment_.desk(r).inside.load() != 0) return true;
  return false;
}

// The operation has failed. Afterwards nobody writes to its buffers.
void Region::withdraw(Running& r) {
  if (r.inside) segment_.desk(rank_).inside.store(0, std::memory_order_release);
  direct_.end();
  if (!r.mine.recv) return;
  segment_.desk(rank_).withdrawn.store(1);
  const Nanoseconds until = engine_.clock().now() + kStaysInside;
  while (somebody_inside()) {
    if (engine_.clock().now() < until) {
      sched_yield();
      continue;
    }
    const Status parted =
        r.mine.recv->part_from_others(static_cast<std::byte*>(r.memory.recv),
                                      plan_.what.schedule.count * size_of(plan_.what.type));
    log_line(LogLevel::warn,
             parted.ok()
                 ? "a rank stays in the middle of a failed operation: its buffer is no "
                   "longer shared with others"
                 : "a rank may still write to a buffer of a failed operation: " + parted.message());
    return;
  }
}

}  // namespace ringfold::region
