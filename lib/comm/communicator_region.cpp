// Collectives of ranks that share memory: how a communicator gets its region, and what a call of
// one looks like.
#include <fmt/format.h>

#include <limits>

#include "lib/comm/communicator_impl.h"

namespace ringfold {
namespace {

// An operation of fewer bytes that is over before its call returns is not timed.
constexpr size_t kTimed = 64 << 10;

}  // namespace

// Everybody makes the same decisions from what was told at start-up; then rank 0 makes the memory
// and hands it on, and there is a region only if every rank has mapped it. A failure meanwhile, be
// it that another rank has given the communicator up already, is the communicator's: health()
// tells.
void Communicator::Impl::open_region() {
  // NCCL's numerics are those of its ring.
  if (!world_ || settled_.algorithm || settled_.numerics != Numerics::exact) return;
  RegionHost* const host = world_->regions(channel_->peers);
  if (host == nullptr) return;
  std::vector<Peer> others = channel_->peers;
  others.erase(others.begin() + rank_);
  Result<region::Segment> segment = Status(Code::unsupported, "rank 0 could not make it");
  if (rank_ == 0) segment = host->make_segment(channel_->id, others);
  uint8_t made = segment.ok() ? 1 : 0;
  const Call tell{Collective::broadcast, &made, &made, 1, DType::u8, Reduction(), 0, {}};
  if (!collective(tell).wait().ok()) return;
  if (made != 0 && rank_ != 0)
    segment = host->receive_segment(channel_->id, channel_->peers[0], size_);
  uint8_t all = segment.ok() ? 1 : 0;
  const Call agree{Collective::all_reduce, &all, &all, 1, DType::u8, Reduction(Op::min), 0, {}};
  if (!collective(agree).wait().ok()) return;
  if (all == 0) {
    log_line(LogLevel::warn,
             "no shared region, messages instead: " +
                 (segment.ok() ? "another rank could not map it" : segment.status().message()));
    return;
  }
  region_ = std::make_shared<region::Region>(std::move(*segment), *channel_, world_->engine(),
                                             world_->patience(), world_->crowded(),
                                             host->neighbours(channel_->peers));
  host->add(region_);
  world_->engine().accompany(channel_, region_);
  record_->name_transport(transport());
}

Description Communicator::Impl::region_description(const Call& call) const {
  Description what;
  what.schedule.collective = call.collective;
  what.schedule.algorithm = Algorithm::region;
  what.schedule.size = size_;
  what.schedule.root = call.root;
  what.schedule.count = call.count;
  what.type = call.type;
  what.op = call.reduction.op;
  what.stands_for = call.stands_for;
  what.part = call.part;
  return what;
}

std::shared_ptr<Work::State> Communicator::Impl::region_state(const Description& what) {
  auto state = std::make_shared<Work::State>(world_);
  state->record = record_;
  state->report = region::report_of(what.schedule, size_of(what.type), rank_, region_->room());
  state->started = steady_clock().now();
  return state;
}

Work::Brief Communicator::Impl::brief_of(const Call& call, Nanoseconds begun, bool direct) const {
  Work::Brief brief = brief_of(call);
  if (begun != Nanoseconds::min()) {
    brief.returned = steady_clock().now();
    brief.seconds = std::chrono::duration<float>(brief.returned - begun).count();
  }
  brief.direct = direct;
  return brief;
}

Work::Brief Communicator::Impl::brief_of(const Call& call) const {
  Work::Brief brief;
  brief.count = static_cast<uint32_t>(call.count);
  brief.ranks = static_cast<uint16_t>(size_);
  brief.rank = static_cast<uint16_t>(rank_);
  brief.root = static_cast<uint16_t>(call.root);
  brief.collective = call.collective;
  brief.element_bytes = static_cast<uint8_t>(size_of(call.type));
  brief.crowded = region_->room().crowded;
  return brief;
}

std::unique_ptr<UserOperation> Communicator::Impl::region_operation(
    const Call& call, const Description& what, const std::shared_ptr<Work::State>& state) {
  state->region = region_;
  auto operation = std::make_unique<UserOperation>(state, pending_);
  operation->channel = channel_;
  operation->called = state->started;
  operation->what = what;
  operation->memory = {call.send, call.recv, call.reduction};
  operation->deadline = deadline();
  operation->region = region_;
  operation->send = region::find_memory(call.send, 1);
  operation->recv = region::find_memory(call.recv, 1);
  return operation;
}

void Communicator::Impl::note_region_calls(UserOperation& operation) const {
  if (region_) operation.beside = region_->called();
}

// Only a region makes something of it.
Status Communicator::Impl::register_memory(const void* memory, size_t bytes) {
  if (Status status = usable(); !status.ok()) return status;
  if (memory == nullptr && bytes != 0)
    return {Code::invalid_argument, "the memory to be registered is null"};
  if (!region_) return {};
  if (const auto found = region::find_memory(memory, bytes))
    world_->regions(channel_->peers)->share(*found, channel_->peers);
  return {};
}

Work Communicator::Impl::after(region::Region::Quick how, const Call& call, Nanoseconds begun,
                               std::shared_ptr<Work::State> started) const {
  using Quick = region::Region::Quick;
  if (how != Quick::started) return Work(brief_of(call, begun, how == Quick::done_directly));
  started->returned = steady_clock().now();
  return Work(std::move(started));
}

Work Communicator::Impl::in_region(const Call& call) {
  const Description what = region_description(call);
  std::shared_ptr<Work::State> state;
  const auto make_own = [&] {
    state = region_state(what);
    return region_operation(call, what, state);
  };
  const auto make = [&] { return std::unique_ptr<Operation>(make_own()); };
  if (!settled_.trace && !group_open() && call.count <= std::numeric_limits<uint32_t>::max() &&
      take_waits_at_once()) {
    // Looking at the clock would be a good part of it.
    const bool timed = call.count * size_of(call.type) >= kTimed;
    const Nanoseconds begun = timed ? steady_clock().now() : Nanoseconds::min();
    const Operation::Memory memory{call.send, call.recv, call.reduction};
    const auto how = region_->run(what, memory, make, begun);
    if (how != region::Region::Quick::none) return after(how, call, begun, std::move(state));
    will_wait_at_once();
  }
  start_or_group(shared_from_this(), make_own());
  return Work(std::move(state));
}

// Looks at little and copies nothing: this is most of what a small all_reduce costs.
region::Region::Quick Communicator::Impl::quick(const Operation::Memory& memory, size_t count,
                                                DType type, Stream stream, bool waits,
                                                std::shared_ptr<Work::State>* takes_longer) {
  using Quick = region::Region::Quick;
  if (!region_ || settled_.trace || count >= kTimed || static_cast<size_t>(type) >= kDTypes ||
      static_cast<size_t>(memory.reduction.op) >= kOps)
    return Quick::none;
  const size_t element = size_of(type), bytes = count * element;
  const bool small = bytes <= region::inline_bytes(size_);
  const auto send = reinterpret_cast<uintptr_t>(memory.send);
  const auto recv = reinterpret_cast<uintptr_t>(memory.recv);
  if ((!small && (!waits || bytes >= kTimed)) || (send | recv) % element != 0 ||
      (bytes != 0 && (send == 0 || recv == 0)) ||
      (send != recv && send < recv + bytes && recv < send + bytes) || group_open() ||
      !world_->same_process() || cuda::is_ordered(memory.send, memory.recv, stream))
    return Quick::none;
  const auto make = [&] {
    const Call call{Collective::all_reduce, memory.send, memory.recv, count, type,
                    memory.reduction};
    const Description what = region_description(call);
    *takes_longer = region_state(what);
    return std::unique_ptr<Operation>(region_operation(call, what, *takes_longer));
  };
  return small ? region_->run_small(count, type, memory, waits, make)
               : region_->run(count, type, memory, make);
}

}  // namespace ringfold
