#include "lib/comm/work.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "lib/comm/communicator_impl.h"

namespace ringfold {
namespace {

// How long a waiter sleeps before it looks whether it may drive the engine again.
constexpr auto kLookAgain = std::chrono::milliseconds(20);

// A wait so soon after the call is a blocking call: the next one will be, too.
constexpr Nanoseconds kAtOnce = std::chrono::microseconds(20);

thread_local int callback_depth = 0;
// Read in every call, so without a call of the thread library.
#define RINGFOLD_QUICK_TLS thread_local __attribute__((tls_model("initial-exec")))
RINGFOLD_QUICK_TLS bool waits_at_once = false;
RINGFOLD_QUICK_TLS int group_depth = 0;

// What `f` owns ends as part of the callback: it may be the last handle of the communicator.
void call(std::function<void(const Status&)> f, const Status& status) {
  ++callback_depth;
  f(status);
  f = nullptr;
  --callback_depth;
}

// One call that a group holds back: an operation of an engine, or a function.
struct Held {
  std::shared_ptr<Communicator::Impl> communicator;  // first: it waits for the end of the operation
  std::unique_ptr<UserOperation> operation;
  std::shared_ptr<Work::State> state;
  std::function<void()> run;
};

thread_local std::vector<Held> held_back;

// Adds what passes while it lives to the record's waits.
class Waiting {
 public:
  Waiting(std::shared_ptr<record::Record> record, Nanoseconds begun)
      : record_(std::move(record)), begun_(begun) {}
  ~Waiting() {
    if (record_) record_->waited(steady_clock().now() - begun_);
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const std::shared_ptr<record::Record> record_;
  const Nanoseconds begun_;
};

}  // namespace

bool group_open() {
  return group_depth != 0;
}

bool take_waits_at_once() {
  return std::exchange(waits_at_once, false);
}

void will_wait_at_once() {
  waits_at_once = true;
}

bool in_callback() {
  return callback_depth != 0;
}

// ---- the state --------------------------------------------------------------------------------

void Work::State::complete(const Status& why) {
  std::vector<std::function<void(const Status&)>> call_now;
  std::shared_ptr<World> release;  // not under the lock
  std::shared_ptr<region::Region> release_region;
  {
    const std::lock_guard guard(lock);
    status = why;
    call_now.swap(callbacks);
    release.swap(world);
    release_region.swap(region);
    done.store(true, std::memory_order_release);
    finished.notify_all();
  }
  for (auto& f : call_now) call(std::move(f), why);
}

bool Work::State::is_done() {
  if (done.load(std::memory_order_acquire)) return true;
  poll_region();
  if (!expire || steady_clock().now() < deadline) return false;
  expire();
  return done.load(std::memory_order_acquire);
}

// Whoever asks again and again shall see it move.
void Work::State::poll_region() {
  std::shared_ptr<World> keep;
  std::shared_ptr<region::Region> polled;
  {
    const std::lock_guard guard(lock);
    keep = world;
    polled = region;
  }
  if (polled) polled->poll();
}

Status Work::State::wait(Nanoseconds timeout) {
  Clock& clock = steady_clock();
  const Nanoseconds now = clock.now();
  const Nanoseconds until =
      timeout >= Nanoseconds::max() - now ? Nanoseconds::max() : now + timeout;
  std::shared_ptr<World> helped;
  std::shared_ptr<region::Region> worked;
  {
    const std::lock_guard guard(lock);
    helped = world;
    worked = region;
  }
  if (timeout != Nanoseconds(0) && now - std::max(started, returned) < kAtOnce)
    waits_at_once = true;
  if (is_done()) return outcome();
  const Waiting counted(record, now);
  while (!is_done()) {
    const bool drove =
        worked ? worked->wait(done, until) : helped && helped->thread().help(done, until);
    if (done.load(std::memory_order_acquire)) break;
    if (clock.now() >= until)
      return {Code::timeout, "the wait ended before the operation did; it is still running"};
    if (drove) continue;
    std::unique_lock guard(lock);
    finished.wait_for(guard, std::min<Nanoseconds>(until - clock.now(), kLookAgain),
                      [this] { return done.load(std::memory_order_acquire); });
  }
  return outcome();
}

Status Work::State::outcome() {
  const std::lock_guard guard(lock);
  return status;
}

void Work::State::then(std::function<void(const Status&)> f) {
  {
    const std::lock_guard guard(lock);
    if (!done.load(std::memory_order_acquire)) {
      callbacks.push_back(std::move(f));
      return;
    }
  }
  call(std::move(f), status);
}

UserOperation::~UserOperation() {
  execution.reset();
  compute.reset();
  state_.reset();
  pending_->count.fetch_sub(1);  // last: now the communicator may go
}

void UserOperation::completed(const Status& why) noexcept {
  {
    const std::lock_guard guard(state_->lock);
    Report& report = state_->report;
    if (region && direct)
      report = region::Direct::report_of(what.schedule, size_of(what.type), channel->rank,
                                         region->room());
    report.bytes_sent = execution            ? execution->bytes_sent()
                        : region && why.ok() ? report.bytes_model
                                             : 0;
    report.measured_seconds =
        std::chrono::duration<double>((ended != Nanoseconds(0) ? ended : steady_clock().now()) -
                                      state_->started)
            .count();
    if (channel->trace && ended != Nanoseconds(0))
      channel->trace->write({channel->id, id.seq, what.text(), report.transport, state_->started,
                             ended, report.bytes_sent, to_string(why.code()), marks});
  }
  // The slots go back before the waiter runs, so that its next operation finds them.
  execution.reset();
  compute.reset();
  send.reset();
  recv.reset();
  state_->complete(why);
}

// ---- Work -------------------------------------------------------------------------------------

Work::Work(const Status& finished) {
  if (finished.ok()) return;
  state_ = std::make_shared<State>();
  state_->complete(finished);
}

bool Work::done() const {
  return !state_ || state_->is_done();
}

Status Work::wait(Nanoseconds timeout) {
  if (state_) return state_->wait(timeout);
  // An operation that was over before its call returned counts as waited for at once only if it is:
  // who computes first shall have the next one run beside it. Small ones are not worth the look.
  if (timeout != Nanoseconds(0))
    waits_at_once =
        brief_.returned == Nanoseconds(0) || steady_clock().now() - brief_.returned < kAtOnce;
  return {};
}

void Work::then(std::function<void(const Status&)> f) {
  if (state_)
    state_->then(std::move(f));
  else
    call(std::move(f), Status());
}

namespace {

Report report_of(const Work::Brief& brief) {
  Report report;
  if (brief.ranks == 0) return report;
  Schedule what;
  what.collective = brief.collective;
  what.size = brief.ranks;
  what.root = brief.root;
  what.count = brief.count;
  const region::Room room{region::Segment::pool_bytes_for(brief.ranks), brief.crowded};
  report = brief.direct ? region::Direct::report_of(what, brief.element_bytes, brief.rank, room)
                        : region::report_of(what, brief.element_bytes, brief.rank, room);
  report.bytes_sent = report.bytes_model;
  report.measured_seconds = brief.seconds;
  return report;
}

}  // namespace

Report Work::report() const {
  if (!state_) return report_of(brief_);
  const std::lock_guard guard(state_->lock);
  Report report = state_->report;
  if (state_->element_bytes == 0) return report;
  const Schedule& schedule = state_->schedule;
  const size_t segment =
      schedule.segment != 0 ? std::min(schedule.segment, schedule.count) : schedule.count;
  report.collective = schedule.collective;
  report.algorithm = schedule.algorithm;
  report.steps = step_count(schedule);
  report.bus_factor = bus_factor(schedule.collective, schedule.size);
  report.bytes_model = bytes_per_rank(schedule, state_->position, state_->element_bytes);
  report.chunk_bytes = (segment + static_cast<size_t>(schedule.size) - 1) /
                       static_cast<size_t>(schedule.size) * state_->element_bytes;
  return report;
}

// ---- groups -----------------------------------------------------------------------------------

void start_or_group(std::shared_ptr<Communicator::Impl> communicator,
                    std::unique_ptr<UserOperation> operation) {
  if (group_depth == 0 && operation->region) {
    const auto region = operation->region;
    region->submit(std::move(operation), take_waits_at_once());
    return;
  }
  if (group_depth == 0) {
    communicator->note_region_calls(*operation);
    EngineThread::caller_waits(std::exchange(waits_at_once, false));
    communicator->world()->engine().submit(std::move(operation));
    EngineThread::caller_waits(false);
    if (Status status = cuda::launch_workers(); !status.ok()) communicator->fail(status);
    return;
  }
  held_back.push_back({std::move(communicator), std::move(operation), nullptr, nullptr});
}

void run_or_group(std::shared_ptr<Communicator::Impl> communicator,
                  std::shared_ptr<Work::State> state, std::function<void()> run) {
  if (group_depth != 0) {
    held_back.push_back({std::move(communicator), nullptr, std::move(state), std::move(run)});
    return;
  }
  run();
  if (Status status = cuda::launch_workers(); !status.ok()) communicator->fail(status);
}

namespace {

// Done when all of them are, with the first error.
Work done_with(std::span<const Held> calls) {
  struct Counter {
    std::mutex lock;
    size_t left = 0;
    Status first;
  };
  auto all = std::make_shared<Work::State>();
  auto counter = std::make_shared<Counter>();
  counter->left = calls.size() + 1;
  const auto one_done = [all, counter](const Status& status) {
    bool last = false;
    {
      const std::lock_guard guard(counter->lock);
      if (!status.ok() && counter->first.ok()) counter->first = status;
      last = --counter->left == 0;
    }
    if (last) all->complete(counter->first);
  };
  for (const Held& call : calls) {
    if (call.operation) all->world = call.operation->state()->world;
    (call.operation ? call.operation->state() : call.state)->then(one_done);
  }
  one_done(Status());
  return Work(std::move(all));
}

// Ends what was never started.
void refuse(std::vector<Held>& held, const Status& why) {
  for (Held& call : held)
    if (call.operation)
      call.operation->completed(why);
    else
      call.state->complete(why);
}

// Starts what this thread holds back: what goes through regions, then all messages of one world at
// once.
void start_held() {
  std::vector<Held> held;
  held.swap(held_back);
  if (Status status = cuda::can_launch_workers(); !status.ok()) return refuse(held, status);
  for (Held& call : held) {
    if (!call.operation) {
      call.run();
    } else if (const auto region = call.operation->region) {
      region->submit(std::move(call.operation), false);
    }
  }
  std::vector<std::pair<World*, std::vector<std::unique_ptr<Operation>>>> worlds;
  for (Held& call : held) {
    if (!call.operation) continue;  // it runs already
    call.communicator->note_region_calls(*call.operation);
    World* const world = call.communicator->world();
    auto known = std::ranges::find(worlds, world, [](const auto& entry) { return entry.first; });
    if (known == worlds.end())
      known = worlds.emplace(worlds.end(), world, std::vector<std::unique_ptr<Operation>>());
    known->second.push_back(std::move(call.operation));
  }
  for (auto& [world, operations] : worlds) world->engine().submit(std::move(operations));
  if (Status status = cuda::launch_workers(); !status.ok())
    for (const Held& call : held) call.communicator->fail(status);
}

}  // namespace

Group::Group() : first_(held_back.size()) {
  ++group_depth;
}

Group::~Group() {
  if (!open_) return;
  --group_depth;
  std::vector<Held> dropped;
  const auto first = held_back.begin() + static_cast<ptrdiff_t>(std::min(first_, held_back.size()));
  std::move(first, held_back.end(), std::back_inserter(dropped));
  held_back.erase(first, held_back.end());
  const Status why(Code::aborted, "the group was dropped without submit(): nothing was started");
  refuse(dropped, why);
}

Work Group::submit() {
  if (!open_) return Work(Status(Code::invalid_argument, "this group was submitted already"));
  open_ = false;
  Work all = done_with(std::span(held_back).subspan(std::min(first_, held_back.size())));
  if (--group_depth == 0) start_held();
  return all;
}

}  // namespace ringfold
