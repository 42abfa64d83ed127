#include "lib/comm/world.h"

#include <fmt/format.h>
#include <sodium.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <thread>

#include "lib/base/cores.h"
#include "lib/base/net.h"
#include "lib/comm/machine.h"
#include "lib/engine/matcher.h"
#include "transports/transports.h"
#include "transports/ucx.h"

namespace ringfold {
namespace {

using namespace std::chrono_literals;

// For what was sent to leave; a receiver may be one of hundreds that wait for a core.
constexpr Nanoseconds kFlush = std::chrono::seconds(1), kFlushPerRank = 20ms;
// After a failure all ranks leave at once, some before UCX has finished its handshakes; then UCX
// 1.13 ends the process of the others by an assertion. So whoever leaves looks after them a little.
constexpr Nanoseconds kHandshakes = std::chrono::milliseconds(200);
// How often a rank offers its core to others before it sleeps in a region, which costs more.
constexpr int kCrowdedYields = 4;
// What a rank with a device gives as its address "cuda"; others say why they have none.
constexpr std::string_view kDevice = "device";
// An address of a Member with this name: its UCX moves memory of its device.
constexpr std::string_view kUcxOfDevice = "cuda by UCX";
// Another: how many rails its UCX has.
constexpr std::string_view kRails = "rails of UCX";

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

const std::string* address_of(const Member& member, std::string_view transport) {
  for (const auto& [name, address] : member.addresses)
    if (name == transport) return &address;
  return nullptr;
}

bool has_device(const Member& member) {
  const std::string* const text = address_of(member, "cuda");
  return text != nullptr && *text == kDevice;
}

// Of all ranks that have UCX, the fewest.
size_t rails_of(const std::vector<Member>& members) {
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (const Member& member : members)
    if (const std::string* rails = address_of(member, kRails))
      fewest = std::min(fewest, parse_integer(*rails).value_or(1));
  return fewest == std::numeric_limits<int64_t>::max() ? 1 : static_cast<size_t>(fewest);
}

bool has_ucx_of_device(const Member& member) {
  return address_of(member, kUcxOfDevice) != nullptr;
}

// An address of a Member with this name: the rank will bring UCX in the second round.
constexpr const char* kWantsUcx = "wants ucx";

bool brings_ucx(const Member& member) {
  return address_of(member, "ucx") != nullptr || address_of(member, kWantsUcx) != nullptr;
}

// How a rank can be reached, as numbers that are equal where the ways are the same: there are so
// many pairs of ranks that nothing may be decoded for each of them.
struct Ways {
  int process = -1, memory = -1;  // -1: it has no such way
  bool ucx = false;
};

std::vector<Ways> ways_of(const std::vector<Member>& members) {
  std::map<std::string, int> known;
  const auto number = [&](std::string place) {
    return known.emplace(std::move(place), static_cast<int>(known.size())).first->second;
  };
  std::vector<Ways> all;
  for (const Member& member : members) {
    Ways ways;
    ways.ucx = brings_ucx(member);
    if (const std::string* loopback = address_of(member, "loopback"))
      ways.process = number(fmt::format("{} process {}", member.host, *loopback));
    const std::string* const shm = address_of(member, "shm");
    if (const auto address = shm != nullptr ? shm::Address::decode(*shm) : std::nullopt)
      ways.memory = number(fmt::format("{} memory {}", member.host, address->host));
    all.push_back(ways);
  }
  return all;
}

// An address of a Member with this name: why it has no UCX, though it wants it.
constexpr const char* kWhyNoUcx = "no ucx";

// Whether every two of them have a way in common. The same on all ranks.
bool all_connected(const std::vector<Member>& members) {
  const auto connected = [](const Ways& a, const Ways& b) {
    return (a.ucx && b.ucx) || (a.process >= 0 && a.process == b.process) ||
           (a.memory >= 0 && a.memory == b.memory);
  };
  const std::vector<Ways> all = ways_of(members);
  for (size_t a = 0; a < all.size(); ++a)
    for (size_t b = a + 1; b < all.size(); ++b)
      if (!connected(all[a], all[b])) return false;
  return true;
}

}  // namespace

// The control connections, looked after by the engine.
class World::ControlSource final : public Source {
 public:
  ControlSource(Control& control, Standings& standings)
      : control_(control), standings_(standings) {}
  bool progress() override {
    const bool heard = control_.progress();
    return standings_.check() || heard;
  }
  int arm() override { return control_.arm(); }
  [[nodiscard]] Nanoseconds deadline() const override { return standings_.deadline(); }

 private:
  Control& control_;
  Standings& standings_;
};

World::World(int rank)
    : rank_(rank),
      pid_(getpid()),
      fork_generation_(ringfold::fork_generation()),
      engine_(steady_clock()) {}

Result<std::shared_ptr<World>> World::create(const Rendezvous& where, const Settled& settled) {
  // A forked child leaves it alone: nothing of it is the child's to close.
  std::shared_ptr<World> world(new World(where.rank), [](World* gone) {
    if (gone->usable()) delete gone;
  });
  Member mine = this_process();
  mine.rank = where.rank;
  if (Status status = world->make_transports(where, settled, &mine); !status.ok()) return status;
  auto met = bootstrap(where, mine,
                       {{"algorithm", settled.algorithm ? std::string(name(*settled.algorithm))
                                                        : std::string("auto")},
                        {"piece bytes", std::to_string(settled.piece_bytes)},
                        {"transports", settled.transports},
                        {"costs of the machine",
                         settled.machine ? to_string(*settled.machine) : std::string("built-in")},
                        {"cuda path", std::string(cuda::name(settled.way))},
                        {"numerics", settled.numerics == Numerics::nccl ? "nccl" : "exact"}},
                       world->with_ucx(settled));
  if (!met.ok()) return met.status();
  world->members_ = std::move(met->members);
  world->control_ = std::move(met->control);
  if (const auto* nonce = address_of(world->members_[0], "nonce"); nonce && nonce->size() >= 8)
    std::memcpy(&world->nonce_, nonce->data(), sizeof world->nonce_);
  world->nonce_ |= 1;
  world->listen();
  if (Status status = world->make_routes(settled); !status.ok()) return status;
  std::vector<Cores> here;
  for (const Member& member : world->members_)
    if (const auto* cores = address_of(member, "cores"); cores && member.host == mine.host)
      here.push_back(Cores::decode(*cores).value_or(Cores()));
  const bool crowded = ringfold::crowded(here);
  world->crowded_ = crowded;
  world->rails_ = rails_of(world->members_);
  if (crowded || settled.spin == Nanoseconds(0)) world->patience_ = {0, kCrowdedYields};
  world->thread_ = std::make_unique<EngineThread>(
      world->engine_, crowded && !settled.spin_given ? Nanoseconds(0) : settled.spin);
  return world;
}

namespace {

// Devices that speak InfiniBand or RoCE, as UCX names them: "mlx5_0:1".
std::vector<std::string> rdma_devices() {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& device : std::filesystem::directory_iterator("/sys/class/infiniband", error))
    for (const auto& port : std::filesystem::directory_iterator(device.path() / "ports", error))
      names.push_back(device.path().filename().string() + ":" + port.path().filename().string());
  return names;
}

// The addresses over which this rank has met others, or, if it has met rank 0 inside this host
// only, rank 0 has. Empty: nobody has met anybody on another host.
std::vector<std::string> reached(const std::vector<Member>& all, const Member& mine) {
  std::vector<std::string> hosts;
  const auto add = [&](const Member& member) {
    for (const auto& [name, host] : member.addresses) {
      const auto address = Address::numeric(host, 0);
      if (name == kReached && address.ok() && !address->loopback()) hosts.push_back(host);
    }
  };
  add(mine);
  if (hosts.empty() && all[0].host == mine.host) add(all[0]);
  return hosts;
}

std::string joined(const std::vector<std::string>& names, std::string_view between) {
  std::string all;
  for (const std::string& name : names) all.append(all.empty() ? "" : between).append(name);
  return all;
}

// What UCX may use: the interfaces that RINGFOLD_INTERFACES names, a rail each, in the order of
// their addresses, which is that of the networks on every host; else those that have proved to
// lead to other ranks, and RDMA. UCX itself believes that any interface leads to all addresses of
// its network, such as a bridge of containers that has the same address on each host. Empty: it
// chooses, or the user has.
Result<std::vector<std::string>> rails_for_ucx(const std::vector<Member>& all, const Member& mine) {
  const std::string filter = setting("RINGFOLD_INTERFACES").value_or("");
  auto interfaces = local_interfaces(filter);
  if (!interfaces.ok()) return interfaces.status();
  std::vector<std::string> devices;
  const auto add = [&](const Interface& interface) {
    if (std::ranges::find(devices, interface.name) == devices.end())
      devices.push_back(interface.name);
  };
  if (!filter.empty()) {
    std::ranges::stable_sort(*interfaces, [](const Interface& a, const Interface& b) {
      return std::ranges::lexicographical_compare(a.address.bytes(), b.address.bytes());
    });
    for (const bool loopback : {false, true})  // that only if there is nothing else
      for (const Interface& interface : *interfaces)
        if (interface.address.loopback() == loopback && (!loopback || devices.empty()))
          add(interface);
    if (filter.front() != '^') return devices;  // else what is left need not lead anywhere
    return std::vector{joined(devices, ",")};
  }
  const std::vector<std::string> proved = reached(all, mine);
  if (proved.empty() || std::getenv("UCX_NET_DEVICES") != nullptr)
    return std::vector{std::string()};
  devices = rdma_devices();
  for (const Interface& interface : *interfaces)
    if (std::ranges::find(proved, interface.address.host()) != proved.end()) add(interface);
  return std::vector{joined(devices, ",")};
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

// ---- news of failures -------------------------------------------------------------------------

void World::listen() {
  if (!control_) return;
  control_->on_notice = [this](const Notice& notice) { on_notice(notice); };
  standings_ = std::make_unique<Standings>(engine_, *control_, members_, rank_, nonce_);
  control_source_ = std::make_unique<ControlSource>(*control_, *standings_);
  engine_.add(*control_source_);
  engine_.on_failed = [this](const Channel& channel, const Status& why) {
    failed_ = true;
    Notice notice;
    notice.comm = channel.id;
    notice.code = why.code();
    notice.text = why.message();
    notice.members = channel.peers;
    control_->tell(std::move(notice));
  };
  engine_.on_stalled = [this](const Channel& channel, const Engine::Stalled& what) {
    standings_->stalled(channel, what);
  };
  engine_.on_quiet = [this](const Channel& channel, const Engine::Question& question, Peer peer) {
    standings_->quiet(channel, question, peer);
  };
  // Asks the other side what it called; its answer is the failure that names both.
  engine_.on_mismatch = [this](const Channel& channel, Peer peer, uint32_t seq) {
    Notice question;
    question.comm = channel.id;
    question.code = Code::ok;
    question.text = fmt::format("{} {}", seq, Engine::recall(channel, seq));
    question.members = {peer};
    control_->tell(std::move(question));
  };
}

std::string World::who(int rank) const {
  const Member& member = members_[static_cast<size_t>(rank)];
  return fmt::format("rank {} (process {} on {})", rank, member.pid, member.host_name);
}

void World::on_notice(const Notice& notice) {
  switch (notice.kind) {
    case Notice::Kind::lost:
      engine_.lost(notice.origin,
                   Status(Code::peer_lost, who(notice.origin) + " died or lost its connection"));
      return;
    case Notice::Kind::left:
      engine_.left(notice.origin);
      return;
    case Notice::Kind::asks:
      standings_->asked(notice);
      return;
    case Notice::Kind::stands:
      standings_->answered(notice);
      return;
    case Notice::Kind::failed:
      break;
  }
  if (notice.code != Code::ok) {
    failed_ = true;
    const bool to_me_alone = notice.members.size() == 1;  // then the others hear it from me
    engine_.fail(notice.comm, Status(notice.code, notice.text), to_me_alone);
    return;
  }
  const auto channel = engine_.find(notice.comm);
  if (!channel) return given_up(notice);
  uint32_t seq = 0;
  const char* end = notice.text.data() + notice.text.size();
  const auto [rest, error] = std::from_chars(notice.text.data(), end, seq);
  if (error != std::errc()) return;
  std::string theirs(rest, end);
  const std::string mine = Engine::recall(*channel, seq);
  // In the same order whoever asked.
  const bool first = rank_ < notice.origin;
  engine_.fail(notice.comm,
               Status(Code::mismatch, fmt::format("{}; {}", first ? mine : theirs.substr(1),
                                                  first ? theirs.substr(1) : mine)),
               true);
}

// Whoever asks about a communicator that is no more here still needs an answer.
void World::given_up(const Notice& question) {
  Notice answer;
  answer.comm = question.comm;
  answer.code = Code::mismatch;
  const auto words = question.text.find(' ');
  answer.text =
      fmt::format("{}; {} called something else, and has given the communicator up since",
                  question.text.substr(words == std::string::npos ? 0 : words + 1), who(rank_));
  answer.members = {question.origin};
  control_->tell(std::move(answer));
}

// ---- the rest ---------------------------------------------------------------------------------

uint64_t World::bytes_sent() const {
  uint64_t sum = regions_ ? regions_->bytes_written() : 0;
  for (const Transport* transport : {loopback_.get(), shm_.get(), ucx_.get()})
    if (transport != nullptr) sum += transport->bytes_sent();
  for (const References* references : {loopback_references_.get(), shm_references_.get()})
    if (references != nullptr) sum += references->bytes_sent() - references->bytes_below();
  return sum;
}

RegionHost* World::regions(const std::vector<Peer>& peers) const {
  if (!regions_ || peers.size() > static_cast<size_t>(region::kMaxRanks)) return nullptr;
  const bool all = std::ranges::all_of(peers, [&](Peer peer) { return regions_->reaches(peer); });
  return all ? regions_.get() : nullptr;
}

bool World::usable() const {
  return getpid() == pid_;
}

uint32_t World::new_id() {
  const uint64_t id =
      1 + ids_given_.fetch_add(1) * static_cast<uint64_t>(size()) + static_cast<uint64_t>(rank_);
  return id < kAgreedIds ? static_cast<uint32_t>(id) : 0;
}

World::~World() {
  thread_.reset();
  engine_.on_request = nullptr;
  Clock& clock = steady_clock();
  const Nanoseconds until = clock.now() + kFlush + size() * kFlushPerRank;
  const auto flushed = [this] {
    return std::ranges::all_of(
        std::array<const Transport*, 3>{loopback_.get(), shm_.get(), ucx_.get()},
        [](const Transport* transport) { return transport == nullptr || transport->flushed(); });
  };
  while ((engine_.busy() || !flushed()) && clock.now() < until) {
    if (engine_.poll()) continue;
    if (crowded_)
      std::this_thread::sleep_for(1ms);
    else
      std::this_thread::yield();
  }
  const Nanoseconds linger = clock.now() + kHandshakes;
  while (failed_ && ucx_ && clock.now() < linger)
    if (!engine_.poll()) std::this_thread::sleep_for(1ms);
  if (control_) control_->leave();
}

}  // namespace ringfold
