// How a world's ranks reach each other: which transports it makes, and which of them leads to whom.
#include <fmt/format.h>
#include <sodium.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "lib/base/cores.h"
#include "lib/base/net.h"
#include "lib/comm/ways.h"
#include "lib/comm/world.h"
#include "transports/transports.h"
#include "transports/ucx.h"

namespace ringfold {
namespace {

// The meeting points of this process, by the nonce of the world.
struct Hubs {
  std::mutex lock;
  std::map<std::string, std::weak_ptr<LoopbackHub>> by_nonce;
};
Hubs& hubs() {
  static auto& all = *new Hubs;  // never destroyed: other threads may still run at exit
  return all;
}
std::shared_ptr<LoopbackHub> hub_of(const std::string& nonce) {
  const std::lock_guard guard(hubs().lock);
  std::erase_if(hubs().by_nonce, [](const auto& entry) { return entry.second.expired(); });
  auto hub = hubs().by_nonce[nonce].lock();
  if (!hub) hubs().by_nonce[nonce] = hub = std::make_shared<LoopbackHub>();
  return hub;
}

// Ranks that give the same address meet there: a process may hold the library several times.
std::string loopback_address() {
  return fmt::format("{:016x} {}", process_number(), static_cast<const void*>(&hubs()));
}

bool on_loopback(const std::string& coordinator) {
  return coordinator.starts_with("127.") || coordinator.starts_with("localhost") ||
         coordinator.starts_with("[::1]");
}

}  // namespace

Status World::open_ucx(const std::vector<Member>& all, Member* mine) {
  const auto rails = rails_for_ucx(all, *mine);
  if (!rails.ok()) return rails.status();
  const std::string devices = joined(*rails, " and ");
  if (!devices.empty()) log_line(LogLevel::info, "UCX may use " + devices);
  auto ucx = make_ucx(rank_, steady_clock(), *rails);
  if (ucx.ok()) {
    ucx_ = std::move(*ucx);
    mine->addresses.emplace_back("ucx", ucx_->address());
    mine->addresses.emplace_back(kRails, std::to_string(rails->size()));
    if (has_device(*mine) && ucx_->reaches(MemoryKind::cuda))
      mine->addresses.emplace_back(kUcxOfDevice, "");
  } else {
    log_line(LogLevel::warn, "no UCX: " + ucx.status().message());
    mine->addresses.emplace_back(kWhyNoUcx, ucx.status().message());
  }
  return {};
}

// UCX is made when it is known which way the others came, and so by whom it is needed: ranks of one
// host do without, unless one of them has been refused shared memory.
SecondRound World::with_ucx(const Settled& settled) {
  if (!settled.allows("ucx")) return {};
  const auto wanted = [](const std::vector<Member>& all) {
    return !all_connected(all) || std::ranges::any_of(all, brings_ucx);
  };
  return {wanted, [this](const std::vector<Member>& all, Member* mine) {
            const bool refused = !all_connected(all);
            if (refused && shm_)  // who has none has said so
              log_line(LogLevel::warn,
                       "not all ranks can share memory: UCX is used where they cannot");
            return refused || wants_ucx_ ? open_ucx(all, mine) : Status();
          }};
}

// Makes what this rank may be reached by, before it is known where the others are.
Status World::make_transports(const Rendezvous& where, const Settled& settled, Member* mine) {
  std::array<unsigned char, 16> nonce;
  if (sodium_init() < 0) return {Code::system, "libsodium cannot start"};
  randombytes_buf(nonce.data(), nonce.size());
  mine->addresses.emplace_back("cores", Cores{allowed_cores(), granted_cores()}.encode());
  mine->addresses.emplace_back("nonce", std::string(nonce.begin(), nonce.end()));
  if (settled.allows("loopback")) mine->addresses.emplace_back("loopback", loopback_address());
  const bool shares = settled.allows("region");
  std::string why_no_region;
  if (shares) {
    auto regions = RegionHost::make(engine_);
    if (regions.ok()) {
      regions_ = std::move(*regions);
      mine->addresses.emplace_back("region", regions_->address());
    } else {
      why_no_region = regions.status().message();
    }
  }
  // Regions carry collectives; messages between the same ranks go by rings.
  if (shares || settled.allows("shm")) {
    auto shm = make_shm(rank_, steady_clock());
    if (shm.ok()) {
      shm_ = std::move(*shm);
      mine->addresses.emplace_back("shm", shm_->address());
    } else {
      log_line(LogLevel::warn, "no shared memory: " + shm.status().message());
      why_no_region.clear();  // the same
    }
  }
  if (!why_no_region.empty()) log_line(LogLevel::warn, "no shared regions: " + why_no_region);
  // Ranks that meet on this host's own loopback need no network, unless shared memory fails them.
  const bool wanted = !on_loopback(where.coordinator) || !shm_ || settled.way == cuda::Way::ucx;
  if (settled.allows("ucx") && wanted) {
    const auto usable = local_interfaces(setting("RINGFOLD_INTERFACES").value_or(""));
    if (!usable.ok()) return usable.status();
    wants_ucx_ = true;
    mine->addresses.emplace_back(kWantsUcx, "");
  }
  // Whether devices of this rank can take part, and if not and it matters, why.
  const Status devices = cuda::has_device();
  if (devices.ok())
    mine->addresses.emplace_back("cuda", kDevice);
  else if (settled.way == cuda::Way::direct || settled.way == cuda::Way::ucx)
    mine->addresses.emplace_back("cuda", devices.message());
  return {};
}

Status World::make_routes(const Settled& settled) {
  routes_.assign(members_.size(), nullptr);
  const std::string* nonce = address_of(members_[0], "nonce");
  for (const Member& member : members_) {
    if (member.rank == rank_) continue;
    if (Status status = route_to(member, settled, nonce != nullptr ? *nonce : ""); !status.ok())
      return status;
  }
  if (Status status = make_device_routes(); !status.ok()) return status;
  for (Transport* transport : {loopback_.get(), shm_.get(), ucx_.get(),
                               static_cast<Transport*>(loopback_references_.get()),
                               static_cast<Transport*>(shm_references_.get())})
    if (transport != nullptr) engine_.add(*transport);
  if (regions_) {
    regions_->meet(members_);
    engine_.add(*regions_);
  }
  return {};
}

// Same process and copy of the library: loopback; same host: shared memory; otherwise UCX.
Status World::route_to(const Member& member, const Settled& settled, const std::string& nonce) {
  const Member& mine = members_[static_cast<size_t>(rank_)];
  const auto peer = static_cast<size_t>(member.rank);
  const bool near = member.host == mine.host;
  const std::string* loopback = address_of(member, "loopback");
  if (near && loopback != nullptr && *loopback == loopback_address()) {
    if (!loopback_) loopback_ = make_loopback(hub_of(nonce), rank_, steady_clock());
    routes_[peer] = loopback_.get();
    return loopback_->connect(member.rank, fmt::format("loopback {}", member.rank));
  }
  std::string lacks = !near                   ? "UCX is needed between hosts"
                      : settled.allows("shm") ? "shared memory failed on one of them"
                                              : "shared memory is not among them";
  const std::string* shm = address_of(member, "shm");
  if (near && shm_ && shm != nullptr) {
    routes_[peer] = shm_.get();
    Status status = shm_->connect(member.rank, *shm);
    if (status.code() == Code::peer_lost) {  // already: whoever needs it will hear of it
      engine_.lost(member.rank, status);
      return {};
    }
    if (status.code() != Code::unsupported) return status;
    lacks = status.message();
    log_line(LogLevel::info, lacks);
  }
  const std::string* ucx = address_of(member, "ucx");
  if (ucx_ && ucx != nullptr) {
    routes_[peer] = ucx_.get();
    return ucx_->connect(member.rank, *ucx);
  }
  for (const Member* one : {&mine, &member})
    if (const std::string* const why = address_of(*one, kWhyNoUcx))
      lacks += fmt::format("; rank {}: {}", one->rank, *why);
  return {
      Code::unsupported,
      fmt::format("no transport reaches rank {} on host {} from rank {} on host {}: allowed are "
                  "{}; {} (RINGFOLD_LOG=warn says more)",
                  member.rank, member.host_name, rank_, mine.host_name, settled.transports, lacks)};
}

// How device memory may travel to each peer, beside the ways of host memory.
Status World::make_device_routes() {
  references_.assign(members_.size(), nullptr);
  device_ucx_.assign(members_.size(), nullptr);
  const Member& mine = members_[static_cast<size_t>(rank_)];
  for (const Member& member : members_) {
    const auto peer = static_cast<size_t>(member.rank);
    if (member.rank == rank_) continue;
    if (has_ucx_of_device(mine) && has_ucx_of_device(member)) {
      device_ucx_[peer] = ucx_.get();
      const std::string* address = address_of(member, "ucx");
      if (routes_[peer] != ucx_.get())
        if (Status status = ucx_->connect(member.rank, *address); !status.ok()) return status;
    }
    if (!has_device(mine) || !has_device(member) || routes_[peer] == ucx_.get()) continue;
    Transport& below = *routes_[peer];
    auto& references = &below == loopback_.get() ? loopback_references_ : shm_references_;
    if (!references) references = std::make_unique<References>(below);
    references_[peer] = references.get();
    if (Status status = references->connect(member.rank, ""); !status.ok()) return status;
  }
  return {};
}

Status World::have_devices(const std::vector<Peer>& peers) const {
  for (const Peer peer : peers) {
    const Member& member = members_[static_cast<size_t>(peer)];
    if (has_device(member)) continue;
    const std::string* const text = address_of(member, "cuda");
    return {Code::unsupported,
            fmt::format("{}: {}", who(peer), text != nullptr ? *text : "it has no CUDA device")};
  }
  return {};
}

}  // namespace ringfold
