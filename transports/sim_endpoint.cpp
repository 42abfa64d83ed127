// One rank's end of the simulated network: the contract of lib/engine/transport.h over what the
// network tells it.
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "lib/engine/matcher.h"
#include "transports/outcome.h"
#include "transports/sim.h"
#include "transports/sim_message.h"

namespace ringfold {
namespace {

// What a message costs a receiver that has not asked for it: of a large one, only the header.
uint64_t charge_of(uint64_t bytes) {
  return bytes > kCreditBatchBytes ? 0 : bytes;
}

Status gone(Peer peer) {
  return {Code::peer_lost, fmt::format("rank {} is gone", peer)};
}

}  // namespace

class SimEndpoint final : public Transport {
 public:
  SimEndpoint(SimNetwork& network, Peer me) : network_(network), me_(me) {}
  ~SimEndpoint() override;

  [[nodiscard]] const char* name() const override { return "sim"; }
  [[nodiscard]] bool reaches(MemoryKind kind) const override { return kind == MemoryKind::host; }
  [[nodiscard]] std::string address() const override { return fmt::format("sim {}", me_); }
  [[nodiscard]] Status connect(Peer peer, std::string_view address) override;
  void send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) override;
  void recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
            Completion* completion) override;
  void give_back(Completion* completion) override;
  void open(uint32_t comm, uint32_t seq, uint32_t fingerprint) override;
  void finish(uint32_t comm, uint32_t seq) override;
  void cancel(uint32_t comm, const Status& why) override;
  bool progress() override;
  int arm() override { return -1; }  // time passes only when the network is told to go on
  [[nodiscard]] bool flushed() const override { return self().open_sends == 0; }

 private:
  using News = SimNetwork::News;
  struct Met {  // a receive that found its message waiting
    SimMessage* message;
    Matcher::Posted posted;
  };

  [[nodiscard]] SimNetwork::Rank& self() const { return network_.ranks_[SimNetwork::at(me_)]; }
  [[nodiscard]] Status refusal(Peer peer, uint32_t comm) const;
  void defer(uint32_t comm, Completion* completion, Status why);
  void handle(const News& news);
  void arrive(SimMessage* message);
  void deliver(SimMessage* message, const Matcher::Posted& posted);
  void owe(const SimMessage& message);
  void drop(SimMessage* message);
  void lose(Peer peer);
  std::vector<Completion*> withdraw(const std::function<bool(const SimMessage&)>& which);

  SimNetwork& network_;
  const Peer me_;
  Matcher matcher_;
  CreditAccounts<SimMessage*> accounts_;
  CreditReturns returns_;
  Deferred deferred_;
  std::vector<std::pair<Peer, MessageId>> contradictions_;  // found by open()
  std::vector<Met> met_;
  std::vector<News> news_;  // being handled
  std::vector<Peer> lost_;
  std::map<uint32_t, Status> cancelled_;
};

std::unique_ptr<Transport> SimNetwork::endpoint(Peer rank) {
  return std::make_unique<SimEndpoint>(*this, rank);
}

SimEndpoint::~SimEndpoint() {
  if (self().open_sends != 0) (void)withdraw([](const SimMessage&) { return true; });
  for (const Met& met : met_) network_.take(met.message);
  for (const News& news : std::exchange(self().news, {}))
    if (news.kind == News::Kind::arrived) network_.take(news.message);
  matcher_.drop_early(
      [&](const Matcher::Early& early) { network_.take(static_cast<SimMessage*>(early.message)); });
  network_.lose(me_);
}

Status SimEndpoint::connect(Peer peer, std::string_view address) {
  if (peer >= 0 && peer < network_.size() && address == fmt::format("sim {}", peer)) return {};
  return {Code::invalid_argument,
          fmt::format("rank {} at \"{}\": this network has the ranks 0 to {}, at \"sim <rank>\"",
                      peer, address, network_.size() - 1)};
}

Status SimEndpoint::refusal(Peer peer, uint32_t comm) const {
  if (!cancelled_.empty()) {
    const auto cancelled = cancelled_.find(comm);
    if (cancelled != cancelled_.end()) return cancelled->second;
  }
  if (!self().alive) return {Code::peer_lost, fmt::format("rank {} itself is gone", me_)};
  if (peer < 0 || peer >= network_.size())
    return {Code::invalid_argument, fmt::format("there is no rank {}", peer)};
  if (!lost_.empty() && std::ranges::find(lost_, peer) != lost_.end()) return gone(peer);
  return {};
}

void SimEndpoint::defer(uint32_t comm, Completion* completion, Status why) {
  deferred_.add(comm, completion, std::move(why));
  network_.wake(me_);
}

void SimEndpoint::send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) {
  if (Status why = refusal(peer, id.comm); !why.ok())
    return defer(id.comm, completion, std::move(why));
  SimMessage* message = network_.make_message();
  message->id = id;
  message->from = me_;
  message->to = peer;
  message->bytes = buffer.bytes;
  message->data = buffer.data;
  message->completion = completion;
  ++self().open_sends;
  count_sent(buffer.bytes);
  if (accounts_.charge(peer, id.comm, id.seq, charge_of(buffer.bytes), message))
    network_.submit(message);
}

void SimEndpoint::recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
                       Completion* completion) {
  const Matcher::Posted posted{buffer, may_lend, completion, id.fingerprint};
  if (Status why = refusal(peer, id.comm); !why.ok())
    if (why.code() != Code::peer_lost || !matcher_.has_early(peer, id))
      return defer(id.comm, completion, std::move(why));
  if (const auto early = matcher_.post(peer, id, posted)) {
    met_.push_back({static_cast<SimMessage*>(early->message), posted});
    network_.wake(me_);
  }
}

void SimEndpoint::open(uint32_t comm, uint32_t seq, uint32_t fingerprint) {
  matcher_.open(comm, seq, fingerprint);
  accounts_.open(comm, seq);
  matcher_.contradictions(comm, seq, fingerprint, [&](Peer peer, const MessageId& theirs) {
    contradictions_.emplace_back(peer, theirs);
  });
  if (!contradictions_.empty()) network_.wake(me_);
}

void SimEndpoint::finish(uint32_t comm, uint32_t seq) {
  matcher_.finish(comm, seq, [&](Peer, const MessageId&, const Matcher::Early& early) {
    drop(static_cast<SimMessage*>(early.message));
  });
  accounts_.finish(comm, seq, [&](Peer, SimMessage* message) { network_.submit(message); });
}

// Takes back what this rank has sent and was not told of yet. Nobody reads the buffers any more.
std::vector<Completion*> SimEndpoint::withdraw(
    const std::function<bool(const SimMessage&)>& which) {
  std::vector<Completion*> completions;
  network_.each_message([&](SimMessage& message) {
    if (message.from == me_ && message.completion != nullptr && which(message))
      completions.push_back(network_.withdraw(&message));
  });
  return completions;
}

void SimEndpoint::cancel(uint32_t comm, const Status& why) {
  cancelled_.emplace(comm, why);
  std::vector<Completion*> pending;
  std::erase_if(met_, [&](const Met& met) {
    if (met.message->id.comm != comm) return false;
    pending.push_back(met.posted.completion);
    network_.take(met.message);
    return true;
  });
  matcher_.cancel(
      comm,
      [&](Peer, const MessageId&, const Matcher::Posted& posted) {
        pending.push_back(posted.completion);
      },
      [&](Peer, const MessageId&, const Matcher::Early& early) {
        network_.take(static_cast<SimMessage*>(early.message));
      });
  std::erase_if(self().news, [&](const News& news) {
    const bool its = news.kind == News::Kind::done && news.peer >= 0 && news.comm == comm;
    if (its) pending.push_back(news.completion);
    return its;
  });
  const auto its = [&](const SimMessage& message) { return message.id.comm == comm; };
  for (Completion* completion : withdraw(its)) pending.push_back(completion);
  accounts_.cancel(comm, [&](SimMessage* message) { network_.release(message); });
  returns_.cancel(comm);
  for (Completion* completion : pending) completion->done(completion, why);
  deferred_.run(comm);
}

bool SimEndpoint::progress() {
  bool moved = deferred_.run();
  for (const auto& [peer, theirs] : std::exchange(contradictions_, {}))
    if (on_mismatch) on_mismatch(peer, theirs, matcher_.expected(theirs));
  if (!met_.empty()) {
    for (const Met& met : std::exchange(met_, {})) deliver(met.message, met.posted);
    moved = true;
  }
  while (!self().news.empty()) {
    news_.swap(self().news);
    for (const News& news : news_) handle(news);
    news_.clear();
    moved = true;
  }
  return moved;
}

void SimEndpoint::handle(const News& news) {
  switch (news.kind) {
    case News::Kind::done:
      return news.completion->done(news.completion,
                                   self().alive ? Status() : refusal(news.peer, news.comm));
    case News::Kind::arrived:
      return arrive(news.message);
    case News::Kind::credit:
      return accounts_.credited(news.peer, news.comm, news.credit,
                                [&](SimMessage* message) { network_.submit(message); });
    case News::Kind::lost:
      return lose(news.peer);
  }
}

// The message no longer counts as one that nobody has asked for.
void SimEndpoint::owe(const SimMessage& message) {
  const uint32_t comm = message.id.comm;
  if (const auto credit = returns_.matched(message.from, comm, charge_of(message.bytes)))
    network_.give_credit(me_, message.from, comm, *credit);
}

void SimEndpoint::drop(SimMessage* message) {
  owe(*message);
  network_.take(message);
}

// The copy that an eager message travels as is lent; it is nobody else's.
void SimEndpoint::give_back(Completion* completion) {
  network_.take(static_cast<SimMessage*>(std::exchange(completion->lender, nullptr)));
}

void SimEndpoint::arrive(SimMessage* message) {
  if (message->revoked || !self().alive) return network_.take(message);
  Matcher::Posted posted;
  switch (matcher_.arrive(message->from, message->id, &posted)) {
    case Matcher::Verdict::matched:
      return deliver(message, posted);
    case Matcher::Verdict::early:
      return matcher_.keep(message->from, message->id,
                           {message->id.fingerprint, message->bytes, message});
    case Matcher::Verdict::drop:
      return drop(message);
    case Matcher::Verdict::mismatch: {
      const Peer from = message->from;
      const MessageId theirs = message->id;
      Completion* completion = posted.completion;
      const uint32_t expected =
          completion != nullptr ? posted.fingerprint : matcher_.expected(theirs);
      drop(message);
      if (completion != nullptr)
        completion->done(completion, different_operation(from, theirs, expected));
      if (on_mismatch) on_mismatch(from, theirs, expected);
      return;
    }
  }
}

void SimEndpoint::deliver(SimMessage* message, const Matcher::Posted& posted) {
  Completion* completion = posted.completion;
  Status status;
  if (message->revoked) {  // taken back by its sender: as if it had never come
    const MessageId id{message->id.comm, message->id.seq, message->id.index, posted.fingerprint};
    const Peer from = message->from;
    network_.take(message);
    return recv(from, id, posted.buffer, posted.may_lend, completion);
  }
  if (message->id.fingerprint != posted.fingerprint)
    status = different_operation(message->from, message->id, posted.fingerprint);
  else if (message->bytes != posted.buffer.bytes)
    status = different_length(message->from, message->id, message->bytes, posted.buffer.bytes);
  completion->view = posted.buffer.data;
  owe(*message);
  if (status.ok() && posted.may_lend && message->copy != nullptr) {
    completion->view = message->copy.get();
    completion->lender = message;
  } else {
    if (status.ok() && message->data != nullptr && message->bytes != 0)
      std::memcpy(posted.buffer.data, message->data, message->bytes);
    network_.take(message);
  }
  completion->done(completion, status);
}

void SimEndpoint::lose(Peer peer) {
  if (std::ranges::find(lost_, peer) != lost_.end()) return;
  lost_.push_back(peer);
  const Status why = gone(peer);
  std::vector<Completion*> pending;
  matcher_.lose(peer, [&](Peer, const MessageId&, const Matcher::Posted& posted) {
    pending.push_back(posted.completion);
  });
  if (self().open_sends != 0)
    for (Completion* completion : withdraw([&](const SimMessage& m) { return m.to == peer; }))
      pending.push_back(completion);
  accounts_.lose(peer, [&](SimMessage* message) { network_.release(message); });
  returns_.lose(peer);
  for (Completion* completion : pending) completion->done(completion, why);
  if (on_lost) on_lost(peer, why);
}

}  // namespace ringfold
