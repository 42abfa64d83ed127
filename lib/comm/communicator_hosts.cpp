// All-reduces of ranks on several hosts that go host by host: the parts, and what a call looks
// like.
#include <algorithm>
#include <array>

#include "lib/comm/two_level.h"

namespace ringfold {

// Everybody makes the same decisions from what was told at start-up; rank 0 gives the numbers. A
// failure meanwhile is the communicator's: health() tells.
void Communicator::Impl::open_two_level() {
  const auto& hosts = layout_.hosts;
  const auto fewer = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  if (!world_ || settled_.algorithm || settled_.numerics != Numerics::exact || hosts.size() < 2 ||
      std::ranges::max_element(hosts, fewer)->size() == 1)
    return;
  std::array<uint32_t, 2> ids{};
  if (rank_ == 0) ids = {world_->new_id(), world_->new_id()};
  const Call tell{Collective::broadcast, ids.data(), ids.data(), ids.size(), DType::u32,
                  Reduction(),           0,          {}};
  if (!collective(tell).wait().ok() || ids[0] == 0 || ids[1] == 0) return;
  const auto here = std::ranges::find_if(
      hosts, [&](const auto& ranks) { return std::ranges::find(ranks, rank_) != ranks.end(); });
  const auto index = static_cast<size_t>(std::ranges::find(*here, rank_) - here->begin());
  const size_t shards = std::ranges::min_element(hosts, fewer)->size();
  std::shared_ptr<Impl> local, across;
  if (here->size() > 1) {
    local = part(ids[0], channel_->family, *here);
    local->open_region();
  }
  if (index < shards) {
    std::vector<int> ring;
    ring.reserve(hosts.size());
    for (const auto& ranks : hosts) ring.push_back(ranks[index]);
    across = part(ids[1], channel_->family, ring);
  }
  two_level_ = std::make_shared<TwoLevel>(std::move(local), std::move(across),
                                          static_cast<int>(shards), size_);
}

// Whether all ranks have called the same must show on this communicator's own channel: the parts
// have too few ranks to see it. A few bytes go round meanwhile.
std::shared_ptr<Work::State> Communicator::Impl::compare_calls(const Call& call) {
  struct Bytes {
    alignas(16) std::array<std::byte, 16> from{}, to{};
  };
  auto chosen = choice(Collective::all_reduce, size_, 1, size_of(call.type), 0);
  auto state = std::make_shared<Work::State>(world_);
  if (!chosen.ok()) {
    state->complete(chosen.status());
    return state;
  }
  auto bytes = std::make_shared<Bytes>();
  state->then([bytes](const Status&) {});  // keeps them
  auto operation = std::make_unique<UserOperation>(state, pending_);
  operation->channel = channel_;
  operation->called = steady_clock().now();
  operation->what = {chosen->schedule,
                     call.type,
                     call.reduction.op,
                     chosen->piece_bytes / size_of(call.type),
                     false,
                     call.count};
  operation->position = rank_;
  order_by_host(*operation);
  if (Status status = place(*operation, bytes->from.data(), bytes->to.data(), call.reduction, {});
      !status.ok()) {
    state->complete(status);
    return state;
  }
  start_or_group(shared_from_this(), std::move(operation));
  return state;
}

Work Communicator::Impl::in_two_levels(const Call& call) {
  auto state = std::make_shared<Work::State>(world_);
  state->record = record_;
  const int hosts = static_cast<int>(layout_.hosts.size());
  state->report.algorithm = Algorithm::two_level;
  state->report.transport = two_level_->transport();
  state->report.bus_factor = bus_factor(Collective::all_reduce, size_);
  state->report.predicted_seconds = TwoLevel::predict(call, hosts, machine_);
  state->report.bytes_model = two_level_->bytes_across(call, hosts);
  state->started = steady_clock().now();
  auto compared = compare_calls(call);
  run_or_group(shared_from_this(), state,
               [two_level = two_level_, call, state, compared = std::move(compared)] {
                 two_level->start(call, state, *compared);
               });
  return Work(std::move(state));
}

}  // namespace ringfold
