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
    no_device_routes_ = {Code::unsupported, fmt::format("RINGFOLD_CUDA_PATH={} cannot be had: {}",
                                                        cuda::name(settled_.way), why)};
  else
    log_line(LogLevel::info,
             fmt::format("communicator {}: device memory is staged through host memory: {}",
                         channel_->id, why));
}

}  // namespace ringfold
