// How messages travel: into the rings, and out of them.
#include <algorithm>

#include "transports/shm.h"

namespace ringfold::shm {
namespace {

// Records of one peer taken in one turn: many small ones, or as much as all its slots hold.
constexpr int kTurn = 256;

constexpr uint64_t charge(size_t bytes) {
  return bytes > kCreditBytes ? 0 : bytes;
}

}  // namespace

// ---- out ----

void Shm::say(Neighbour& n, const Record& record) {
  if (!n.lost.ok()) return;
  n.control.push_back(record);
  pump(n);
}

void Shm::ring(Neighbour& n) {
  if (post_.ring(n.address) == Post::Sent::gone && n.fault.ok())
    n.fault = {Code::peer_lost, fmt::format("rank {} has closed its socket", n.peer)};
}

// A segment is made by the first send, and handed over as soon as the peer's queue has room.
bool Shm::prepare(Neighbour& n) {
  if (n.out.get() == nullptr) {
    auto made = Mapping::create(&n.handing_over);
    if (!made.ok()) {
      n.fault = made.status();
      return false;
    }
    n.out = std::move(*made);
    n.writer.attach(n.out.get());
    if (n.in.get() == nullptr) active_.push_back(&n);
  }
  if (!n.handing_over) return true;
  const Post::Sent sent = post_.hand_over(n.address, n.handing_over.get());
  if (sent != Post::Sent::later) n.handing_over = Fd();
  if (sent == Post::Sent::gone)
    n.fault = {Code::peer_lost, fmt::format("rank {} has closed its socket", n.peer)};
  return true;
}

void Shm::pump(Neighbour& n) {
  if (!n.fault.ok() || !prepare(n)) return;
  while (!n.control.empty() && n.writer.room(0)) {
    n.writer.write(n.control.front());
    n.control.pop_front();
  }
  if (n.control.empty())
    while (!n.data.empty() && write(n, n.data.front())) n.data.pop_front();
  if (n.writer.publish()) ring(n);
}

// True if all of it is written.
bool Shm::write(Neighbour& n, Outgoing& out) {
  if (out.kind != Kind::announce && out.kind != Kind::give_up) return write_bytes(n, out);
  if (!n.writer.room(0)) return false;
  Record record;
  record.kind = out.kind;
  record.id = out.id;
  record.total = out.bytes;
  if (out.kind == Kind::announce) {
    record.number = out.number = n.next_number++;
    out.kind = Kind::answer;
    n.announced.emplace(out.number, out);
  }
  n.writer.write(record);
  return true;
}

bool Shm::write_bytes(Neighbour& n, Outgoing& out) {
  do {
    const size_t left = out.bytes - out.written;
    const bool inlined = left <= kInlineBytes;
    if (!n.writer.room(inlined ? static_cast<uint32_t>(left) : 0)) return false;
    Record record;
    record.kind = out.begun ? Kind::part : out.kind;
    record.here = static_cast<uint32_t>(std::min<size_t>(left, kSlotBytes));
    record.total = out.bytes;
    record.id = out.id;
    record.number = out.number;
    if (!inlined) {
      record.slot = n.writer.take_slot();
      if (record.slot == kNoSlot) return false;
      std::memcpy(n.writer.slot(record.slot), out.data + out.written, record.here);
    }
    n.writer.write(record, out.data + out.written);
    out.written += record.here;
    out.begun = true;
    // The receiver works on this part while the next is written.
    if (!inlined && n.writer.publish()) ring(n);
  } while (out.written != out.bytes);
  deferred_.add(out.id.comm, out.completion, {});
  return true;
}

// ---- in ----

void Shm::distrust(Neighbour& n, std::string_view why) {
  n.broken = true;
  n.fault = {Code::peer_lost, fmt::format("rank {} broke the shared segment: {}", n.peer, why)};
}

// True if there may be more.
bool Shm::take(Neighbour& n) {
  if (n.in.get() == nullptr || !n.lost.ok() || n.broken) return false;
  int taken = 0;
  for (; taken < kTurn; ++taken) {
    Record record;
    const uint8_t* bytes = nullptr;
    const RingReader::Look look = n.reader.look(&record, &bytes);
    if (look == RingReader::Look::broken) distrust(n, "impossible record");
    if (look != RingReader::Look::record || waits(n, record)) break;
    handle(n, record, bytes);
    if (n.broken) break;
  }
  if (n.reader.release()) ring(n);
  return taken != 0 || n.waited;
}

// A large message that nobody asked for yet waits for one turn: whoever was just called back is
// likely to ask for it, which spares a copy to the heap.
bool Shm::waits(Neighbour& n, const Record& record) {
  const bool large = record.kind == Kind::message && record.slot != kNoSlot;
  n.waited = large && !n.waited && !matcher_.has_posted(n.peer, record.id);
  return n.waited;
}

void Shm::handle(Neighbour& n, const Record& record, const uint8_t* bytes) {
  const bool idle = n.current.to == Incoming::To::nobody;
  switch (record.kind) {
    case Kind::message:
    case Kind::answer:
      if (!idle) return distrust(n, "a message within another");
      record.kind == Kind::message ? begin(n, record) : begin_answer(n, record);
      return take_bytes(n, record, bytes);
    case Kind::part:
      if (idle || record.here == 0) return distrust(n, "a part of nothing");
      return take_bytes(n, record, bytes);
    case Kind::give_up:
      if (idle) return distrust(n, "the end of nothing");
      n.reader.advance();
      return gave_up(n);
    case Kind::announce:
      n.reader.advance();
      return announced(n, record);
    case Kind::ask:
    case Kind::decline:
      n.reader.advance();
      return asked(n, record.number, record.kind == Kind::decline);
    case Kind::credit:
      n.reader.advance();
      return accounts_.credited(n.peer, record.id.comm, {record.number, record.total},
                                [&](const Outgoing& out) { n.data.push_back(out); });
    case Kind::skip:
      break;
  }
  distrust(n, "unknown kind of record");
}

// Looks for the receive. Whatever is wrong with the message is reported from here.
Shm::Fate Shm::meet(Neighbour& n, const MessageId& id, uint64_t bytes, Matcher::Posted* posted) {
  const Matcher::Verdict verdict = matcher_.arrive(n.peer, id, posted);
  if (verdict == Matcher::Verdict::early) return Fate::keep;
  owe(n, id.comm, charge(bytes));
  if (verdict == Matcher::Verdict::drop) return Fate::waste;
  Completion* completion = posted->completion;
  if (verdict == Matcher::Verdict::mismatch) {
    const uint32_t expected = completion != nullptr ? posted->fingerprint : matcher_.expected(id);
    if (completion != nullptr)
      completion->done(completion, different_operation(n.peer, id, expected));
    if (on_mismatch) on_mismatch(n.peer, id, expected);
    return Fate::waste;
  }
  if (bytes == posted->buffer.bytes) return Fate::deliver;
  completion->done(completion, different_length(n.peer, id, bytes, posted->buffer.bytes));
  return Fate::waste;
}

void Shm::begin(Neighbour& n, const Record& record) {
  if (record.total > kCreditBytes) return distrust(n, "too long to be sent unasked");
  n.current.id = record.id;
  n.current.total = record.total;
  n.current.received = 0;
  n.current.to = Incoming::To::waste;  // what a callback sees, should it cancel
  switch (meet(n, record.id, record.total, &n.current.posted)) {
    case Fate::deliver:
      n.current.to = Incoming::To::buffer;
      break;
    case Fate::keep:
      n.current.to = Incoming::To::heap;
      n.current.unasked = std::make_unique<Unasked>();
      n.current.unasked->peer = n.peer;
      n.current.unasked->id = record.id;
      n.current.unasked->bytes = record.total;
      n.current.unasked->data = std::make_unique_for_overwrite<uint8_t[]>(record.total);
      break;
    case Fate::waste:
      break;
  }
}

void Shm::begin_answer(Neighbour& n, const Record& record) {
  const auto found = n.asked.find(record.number);
  if (found == n.asked.end() || (found->second.posted.completion != nullptr &&
                                 record.total != found->second.posted.buffer.bytes))
    return distrust(n, "an answer to nothing");
  n.current.id = found->second.id;
  n.current.total = record.total;
  n.current.received = 0;
  n.current.posted = found->second.posted;
  n.current.to =
      n.current.posted.completion != nullptr ? Incoming::To::buffer : Incoming::To::waste;
  n.asked.erase(found);
}

void Shm::take_bytes(Neighbour& n, const Record& record, const uint8_t* bytes) {
  if (n.broken) return;
  Incoming& message = n.current;
  if (record.here > message.total - message.received || (record.here == 0 && message.total != 0))
    return distrust(n, "more bytes than the message has, or none");
  if (lend(n, record, bytes)) return;
  if (record.here != 0) {
    if (message.to == Incoming::To::buffer)
      std::memcpy(static_cast<uint8_t*>(message.posted.buffer.data) + message.received, bytes,
                  record.here);
    else if (message.to == Incoming::To::heap)
      std::memcpy(message.unasked->data.get() + message.received, bytes, record.here);
  }
  message.received += record.here;
  n.reader.advance();
  if (record.slot != kNoSlot && n.reader.return_slot(record.slot)) ring(n);
  if (message.received == message.total) complete(n);
}

bool Shm::lend(Neighbour& n, const Record& record, const uint8_t* bytes) {
  if (n.current.to != Incoming::To::buffer || !n.current.posted.may_lend) return false;
  if (record.slot == kNoSlot || record.here != n.current.total) return false;
  Loan& loan = n.loans[record.slot];
  if (n.loaned >= kSlots / 2) return false;
  if (loan.owner != nullptr) {
    distrust(n, "a slot that is on loan is used again");
    return false;
  }
  Completion* completion = n.current.posted.completion;
  n.current.to = Incoming::To::nobody;
  n.reader.advance();
  loan = {&n, record.slot};
  ++n.loaned;
  completion->view = bytes;
  completion->lender = &loan;
  completion->done(completion, {});
  return true;
}

// All bytes are there.
void Shm::complete(Neighbour& n) {
  const Incoming::To to = std::exchange(n.current.to, Incoming::To::nobody);
  if (to == Incoming::To::buffer) {
    Completion* completion = n.current.posted.completion;
    completion->view = n.current.posted.buffer.data;
    return completion->done(completion, {});
  }
  if (to != Incoming::To::heap) return;
  // Somebody may have asked meanwhile.
  std::unique_ptr<Unasked> unasked = std::move(n.current.unasked);
  Matcher::Posted posted;
  const Fate fate = meet(n, unasked->id, unasked->bytes, &posted);
  if (fate == Fate::deliver) return deliver(std::move(unasked), posted);
  if (fate == Fate::waste) return;
  const MessageId id = unasked->id;
  matcher_.keep(n.peer, id, {id.fingerprint, unasked->bytes, unasked.release()});
}

// The peer has cancelled its communicator: as if the message had not come yet.
void Shm::gave_up(Neighbour& n) {
  const Incoming::To to = std::exchange(n.current.to, Incoming::To::nobody);
  n.current.unasked.reset();
  if (to != Incoming::To::buffer) return;
  MessageId id = n.current.id;
  id.fingerprint = n.current.posted.fingerprint;
  matcher_.post(n.peer, id, n.current.posted);
}

void Shm::announced(Neighbour& n, const Record& record) {
  if (record.total <= kCreditBytes) return distrust(n, "a short message was announced");
  if (n.asked.count(record.number) != 0) return distrust(n, "announced twice");
  auto unasked = std::make_unique<Unasked>();
  unasked->peer = n.peer;
  unasked->id = record.id;
  unasked->bytes = record.total;
  unasked->number = record.number;
  Matcher::Posted posted;
  switch (meet(n, record.id, record.total, &posted)) {
    case Fate::deliver:
      return deliver(std::move(unasked), posted);
    case Fate::keep:
      return matcher_.keep(n.peer, record.id,
                           {record.id.fingerprint, unasked->bytes, unasked.release()});
    case Fate::waste:
      return discard(std::move(unasked));
  }
}

void Shm::asked(Neighbour& n, uint32_t number, bool declined) {
  const auto found = n.announced.find(number);
  if (found == n.announced.end()) return;  // cancelled meanwhile
  const Outgoing out = found->second;
  n.announced.erase(found);
  if (declined)
    deferred_.add(out.id.comm, out.completion, {});
  else
    n.data.push_back(out);
}

// A message that waited, and the receive for it: both agree on what it is.
void Shm::deliver(std::unique_ptr<Unasked> unasked, const Matcher::Posted& posted) {
  Completion* completion = posted.completion;
  if (unasked->announced()) {
    Neighbour& n = *find(unasked->peer);
    if (!n.lost.ok()) return completion->done(completion, n.lost);
    n.asked.emplace(unasked->number, Asked{unasked->id, posted});
    Record record;
    record.kind = Kind::ask;
    record.number = unasked->number;
    return say(n, record);
  }
  if (posted.may_lend && unasked->bytes != 0) {
    completion->view = unasked->data.get();
    completion->lender = static_cast<Loan*>(unasked.release());
  } else {
    if (unasked->bytes != 0) std::memcpy(posted.buffer.data, unasked->data.get(), unasked->bytes);
    completion->view = posted.buffer.data;
  }
  completion->done(completion, {});
}

void Shm::discard(std::unique_ptr<Unasked> unasked) {
  if (!unasked->announced()) return;
  Record record;
  record.kind = Kind::decline;
  record.number = unasked->number;
  say(*find(unasked->peer), record);
}

void Shm::owe(Neighbour& n, uint32_t comm, uint64_t bytes) {
  const auto credit = returns_.matched(n.peer, comm, bytes);
  if (!credit) return;
  Record record;
  record.kind = Kind::credit;
  record.id.comm = comm;
  record.number = credit->messages;
  record.total = credit->bytes;
  say(n, record);
}

}  // namespace ringfold::shm
