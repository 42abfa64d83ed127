// The endpoint of a rank: lib/engine/transport.h over an inbox.
#include <fmt/core.h>

#include <cassert>
#include <cstring>
#include <random>

#include "lib/engine/matcher.h"
#include "transports/loopback_inbox.h"
#include "transports/outcome.h"
#include "transports/transports.h"

namespace ringfold {
namespace {

using namespace loopback;

Status gone(Peer peer) {
  return {Code::peer_lost, fmt::format("rank {} is gone", peer)};
}

class Loopback final : public Transport {
 public:
  Loopback(std::shared_ptr<LoopbackHub> hub, Peer me, Clock& clock, Faults faults)
      : hub_(std::move(hub)),
        me_(me),
        inbox_(hub_->join(me)),
        clock_(clock),
        faults_(faults),
        random_(faults.seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(me)) {
    neighbours_[me].inbox = inbox_;
  }
  ~Loopback() override;

  [[nodiscard]] const char* name() const override { return "loopback"; }
  [[nodiscard]] bool reaches(MemoryKind kind) const override { return kind == MemoryKind::host; }
  [[nodiscard]] std::string address() const override;
  [[nodiscard]] Status connect(Peer peer, std::string_view address) override;
  void send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) override;
  void recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
            Completion* completion) override;
  void give_back(Completion* completion) override;
  void open(uint32_t comm, uint32_t seq, uint32_t fingerprint) override;
  void finish(uint32_t comm, uint32_t seq) override;
  void cancel(uint32_t comm, const Status& why) override;
  bool progress() override;
  int arm() override;
  [[nodiscard]] bool flushed() const override { return outstanding_.empty(); }

 private:
  struct Neighbour {
    std::shared_ptr<LoopbackInbox> inbox;
    bool lost = false;
  };
  struct Order {  // nothing from a peer may be delivered before these
    Nanoseconds latest{0};
    std::map<uint32_t, Nanoseconds> latest_of_comm;
  };
  struct Met {  // a receive that found its message waiting
    Message* message;
    Matcher::Posted posted;
  };

  bool take_in();
  bool bury();
  Nanoseconds due(Peer from, const uint32_t* comm);
  void handle(const Event& event);
  void arrive(Message* message);
  void deliver(Message* message, const Matcher::Posted& posted);
  void refuse(Message* message, Completion* completion, const Status& why);
  void hand_back(Message* message);
  void returned(Message* message);
  void lose(Peer peer);
  void forget(Message* message);
  template <class Which>
  void withdraw(Which which, bool nobody_reads, const Status& why);
  // Why nothing can be sent to or received from this peer; ok if it can.
  [[nodiscard]] Status refusal(Peer peer, uint32_t comm) const;

  const std::shared_ptr<LoopbackHub> hub_;
  const Peer me_;
  const std::shared_ptr<LoopbackInbox> inbox_;
  Clock& clock_;
  const Faults faults_;
  std::mt19937_64 random_;
  std::map<Peer, Neighbour> neighbours_;
  std::map<Peer, Order> order_;
  std::map<uint32_t, Status> cancelled_;
  Matcher matcher_;
  Deferred deferred_;
  std::vector<std::pair<Peer, MessageId>> contradictions_;  // found by open()
  std::deque<Met> met_;
  std::deque<Event> events_;                   // taken from the inbox
  std::multimap<Nanoseconds, Event> delayed_;  // equal times keep their order
  std::vector<Message*> outstanding_;          // sent and not returned
};

Loopback::~Loopback() {
  hub_->leave(me_);
  take_in();
  {
    const std::lock_guard lock(inbox_->mutex);
    inbox_->closed = true;
  }
  take_in();
  for (auto& [time, event] : delayed_) events_.push_back(event);
  for (const Event& event : events_) {
    if (const auto* arrived = std::get_if<Arrived>(&event)) arrived->message->release();
    if (const auto* back = std::get_if<Returned>(&event)) back->message->release();
  }
  for (const Met& met : met_) met.message->release();
  matcher_.drop_early(
      [](const Matcher::Early& early) { static_cast<Message*>(early.message)->release(); });
  for (Message* message : outstanding_) {
    message->claim(Message::State::revoked);
    message->release();
  }
}

std::string Loopback::address() const {
  return fmt::format("loopback {}", me_);
}

Status Loopback::connect(Peer peer, std::string_view address) {
  if (address != fmt::format("loopback {}", peer))
    return {Code::invalid_argument,
            fmt::format("address of rank {}: expected \"loopback {}\", given \"{}\"", peer, peer,
                        address)};
  neighbours_[peer].inbox = hub_->join(peer);
  return {};
}

Status Loopback::refusal(Peer peer, uint32_t comm) const {
  if (!cancelled_.empty()) {
    const auto cancelled = cancelled_.find(comm);
    if (cancelled != cancelled_.end()) return cancelled->second;
  }
  const auto neighbour = neighbours_.find(peer);
  if (neighbour == neighbours_.end())
    return {Code::invalid_argument, fmt::format("rank {} was never connected", peer)};
  if (neighbour->second.lost) return gone(peer);
  return {};
}

void Loopback::send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) {
  if (inbox_->dead) return;
  if (Status why = refusal(peer, id.comm); !why.ok())
    return deferred_.add(id.comm, completion, std::move(why));
  auto* message = new Message;
  message->from = me_;
  message->to = peer;
  message->id = id;
  message->data = buffer.data;
  message->bytes = buffer.bytes;
  message->completion = completion;
  message->place = outstanding_.size();
  outstanding_.push_back(message);
  count_sent(buffer.bytes);
  if (inbox_->corrupt.exchange(false)) message->id.fingerprint ^= 1;
  if (inbox_->mute || !neighbours_[peer].inbox->push(Arrived{message})) message->release();
}

void Loopback::recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
                    Completion* completion) {
  if (inbox_->dead) return;
  const Matcher::Posted posted{buffer, may_lend, completion, id.fingerprint};
  Status why = refusal(peer, id.comm);
  if (!why.ok() && why.code() != Code::peer_lost)
    return deferred_.add(id.comm, completion, std::move(why));
  if (why.code() == Code::peer_lost && !matcher_.has_early(peer, id))
    return deferred_.add(id.comm, completion, std::move(why));
  if (const auto early = matcher_.post(peer, id, posted))
    met_.push_back({static_cast<Message*>(early->message), posted});
}

void Loopback::give_back(Completion* completion) {
  auto* message = static_cast<Message*>(std::exchange(completion->lender, nullptr));
  assert(message != nullptr);
  hand_back(message);
}

void Loopback::open(uint32_t comm, uint32_t seq, uint32_t fingerprint) {
  matcher_.open(comm, seq, fingerprint);
  matcher_.contradictions(comm, seq, fingerprint, [&](Peer peer, const MessageId& theirs) {
    contradictions_.emplace_back(peer, theirs);
  });
}

void Loopback::finish(uint32_t comm, uint32_t seq) {
  matcher_.finish(comm, seq, [&](Peer, const MessageId&, const Matcher::Early& early) {
    hand_back(static_cast<Message*>(early.message));
  });
}

void Loopback::cancel(uint32_t comm, const Status& why) {
  cancelled_.emplace(comm, why);
  std::vector<Completion*> receives;
  std::deque<Met> others;
  for (const Met& met : std::exchange(met_, {})) {
    if (met.posted.completion != nullptr && met.message->id.comm == comm) {
      receives.push_back(met.posted.completion);
      hand_back(met.message);
    } else {
      met_.push_back(met);
    }
  }
  matcher_.cancel(
      comm,
      [&](Peer, const MessageId&, const Matcher::Posted& posted) {
        receives.push_back(posted.completion);
      },
      [&](Peer, const MessageId&, const Matcher::Early& early) {
        hand_back(static_cast<Message*>(early.message));
      });
  for (Completion* completion : receives) completion->done(completion, why);
  withdraw([&](const Message& m) { return m.id.comm == comm; }, false, why);
  deferred_.run(comm);
}

// Takes back what was sent and not read yet. What is being read comes back by itself, unless the
// reader is gone.
template <class Which>
void Loopback::withdraw(Which which, bool nobody_reads, const Status& why) {
  std::vector<Completion*> completed;
  for (size_t i = outstanding_.size(); i-- > 0;) {
    Message* message = outstanding_[i];
    if (!which(*message) || message->completion == nullptr) continue;
    const bool revoked = message->claim(Message::State::revoked);
    if (revoked || (nobody_reads && message->state == Message::State::lent)) {
      completed.push_back(message->completion);
      forget(message);
    } else {
      message->why = why;
    }
  }
  for (auto it = completed.rbegin(); it != completed.rend(); ++it) (*it)->done(*it, why);
}

void Loopback::forget(Message* message) {
  message->completion = nullptr;
  outstanding_[message->place] = outstanding_.back();
  outstanding_[message->place]->place = message->place;
  outstanding_.pop_back();
  message->release();
}

// Back to the sender; this side no longer owns it.
void Loopback::hand_back(Message* message) {
  const auto known = neighbours_.find(message->from);
  // A peer may send before it is connected here.
  const auto sender = known != neighbours_.end() ? known->second.inbox : hub_->find(message->from);
  // The receiver's ownership travels along, so that the sender may look at it.
  if (!sender || !sender->push(Returned{message})) message->release();
}

void Loopback::returned(Message* message) {
  if (Completion* completion = message->completion) {
    const Status why = message->why;
    forget(message);
    completion->done(completion, why);
  }
  message->release();
}

bool Loopback::progress() {
  if (inbox_->dead) return bury();
  bool moved = deferred_.run();
  for (const auto& [peer, theirs] : std::exchange(contradictions_, {})) {
    moved = true;
    if (on_mismatch) on_mismatch(peer, theirs, matcher_.expected(theirs));
  }
  for (size_t now = met_.size(); now != 0 && !met_.empty(); --now, moved = true) {
    const Met met = met_.front();
    met_.pop_front();
    deliver(met.message, met.posted);
  }
  moved |= take_in();
  while (!delayed_.empty() && delayed_.begin()->first <= clock_.now()) {
    events_.push_back(delayed_.extract(delayed_.begin()).mapped());
  }
  for (; !events_.empty(); moved = true) {
    const Event event = events_.front();
    events_.pop_front();
    handle(event);
  }
  return moved;
}

// A dead rank does nothing, but whoever plays it may clean up after it.
bool Loopback::bury() {
  const bool moved = take_in();
  for (const Event& event : std::exchange(events_, {})) {
    if (const auto* back = std::get_if<Returned>(&event)) returned(back->message);
    if (const auto* arrived = std::get_if<Arrived>(&event)) arrived->message->release();
  }
  return moved;
}

// Moves the inbox to where this thread alone works on it.
bool Loopback::take_in() {
  std::deque<Event> fresh;
  if (!inbox_->news.load(std::memory_order_acquire)) return false;
  {
    const std::lock_guard lock(inbox_->mutex);
    fresh.swap(inbox_->events);
    inbox_->news.store(false, std::memory_order_relaxed);
  }
  for (const Event& event : fresh) {
    const auto* arrived = std::get_if<Arrived>(&event);
    const auto* lost = std::get_if<Lost>(&event);
    if (faults_.max_delay == Nanoseconds{0} || (arrived == nullptr && lost == nullptr))
      events_.push_back(event);
    else if (arrived != nullptr)
      delayed_.emplace(due(arrived->message->from, &arrived->message->id.comm), event);
    else
      delayed_.emplace(due(lost->peer, nullptr), event);
  }
  return !fresh.empty();
}

// When an arrival is delivered; without `comm` it comes after all else from that peer.
Nanoseconds Loopback::due(Peer from, const uint32_t* comm) {
  const auto late = random_() % static_cast<uint64_t>(faults_.max_delay.count() + 1);
  Nanoseconds time = clock_.now() + Nanoseconds(late);
  if (!faults_.reorder) {
    if (!delayed_.empty()) time = std::max(time, delayed_.rbegin()->first);
    return time;
  }
  Order& order = order_[from];
  if (comm != nullptr) {
    Nanoseconds& floor = order.latest_of_comm[*comm];
    floor = time = std::max(time, floor);
  } else {
    time = std::max(time, order.latest);
  }
  order.latest = std::max(order.latest, time);
  return time;
}

void Loopback::handle(const Event& event) {
  if (const auto* arrived = std::get_if<Arrived>(&event))
    arrive(arrived->message);
  else if (const auto* back = std::get_if<Returned>(&event))
    returned(back->message);
  else
    lose(std::get<Lost>(event).peer);
}

void Loopback::arrive(Message* message) {
  if (message->state == Message::State::revoked) return message->release();
  Matcher::Posted posted;
  switch (matcher_.arrive(message->from, message->id, &posted)) {
    case Matcher::Verdict::matched:
      return deliver(message, posted);
    case Matcher::Verdict::early:
      return matcher_.keep(message->from, message->id,
                           {message->id.fingerprint, message->bytes, message});
    case Matcher::Verdict::drop:
      return hand_back(message);
    case Matcher::Verdict::mismatch: {
      const Peer from = message->from;
      const MessageId theirs = message->id;
      const uint32_t expected =
          posted.completion != nullptr ? posted.fingerprint : matcher_.expected(theirs);
      refuse(message, posted.completion, different_operation(from, theirs, expected));
      if (on_mismatch) on_mismatch(from, theirs, expected);
      return;
    }
  }
}

void Loopback::deliver(Message* message, const Matcher::Posted& posted) {
  Completion* completion = posted.completion;
  if (message->id.fingerprint != posted.fingerprint)
    return refuse(message, completion,
                  different_operation(message->from, message->id, posted.fingerprint));
  if (message->bytes != posted.buffer.bytes)
    return refuse(
        message, completion,
        different_length(message->from, message->id, message->bytes, posted.buffer.bytes));
  const bool lend = posted.may_lend && message->bytes != 0;
  if (!message->claim(lend ? Message::State::lent : Message::State::copying)) {
    // Taken back by its sender: as if it had never come.
    const Peer from = message->from;
    const MessageId id = {message->id.comm, message->id.seq, message->id.index, posted.fingerprint};
    message->release();
    return recv(from, id, posted.buffer, posted.may_lend, completion);
  }
  if (lend) {
    completion->view = message->data;
    completion->lender = message;
  } else {
    if (message->bytes != 0) std::memcpy(posted.buffer.data, message->data, message->bytes);
    completion->view = posted.buffer.data;
    hand_back(message);
  }
  completion->done(completion, {});
}

void Loopback::refuse(Message* message, Completion* completion, const Status& why) {
  hand_back(message);
  if (completion != nullptr) completion->done(completion, why);
}

void Loopback::lose(Peer peer) {
  const auto found = neighbours_.find(peer);
  if (found == neighbours_.end() || std::exchange(found->second.lost, true)) return;
  const Status why = gone(peer);
  std::vector<Completion*> receives;
  matcher_.lose(peer, [&](Peer, const MessageId&, const Matcher::Posted& posted) {
    receives.push_back(posted.completion);
  });
  for (Completion* completion : receives) completion->done(completion, why);
  withdraw([&](const Message& m) { return m.to == peer; }, true, why);
  if (on_lost) on_lost(peer, why);
}

int Loopback::arm() {
  if (!deferred_.empty() || !contradictions_.empty() || !met_.empty() || !delayed_.empty())
    return -1;
  const std::lock_guard lock(inbox_->mutex);
  eventfd_t rings;
  eventfd_read(inbox_->doorbell, &rings);  // left from a sleep that ended otherwise
  if (!inbox_->events.empty()) return -1;
  inbox_->asleep = true;
  return inbox_->doorbell;
}

}  // namespace

std::unique_ptr<Transport> make_loopback(std::shared_ptr<LoopbackHub> hub, Peer me, Clock& clock,
                                         Faults faults) {
  return std::make_unique<Loopback>(std::move(hub), me, clock, faults);
}

}  // namespace ringfold
