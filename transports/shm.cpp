#include "transports/shm.h"

#include <cassert>
#include <cerrno>

#include "transports/transports.h"

namespace ringfold {
namespace shm {
namespace {

using namespace std::chrono_literals;

// While it is polled, the transport asks the system for news this often.
constexpr uint32_t kTurnsBetweenGlances = 32;
constexpr Nanoseconds kBetweenGlances = 50us;
// How often a process without a pidfd is looked at.
constexpr Nanoseconds kBetweenLooks = 200ms;
// How soon a segment is offered again to a peer whose queue was full.
constexpr Nanoseconds kHandOverAgain = 1ms;

}  // namespace

Shm::~Shm() {
  matcher_.drop_early(
      [](const Matcher::Early& early) { delete static_cast<Unasked*>(early.message); });
  if (!post_.ours()) return;
  for (const auto& n : neighbours_)
    if (n && n->lost.ok() && n->peer != me_) post_.say_goodbye(n->address);
}

Neighbour* Shm::find(Peer peer) {
  return peer >= 0 && static_cast<size_t>(peer) < neighbours_.size() ? neighbours_[peer].get()
                                                                     : nullptr;
}

Status Shm::connect(Peer peer, std::string_view text) {
  auto address = Address::decode(text);
  if (!address || peer < 0)
    return {Code::invalid_argument, fmt::format("rank {}: not an shm address: \"{}\"", peer, text)};
  if (find(peer) != nullptr)
    return {Code::invalid_argument, fmt::format("rank {} is connected already", peer)};
  if (address->host != post_.address().host)
    return {Code::unsupported,
            fmt::format("rank {} is on another host or in another namespace: {}, here {}", peer,
                        address->host, post_.address().host)};
  auto n = std::make_unique<Neighbour>();
  n->peer = peer;
  n->address = *address;
  auto watch = post_.watch(*address);
  if (!watch.ok())
    n->lost = {watch.status().code(), fmt::format("rank {}: {}", peer, watch.status().message())};
  else if (!post_.reaches(*address))
    n->lost =
        errno == EPERM
            ? Status(Code::unsupported,
                     fmt::format("rank {}: sending to its socket is forbidden", peer))
            : Status(Code::peer_lost, fmt::format("rank {} has left: its socket is closed", peer));
  if (!n->lost.ok() && n->lost.code() != Code::peer_lost) return n->lost;
  if (watch.ok()) n->watch = std::move(*watch);
  silent_peers_ |= n->lost.ok() && n->watch.silent();
  // One that is gone already is known as that: what is sent to it is lost, not a mistake.
  Status lost = n->fault = n->lost;
  if (neighbours_.size() <= static_cast<size_t>(peer)) neighbours_.resize(peer + 1);
  neighbours_[peer] = std::move(n);
  if (!lost.ok()) return lost;
  // It may have spoken before it was known.
  for (Post::News& news : std::exchange(strangers_, {})) read(std::move(news));
  return {};
}

Status Shm::refusal(const Neighbour* n, Peer peer, uint32_t comm) const {
  if (!cancelled_.empty()) {
    const auto cancelled = cancelled_.find(comm);
    if (cancelled != cancelled_.end()) return cancelled->second;
  }
  if (n == nullptr)
    return {Code::invalid_argument, fmt::format("rank {} was never connected", peer)};
  return n->lost;
}

void Shm::send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) {
  Neighbour* n = find(peer);
  if (Status why = refusal(n, peer, id.comm); !why.ok())
    return deferred_.add(id.comm, completion, std::move(why));
  count_sent(buffer.bytes);
  const bool announce = buffer.bytes > kCreditBytes;
  Outgoing out;
  out.id = id;
  out.data = static_cast<const uint8_t*>(buffer.data);
  out.bytes = buffer.bytes;
  out.completion = completion;
  out.kind = announce ? Kind::announce : Kind::message;
  if (!accounts_.charge(peer, id.comm, id.seq, announce ? 0 : buffer.bytes, out)) return;
  n->data.push_back(out);
  pump(*n);
}

void Shm::recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
               Completion* completion) {
  Neighbour* n = find(peer);
  Status why = refusal(n, peer, id.comm);
  const bool waiting = n != nullptr && !n->lost.ok() && matcher_.has_early(peer, id);
  if (!why.ok() && !(waiting && cancelled_.count(id.comm) == 0))
    return deferred_.add(id.comm, completion, std::move(why));
  const Matcher::Posted posted{buffer, may_lend, completion, id.fingerprint};
  const auto early = matcher_.post(peer, id, posted);
  if (!early) return;
  std::unique_ptr<Unasked> unasked(static_cast<Unasked*>(early->message));
  owe(*n, id.comm, unasked->announced() ? 0 : unasked->bytes);
  met_.push_back({std::move(unasked), posted});
}

void Shm::give_back(Completion* completion) {
  auto* loan = static_cast<Loan*>(std::exchange(completion->lender, nullptr));
  assert(loan != nullptr);
  if (loan->owner == nullptr) {
    delete static_cast<Unasked*>(loan);
    return;
  }
  Neighbour& n = *std::exchange(loan->owner, nullptr);
  --n.loaned;
  if (n.reader.return_slot(loan->slot) && n.lost.ok()) ring(n);
}

void Shm::open(uint32_t comm, uint32_t seq, uint32_t fingerprint) {
  matcher_.open(comm, seq, fingerprint);
  accounts_.open(comm, seq);
  matcher_.contradictions(comm, seq, fingerprint, [&](Peer peer, const MessageId& theirs) {
    contradictions_.emplace_back(peer, theirs);
  });
}

void Shm::finish(uint32_t comm, uint32_t seq) {
  matcher_.finish(comm, seq, [&](Peer peer, const MessageId&, const Matcher::Early& early) {
    std::unique_ptr<Unasked> unasked(static_cast<Unasked*>(early.message));
    owe(*find(peer), comm, unasked->announced() ? 0 : unasked->bytes);
    discard(std::move(unasked));
  });
  accounts_.finish(comm, seq, [&](Peer peer, const Outgoing& out) {
    Neighbour& n = *find(peer);
    n.data.push_back(out);
    pump(n);
  });
}

void Shm::cancel(uint32_t comm, const Status& why) {
  cancelled_.emplace(comm, why);
  std::vector<Completion*> gone;
  for (Met& met : std::exchange(met_, {})) {
    if (met.unasked->id.comm != comm) {
      met_.push_back(std::move(met));
      continue;
    }
    gone.push_back(met.posted.completion);
    discard(std::move(met.unasked));
  }
  matcher_.cancel(
      comm,
      [&](Peer, const MessageId&, const Matcher::Posted& posted) {
        gone.push_back(posted.completion);
      },
      [&](Peer, const MessageId&, const Matcher::Early& early) {
        discard(std::unique_ptr<Unasked>(static_cast<Unasked*>(early.message)));
      });
  for (const auto& n : neighbours_)
    if (n) withdraw(*n, comm, &gone);
  accounts_.cancel(comm, [&](const Outgoing& out) { gone.push_back(out.completion); });
  returns_.cancel(comm);
  for (Completion* completion : gone) completion->done(completion, why);
  deferred_.run(comm);
}

// Takes back what is under way to or from this peer. Nobody but this process touches the buffers,
// so nothing has to be waited for.
void Shm::withdraw(Neighbour& n, uint32_t comm, std::vector<Completion*>* gone) {
  if (n.current.id.comm == comm && n.current.to != Incoming::To::nobody) {
    if (n.current.to == Incoming::To::buffer) gone->push_back(n.current.posted.completion);
    n.current.unasked.reset();
    n.current.to = Incoming::To::waste;
  }
  for (auto& [number, asked] : n.asked)
    if (asked.id.comm == comm && asked.posted.completion != nullptr)
      gone->push_back(std::exchange(asked.posted.completion, nullptr));
  for (const auto& [number, out] : n.announced)
    if (out.id.comm == comm) gone->push_back(out.completion);
  std::erase_if(n.announced, [&](const auto& entry) { return entry.second.id.comm == comm; });
  for (Outgoing& out : n.data) {
    if (out.id.comm != comm || out.completion == nullptr) continue;
    gone->push_back(std::exchange(out.completion, nullptr));
    if (out.begun) out.kind = Kind::give_up;
  }
  std::erase_if(n.data, [](const Outgoing& out) {
    return out.completion == nullptr && out.kind != Kind::give_up;
  });
}

bool Shm::progress() {
  bool moved = armed_ && wake_up();
  moved |= deferred_.run();
  for (const auto& [peer, theirs] : std::exchange(contradictions_, {})) {
    moved = true;
    if (on_mismatch) on_mismatch(peer, theirs, matcher_.expected(theirs));
  }
  for (size_t now = met_.size(); now != 0 && !met_.empty(); --now, moved = true) {
    Met met = std::move(met_.front());
    met_.pop_front();
    settle(std::move(met));
  }
  for (size_t i = 0; i < active_.size(); ++i) {
    Neighbour& n = *active_[i];
    moved |= take(n);
    if (!n.lost.ok()) continue;
    if (!n.control.empty() || !n.data.empty() || n.handing_over) pump(n);
  }
  if (++turn_ % kTurnsBetweenGlances == 0 && clock_.now() - glanced_ >= kBetweenGlances)
    moved |= glance();
  return moved;
}

void Shm::settle(Met met) {
  const MessageId& id = met.unasked->id;
  const Matcher::Posted& posted = met.posted;
  Status why;
  if (id.fingerprint != posted.fingerprint)
    why = different_operation(met.unasked->peer, id, posted.fingerprint);
  else if (met.unasked->bytes != posted.buffer.bytes)
    why = different_length(met.unasked->peer, id, met.unasked->bytes, posted.buffer.bytes);
  if (why.ok()) return deliver(std::move(met.unasked), posted);
  discard(std::move(met.unasked));
  posted.completion->done(posted.completion, why);
}

bool Shm::wake_up() {
  armed_ = false;
  for (Neighbour* n : active_) {
    if (n->in.get() != nullptr) n->reader.wake();
    if (n->out.get() != nullptr) n->writer.wake();
  }
  return glance();
}

// What comes by the system: new segments, farewells, deaths. True if anything came of it.
bool Shm::glance() {
  glanced_ = clock_.now();
  const bool look = silent_peers_ && glanced_ - looked_ >= kBetweenLooks;
  if (look) looked_ = glanced_;
  bool moved = false;
  const Post::Stir stir = post_.stirred();
  // Deaths first: what is read after that is all there will ever be.
  if (stir.death || look) look_for_deaths();
  if (stir.any || look)
    for (; auto news = post_.next(); moved = true) read(std::move(*news));
  for (const auto& n : neighbours_) {
    if (!n || n->fault.ok() || !n->lost.ok()) continue;
    while (take(*n)) {
    }
    lose(*n);
    moved = true;
  }
  return moved;
}

void Shm::look_for_deaths() {
  for (const auto& n : neighbours_)
    if (n && n->fault.ok() && n->watch.dead())
      n->fault = {Code::peer_lost,
                  fmt::format("rank {} (process {}) has died", n->peer, n->address.pid)};
}

void Shm::read(Post::News news) {
  Neighbour* from = nullptr;
  for (const auto& n : neighbours_)
    if (n && n->address.token == news.from) from = n.get();
  if (from == nullptr) return strangers_.push_back(std::move(news));
  if (news.what == Post::News::What::segment) return adopt(*from, news.segment);
  if (news.what == Post::News::What::goodbye && from->fault.ok()) {
    from->fault = {Code::peer_lost, fmt::format("rank {} has left", from->peer)};
    from->left = true;
  }
}

void Shm::adopt(Neighbour& n, const Fd& segment) {
  if (n.in.get() != nullptr) return;  // one is all it may give
  auto mapped = Mapping::adopt(segment);
  if (!mapped.ok()) return distrust(n, mapped.status().message());
  n.in = std::move(*mapped);
  n.reader.attach(n.in.get());
  if (n.out.get() == nullptr) active_.push_back(&n);
}

// Everything it sent has been received.
void Shm::lose(Neighbour& n) {
  n.lost = n.fault;
  n.watch.end(post_);
  std::vector<Completion*> gone;
  if (std::exchange(n.current.to, Incoming::To::nobody) == Incoming::To::buffer)
    gone.push_back(n.current.posted.completion);
  n.current.unasked.reset();
  matcher_.lose(n.peer, [&](Peer, const MessageId&, const Matcher::Posted& posted) {
    gone.push_back(posted.completion);
  });
  for (const auto& [number, asked] : std::exchange(n.asked, {}))
    gone.push_back(asked.posted.completion);
  for (const Outgoing& out : std::exchange(n.data, {})) gone.push_back(out.completion);
  for (const auto& [number, out] : std::exchange(n.announced, {})) gone.push_back(out.completion);
  accounts_.lose(n.peer, [&](const Outgoing& out) { gone.push_back(out.completion); });
  returns_.lose(n.peer);
  n.control.clear();
  n.handing_over = Fd();
  for (Completion* completion : gone)
    if (completion != nullptr) completion->done(completion, n.lost);
  if (n.left && on_left)
    on_left(n.peer);
  else if (on_lost)
    on_lost(n.peer, n.lost);
}

int Shm::arm() {
  bool news = !deferred_.empty() || !contradictions_.empty() || !met_.empty();
  bool again = false;
  armed_ = true;
  for (Neighbour* n : active_) {
    if (!n->lost.ok()) continue;
    news |= !n->fault.ok();
    if (n->in.get() != nullptr) news |= !n->reader.sleep();
    if (!n->control.empty() || !n->data.empty()) news |= !n->writer.sleep();
    again |= static_cast<bool>(n->handing_over);
  }
  if (news) return -1;
  if (again)
    post_.wake_within(kHandOverAgain);
  else if (silent_peers_)
    post_.wake_within(kBetweenLooks);
  return post_.descriptor();
}

bool Shm::flushed() const {
  for (const Neighbour* n : active_)
    if (n->lost.ok() &&
        (!n->data.empty() || !n->control.empty() || !n->announced.empty() || n->handing_over))
      return false;
  return accounts_.waiting() == 0;
}

}  // namespace shm

Result<std::unique_ptr<Transport>> make_shm(Peer me, Clock& clock) {
  auto post = shm::Post::make();
  if (!post.ok()) return post.status();
  return std::unique_ptr<Transport>(std::make_unique<shm::Shm>(std::move(*post), me, clock));
}

}  // namespace ringfold
