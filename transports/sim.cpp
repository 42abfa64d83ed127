#include "transports/sim.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

#include "transports/sim_message.h"

namespace ringfold {
namespace {

Picoseconds rounded(double picoseconds) {
  return std::llround(picoseconds);
}
Picoseconds picoseconds(Nanoseconds time) {
  return time.count() * 1000;
}

}  // namespace

SimNetwork::SimNetwork(int ranks, const SimOptions& options)
    : options_(options), ranks_(static_cast<size_t>(ranks)), random_(options.faults.seed) {
  for (const SimFaults::Loss& loss : options.faults.lost)
    push(picoseconds(loss.when), Kind::loss, static_cast<uint32_t>(loss.rank));
  for (const SimFaults::Stall& stall : options.faults.stalled) {
    push(picoseconds(stall.begin), Kind::stall, static_cast<uint32_t>(stall.rank));
    if (stall.end != Nanoseconds::max())
      push(picoseconds(stall.end), Kind::resume, static_cast<uint32_t>(stall.rank));
  }
}

SimNetwork::~SimNetwork() = default;

// ---- time -------------------------------------------------------------------------------------

void SimNetwork::push(Picoseconds time, Kind kind, uint32_t index) {
  events_.push(time, index << kKindBits | static_cast<uint32_t>(kind));
}

bool SimNetwork::next(Picoseconds until) {
  if (events_.empty() || events_.next_time() > until) return false;
  now_ = events_.next_time();
  do handle(events_.pop());
  while (!events_.empty() && events_.next_time() == now_);
  return true;
}

void SimNetwork::pass_until(Picoseconds time) {
  assert(events_.empty() || events_.next_time() > time);
  now_ = std::max(now_, time);
}

void SimNetwork::handle(uint32_t what) {
  ++events_handled_;
  const uint32_t index = what >> kKindBits;
  const auto rank = static_cast<Peer>(index);
  const auto message = [&] { return &messages_[index / kBlock][index % kBlock]; };
  switch (static_cast<Kind>(what & ((1u << kKindBits) - 1))) {
    case Kind::left:
      return left(message());
    case Kind::arrived:
      return arrived(message());
    case Kind::taken:
      return taken(message());
    case Kind::credit: {
      const Returning r = returning_.take(index);
      return tell(r.to, {News::Kind::credit, r.from, r.comm, r.credit});
    }
    case Kind::added: {
      const Added added = adding_.take(index);
      return tell(added.rank, {News::Kind::done, -1, 0, {}, added.completion});
    }
    case Kind::loss:
      return lose(rank);
    case Kind::notice:
      for (Peer other = 0; other < size(); ++other)
        if (other != rank && alive(other)) tell(other, {News::Kind::lost, rank});
      return;
    case Kind::stall:
      ranks_[at(rank)].stalled = true;
      return;
    case Kind::resume:
      return resume(rank);
  }
}

void SimNetwork::tell(Peer rank, const News& news) {
  ranks_[at(rank)].news.push_back(news);
  wake(rank);
}

void SimNetwork::wake(Peer rank) {
  Rank& r = ranks_[at(rank)];
  if (r.ready || r.stalled) return;
  r.ready = true;
  ready_.push_back(rank);
}

void SimNetwork::resume(Peer rank) {
  ranks_[at(rank)].stalled = false;
  wake(rank);
}

Peer SimNetwork::take_ready() {
  while (next_ready_ != ready_.size()) {
    const Peer rank = ready_[next_ready_++];
    ranks_[at(rank)].ready = false;
    if (!ranks_[at(rank)].stalled) return rank;
  }
  ready_.clear();
  next_ready_ = 0;
  return -1;
}

void SimNetwork::add_up(Peer rank, double seconds, uint64_t bytes, Completion* completion) {
  Rank& r = ranks_[at(rank)];
  const Picoseconds begin = std::max(now_, r.adds_from);
  r.adds_from = begin + rounded(seconds * 1e12);
  push(r.adds_from, Kind::added, adding_.add({rank, completion}));
  if (trace_ != nullptr)
    trace_->push_back({SimSpan::Kind::add, rank, -1, begin, r.adds_from, bytes, 0});
}

// ---- messages ---------------------------------------------------------------------------------

SimMessage* SimNetwork::make_message() {
  if (free_messages_.empty()) {
    const auto first = static_cast<uint32_t>(messages_.size()) * kBlock;
    messages_.push_back(std::make_unique<SimMessage[]>(kBlock));
    for (uint32_t i = kBlock; i-- > 0;) {
      messages_.back()[i].index = first + i;
      free_messages_.push_back(first + i);
    }
  }
  const uint32_t index = free_messages_.back();
  free_messages_.pop_back();
  SimMessage* message = &messages_[index / kBlock][index % kBlock];
  message->used = true;
  message->left = message->revoked = message->stranded = false;
  message->next = nullptr;
  return message;
}

void SimNetwork::release(SimMessage* message) {
  assert(message->used && message->completion == nullptr);
  message->used = false;
  message->copy.reset();
  free_messages_.push_back(message->index);
}

void SimNetwork::each_message(const std::function<void(SimMessage&)>& f) {
  for (auto& block : messages_)
    for (uint32_t i = 0; i < kBlock; ++i)
      if (block[i].used) f(block[i]);
}

SimNetwork::Path SimNetwork::path(Peer from, Peer to) const {
  const Machine& machine = options_.machine;
  const bool local = from / machine.per_host == to / machine.per_host;
  const LinkCost& link = local ? machine.local : machine.remote;
  Path path{link.alpha * 1e12, link.beta * 1e12, local ? size_t{0} : size_t{1}};
  for (const SimFaults::Slow& slow : options_.faults.slow) {
    if (slow.from != from || slow.to != to) continue;
    path.alpha *= slow.factor;
    path.beta *= slow.factor;
  }
  return path;
}

// Into the queue of the sender's port.
void SimNetwork::submit(SimMessage* message) {
  Port& port = ranks_[at(message->from)].ports[path(message->from, message->to).port];
  if (!port.sending) return depart(message);
  (port.first == nullptr ? port.first : port.last->next) = message;
  port.last = message;
}

void SimNetwork::depart(SimMessage* message) {
  const Path p = path(message->from, message->to);
  const Picoseconds busy = rounded(static_cast<double>(message->bytes) * p.beta);
  const Picoseconds leaves = now_ + busy;
  Port& there = ranks_[at(message->to)].ports[p.port];
  Picoseconds late = 0;
  if (const auto most = static_cast<uint64_t>(picoseconds(options_.faults.jitter)); most != 0)
    late = static_cast<Picoseconds>(random_() % (most + 1));
  const Picoseconds begins = std::max(now_ + rounded(p.alpha) + late, there.receives_from);
  there.receives_from = begins + busy;
  ranks_[at(message->from)].ports[p.port].sending = true;
  push(leaves, Kind::left, message->index);
  push(begins + busy, Kind::arrived, message->index);
  if (trace_ == nullptr) return;
  const uint32_t index = message->id.index;
  trace_->push_back(
      {SimSpan::Kind::send, message->from, message->to, now_, leaves, message->bytes, index});
  trace_->push_back({SimSpan::Kind::receive, message->to, message->from, begins, begins + busy,
                     message->bytes, index});
}

// The last byte is on its way; the port takes the next message.
void SimNetwork::left(SimMessage* message) {
  Port& port = ranks_[at(message->from)].ports[path(message->from, message->to).port];
  port.sending = false;
  while (port.first != nullptr && !port.sending) {
    SimMessage* next = port.first;
    port.first = std::exchange(next->next, nullptr);
    if (next->revoked)
      release(next);
    else
      depart(next);
  }
  message->left = true;
  if (message->revoked || options_.rendezvous) return;
  if (message->data != nullptr && message->bytes != 0) {
    message->copy = std::make_unique<std::byte[]>(message->bytes);
    std::memcpy(message->copy.get(), message->data, message->bytes);
    message->data = message->copy.get();
  }
  tell(message->from, {News::Kind::done, message->to, message->id.comm, {}, close(message)});
}

void SimNetwork::arrived(SimMessage* message) {
  if (message->revoked || !alive(message->to)) return take(message);
  tell(message->to, {News::Kind::arrived, message->from, message->id.comm, {}, nullptr, message});
}

void SimNetwork::take(SimMessage* message) {
  if (message->completion == nullptr) return release(message);
  message->stranded = !alive(message->to);  // its sender takes it back when told of the loss
  if (message->stranded) return;
  const Path back = path(message->to, message->from);
  push(now_ + rounded(back.alpha), Kind::taken, message->index);
}

void SimNetwork::taken(SimMessage* message) {
  if (!message->revoked)
    tell(message->from, {News::Kind::done, message->to, message->id.comm, {}, close(message)});
  release(message);
}

void SimNetwork::give_credit(Peer from, Peer to, uint32_t comm, const Credit& credit) {
  if (!alive(from) || !alive(to)) return;
  push(now_ + rounded(path(from, to).alpha), Kind::credit,
       returning_.add({from, to, comm, credit}));
}

Completion* SimNetwork::close(SimMessage* message) {
  --ranks_[at(message->from)].open_sends;
  return std::exchange(message->completion, nullptr);
}

Completion* SimNetwork::withdraw(SimMessage* message) {
  Completion* completion = close(message);
  message->revoked = true;
  if (message->stranded) release(message);
  return completion;
}

// What has not left never will; its endpoint may still say so to the program that plays the rank.
void SimNetwork::lose(Peer rank) {
  if (!alive(rank)) return;
  ranks_[at(rank)].alive = false;
  each_message([&](SimMessage& m) {
    if (m.from != rank || m.completion == nullptr || m.left) return;
    tell(rank, {News::Kind::done, m.to, m.id.comm, {}, withdraw(&m)});
  });
  wake(rank);
  push(now_ + picoseconds(options_.faults.notice), Kind::notice, static_cast<uint32_t>(rank));
}

void SimNetwork::reset(Peer a, Peer b) {
  if (!alive(a) || !alive(b)) return;
  tell(a, {News::Kind::lost, b});
  tell(b, {News::Kind::lost, a});
}

}  // namespace ringfold
