#include "lib/engine/engine.h"

#include <algorithm>
#include <cassert>

#include "lib/engine/matcher.h"

namespace ringfold {
namespace {

// How long data that a peer sent before it left may take to arrive.
constexpr Nanoseconds kGraceLeft = std::chrono::seconds(1);
// How long the goodbye of a peer that has gone may take to arrive.
constexpr Nanoseconds kGraceLost = std::chrono::milliseconds(200);
// How long to sleep while something silent is waited for: ever longer while nothing moves.
constexpr Nanoseconds kShortestNap = std::chrono::microseconds(10);
constexpr Nanoseconds kLongestNap = std::chrono::milliseconds(1);

uint32_t mix(uint32_t hash, uint64_t value) {
  uint64_t h = (hash ^ value) * 0x9e3779b97f4a7c15u;
  h = (h ^ (h >> 32)) * 0xd6e8feb86659fd93u;
  return static_cast<uint32_t>(h ^ (h >> 32));
}

bool reduces(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce ||
         collective == Collective::reduce_scatter;
}

}  // namespace

uint32_t Description::fingerprint() const {
  uint32_t h = mix(
      0x52464c44u,
      static_cast<uint64_t>(schedule.collective) | static_cast<uint64_t>(schedule.algorithm) << 8 |
          static_cast<uint64_t>(type) << 16 | static_cast<uint64_t>(op) << 24 |
          static_cast<uint64_t>(point_to_point) << 32 | static_cast<uint64_t>(on_device) << 33);
  h = mix(h, schedule.count);
  h = mix(h, static_cast<uint64_t>(schedule.root) << 32 | static_cast<uint32_t>(schedule.per_host));
  h = mix(h, schedule.segment << 1 | static_cast<uint64_t>(schedule.cut));
  h = mix(h, piece);
  return stands_for == 0 ? h : mix(h, stands_for);
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
        operation->id.seq = channel.next_seq++;
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
                      size_of(o.what.type));
  next_deadline_ = std::min(next_deadline_, o.deadline);
  running_.push_back(std::move(operation));
}

void Engine::start_waiting(Channel& channel) {
  while (channel.running < kRunning && !channel.waiting.empty()) {
    auto next = std::move(channel.waiting.front());
    channel.waiting.pop_front();
    start(std::move(next));
  }
}

// Takes running_[i] out. The order of running_ does not matter.
void Engine::end(size_t i, const Status& status) {
  auto operation = std::move(running_[i]);
  running_[i] = std::move(running_.back());
  running_.pop_back();
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

bool Engine::advance_all() {
  bool moved = false;
  for (size_t i = 0; i < running_.size();) {
    Operation& operation = *running_[i];
    Execution& execution = *operation.execution;
    if (ready(operation)) {
      moved |= operation.compute->progress();
      if (execution.woken()) moved |= execution.advance();
    }
    if (!execution.status().ok() && operation.channel->failed.ok()) failed_by_itself(operation);
    const bool undecided = !execution.status().ok() && operation.channel->failed.ok();
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

// ---- failure: the one path --------------------------------------------------------------------

bool Engine::pending(const Channel& channel) const {
  if (channel.companion && channel.companion->pending()) return true;
  return !channel.waiting.empty() || std::ranges::any_of(running_, [&](const auto& operation) {
    return operation->channel.get() == &channel;
  });
}

void Engine::fail_channel(Channel& channel, const Status& why, bool tell) {
  if (!channel.failed.ok()) return;
  channel.failed = why;
  channel.mark_failed(why);
  for (auto& operation : running_)
    if (operation->channel.get() == &channel) operation->execution->fail(why);
  for (auto& operation : channel.waiting) finished_.push_back({std::move(operation), why});
  channel.waiting.clear();
  if (channel.companion) channel.companion->fail(why);
  for (Transport* transport : transports_) {
    transport->cancel(channel.id, why);
    transport->cancel(channel.id | kPointToPoint, why);
  }
  if (on_failed && tell) on_failed(channel, why);
  if (channel.family == Channel::kAlone) return;
  for (size_t i = 0; i < channels_.size(); ++i)
    if (channels_[i]->family == channel.family) fail_channel(*channels_[i], why, tell);
}

// An operation met an error: who is to blame, and in which words, may take a moment to find out.
void Engine::failed_by_itself(Operation& operation) {
  const Execution& execution = *operation.execution;
  const Status why(execution.status().code(),
                   operation.text() + ": " + execution.status().message());
  const Peer peer = execution.failed_peer();
  if (why.code() == Code::peer_lost && peer >= 0)
    // It may have left because another rank died: whoever heard of that first says so soon.
    departures_.try_emplace(peer, Departure{clock_.now(), why, false});
  else if (why.code() == Code::mismatch && !operation.what.point_to_point && peer >= 0)
    suspect(*operation.channel, peer, operation.id.seq);
  else
    fail_channel(*operation.channel, why, true);
}

void Engine::suspect(Channel& channel, Peer peer, uint32_t seq) {
  if (!channel.failed.ok() || channel.suspected) return;
  channel.suspected = true;
  if (on_mismatch)
    on_mismatch(channel, peer, seq);
  else
    fail_channel(channel,
                 Status(Code::mismatch, recall(channel, seq) + ", but another rank differs"), true);
}

void Engine::check_deadlines() {
  const Nanoseconds now = clock_.now();
  if (now < next_deadline_) return;
  next_deadline_ = Nanoseconds::max();
  for (auto& operation : running_) {
    if (!operation->channel->failed.ok()) continue;
    if (operation->deadline > now) {
      next_deadline_ = std::min(next_deadline_, operation->deadline);
      continue;
    }
    fail_channel(
        *operation->channel,
        Status(Code::timeout, operation->text() + ": not done at its deadline; waiting at " +
                                  operation->execution->waiting_for()),
        true);
  }
}

// A peer that died fails every communicator it belongs to. One that left in order fails only what
// waits for it, and only after a moment: what it sent before may still be on its way.
void Engine::check_departures() {
  if (departures_.empty()) return;
  const Nanoseconds now = clock_.now();
  for (const auto& [peer, departure] : departures_) {
    if (departure.orderly || now < departure.when + kGraceLost) continue;
    for (size_t i = 0; i < channels_.size(); ++i)
      if (std::ranges::find(channels_[i]->peers, peer) != channels_[i]->peers.end())
        fail_channel(*channels_[i], departure.why, true);
  }
  // What a companion waits for would be there already: memory has no delay.
  for (const auto& channel : channels_) {
    if (!channel->companion || !channel->companion->pending()) continue;
    for (size_t r = 0; r < channel->peers.size(); ++r) {
      const auto gone = departures_.find(channel->peers[r]);
      if (gone == departures_.end() || !gone->second.orderly) continue;
      if (channel->companion->waits_for(static_cast<int>(r)))
        fail_channel(*channel, gone->second.why, true);
    }
  }
  for (auto& operation : running_) {
    const auto gone = std::ranges::find_if(departures_, [&](const auto& entry) {
      const Execution& execution = *operation->execution;
      return entry.second.orderly &&
             (execution.waits_for(entry.first) || execution.failed_peer() == entry.first);
    });
    if (gone == departures_.end())
      operation->starved = Nanoseconds(0);
    else if (operation->starved == Nanoseconds(0))
      operation->starved = now;
    else if (now >= operation->starved + kGraceLeft)
      fail_channel(*operation->channel, gone->second.why, true);
  }
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
      check_deadlines();
      check_departures();
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
  sleep->until = next_deadline_;
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
