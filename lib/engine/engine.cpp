#include "lib/engine/engine.h"

#include <algorithm>
#include <cassert>

#include "lib/engine/matcher.h"

namespace ringfold {
namespace {

// How long to sleep while something silent is waited for: ever longer while nothing moves.
constexpr Nanoseconds kShortestNap = std::chrono::microseconds(10);
constexpr Nanoseconds kLongestNap = std::chrono::milliseconds(1);

bool reduces(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce ||
         collective == Collective::reduce_scatter;
}

}  // namespace

// Every field has an odd factor of its own, so two that differ in one are never the same before the
// last step; and nothing waits for another multiplication, since each call by messages pays for it.
uint32_t Description::fingerprint() const {
  const uint64_t kind =
      static_cast<uint64_t>(schedule.collective) | static_cast<uint64_t>(schedule.algorithm) << 8 |
      static_cast<uint64_t>(type) << 16 | static_cast<uint64_t>(op) << 24 |
      static_cast<uint64_t>(point_to_point) << 32 | static_cast<uint64_t>(on_device) << 33;
  const uint64_t where =
      static_cast<uint64_t>(schedule.root) << 32 | static_cast<uint32_t>(schedule.per_host);
  const uint64_t cut = schedule.segment << 1 | static_cast<uint64_t>(schedule.cut);
  uint64_t h = kind * 0x9e3779b97f4a7c15u + schedule.count * 0xc2b2ae3d27d4eb4fu +
               where * 0x165667b19e3779f9u + cut * 0x85ebca77c2b2ae63u +
               piece * 0x27d4eb2f165667c5u + stands_for * 0xff51afd7ed558ccdu +
               part * 0xc4ceb9fe1a85ec53u;
  h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
  return static_cast<uint32_t>(h ^ h >> 32);
}

std::string Description::text() const {
  if (stands_for != 0)
    return "all_reduce " + std::string(name(type)) + " " + std::string(name(op)) + " of " +
           std::to_string(stands_for) + " elements (host by host)";
  std::string text = point_to_point ? "message" : std::string(name(schedule.collective));
  text += " " + std::string(name(type));
  if (!point_to_point && reduces(schedule.collective)) text += " " + std::string(name(op));
  text += " of " + std::to_string(schedule.count) + " elements";
  if (on_device) text += " on devices";
  if (!point_to_point && has_root(schedule.collective))
    text += ", root " + std::to_string(schedule.root);
  if (!point_to_point)
    text += " (" + std::string(name(schedule.algorithm)) + ", pieces of " +
            std::to_string(piece * size_of(type)) + " bytes)";
  return text;
}

int Operation::rank_at(int at) const {
  if (at < 0 || peers.empty()) return at;
  const auto& ranks = channel->peers;
  const auto rank = std::ranges::find(ranks, peers[static_cast<size_t>(at)]);
  return static_cast<int>(rank - ranks.begin());
}

record::What Description::recorded() const {
  record::What what;
  what.collective = schedule.collective;
  what.algorithm = schedule.algorithm;
  what.type = type;
  what.op = op;
  what.whom = schedule.root;
  what.count = schedule.count;
  if (stands_for != 0) {  // in the words of the user
    what.collective = Collective::all_reduce;
    what.algorithm = Algorithm::two_level;
    what.whom = 0;
    what.count = stands_for;
  }
  return what;
}

std::string Operation::text() const {
  std::string text = "rank " + std::to_string(channel->named(channel->rank));
  if (what.point_to_point)
    return text + (position == 0 ? ", send to rank " : ", receive from rank ") +
           std::to_string(partner) + " number " + std::to_string(id.seq) + ": " + what.text();
  return text + ", operation " + std::to_string(id.seq) + ": " + what.text();
}

Engine::~Engine() {
  assert(running_.empty());
}

void Engine::add(Transport& transport) {
  transports_.push_back(&transport);
  transport.on_lost = [this](Peer peer, const Status& why) { lost(peer, why); };
  transport.on_left = [this](Peer peer) { left(peer); };
  transport.on_mismatch = [this](Peer peer, const MessageId& theirs, uint32_t) {
    if (const auto channel = find(theirs.comm)) suspect(*channel, peer, theirs.seq);
  };
}

void Engine::add(Source& source) {
  sources_.push_back(&source);
}

// ---- requests from any thread -----------------------------------------------------------------

void Engine::request(Request request) {
  {
    const std::lock_guard lock(queue_lock_);
    queue_.push_back(std::move(request));
    unfinished_.fetch_add(1, std::memory_order_release);
    queued_.store(true, std::memory_order_release);
  }
  if (on_request) on_request();
}

void Engine::open(const std::shared_ptr<Channel>& channel) {
  channel->next_to.assign(channel->peers.size(), 0);
  channel->next_from.assign(channel->peers.size(), 0);
  channel->gone_to.assign(channel->peers.size(), 0);
  Request r;
  r.kind = Request::Kind::open;
  r.channel = channel;
  request(std::move(r));
}

void Engine::close(const std::shared_ptr<Channel>& channel) {
  Request r;
  r.kind = Request::Kind::close;
  r.channel = channel;
  request(std::move(r));
}

void Engine::submit(std::unique_ptr<Operation> operation) {
  std::vector<std::unique_ptr<Operation>> one;
  one.push_back(std::move(operation));
  submit(std::move(one));
}

void Engine::submit(std::vector<std::unique_ptr<Operation>> operations) {
  {
    const std::lock_guard lock(queue_lock_);
    for (auto& operation : operations) {
      Channel& channel = *operation->channel;
      const auto partner = static_cast<size_t>(operation->partner);
      operation->id.comm = channel.id;
      operation->id.fingerprint = operation->what.fingerprint();
      if (operation->what.point_to_point) {
        operation->id.comm |= kPointToPoint;
        operation->id.seq =
            operation->position == 0 ? channel.next_to[partner]++ : channel.next_from[partner]++;
      } else {
        operation->id.seq = channel.called++;
      }
      if (channel.record) {
        auto& called = channel.record->messages().called;
        called.store(called.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      }
      Request r;
      r.operation = std::move(operation);
      queue_.push_back(std::move(r));
      unfinished_.fetch_add(1, std::memory_order_release);
    }
    queued_.store(true, std::memory_order_release);
  }
  if (on_request) on_request();
}

void Engine::fail(uint32_t channel, const Status& why, bool tell) {
  Request r;
  r.kind = Request::Kind::fail;
  r.id = channel;
  r.why = why;
  r.tell = tell;
  request(std::move(r));
}

void Engine::left(Peer peer) {
  Request r;
  r.kind = Request::Kind::left;
  r.peer = peer;
  request(std::move(r));
}

void Engine::lost(Peer peer, const Status& why) {
  Request r;
  r.kind = Request::Kind::lost;
  r.peer = peer;
  r.why = why;
  request(std::move(r));
}

void Engine::accompany(const std::shared_ptr<Channel>& channel,
                       std::shared_ptr<Companion> companion) {
  Request r;
  r.kind = Request::Kind::accompany;
  r.channel = channel;
  r.companion = std::move(companion);
  request(std::move(r));
}

void Engine::stalled(uint32_t channel, const Stalled& what) {
  Request r;
  r.kind = Request::Kind::stalled;
  r.id = channel;
  r.stalled = what;
  request(std::move(r));
}

void Engine::contradicted(uint32_t channel, Peer peer, uint32_t seq) {
  Request r;
  r.kind = Request::Kind::contradicted;
  r.id = channel;
  r.seq = seq;
  r.peer = peer;
  request(std::move(r));
}

void Engine::finish(std::unique_ptr<Operation> operation, const Status& status) {
  finished_.push_back({std::move(operation), status});
}

bool Engine::take_requests() {
  if (!queued_.load(std::memory_order_acquire)) return false;
  {
    const std::lock_guard lock(queue_lock_);
    taken_.swap(queue_);
    queued_.store(false, std::memory_order_release);
  }
  for (Request& r : taken_) {
    const bool operation = r.kind == Request::Kind::submit;
    handle(r);
    if (!operation) unfinished_.fetch_sub(1, std::memory_order_release);
  }
  taken_.clear();
  return true;
}

void Engine::handle(Request& r) {
  switch (r.kind) {
    case Request::Kind::submit:
      if (!r.operation->channel->failed.ok()) {
        const Status why = r.operation->channel->failed;
        finished_.push_back({std::move(r.operation), why});
      } else if (r.operation->what.point_to_point || r.operation->channel->running < kRunning) {
        start(std::move(r.operation));
      } else {
        Channel& channel = *r.operation->channel;
        channel.waiting.push_back(std::move(r.operation));
      }
      return;
    case Request::Kind::fail:
      if (const auto channel = find(r.id))
        fail_channel(*channel, r.why, r.tell);
      else if (!closed_.contains(r.id))
        unborn_.try_emplace(r.id, r.why);
      return;
    case Request::Kind::open:
      channels_.push_back(r.channel);
      if (const auto early = unborn_.find(r.channel->id); early != unborn_.end()) {
        fail_channel(*r.channel, early->second, false);
        unborn_.erase(early);
      }
      return;
    case Request::Kind::close:
      // Whoever gives up while something is under way leaves the others waiting: they are told.
      r.channel->family = Channel::kAlone;
      r.channel->closing = true;
      fail_channel(
          *r.channel,
          Status(Code::aborted, "rank " + std::to_string(r.channel->named(r.channel->rank)) +
                                    ": the communicator was destroyed"),
          pending(*r.channel));
      std::erase(channels_, r.channel);
      closed_.insert(r.channel->id);
      return;
    case Request::Kind::left: {
      Departure& departure = departures_[r.peer];
      departure = {clock_.now(),
                   Status(Code::peer_lost, "rank " + std::to_string(r.peer) +
                                               " (of the world) has left while it was needed"),
                   true};
      return;
    }
    case Request::Kind::accompany:
      r.channel->companion = std::move(r.companion);
      if (!r.channel->failed.ok()) r.channel->companion->fail(r.channel->failed);
      return;
    case Request::Kind::contradicted:
      if (const auto channel = find(r.id)) suspect(*channel, r.peer, r.seq);
      return;
    case Request::Kind::stalled:
      if (const auto channel = find(r.id)) stall(*channel, r.stalled);
      return;
    case Request::Kind::lost:
      departures_.try_emplace(r.peer, Departure{clock_.now(), r.why, false});
      return;
  }
}

std::shared_ptr<Channel> Engine::find(uint32_t id) const {
  for (const auto& channel : channels_)
    if (channel->id == (id & ~kPointToPoint)) return channel;
  return nullptr;
}

std::string Engine::recall(const Channel& channel, uint32_t seq) {
  if (channel.companion) return channel.companion->recall(seq);
  const Channel::Past& past = channel.history[seq % channel.history.size()];
  const std::string who = "rank " + std::to_string(channel.named(channel.rank));
  if (past.seq != seq) return who + " has not called operation " + std::to_string(seq);
  return who + " called " + past.what.text() + " as operation " + std::to_string(seq);
}

// ---- operations -------------------------------------------------------------------------------

void Engine::start(std::unique_ptr<Operation> operation) {
  Channel& channel = *operation->channel;
  Operation& o = *operation;
  if (!o.what.point_to_point) {
    ++channel.running;
    channel.history[o.id.seq % channel.history.size()] = {o.id.seq, o.what};
    for (Transport* transport : transports_) transport->open(o.id.comm, o.id.seq, o.id.fingerprint);
  }
  const bool own = !o.transports.empty();
  const Execution::Route route{own ? o.transports : channel.transports,
                               own ? o.peers : channel.peers};
  o.execution.emplace(o.what.schedule, o.position, o.id, route, *o.compute, o.what.piece,
                      size_of(o.what.type), channel.verify && !o.what.on_device);
  if (channel.record) {
    record::What what = o.what.recorded();
    what.fingerprint = o.id.fingerprint;
    what.steps = o.execution->steps();
    if ((o.id.comm & kCapturedChannel) != 0 && !o.what.point_to_point)
      what.kind = record::Kind::captured;
    if (o.what.point_to_point) {
      what.kind = o.position == 0 ? record::Kind::send : record::Kind::receive;
      what.whom = o.partner;
    }
    o.entry = &record::begin(channel.record->messages(), what, o.id.seq, record::State::running,
                             o.called);
  }
  next_deadline_ = std::min(next_deadline_, o.deadline);
  if (on_quiet && !o.what.point_to_point) {
    o.quiet_at = first_question(o.called, channel.peers.size());
    next_quiet_ = std::min(next_quiet_, o.quiet_at);
  }
  running_.push_back(std::move(operation));
}

void Engine::start_waiting(Channel& channel) {
  while (channel.running < kRunning && !channel.waiting.empty()) {
    auto next = std::move(channel.waiting.front());
    channel.waiting.pop_front();
    start(std::move(next));
  }
}

// Where it stands, for whoever looks from outside.
void Engine::note_progress(Operation& operation) {
  if (operation.entry == nullptr) return;
  const Execution::Awaited next = operation.execution->awaited();
  if (operation.channel->trace) operation.mark(next.step, steady_clock().now());
  record::progress(*operation.entry, next.step, operation.execution->steps());
  const auto whom = static_cast<uint32_t>(operation.rank_at(next.position) + 1);
  record::put(operation.entry->awaited, whom | (next.sends ? 0x80000000u : 0u));
}

// Takes running_[i] out. The order of running_ does not matter.
void Engine::end(size_t i, const Status& status) {
  auto operation = std::move(running_[i]);
  operation->ended = clock_.now();
  if (operation->entry != nullptr) {
    record::Lane& lane = operation->channel->record->messages();
    record::add(lane.sent, operation->execution->bytes_sent());
    record::add(lane.received, operation->execution->bytes_received());
    record::end(lane, *operation->entry, status.ok(), operation->ended);
  }
  running_[i] = std::move(running_.back());
  running_.pop_back();
  if (operation->what.point_to_point && operation->position == 0)
    ++operation->channel->gone_to[static_cast<size_t>(operation->partner)];
  if (!operation->what.point_to_point) {
    --operation->channel->running;
    for (Transport* transport : transports_)
      transport->finish(operation->id.comm, operation->id.seq);
  }
  finished_.push_back({std::move(operation), status});
}

// Whether its memory may be touched; from then on its time runs.
bool Engine::ready(Operation& operation) {
  if (operation.ready || !operation.compute->ready()) return operation.ready;
  operation.ready = true;
  if (operation.patience != Nanoseconds(0)) {
    const Nanoseconds now = clock_.now();
    operation.deadline = operation.patience >= Nanoseconds::max() - now ? Nanoseconds::max()
                                                                        : now + operation.patience;
    next_deadline_ = std::min(next_deadline_, operation.deadline);
  }
  return true;
}

// Messages to one rank go one after another, as it takes them: one that is sent in pieces must not
// wait for credit that a later one has used up.
bool Engine::has_its_turn(const Operation& operation) {
  if (!operation.what.point_to_point || operation.position != 0) return true;
  return operation.channel->gone_to[static_cast<size_t>(operation.partner)] == operation.id.seq;
}

bool Engine::advance_all() {
  bool moved = false;
  for (size_t i = 0; i < running_.size();) {
    Operation& operation = *running_[i];
    Execution& execution = *operation.execution;
    if (has_its_turn(operation) && ready(operation)) {
      moved |= operation.compute->progress();
      if (execution.woken() && execution.advance()) {
        moved = true;
        note_progress(operation);
      }
    }
    const Channel& its = *operation.channel;
    if (!execution.status().ok() && its.failed.ok()) failed_by_itself(operation);
    // Nothing of a channel is over any more while the words for its failure are being found.
    const bool undecided =
        its.failed.ok() &&
        (!execution.status().ok() || (its.suspected >= 0 && !operation.what.point_to_point));
    if (!execution.finished() || undecided) {
      ++i;
      continue;
    }
    const auto channel = operation.channel;
    end(i, channel->failed.ok() ? Status() : channel->failed);
    start_waiting(*channel);
    moved = true;
  }
  return moved;
}

// ---- the turn ---------------------------------------------------------------------------------

bool Engine::poll() {
  std::vector<Finished> finished;
  bool moved = false;
  {
    const std::unique_lock turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    moved = take_requests();
    for (Transport* transport : transports_) moved |= transport->progress();
    for (Source* source : sources_) moved |= source->progress();
    moved |= advance_all();
    if (!moved) {
      failed_any_ = false;
      check_deadlines();
      check_quiet(clock_.now());
      check_departures();
      moved = failed_any_;  // what failed is taken out in the next turn: nobody may sleep before
    }
    if (moved) nap_ = Nanoseconds(0);
    finished.swap(finished_);
  }
  for (Finished& f : finished) {
    f.operation->completed(f.status);
    f.operation.reset();
    unfinished_.fetch_sub(1, std::memory_order_release);
  }
  return moved || !finished.empty();
}

void Engine::arm(Sleep* sleep) {
  sleep->fds.clear();
  sleep->now = false;
  const std::unique_lock turn(turn_, std::try_to_lock);
  if (!turn.owns_lock() || queued_.load(std::memory_order_acquire)) {
    sleep->now = true;
    return;
  }
  const auto add = [&](int fd) {
    if (fd < 0)
      sleep->now = true;
    else
      sleep->fds.push_back(fd);
  };
  for (Transport* transport : transports_) add(transport->arm());
  for (Source* source : sources_) add(source->arm());
  sleep->until = std::min(next_deadline_, next_quiet_);
  for (const Source* source : sources_) sleep->until = std::min(sleep->until, source->deadline());
  const auto silent = [](const auto& operation) { return operation->compute->silent(); };
  if (std::ranges::any_of(running_, silent)) {
    nap_ = std::clamp(2 * nap_, kShortestNap, kLongestNap);
    sleep->until = std::min(sleep->until, clock_.now() + nap_);
  }
  if (!departures_.empty()) {
    const Nanoseconds now = clock_.now();
    for (const auto& [peer, departure] : departures_) {
      const Nanoseconds when = departure.when + (departure.orderly ? kGraceLeft : kGraceLost);
      if (when > now) sleep->until = std::min(sleep->until, when);
    }
    if (busy()) sleep->until = std::min(sleep->until, now + kGraceLost);
  }
}

}  // namespace ringfold
