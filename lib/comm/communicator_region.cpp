// Collectives of ranks that share memory: how a communicator gets its region, and what a call of
// one looks like.
#include <fmt/format.h>

#include "lib/comm/communicator_impl.h"

namespace ringfold {

// Everybody makes the same decisions from what was told at start-up; then rank 0 makes the memory
// and hands it on, and there is a region only if every rank has mapped it.
Status Communicator::Impl::open_region() {
  if (!world_ || settled_.algorithm) return {};
  RegionHost* const host = world_->regions(channel_->peers);
  if (host == nullptr) return {};
  std::vector<Peer> others = channel_->peers;
  others.erase(others.begin() + rank_);
  Result<region::Segment> segment = Status(Code::unsupported, "rank 0 could not make it");
  if (rank_ == 0) segment = host->make_segment(channel_->id, others);
  uint8_t made = segment.ok() ? 1 : 0;
  if (Status status =
          collective({Collective::broadcast, &made, &made, 1, DType::u8, Reduction(), 0}).wait();
      !status.ok())
    return status;
  if (made != 0 && rank_ != 0)
    segment = host->receive_segment(channel_->id, channel_->peers[0], size_);
  uint8_t all = segment.ok() ? 1 : 0;
  if (Status status =
          collective({Collective::all_reduce, &all, &all, 1, DType::u8, Reduction(Op::min)}).wait();
      !status.ok())
    return status;
  if (all == 0) {
    log_line(LogLevel::warn,
             "no shared region, messages instead: " +
                 (segment.ok() ? "another rank could not map it" : segment.status().message()));
    return {};
  }
  region_ = std::make_shared<region::Region>(
      std::move(*segment), *channel_, world_->engine(), world_->patience(),
      [host, peers = channel_->peers](int rank) { host->ring(peers[static_cast<size_t>(rank)]); });
  host->add(region_);
  world_->engine().accompany(channel_, region_);
  return {};
}

// The operation of a call, and its Work.
std::unique_ptr<UserOperation> Communicator::Impl::region_operation(const Call& call, Work* work) {
  auto state = std::make_shared<Work::State>(world_);
  const size_t element = size_of(call.type);
  Schedule what;
  what.collective = call.collective;
  what.algorithm = Algorithm::region;
  what.size = size_;
  what.root = call.root;
  what.count = call.count;
  const region::Shape shape = region::shape_of(what, element, region_->pool_bytes());
  state->region = region_;
  Report& report = state->report;
  report.collective = call.collective;
  report.algorithm = Algorithm::region;
  report.transport = "region";
  report.steps = region::phases_of(shape);
  report.bus_factor = bus_factor(call.collective, size_);
  report.bytes_model = region::bytes_written(what, shape, rank_, element);
  report.chunk_bytes = report.piece_bytes = shape.block * element;
  report.predicted_seconds =
      region::predict_seconds(what, shape, element, world_->patience().spins == 0);
  state->started = steady_clock().now();
  auto operation = std::make_unique<UserOperation>(state, pending_);
  operation->channel = channel_;
  operation->what = {what, call.type, call.reduction.op, shape.block, false};
  operation->memory = {call.send, call.recv, call.reduction};
  operation->deadline = deadline();
  operation->region = region_;
  operation->bytes_written = report.bytes_model;
  *work = Work(std::move(state));
  return operation;
}

Work Communicator::Impl::in_region(const Call& call) {
  Work work;
  auto operation = region_operation(call, &work);
  start_or_group(shared_from_this(), std::move(operation));
  return work;
}

// A small all_reduce in a state of rest: everything else is left to the ordinary way, which also
// finds the words for what is wrong with a call.
bool Communicator::Impl::quick(const Call& call, Work* work) {
  if (call.collective != Collective::all_reduce || static_cast<size_t>(call.type) >= kDTypes ||
      static_cast<size_t>(call.reduction.op) >= kOps || call.count > region::kInline)
    return false;
  const size_t element = size_of(call.type), bytes = call.count * element;
  const auto send = reinterpret_cast<uintptr_t>(call.send);
  const auto recv = reinterpret_cast<uintptr_t>(call.recv);
  if (bytes > region::kInline || (send | recv) % element != 0 ||
      (bytes != 0 && (call.send == nullptr || call.recv == nullptr)) ||
      (send != recv && send < recv + bytes && recv < send + bytes) || group_open() ||
      !world_->same_process())
    return false;
  Description what;
  what.schedule.collective = Collective::all_reduce;
  what.schedule.algorithm = Algorithm::region;
  what.schedule.size = size_;
  what.schedule.count = call.count;
  what.type = call.type;
  what.op = call.reduction.op;
  what.piece = call.count;
  const bool waits = take_waits_at_once();
  switch (region_->quick(what, {call.send, call.recv, call.reduction}, waits,
                         [&] { return region_operation(call, work); })) {
    case region::Region::Quick::none:
      if (waits) will_wait_at_once();
      return false;
    case region::Region::Quick::done:
      *work = Work::quick(size_, bytes);
      return true;
    case region::Region::Quick::started:
      return true;
  }
  return false;
}

}  // namespace ringfold
