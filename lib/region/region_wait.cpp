// How a region waits, and what it does in the turn of its engine.
#include <linux/futex.h>
#include <sched.h>

#include <algorithm>
#include <climits>
#include <thread>
#include <utility>

#include "lib/region/region.h"
#include "lib/region/waiting.h"

namespace ringfold::region {
namespace {

// A wait longer than this is no ordinary one: the engine then looks after failures.
constexpr Nanoseconds kOrdinary = std::chrono::milliseconds(2);
// Turns of a brief wait: less than waking a thread costs.
constexpr int kBriefSpins = 200;
// A sleeper looks around so often.
constexpr Nanoseconds kLookAround = std::chrono::milliseconds(50);

}  // namespace

// ---- waiting ----------------------------------------------------------------------------------

// Wakes the engine's thread to do what nobody here will do.
void Region::look_after() {
  if (pending()) engine_.nudge();
}

// Spins, offers the core to others, then sleeps; but not for ever, since nothing else goes on here
// while we have the turn.
bool Region::wait_for(int rank, uint32_t phase, Wait wait) {
  const int spins =
      wait == Wait::briefly ? std::min(patience_.spins, kBriefSpins) : patience_.spins;
  for (int i = 0; i < spins; ++i) {
    relax();
    if (reached(rank, phase)) return true;
  }
  if (wait == Wait::briefly) return false;
  if (courtesy_.offer(patience_.yields, [&] { return reached(rank, phase); })) return true;
  const Nanoseconds begun = engine_.clock().now();
  bool came = false;
  Nanoseconds now{};
  do {
    sleep(rank, phase, kOrdinary);
    came = reached(rank, phase);
    now = engine_.clock().now();
  } while (!came && !failed() && now < begun + kOrdinary);
  if (attended_.load() == 0) record_->waited(now - begun);  // else it is counted where it waits
  return came;
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

// Whoever keeps this rank waiting may have called something that goes another way: there is no flag
// that could tell. Returns when to ask again.
Nanoseconds Region::ask(const Engine::Question& question, Nanoseconds now) {
  if (contradicted_) return Nanoseconds::max();
  const Nanoseconds called = running_->operation->called;
  Nanoseconds& at = running_->ask_at;
  if (at == Nanoseconds(0)) at = Engine::first_question(called, peers_.size());
  if (now < at) return at;
  at = Engine::next_question(called, now);
  engine_.quiet(channel_, question, peers_[static_cast<size_t>(awaited().rank)]);
  return at;
}

Nanoseconds Region::check_deadline(Nanoseconds now) {
  if (!pending() || failed()) return Nanoseconds::max();
  Engine::Stalled what;
  {
    const Turn turn(turn_);
    if (!turn) return now + kOrdinary;
    if (!running_ || stalled_) return Nanoseconds::max();
    what.question = {running_->seq, plan_.fingerprint, true, running_->operation->beside};
    const Nanoseconds deadline = running_->operation->deadline;
    if (now < deadline) return std::min(deadline, ask(what.question, now));
    stalled_ = true;
    std::string missing;
    const Awaited next = awaited();
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && !reached(r, next.phase))
        missing += (missing.empty() ? "" : ", ") + std::to_string(names_[static_cast<size_t>(r)]);
    const std::string text =
        running_->operation->text() + ": not done at its deadline; waiting in step " +
        std::to_string(running_->step) + " of " +
        std::to_string(running_->way == Way::direct ? Direct::kPhases : running_->moves.phases()) +
        " for rank " + missing;
    what.why = Status(Code::timeout, text);
  }
  engine_.stalled(channel_, what);
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

// One that is taken out of the queue counts twice for a moment, never not at all.
uint32_t Region::called() const {
  const uint32_t waiting = queued_.load();
  return next_seq_.load() + waiting;
}

bool Region::waits_for(int rank) {
  const Turn turn(turn_);
  if (!turn || !running_) return false;
  const Awaited next = awaited();
  return !at_or_after(segment_.flag(next.rank, next.phase).phase.load(), next.phase) &&
         !reached(rank, next.phase);
}

}  // namespace ringfold::region
