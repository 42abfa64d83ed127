// Collectives that are captured in CUDA graphs.
#include "lib/comm/communicator_impl.h"

namespace ringfold {
namespace {

// A collective of a graph. It has a channel of its own, so that its replays are numbered apart from
// other calls, which come in another order on each rank. Lives as long as the graph.
class GraphOperation final : public cuda::Replayed {
 public:
  GraphOperation(std::shared_ptr<World> world, std::shared_ptr<Channel> channel,
                 std::shared_ptr<Pending> pending, std::shared_ptr<DeviceRoutes> routes,
                 const UserOperation& captured, Nanoseconds timeout)
      : world_(std::move(world)),
        routes_(std::move(routes)),
        channel_(std::move(channel)),
        pending_(std::move(pending)),
        what_(captured.what),
        position_(captured.position),
        transports_(captured.transports),
        peers_(captured.peers),
        timeout_(timeout) {
    world_->engine().open(channel_);
  }
  ~GraphOperation() override { world_->engine().close(channel_); }
  GraphOperation(const GraphOperation&) = delete;
  GraphOperation& operator=(const GraphOperation&) = delete;

  void start(std::unique_ptr<Compute> compute) noexcept override {
    auto operation = std::make_unique<UserOperation>(std::make_shared<Work::State>(), pending_);
    operation->channel = channel_;
    operation->called = steady_clock().now();
    operation->what = what_;
    operation->position = position_;
    operation->transports = transports_;
    operation->peers = peers_;
    operation->compute = std::move(compute);
    operation->deadline = Nanoseconds::max();
    operation->patience = timeout_;
    world_->engine().submit(std::move(operation));
  }
  void fail(const Status& why) noexcept override { world_->engine().fail(channel_->id, why, true); }

 private:
  const std::shared_ptr<World> world_;
  const std::shared_ptr<DeviceRoutes> routes_;  // null: staged
  const std::shared_ptr<Channel> channel_;
  const std::shared_ptr<Pending> pending_;
  const Description what_;
  const int position_;
  const std::vector<Transport*> transports_;  // by position, as those of an operation
  const std::vector<Peer> peers_;
  const Nanoseconds timeout_;
};

}  // namespace

// Every rank captures the same collectives in the same order: that numbers their channels.
Status Communicator::Impl::capture(UserOperation& operation, const void* input, void* work,
                                   Reduction reduction, Stream stream) {
  constexpr uint32_t kMostCaptured = 1u << 16, kLargestId = (1u << 14) - 2;  // all ones: kReturns
  Description& what = operation.what;
  // Only two ranks would count it.
  if (what.point_to_point)
    return {Code::unsupported, "a message cannot be captured in a CUDA graph, only collectives"};
  const uint32_t number = captured_.fetch_add(1);
  if (number >= kMostCaptured || channel_->id > kLargestId)
    return {Code::unsupported, "too many communicators, or too many captured collectives of one"};
  auto channel = std::make_shared<Channel>();
  channel->id = kCapturedChannel | channel_->id * kMostCaptured | number;
  channel->family = channel_->family;
  channel->names = channel_->names;
  channel->rank = rank_;
  channel->transports = channel_->transports;
  channel->peers = channel_->peers;
  channel->record = record_;
  channel->trace = settled_.trace;
  channel->verify = settled_.verify;
  const cuda::DeviceCall call{&what.schedule, operation.position,  input,
                              work,           what.type,           reduction,
                              what.piece,     what.point_to_point, stream};
  const bool wanted = device_routes_ && what.schedule.count != 0;
  auto path = cuda::path_of_captured(call, wanted ? device_routes_->path() : nullptr);
  if (!path.ok()) return path.status();
  what.on_device = (*path)->kind() == MemoryKind::cuda;
  if (what.on_device) {
    if (operation.peers.empty()) operation.peers = channel_->peers;
    operation.transports = device_routes_->to(operation.peers);
  }
  return cuda::record(call, *path,
                      std::make_unique<GraphOperation>(world_, std::move(channel), pending_,
                                                       what.on_device ? device_routes_ : nullptr,
                                                       operation, settled_.timeout));
}

}  // namespace ringfold
