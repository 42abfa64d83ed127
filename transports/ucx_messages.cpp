// Sending, receiving, and what arrives.
#include <fmt/core.h>

#include <cassert>
#include <cstring>

#include "transports/ucx_transport.h"

namespace ringfold::ucx {
namespace {

constexpr size_t kLendAlignment = 16;  // every element type may be read there

}  // namespace

// ---- Requests under way

Flight* UcxTransport::take_off(Link& link, Completion* completion, uint32_t comm) {
  if (spare_.empty()) spare_.push_back(std::make_unique<Flight>());
  flights_.push_back(std::move(spare_.back()));
  spare_.pop_back();
  Flight* flight = flights_.back().get();
  *flight = {&link, completion, comm, flights_.size() - 1, false, {}, {}, {}, {}};
  ++link.flights;
  return flight;
}

ucp_request_param_t UcxTransport::parameters(Flight* flight, MemoryKind kind) {
  ucp_request_param_t parameters{};
  parameters.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  parameters.user_data = flight;
  parameters.memory_type = kind == MemoryKind::cuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
  return parameters;
}

// What UCX answered when the request was made: ended, refused, or it will call back.
void UcxTransport::launched(Flight* flight, ucs_status_ptr_t request) {
  if (!UCS_PTR_IS_PTR(request)) land(flight, UCS_PTR_RAW_STATUS(request));
}

void UcxTransport::land(Flight* flight, ucs_status_t status) {
  Link& link = *flight->link;
  if (status != UCS_OK && link.lost.ok()) fail(link, status);
  if (flight->completion) {
    Status end;
    if (flight->cancelled) {
      end = std::move(flight->why);
      --cancelled_;
    } else if (status != UCS_OK) {
      end = link.lost.ok() ? failed_.back().second : link.lost;
    }
    deferred_.add(flight->comm, flight->completion, std::move(end));
  }
  --link.flights;
  const size_t at = flight->at;
  spare_.push_back(std::move(flights_[at]));
  if (at + 1 != flights_.size()) {
    flights_[at] = std::move(flights_.back());
    flights_[at]->at = at;
  }
  flights_.pop_back();
}

// ---- Sending

void UcxTransport::send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) {
  Link& link = link_to(peer);
  if (Status status = refusal(link, id.comm); !status.ok())
    return deferred_.add(id.comm, completion, std::move(status));
  const Waiting message{completion, id, buffer};
  if (credits_.charge(peer, id.comm, id.seq, charge_of(link, buffer.bytes), message))
    start_send(link, message);
}

void UcxTransport::start_send(Link& link, const Waiting& message) {
  Flight* flight = take_off(link, message.completion, message.id.comm);
  flight->data = {message.id, me_};
  ucp_request_param_t parameters = UcxTransport::parameters(flight, message.buffer.kind);
  parameters.cb.send = &UcxTransport::on_sent;
  // Device memory is fetched whatever its length: UCX 1.22 does not get back the descriptors of
  // what came eagerly for it.
  const bool device = message.buffer.kind == MemoryKind::cuda && message.buffer.bytes != 0;
  if (device || message.buffer.bytes > kAlwaysRendezvous) {
    parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = UCP_AM_SEND_FLAG_RNDV;
  } else if (first().prefers_eager()) {
    parameters.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = UCP_AM_SEND_FLAG_EAGER;
  }
  ++link.sent;
  count_sent(message.buffer.bytes);
  Way& way = link.ways[choose_rail(link, message.buffer.bytes)];
  launched(flight, ucx_.ucp_am_send_nbx(way.endpoint, kData, &flight->data, sizeof(flight->data),
                                        message.buffer.data, message.buffer.bytes, &parameters));
}

void UcxTransport::send_control(Link& link, const ControlHeader& header, size_t rail) {
  if (!usable(link).ok()) return;
  Flight* flight = take_off(link, nullptr, 0);
  flight->control = header;
  ucp_request_param_t parameters = UcxTransport::parameters(flight, MemoryKind::host);
  parameters.cb.send = &UcxTransport::on_sent;
  launched(flight, ucx_.ucp_am_send_nbx(link.ways[rail].endpoint, kControl, &flight->control,
                                        sizeof(flight->control), nullptr, 0, &parameters));
}

void UcxTransport::on_sent(void* request, ucs_status_t status, void* user_data) {
  Flight* flight = static_cast<Flight*>(user_data);
  UcxTransport& self = *flight->link->owner;
  self.land(flight, status);
  self.ucx_.ucp_request_free(request);
}

void UcxTransport::on_received(void* request, ucs_status_t status, size_t, void* user_data) {
  on_sent(request, status, user_data);
}

// The way with the least on it. Also of `bytes`, which are on it from now on.
size_t UcxTransport::choose_rail(Link& link, size_t bytes) const {
  size_t best = 0;
  for (size_t rail = 1; rail < link.rails; ++rail) {
    const Way &one = link.ways[rail], &other = link.ways[best];
    if (one.sent - one.seen < other.sent - other.seen) best = rail;
  }
  link.ways[best].sent += bytes;
  return best;
}

void UcxTransport::count_arrival(Link& link, const Arrival& arrival) {
  if (rails_.size() == 1) return;
  Way& way = link.ways[arrival.rail];
  way.arrived += arrival.bytes;
  if (way.arrived - way.reported < kSeenBytes || !link.lost.ok()) return;
  way.reported = way.arrived;
  const auto rail = static_cast<uint32_t>(arrival.rail);
  send_control(link, {me_, Control::seen, rail, 0, way.arrived}, arrival.rail);
}

// ---- Receiving

void UcxTransport::recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
                        Completion* completion) {
  completion->view = buffer.data;
  completion->lender = nullptr;
  Link& link = link_to(peer);
  // The endpoint is made for the receiver too: only then does it hear of the peer's death.
  const Status status = refusal(link, id.comm);
  // What a lost peer had sent is there to be received.
  if (!status.ok() && !matcher_.has_early(peer, id))
    return deferred_.add(id.comm, completion, status);
  const Matcher::Posted posted{buffer, may_lend, completion, id.fingerprint};
  const std::optional<Matcher::Early> early = matcher_.post(peer, id, posted);
  if (!early) return;
  Kept* kept = static_cast<Kept*>(early->message);
  const Arrival arrival{kept->how, kept->rail, kept->data, early->bytes};
  if (early->fingerprint != id.fingerprint) {
    MessageId theirs = id;
    theirs.fingerprint = early->fingerprint;
    deferred_.add(id.comm, completion, different_operation(peer, theirs, id.fingerprint));
    if (matcher_.expected(id) != id.fingerprint)  // else open() has reported it
      contradictions_.push_back({peer, theirs, id.fingerprint});
  } else if (first().forked() || (kept->how == Kept::How::rendezvous && !link.lost.ok())) {
    deferred_.add(id.comm, completion, status);  // its bytes are out of reach
  } else if (deliver(link, id, posted, arrival)) {
    kept->how = Kept::How::copy;  // UCX's descriptor has been handed on
  }
  release(kept);
  credit_back(link, id.comm, early->bytes);
}

void UcxTransport::give_back(Completion* completion) {
  size_t rail = 0;
  if (rails_.size() > 1) rail = lent_.extract(completion->lender).mapped();
  release(rail, completion->lender);
  completion->lender = nullptr;
}

// True if UCX's descriptor was handed on: lent, or to the request that fetches the bytes.
bool UcxTransport::deliver(Link& link, const MessageId& id, const Matcher::Posted& posted,
                           const Arrival& arrival) {
  if (arrival.bytes != posted.buffer.bytes) {
    deferred_.add(id.comm, posted.completion,
                  different_length(link.peer, id, arrival.bytes, posted.buffer.bytes));
    return false;
  }
  const bool host = posted.buffer.kind == MemoryKind::host;
  const bool aligned = reinterpret_cast<uintptr_t>(arrival.data) % kLendAlignment == 0;
  if (arrival.how == Kept::How::descriptor && posted.may_lend && host && aligned) {
    posted.completion->view = posted.completion->lender = arrival.data;
    if (rails_.size() > 1) lent_.emplace(arrival.data, arrival.rail);
  } else if (arrival.how == Kept::How::rendezvous || (!host && arrival.bytes != 0)) {
    Flight* flight = take_off(link, posted.completion, id.comm);
    ucp_request_param_t parameters = UcxTransport::parameters(flight, posted.buffer.kind);
    parameters.cb.recv_am = &UcxTransport::on_received;
    launched(flight, ucx_.ucp_am_recv_data_nbx(worker(arrival.rail), arrival.data,
                                               posted.buffer.data, arrival.bytes, &parameters));
    // What came eagerly was copied at once, and the descriptor is still ours.
    return arrival.how == Kept::How::rendezvous;
  } else if (arrival.bytes != 0) {
    std::memcpy(posted.buffer.data, arrival.data, arrival.bytes);
  }
  deferred_.add(id.comm, posted.completion, {});
  return posted.completion->lender != nullptr;
}

void UcxTransport::release(Kept* kept) {
  if (kept->how != Kept::How::copy) release(kept->rail, kept->data);
  delete kept;
}

void UcxTransport::release(size_t rail, void* descriptor) {
  if (!first().forked()) ucx_.ucp_am_data_release(worker(rail), descriptor);
}

void UcxTransport::drop(Peer peer, const MessageId& id, const Matcher::Early& early) {
  release(static_cast<Kept*>(early.message));
  credit_back(link_to(peer), id.comm, early.bytes);
}

void UcxTransport::open(uint32_t comm, uint32_t seq, uint32_t fingerprint) {
  matcher_.open(comm, seq, fingerprint);
  credits_.open(comm, seq);
  matcher_.contradictions(comm, seq, fingerprint, [&](Peer peer, const MessageId& theirs) {
    contradictions_.push_back({peer, theirs, fingerprint});
  });
}

void UcxTransport::finish(uint32_t comm, uint32_t seq) {
  matcher_.finish(comm, seq, [&](Peer peer, const MessageId& id, const Matcher::Early& early) {
    drop(peer, id, early);
  });
  credits_.finish(comm, seq,
                  [&](Peer peer, const Waiting& message) { start_send(link_to(peer), message); });
}

void UcxTransport::credit_back(Link& link, uint32_t comm, size_t bytes) {
  if (first().forked() || !link.lost.ok()) return;
  if (const auto due = returns_.matched(link.peer, comm, charge_of(link, bytes)))
    send_control(link, {me_, Control::credit, comm, due->messages, due->bytes});
}

// ---- Arriving

ucs_status_t UcxTransport::on_data(void* arg, const void* header, size_t header_bytes, void* data,
                                   size_t bytes, const ucp_am_recv_param_t* how) {
  if (header_bytes != sizeof(DataHeader)) return UCS_OK;  // not one of ours
  DataHeader message;
  std::memcpy(&message, header, sizeof(message));
  auto* const rail = static_cast<Rail*>(arg);
  Arrival arrival{Kept::How::copy, rail->index, data, bytes};
  if ((how->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) arrival.how = Kept::How::rendezvous;
  if ((how->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0) arrival.how = Kept::How::descriptor;
  return rail->owner->arrived(message, arrival) ? UCS_INPROGRESS : UCS_OK;
}

// True if UCX's descriptor was kept or handed on.
bool UcxTransport::arrived(const DataHeader& message, const Arrival& arrival) {
  Link& link = link_to(message.from);
  ++link.received;
  count_arrival(link, arrival);
  confirm_if_wanted(link);
  Matcher::Posted posted;
  bool held = false;
  switch (matcher_.arrive(message.from, message.id, &posted)) {
    case Matcher::Verdict::matched:
      held = deliver(link, message.id, posted, arrival);
      break;
    case Matcher::Verdict::early:
      return keep(message, arrival);
    case Matcher::Verdict::drop:
      break;
    case Matcher::Verdict::mismatch: {
      const uint32_t expected =
          posted.completion ? posted.fingerprint : matcher_.expected(message.id);
      if (posted.completion)
        deferred_.add(message.id.comm, posted.completion,
                      different_operation(message.from, message.id, expected));
      contradictions_.push_back({message.from, message.id, expected});
      break;
    }
  }
  credit_back(link, message.id.comm, arrival.bytes);
  return held;
}

bool UcxTransport::keep(const DataHeader& message, const Arrival& arrival) {
  auto kept = std::make_unique<Kept>(Kept{arrival.how, arrival.rail, arrival.data, nullptr});
  if (kept->how == Kept::How::copy && arrival.bytes != 0) {
    kept->own = std::make_unique_for_overwrite<std::byte[]>(arrival.bytes);
    std::memcpy(kept->own.get(), arrival.data, arrival.bytes);
    kept->data = kept->own.get();
  }
  const bool held = kept->how != Kept::How::copy;
  matcher_.keep(message.from, message.id, {message.id.fingerprint, arrival.bytes, kept.release()});
  return held;
}

ucs_status_t UcxTransport::on_control(void* arg, const void* header, size_t header_bytes, void*,
                                      size_t, const ucp_am_recv_param_t*) {
  if (header_bytes != sizeof(ControlHeader)) return UCS_OK;  // not one of ours
  ControlHeader message;
  std::memcpy(&message, header, sizeof(message));
  static_cast<Rail*>(arg)->owner->heard(message);
  return UCS_OK;
}

void UcxTransport::heard(const ControlHeader& message) {
  Link& link = link_to(message.from);
  switch (message.what) {
    case Control::credit:
      credits_.credited(message.from, message.comm, {message.messages, message.number},
                        [&](const Waiting& waiting) { start_send(link, waiting); });
      break;
    case Control::ask:
      link.must_confirm = message.number;
      confirm_if_wanted(link);
      break;
    case Control::answer:
      link.confirmed = message.number;
      break;
    case Control::seen:
      if (message.comm < link.rails) link.ways[message.comm].seen = message.number;
      break;
    case Control::leave:
      failed_.emplace_back(
          &link, Status(Code::peer_lost, fmt::format("{} gave up a transfer with this rank that "
                                                     "would not end",
                                                     describe(link))));
      break;
  }
}

// Active messages may overtake each other: the question may come before the last message.
void UcxTransport::confirm_if_wanted(Link& link) {
  if (link.must_confirm == 0 || link.received < link.must_confirm) return;
  send_control(link, {me_, Control::answer, 0, 0, std::exchange(link.must_confirm, 0)});
}

}  // namespace ringfold::ucx
