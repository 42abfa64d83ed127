// How a communicator's collectives on device memory travel: chosen once, when it is made, by all
// its ranks alike.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "lib/comm/communicator_impl.h"
#include "lib/cuda/pool.h"

namespace ringfold {
namespace {

// What a rank found out about the ways to all others, and why one cannot be had.
struct Verdict {
  uint8_t direct = 1, ucx = 1;
  std::array<char, 126> no_direct{}, no_ucx{};
};

void refuse(uint8_t* way, std::array<char, 126>* why, const std::string& text) {
  if (*way == 0) return;  // the first reason stays
  *way = 0;
  text.copy(why->data(), why->size() - 1);
}

}  // namespace

DeviceRoutes::~DeviceRoutes() {
  for (const Known& known : known_) known.references->forget(known.peer, known.begin);
}

// Null if the way cannot be had; `way` is direct or ucx.
Transport* DeviceRoutes::route(cuda::Way way, Peer peer) const {
  if (way == cuda::Way::ucx) return world_->device_ucx(peer);
  if (References* const references = world_->references(peer)) return references;
  return world_->device_ucx(peer);  // the devices of another host
}

// From now on what that rank sends can be read.
Status DeviceRoutes::know(Peer peer, const cuda::Offer& theirs) {
  References* const references = world_->references(peer);
  if (references == nullptr) return {};
  const auto memory = pool_->reach(theirs);
  if (!memory.ok()) return memory.status();
  references->know(peer, theirs.begin, theirs.bytes, *memory);
  known_.push_back({references, peer, theirs.begin});
  return {};
}

void DeviceRoutes::take(cuda::Way way, const std::vector<Peer>& peers) {
  way_ = way;
  for (const Transport* transport : to(peers)) {
    if (transport == nullptr || names_.find(transport->name()) != std::string::npos) continue;
    names_ += (names_.empty() ? "" : "+") + std::string(transport->name());
  }
}

std::vector<Transport*> DeviceRoutes::to(const std::vector<Peer>& peers) const {
  std::vector<Transport*> transports;
  transports.reserve(peers.size());
  for (const Peer peer : peers) transports.push_back(route(way_, peer));
  return transports;
}

Status DeviceRoutes::reserve() {
  path_ = std::make_shared<cuda::Path>(pool_, cuda::Path::kAtOnce);
  return path_->reserve(kMaxPieceBytes);
}

// Every rank tells where its pool is, tries to reach the others', and hears what the others found.
// A failure meanwhile is the communicator's: health() tells.
void Communicator::Impl::open_device_routes() {
  if (!world_ || settled_.way == cuda::Way::staged) return;
  if (Status status = world_->have_devices(channel_->peers); !status.ok())
    return without_device_routes(status.message());
  auto pool = cuda::Pool::make();
  cuda::Offer mine;
  if (pool.ok())
    mine = (*pool)->offer();
  else
    pool.status().message().copy(mine.why.data(), mine.why.size() - 1);
  const auto tell_all = [this](const auto& one, auto* all) {
    return part_wise({Collective::all_gather,
                      &one,
                      all->data(),
                      sizeof(one),
                      DType::u8,
                      Reduction(),
                      0,
                      {}})
        .wait()
        .ok();
  };
  std::vector<cuda::Offer> offers(static_cast<size_t>(size_));
  if (!tell_all(mine, &offers)) return;
  auto routes = std::make_shared<DeviceRoutes>(world_, pool.ok() ? *pool : nullptr);
  Verdict verdict;
  for (size_t r = 0; r < offers.size(); ++r) {
    if (r == static_cast<size_t>(rank_)) continue;
    const Peer peer = channel_->peers[r];
    Status status = pool.ok() ? routes->know(peer, offers[r]) : pool.status();
    if (status.ok() && routes->route(cuda::Way::direct, peer) == nullptr)
      status = {Code::unsupported, "it is on another host, and no CUDA-aware UCX leads there"};
    const std::string who = fmt::format("rank {} to rank {}: ", rank_, r);
    if (!status.ok()) refuse(&verdict.direct, &verdict.no_direct, who + status.message());
    if (!pool.ok() || world_->device_ucx(peer) == nullptr)
      refuse(
          &verdict.ucx, &verdict.no_ucx,
          pool.ok() ? who + "not both have a UCX that moves device memory" : who + mine.why.data());
  }
  std::vector<Verdict> verdicts(static_cast<size_t>(size_));
  if (!tell_all(verdict, &verdicts)) return;
  const auto no_direct = std::ranges::find(verdicts, 0, &Verdict::direct);
  const auto no_ucx = std::ranges::find(verdicts, 0, &Verdict::ucx);
  const bool direct = no_direct == verdicts.end() && settled_.way != cuda::Way::ucx;
  const bool ucx = no_ucx == verdicts.end() && settled_.way != cuda::Way::direct;
  if (!direct && !ucx)
    return without_device_routes(settled_.way == cuda::Way::ucx ? no_ucx->no_ucx.data()
                                                                : no_direct->no_direct.data());
  routes->take(direct ? cuda::Way::direct : cuda::Way::ucx, channel_->peers);
  if (Status status = routes->reserve(); !status.ok()) return fail(status);
  log_line(LogLevel::info, fmt::format("communicator {}: device memory travels by {}", channel_->id,
                                       routes->names()));
  device_routes_ = std::move(routes);
}

void Communicator::Impl::without_device_routes(const std::string& why) {
  const bool forced = settled_.way != cuda::Way::automatic;
  if (forced)
    no_device_routes_ = {Code::unsupported,
                         fmt::format("RINGFOLD_CUDA_PATH={} cannot be had: {}",
                                     settled_.way == cuda::Way::direct ? "direct" : "ucx", why)};
  else
    log_line(LogLevel::info,
             fmt::format("communicator {}: device memory is staged through host memory: {}",
                         channel_->id, why));
}

// ---- graphs -----------------------------------------------------------------------------------

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
  channel->rank = rank_;
  channel->names = channel_->names;
  channel->transports = channel_->transports;
  channel->peers = channel_->peers;
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

// ---- one rank ---------------------------------------------------------------------------------

// Done means here that it is on the stream.
Status Communicator::Impl::run_alone_on_device(const Schedule& schedule, const Call& call) {
  const size_t element = size_of(call.type);
  const double factor = call.reduction.op == Op::premul_sum ? call.reduction.factor : 1.0;
  for (int i = 0; i < step_count(schedule); ++i) {
    const Range range = step(schedule, 0, i).recv;  // of frames that begin at 0
    const size_t offset = range.begin * element;
    if (Status status = cuda::enqueue_copy(static_cast<const std::byte*>(call.send) + offset,
                                           static_cast<std::byte*>(call.recv) + offset, range.count,
                                           call.type, factor, call.stream);
        !status.ok())
      return status;
  }
  return {};
}

}  // namespace ringfold
