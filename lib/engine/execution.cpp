#include "lib/engine/execution.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <utility>

#include "lib/base/checksum.h"

namespace ringfold {
namespace {

bool overlap(const Range& a, const Range& b) {
  return a.count != 0 && b.count != 0 && a.begin < b.end() && b.begin < a.end();
}

bool receives(const Step& step) {
  return step.from >= 0;
}
bool local(const Step& step) {
  return step.from < 0 && step.to < 0 && step.then == Then::copy;
}

// Bits for the number of a piece within its step: the longest step decides, on all ranks alike.
int piece_bits(const Schedule& schedule, size_t piece) {
  const size_t longest =
      schedule.segment != 0 ? std::min(schedule.segment, schedule.count) : schedule.count;
  const size_t pieces = std::max<size_t>(1, (longest + piece - 1) / piece);
  return std::bit_width(pieces - 1);
}

// The record that a completion is part of.
template <class Record>
Record* record_of(Completion* completion, Completion Record::*member) {
  static const Record kProbe{};
  const auto offset =
      reinterpret_cast<const char*>(&(kProbe.*member)) - reinterpret_cast<const char*>(&kProbe);
  return reinterpret_cast<Record*>(reinterpret_cast<char*>(completion) - offset);
}

}  // namespace

bool Execution::messages_fit(const Schedule& schedule, size_t piece) {
  const int bits = piece_bits(schedule, piece);
  return bits < 32 && (static_cast<uint64_t>(step_count(schedule)) << bits) <= (uint64_t{1} << 32);
}

Execution::Execution(const Schedule& schedule, int position, const MessageId& id,
                     const Route& route, Compute& compute, size_t piece, size_t element_bytes,
                     bool verify)
    : schedule_(schedule),
      position_(position),
      steps_(step_count(schedule)),
      id_(id),
      route_(route),
      compute_(compute),
      piece_(piece),
      element_bytes_(element_bytes),
      piece_bits_(piece_bits(schedule, piece)),
      verify_(verify) {
  assert(piece > 0 && messages_fit(schedule, piece));
  for (Receive& receive : receives_) {
    receive.owner = this;
    receive.arrival.done = on_arrival;
    receive.check.done = on_check;
    receive.consumed.done = on_consumed;
  }
  for (Send& send : sends_) {
    send.owner = this;
    send.staged.done = on_staged;
    send.sent.done = on_sent;
    send.check.done = on_check_sent;
  }
  enter(next_receive_, 0, true);
  enter(next_send_, 0, false);
}

Execution::~Execution() {
  assert(outstanding_ == 0);
}

// ---- places in the schedule -------------------------------------------------------------------

const Step& Execution::step_at(int index) const {
  Cached& cached = cache_[static_cast<size_t>(index) % cache_.size()];
  if (cached.index != index) cached = {index, ringfold::step(schedule_, position_, index)};
  return cached.step;
}

uint32_t Execution::pieces_of(const Range& range) const {
  return range.count <= piece_ ? 1 : static_cast<uint32_t>((range.count + piece_ - 1) / piece_);
}

Range Execution::piece_range(const Range& range, uint32_t piece) const {
  const size_t begin = std::min(range.count, piece * piece_);
  return {range.begin + begin, std::min(piece_, range.count - begin)};
}

MessageId Execution::id_of(int step, uint32_t piece) const {
  MessageId id = id_;
  id.index = (static_cast<uint32_t>(step) << piece_bits_) | piece;
  return id;
}

// Pieces are numbered from below, their checksums from above.
MessageId Execution::check_id_of(int step, uint32_t piece) const {
  MessageId id = id_of(step, piece);
  id.index = ~id.index;
  return id;
}

// Puts the cursor on the first step from `index` on that receives (or copies), or that sends.
void Execution::enter(Cursor& cursor, int index, bool receiving) {
  for (; index < steps_; ++index) {
    const Step& step = step_at(index);
    if (receiving ? receives(step) || local(step) : step.to >= 0) {
      cursor.step = step;
      cursor.piece = 0;
      cursor.pieces = local(step) ? 1 : pieces_of(receiving ? step.recv : step.send);
      break;
    }
    if (receives(step) && step.into == From::transit) cursor.transit_step = index;
  }
  cursor.index = index;
}

void Execution::next_piece(Cursor& cursor, bool receiving) {
  if (++cursor.piece < cursor.pieces) return;
  if (receives(cursor.step) && cursor.step.into == From::transit)
    cursor.transit_step = cursor.index;
  enter(cursor, cursor.index + 1, receiving);
}

// ---- the one rule -----------------------------------------------------------------------------

bool Execution::reads_work(From from) const {
  return from == From::work || (from == From::input && compute_.in_place());
}

bool Execution::touches_work(const Receive& receive) const {
  if (receive.piece.into == From::work) return true;
  return receive.piece.then == Then::reduce && reads_work(receive.piece.side);
}

// What was staged into a slot is sent from there.
bool Execution::touches_work(const Send& send) const {
  if (send.state == State::done || (send.slot >= 0 && send.state != State::posted)) return false;
  return reads_work(send.piece.side);
}

// Whether the next step sends what this one receives into work, from a slot.
bool Execution::forwarded(int index) const {
  if (index + 1 >= steps_ || !compute_.stages(From::work)) return false;
  const Step &step = step_at(index), &next = step_at(index + 1);
  return step.into == From::work && next.to >= 0 && next.send_from == From::work &&
         !step.recv.empty() && next.send == step.recv;
}

// Whether `range` of the work buffer holds what all steps before `step` have made of it. An empty
// range waits for all of them: so a rank that is through with a collective has heard, directly or
// not, from every other, even where there is nothing to add up; a barrier is no more than that.
bool Execution::may_read(const Range& range, int step) const {
  const bool everything = range.empty();
  for (uint32_t n = retired_; n != received_; ++n) {
    const Receive& receive = receives_[n % kWindow];
    if (receive.step < step && receive.state != State::done &&
        (everything || (receive.piece.into == From::work && overlap(receive.piece.range, range))))
      return false;
  }
  if (next_receive_.index >= step) return true;
  if (everything) return false;
  const auto writes = [](const Step& s) {
    return (receives(s) || local(s)) && s.into == From::work;
  };
  const Range rest{next_receive_.step.recv.begin + next_receive_.piece * piece_,
                   next_receive_.step.recv.count -
                       std::min(next_receive_.step.recv.count, next_receive_.piece * piece_)};
  if (writes(next_receive_.step) && overlap(rest, range)) return false;
  for (int i = next_receive_.index + 1; i < step && i < steps_; ++i)
    if (writes(step_at(i)) && overlap(step_at(i).recv, range)) return false;
  return true;
}

// Whether a receive of `step`, number `self`, may write `range` of the work buffer: everything that
// an earlier step, or the send of the same step, still has to read or write there has happened.
bool Execution::may_write(const Range& range, int step, uint32_t self) const {
  for (uint32_t n = retired_; n != self; ++n) {
    const Receive& receive = receives_[n % kWindow];
    if (receive.state != State::done && touches_work(receive) &&
        overlap(receive.piece.range, range))
      return false;
  }
  for (uint32_t n = sends_retired_; n != sends_posted_; ++n) {
    const Send& send = sends_[n % kWindow];
    if (send.step <= step && touches_work(send) && overlap(send.piece.range, range)) return false;
  }
  if (next_send_.index > step || next_send_.index >= steps_) return true;
  const Range rest{
      next_send_.step.send.begin + next_send_.piece * piece_,
      next_send_.step.send.count - std::min(next_send_.step.send.count, next_send_.piece * piece_)};
  if (reads_work(next_send_.step.send_from) && overlap(rest, range)) return false;
  for (int i = next_send_.index + 1; i <= step && i < steps_; ++i) {
    const Step& s = step_at(i);
    if (s.to >= 0 && reads_work(s.send_from) && overlap(s.send, range)) return false;
  }
  return true;
}

// ---- slots ------------------------------------------------------------------------------------

int Execution::take(uint32_t& free) {
  if (free == 0) return -1;
  const int slot = std::countr_zero(free);
  free &= free - 1;
  return slot;
}

void Execution::free_slot(int slot) {
  if (slot < 0) return;
  if (slot < kSlots)
    free_slots_ |= 1u << slot;
  else if (slot < kSlots + kStagingSlots)
    free_staging_ |= 1u << (slot - kSlots);
  else
    free_mirrors_ |= 1u << (slot - kSlots - kStagingSlots);
}

// The slot of a result in transit or mirrored, whose user takes it over; -1 if it is not there yet.
int Execution::take_result(std::span<Transit> results, int step, uint32_t piece) {
  for (Transit& result : results) {
    if (result.slot < 0 || result.step != step || result.piece != piece) continue;
    return std::exchange(result.slot, -1);
  }
  return -1;
}

// At most one a slot: there is room.
void Execution::keep_result(std::span<Transit> results, const Transit& result) {
  *std::ranges::find_if(results, [](const Transit& r) { return r.slot < 0; }) = result;
}

// ---- what advance() tries ---------------------------------------------------------------------

bool Execution::post_receive() {
  if (next_receive_.index >= steps_ || received_ - retired_ == kWindow) return false;
  if (next_receive_.index > next_send_.index + kLead) return false;
  const Step& step = next_receive_.step;
  Receive& receive = receives_[received_ % kWindow];
  receive.local = local(step);
  receive.step = next_receive_.index;
  receive.number = next_receive_.piece;
  receive.from = step.from;
  receive.operand_step = next_receive_.transit_step;
  receive.operand_slot = receive.slot = -1;
  receive.piece = {receive.local ? step.recv : piece_range(step.recv, next_receive_.piece),
                   step.operand,
                   step.into,
                   step.then,
                   step.mine,
                   step.theirs,
                   -1};
  if (receive.local) {
    receive.state = State::arrived;
  } else {
    const bool direct = step.then == Then::copy && step.into == From::work;
    if (direct && !may_write(receive.piece.range, receive.step, received_)) return false;
    if (!direct && (receive.slot = take(free_slots_)) < 0) return false;
    receive.state = State::posted;
    receive.arrival.view = nullptr;
    receive.arrival.lender = nullptr;
    const Buffer buffer = compute_.landing(receive.piece, receive.slot);
    // Two ranks that exchange the same range would each keep the other's send open by a loan, and
    // wait for their own: so such a receive is copied out.
    const bool exchange =
        step.to >= 0 && reads_work(step.send_from) && overlap(step.send, step.recv);
    const Loans loans = compute_.loans();
    const bool may_lend = loans == Loans::all || (loans == Loans::some && !direct && !exchange);
    ++outstanding_;
    route_.transport[static_cast<size_t>(step.from)]->recv(
        route_.peer[static_cast<size_t>(step.from)], id_of(receive.step, receive.number), buffer,
        may_lend, &receive.arrival);
    receive.to_come = 1;
    if (checks(receive.piece.range)) {
      ++receive.to_come;
      ++outstanding_;
      receive.check.view = nullptr;
      receive.check.lender = nullptr;
      route_.transport[static_cast<size_t>(step.from)]->recv(
          route_.peer[static_cast<size_t>(step.from)], check_id_of(receive.step, receive.number),
          {&receive.sum, sizeof receive.sum, MemoryKind::host}, false, &receive.check);
    }
  }
  ++received_;
  next_piece(next_receive_, true);
  return true;
}

bool Execution::post_send() {
  if (next_send_.index >= steps_ || sends_posted_ - sends_retired_ == kWindow) return false;
  if (next_send_.index > next_receive_.index + kLead) return false;
  const Step& step = next_send_.step;
  const Range range = piece_range(step.send, next_send_.piece);
  From side = step.send_from;
  int slot = -1;
  if (side == From::transit) {
    slot = take_result(transit_, next_send_.transit_step, next_send_.piece);
    if (slot < 0) return false;
  } else if ((slot = take_result(mirrors_, next_send_.index - 1, next_send_.piece)) >= 0) {
    side = From::transit;
  } else {
    if ((range.empty() || reads_work(step.send_from)) && !may_read(range, next_send_.index))
      return false;
    if (!range.empty() && compute_.stages(step.send_from)) {
      slot = take(free_staging_);
      if (slot < 0) return false;
      slot += kSlots;
    }
  }
  Send& send = sends_[sends_posted_ % kWindow];
  send.step = next_send_.index;
  send.number = next_send_.piece;
  send.to = step.to;
  send.slot = slot;
  send.piece = {range, side, From::work, Then::none, 1, 1, -1};
  send.state = State::posted;
  ++sends_posted_;
  next_piece(next_send_, false);
  ++outstanding_;
  compute_.stage(send.piece, slot, &send.buffer, &send.staged);
  return true;
}

// Hands staged sends to the transport, in order.
bool Execution::issue_sends() {
  bool moved = false;
  while (sends_issued_ != sends_posted_) {
    Send& send = sends_[sends_issued_ % kWindow];
    if (send.state != State::arrived) break;
    send.state = State::consuming;
    ++sends_issued_;
    ++outstanding_;
    moved = true;
    bytes_sent_ += send.piece.range.count * element_bytes_;
    Transport& transport = *route_.transport[static_cast<size_t>(send.to)];
    const Peer peer = route_.peer[static_cast<size_t>(send.to)];
    send.to_go = 1;
    if (checks(send.piece.range)) send.sum = checksum(send.buffer.data, send.buffer.bytes);
    transport.send(peer, id_of(send.step, send.number), send.buffer, &send.sent);
    if (!checks(send.piece.range)) continue;
    ++send.to_go;
    ++outstanding_;
    transport.send(peer, check_id_of(send.step, send.number),
                   {&send.sum, sizeof send.sum, MemoryKind::host}, &send.check);
  }
  return moved;
}

// Whether it is what was sent; if not, the operation fails.
bool Execution::intact(const Receive& receive) {
  if (receive.local || !checks(receive.piece.range) ||
      checksum(receive.arrival.view, receive.piece.range.count * element_bytes_) == receive.sum)
    return true;
  fail_with(receive.from, Status(Code::system, "piece " + std::to_string(receive.number) +
                                                   " of step " + std::to_string(receive.step + 1) +
                                                   " of " + std::to_string(steps_) +
                                                   " arrived damaged: its checksum differs"));
  return false;
}

// Folds or places what has arrived, in the order in which it was posted.
bool Execution::consume_next() {
  if (consumed_ == received_) return false;
  Receive& receive = receives_[consumed_ % kWindow];
  if (receive.state != State::arrived) return false;
  const bool landed =
      !receive.local && receive.slot < 0;  // was allowed to write when it was posted
  if (!landed && receive.piece.into == From::work &&
      !may_write(receive.piece.range, receive.step, consumed_))
    return false;
  if (receive.piece.then == Then::reduce && receive.piece.side == From::transit) {
    receive.operand_slot = take_result(transit_, receive.operand_step, receive.number);
    if (receive.operand_slot < 0) return false;
  }
  if (!intact(receive)) return false;
  if (!receive.local && forwarded(receive.step)) {
    const int mirror = take(free_mirrors_);
    if (mirror >= 0) receive.piece.mirror = kSlots + kStagingSlots + mirror;
  }
  receive.state = State::consuming;
  ++consumed_;
  ++outstanding_;
  if (receive.local)
    compute_.copy_local(receive.piece.range, &receive.consumed);
  else
    compute_.consume(receive.piece, receive.slot, receive.operand_slot, receive.arrival.view,
                     &receive.consumed);
  return true;
}

bool Execution::retire() {
  const uint32_t before = retired_ + sends_retired_;
  while (retired_ != consumed_ && receives_[retired_ % kWindow].state == State::done) ++retired_;
  while (sends_retired_ != sends_issued_ && sends_[sends_retired_ % kWindow].state == State::done)
    ++sends_retired_;
  return before != retired_ + sends_retired_;
}

bool Execution::advance() {
  woken_ = false;
  bool any = false;
  for (bool moved = true; moved && status_.ok();) {
    moved = retire();
    while (post_receive()) moved = true;
    while (post_send()) moved = true;
    if (issue_sends()) moved = true;
    while (consume_next()) moved = true;
    any |= moved;
  }
  return any;
}

bool Execution::finished() const {
  if (outstanding_ != 0) return false;
  if (!status_.ok()) return true;
  return next_receive_.index >= steps_ && next_send_.index >= steps_ && retired_ == received_ &&
         sends_retired_ == sends_posted_;
}

void Execution::fail(const Status& why) {
  if (!status_.ok()) return;
  status_ = why;
  woken_ = true;
  for (uint32_t n = consumed_; n != received_; ++n) {
    Receive& receive = receives_[n % kWindow];
    if (receive.state == State::arrived && receive.arrival.lender != nullptr)
      route_.transport[static_cast<size_t>(receive.from)]->give_back(&receive.arrival);
    if (receive.state == State::arrived) receive.state = State::done;
  }
}

// The first failure counts, and whose it was.
void Execution::fail_with(int position, const Status& why) {
  if (status_.ok()) failed_peer_ = route_.peer[static_cast<size_t>(position)];
  fail(why);
}

// ---- completions ------------------------------------------------------------------------------

// The piece, or its checksum.
void Execution::came(Receive& receive, const Status& status) {
  --outstanding_;
  woken_ = true;
  --receive.to_come;
  if (status.ok() && status_.ok()) {
    if (receive.to_come > 0) return;
    receive.state = State::arrived;
    bytes_received_ += receive.piece.range.count * element_bytes_;
    return;
  }
  receive.state = State::done;
  if (receive.arrival.lender != nullptr)
    route_.transport[static_cast<size_t>(receive.from)]->give_back(&receive.arrival);
  if (!status.ok()) fail_with(receive.from, status);
}

void Execution::on_arrival(Completion* completion, const Status& status) noexcept {
  Receive& receive = *record_of(completion, &Receive::arrival);
  receive.owner->came(receive, status);
}

void Execution::on_check(Completion* completion, const Status& status) noexcept {
  Receive& receive = *record_of(completion, &Receive::check);
  receive.owner->came(receive, status);
}

void Execution::on_consumed(Completion* completion, const Status& status) noexcept {
  Receive& receive = *record_of(completion, &Receive::consumed);
  Execution& self = *receive.owner;
  --self.outstanding_;
  self.woken_ = true;
  receive.state = State::done;
  if (!receive.local && receive.arrival.lender != nullptr)
    self.route_.transport[static_cast<size_t>(receive.from)]->give_back(&receive.arrival);
  self.free_slot(receive.operand_slot);
  if (receive.piece.into == From::transit)
    keep_result(self.transit_, {receive.step, receive.number, receive.slot});
  else
    self.free_slot(receive.slot);
  if (receive.piece.mirror >= 0)
    keep_result(self.mirrors_, {receive.step, receive.number, receive.piece.mirror});
  if (!status.ok()) self.fail(status);
}

void Execution::on_staged(Completion* completion, const Status& status) noexcept {
  Send& send = *record_of(completion, &Send::staged);
  Execution& self = *send.owner;
  --self.outstanding_;
  self.woken_ = true;
  send.state = State::arrived;
  if (!status.ok()) self.fail(status);
}

// The piece, or its checksum.
void Execution::went(Send& send, const Status& status) {
  --outstanding_;
  woken_ = true;
  if (--send.to_go == 0) {
    send.state = State::done;
    free_slot(send.slot);
  }
  if (!status.ok()) fail_with(send.to, status);
}

void Execution::on_sent(Completion* completion, const Status& status) noexcept {
  Send& send = *record_of(completion, &Send::sent);
  send.owner->went(send, status);
}

void Execution::on_check_sent(Completion* completion, const Status& status) noexcept {
  Send& send = *record_of(completion, &Send::check);
  send.owner->went(send, status);
}

}  // namespace ringfold
