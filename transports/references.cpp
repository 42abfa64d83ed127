#include "transports/references.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>

namespace ringfold {
namespace {

// A message of the returns: nothing but a ticket.
Buffer as_message(uint64_t& ticket) {
  return {&ticket, sizeof(ticket)};
}

// The record whose first member is this completion.
template <class Record>
Record& record_of(Completion* message) {
  return *reinterpret_cast<Record*>(message);
}

}  // namespace

References::References(Transport& below) : below_(below), bell_(eventfd(0, EFD_CLOEXEC)) {}

References::~References() {
  close(bell_);
}

void References::know(Peer peer, uintptr_t theirs, size_t bytes, const std::byte* mine) {
  const std::lock_guard guard(lock_);
  ranges_[{peer, theirs}] = {bytes, mine};
}

void References::forget(Peer peer, uintptr_t theirs) {
  const std::lock_guard guard(lock_);
  ranges_.erase({peer, theirs});
}

// Null if it was not made known.
const std::byte* References::translate(Peer peer, const Reference& reference) {
  const std::lock_guard guard(lock_);
  auto next = ranges_.upper_bound({peer, reference.address});
  if (next == ranges_.begin()) return nullptr;
  const auto& [key, range] = *std::prev(next);
  if (key.first != peer) return nullptr;
  const uint64_t offset = reference.address - key.second;
  if (offset > range.bytes || reference.bytes > range.bytes - offset) return nullptr;
  return range.mine + offset;
}

// ---- what comes back --------------------------------------------------------------------------

Status References::connect(Peer peer, std::string_view) {
  auto& link = links_[peer];
  if (link) return {Code::invalid_argument, fmt::format("rank {} is connected already", peer)};
  link = std::make_unique<Link>();
  link->message.done = on_returned;
  link->owner = this;
  link->peer = peer;
  await_return(*link);
  return {};
}

void References::await_return(Link& link) {
  below_.recv(link.peer, {kReturns, link.received++, 0, 0}, as_message(link.ticket), false,
              &link.message);
}

void References::on_returned(Completion* message, const Status& status) noexcept {
  Link& link = record_of<Link>(message);
  References& self = *link.owner;
  if (!status.ok()) {
    link.lost = status;
    return self.end_all([&](const Sent& sent) { return sent.peer == link.peer; }, status);
  }
  const uint64_t ticket = link.ticket;
  self.await_return(link);
  // What ended with its communicator is not known any more.
  const auto known = self.sent_.find(ticket);
  if (known == self.sent_.end() || known->second->peer != link.peer) return;
  known->second->returned = true;
  if (known->second->left) self.end(ticket, {});
}

void References::end(uint64_t ticket, const Status& why) {
  const auto ended = sent_.extract(ticket);
  Completion* const completion = ended.mapped()->completion;
  completion->done(completion, why);
}

// Ends sends that `below` is through with; the others end when it is.
template <class Which>
void References::end_all(Which which, const Status& why) {
  std::vector<uint64_t> tickets;
  for (const auto& [ticket, sent] : sent_)
    if (sent->left && which(*sent)) tickets.push_back(ticket);
  std::ranges::sort(tickets);
  for (const uint64_t ticket : tickets)
    if (sent_.contains(ticket)) end(ticket, why);
}

void References::cancel(uint32_t comm, const Status& why) {
  cancelled_.emplace(comm, why);
  end_all([comm](const Sent& sent) { return sent.comm == comm; }, why);
}

bool References::progress() {
  return false;  // all that moves is moved by `below`
}

// ---- sending ----------------------------------------------------------------------------------

void References::send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) {
  if (buffer.kind == MemoryKind::host) return below_.send(peer, id, buffer, completion);
  count_sent(buffer.bytes);
  const uint64_t ticket = next_ticket_++;
  auto& sent = *(sent_[ticket] = std::make_unique<Sent>());
  sent.message.done = on_left;
  sent.owner = this;
  sent.peer = peer;
  sent.comm = id.comm;
  sent.reference = {reinterpret_cast<uintptr_t>(buffer.data), buffer.bytes, ticket};
  sent.completion = completion;
  send_below(peer, id, {&sent.reference, sizeof(Reference)}, &sent.message);
}

void References::send_below(Peer peer, const MessageId& id, Buffer message,
                            Completion* completion) {
  below_bytes_.store(bytes_below() + message.bytes, std::memory_order_relaxed);
  below_.send(peer, id, message, completion);
}

// The reference has left; or never will, and then nobody reads what it means.
void References::on_left(Completion* message, const Status& status) noexcept {
  Sent& sent = record_of<Sent>(message);
  References& self = *sent.owner;
  sent.left = true;
  const auto cancelled = self.cancelled_.find(sent.comm);
  const Status& lost = self.links_.at(sent.peer)->lost;
  if (!status.ok() || sent.returned)
    self.end(sent.reference.ticket, status);
  else if (cancelled != self.cancelled_.end())
    self.end(sent.reference.ticket, cancelled->second);
  else if (!lost.ok())
    self.end(sent.reference.ticket, lost);
}

// ---- receiving --------------------------------------------------------------------------------

void References::recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
                      Completion* completion) {
  if (buffer.kind == MemoryKind::host) return below_.recv(peer, id, buffer, may_lend, completion);
  assert(may_lend);
  auto made = std::make_unique<Received>();
  Received& received = *made;
  received_[&received] = std::move(made);
  received.message.done = on_arrived;
  received.owner = this;
  received.peer = peer;
  received.id = id;
  received.bytes = buffer.bytes;
  received.completion = completion;
  below_.recv(peer, id, {&received.reference, sizeof(Reference)}, false, &received.message);
}

void References::on_arrived(Completion* message, const Status& status) noexcept {
  Received& received = record_of<Received>(message);
  References& self = *received.owner;
  Completion* const completion = received.completion;
  const Reference& reference = received.reference;
  Status why = status;
  const std::byte* const view = why.ok() ? self.translate(received.peer, reference) : nullptr;
  if (why.ok() && reference.bytes != received.bytes)
    why = different_length(received.peer, received.id, reference.bytes, received.bytes);
  else if (why.ok() && view == nullptr)
    why = {Code::internal, fmt::format("rank {} refers to device memory that it has not made known",
                                       received.peer)};
  if (why.ok()) {
    completion->view = view;
    completion->lender = &received;
  } else {
    self.received_.erase(&received);
  }
  completion->done(completion, why);
}

void References::give_back(Completion* completion) {
  auto* const lender = std::exchange(completion->lender, nullptr);
  const auto own = received_.find(static_cast<Received*>(lender));
  if (own == received_.end()) {  // a loan of host memory
    completion->lender = lender;
    return below_.give_back(completion);
  }
  Link& link = *links_.at(own->second->peer);
  auto made = std::make_unique<Return>();
  Return& back = *made;
  returns_[&back] = std::move(made);
  back.message.done = on_return_left;
  back.owner = this;
  back.ticket = own->second->reference.ticket;
  received_.erase(own);
  send_below(link.peer, {kReturns, link.sent++, 0, 0}, as_message(back.ticket), &back.message);
}

void References::on_return_left(Completion* message, const Status&) noexcept {
  Return& back = record_of<Return>(message);
  back.owner->returns_.erase(&back);
}

}  // namespace ringfold
