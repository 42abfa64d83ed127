// What a call may look like, and messages to oneself: the parts of a communicator that need no
// other rank.
#include <fmt/format.h>

#include <cstring>
#include <limits>

#include "lib/comm/communicator_impl.h"

namespace ringfold {
namespace {

struct Span {
  uintptr_t begin = 0, end = 0;
};

Span span_of(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + bytes};
}

Status check_elements(size_t count, DType type) {
  if (static_cast<size_t>(type) >= kDTypes)
    return {Code::invalid_argument,
            fmt::format("element type {}: expected 0 to {}", static_cast<int>(type), kDTypes - 1)};
  if (count > std::numeric_limits<ptrdiff_t>::max() / size_of(type))
    return {
        Code::invalid_argument,
        fmt::format("{} elements of {} bytes are more than memory holds", count, size_of(type))};
  return {};
}

}  // namespace

Status Communicator::Impl::usable() const {
  if (world_ && !world_->same_process())
    return {Code::invalid_argument,
            "this process was forked after the communicator was made: the child must make its own"};
  if (Status status = health(); !status.ok())
    return {status.code(), "this communicator has failed before: " + status.message()};
  return {};
}

Status Communicator::Impl::health() const {
  if (world_) return channel_->health();
  const std::lock_guard lock(self_lock_);
  return alone_;
}

void Communicator::Impl::abort(const std::string& why) {
  fail(Status(Code::aborted, fmt::format("rank {}: {}", rank_, why)));
}

// Ends everything on this communicator, on every rank.
void Communicator::Impl::fail(const Status& status) {
  if (world_) {
    channel_->mark_failed(status);  // this rank's next call is refused already
  } else {
    const std::lock_guard lock(self_lock_);
    if (alone_.ok()) alone_ = status;
  }
  fail_self_messages(status);
  if (region_ && world_->usable()) region_->fail(status);
  if (world_ && world_->usable()) world_->engine().fail(channel_->id, status, true);
}

Status Communicator::Impl::check_buffer(const char* what, const void* buffer, size_t count,
                                        DType type) {
  if (Status status = check_elements(count, type); !status.ok()) return status;
  if (count == 0) return {};
  if (buffer == nullptr)
    return {Code::invalid_argument,
            fmt::format("{} is null, but {} elements were given", what, count)};
  const size_t bytes = size_of(type);
  if (reinterpret_cast<uintptr_t>(buffer) % bytes != 0)
    return {Code::invalid_argument,
            fmt::format("{} at {} is not aligned to its element type {} ({} bytes)", what, buffer,
                        name(type), bytes)};
  return {};
}

// Equal memory means in place; any other overlap would make the result depend on timing.
Status Communicator::Impl::check(const Call& call) const {
  if (Status status = check_elements(call.count, call.type); !status.ok()) return status;
  if (static_cast<size_t>(call.reduction.op) >= kOps)
    return {Code::invalid_argument, fmt::format("operation {}: expected 0 to {}",
                                                static_cast<int>(call.reduction.op), kOps - 1)};
  const size_t element = size_of(call.type);
  if (has_root(call.collective) && (call.root < 0 || call.root >= size_))
    return {Code::invalid_argument, fmt::format("root {}: expected 0 to {}", call.root, size_ - 1)};
  Schedule schedule;
  schedule.collective = call.collective;
  schedule.size = size_;
  schedule.root = call.root;
  schedule.count = call.count;
  const Frame frames = frame(schedule, rank_);
  if (Status status = check_buffer("the send buffer", call.send, frames.input.count, call.type);
      !status.ok())
    return status;
  if (Status status = check_buffer("the receive buffer", call.recv, frames.work.count, call.type);
      !status.ok())
    return status;
  if (frames.input.empty() || frames.work.empty() || call.collective == Collective::broadcast)
    return {};
  const Span send = span_of(call.send, frames.input.count * element);
  const Span recv = span_of(call.recv, frames.work.count * element);
  const bool apart = send.end <= recv.begin || recv.end <= send.begin;
  const bool in_place =
      send.begin - frames.input.begin * element == recv.begin - frames.work.begin * element;
  if (apart || (in_place && call.collective != Collective::all_to_all)) return {};
  return {Code::invalid_argument,
          fmt::format("{}: the send buffer [{:#x}, {:#x}) and the receive buffer [{:#x}, {:#x}) "
                      "overlap, but not in place{}",
                      name(call.collective), send.begin, send.end, recv.begin, recv.end,
                      call.collective == Collective::all_to_all ? ", which it cannot be" : "")};
}

Work Communicator::Impl::part_wise(Call call) {
  const auto parts = static_cast<size_t>(size_);
  if (call.count > std::numeric_limits<size_t>::max() / parts)
    return Work(Status(Code::invalid_argument,
                       fmt::format("{} elements from each of {} ranks are more than memory holds",
                                   call.count, size_)));
  call.count *= parts;
  return collective(call);
}

// ---- messages to oneself ----------------------------------------------------------------------

Work Communicator::Impl::self_message(bool sends, void* buffer, size_t count, DType type,
                                      Stream stream) {
  auto state = std::make_shared<Work::State>();
  state->report.transport = "self";
  state->deadline = deadline();
  state->expire = [weak = weak_from_this(), sends, count, type] {
    if (const auto self = weak.lock())
      self->fail(
          Status(Code::timeout,
                 fmt::format("rank {} {} itself {} elements of {}: the other half was not "
                             "called before the deadline",
                             self->rank_, sends ? "sends" : "receives from", count, name(type))));
  };
  const SelfMessage message{sends, buffer, count, type, stream, state};
  run_or_group(shared_from_this(), state, [this, message] { meet_self(message); });
  return Work(std::move(state));
}

// The first open half of the other kind, in order, is the partner.
void Communicator::Impl::meet_self(const SelfMessage& message) {
  SelfMessage partner;
  Status status;
  {
    const std::lock_guard lock(self_lock_);
    status = world_ ? channel_->health() : alone_;  // a group may come to it late
    const bool met = !self_messages_.empty() && self_messages_.front().sends != message.sends;
    if (status.ok() && !met) {
      self_messages_.push_back(message);
      return;
    }
    if (status.ok()) {
      partner = self_messages_.front();
      self_messages_.pop_front();
    }
  }
  if (!status.ok()) return message.state->complete(status);
  const SelfMessage& from = message.sends ? message : partner;
  const SelfMessage& to = message.sends ? partner : message;
  if (from.count != to.count || from.type != to.type)
    status = {Code::mismatch, fmt::format("rank {} sends itself {} {} but receives {} {}", rank_,
                                          from.count, name(from.type), to.count, name(to.type))};
  else
    status = move_to_self(from, to);
  partner.state->complete(status);
  message.state->complete(status);
}

// On a device it is behind what is on both streams, and before what comes.
Status Communicator::Impl::move_to_self(const SelfMessage& from, const SelfMessage& to) {
  if (from.count == 0 || from.buffer == to.buffer) return {};
  const bool ordered = cuda::is_ordered(from.buffer, nullptr, from.stream) ||
                       cuda::is_ordered(nullptr, to.buffer, to.stream);
  if (!ordered) {
    std::memmove(to.buffer, from.buffer, from.count * size_of(from.type));
    return {};
  }
  return cuda::move(from.buffer, from.stream, to.buffer, to.stream, from.count, from.type);
}

void Communicator::Impl::fail_self_messages(const Status& why) {
  std::deque<SelfMessage> open;
  {
    const std::lock_guard lock(self_lock_);
    open.swap(self_messages_);
  }
  for (const SelfMessage& message : open) message.state->complete(why);
}

}  // namespace ringfold
