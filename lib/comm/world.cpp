#include "lib/comm/world.h"

#include <fmt/format.h>
#include <sodium.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <thread>

#include "lib/base/cores.h"
#include "lib/engine/matcher.h"
#include "transports/transports.h"
#include "transports/ucx.h"

namespace ringfold {
namespace {

constexpr Nanoseconds kDefaultTimeout = std::chrono::minutes(10);
constexpr Nanoseconds kDefaultSpin = std::chrono::microseconds(100);
constexpr Nanoseconds kFlush = std::chrono::seconds(1);
// After a failure all ranks leave at once, some before UCX has finished its handshakes; then UCX
// 1.13 ends the process of the others by an assertion. So whoever leaves looks after them a little.
constexpr Nanoseconds kHandshakes = std::chrono::milliseconds(200);
// How often a rank offers its core to others before it sleeps in a region, which costs more.
constexpr int kCrowdedYields = 4;
// What a rank with a device says of it; others say why they have none.
constexpr std::string_view kDevice = "device", kDeviceWithUcx = "device and UCX";
constexpr std::string_view kAllTransports = "loopback,region,shm,ucx";

// A comma-separated list of transports, each of them known.
Status check_transports(const std::string& list) {
  size_t begin = 0;
  while (begin <= list.size()) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view word = std::string_view(list).substr(begin, end - begin);
    if (word != "loopback" && word != "region" && word != "shm" && word != "ucx")
      return {Code::invalid_argument, fmt::format("transports \"{}\": \"{}\" is not one of {}",
                                                  list, word, kAllTransports)};
    begin = end + 1;
  }
  return {};
}

bool allowed(const std::string& list, std::string_view transport) {
  return ("," + list + ",").find(fmt::format(",{},", transport)) != std::string::npos;
}

Status refuse_unfinished(std::string_view name, std::string_view plain) {
  const auto value = setting(name);
  if (!value || value->empty() || *value == plain) return {};
  return {Code::unsupported, fmt::format("{}={} is not offered by this version", name, *value)};
}

Result<std::optional<Algorithm>> algorithm_from(const std::string& word) {
  if (word == "auto") return std::optional<Algorithm>();
  for (int i = 0; i < kAlgorithms; ++i)
    if (word == kAlgorithmNames[static_cast<size_t>(i)])
      return std::optional<Algorithm>(static_cast<Algorithm>(i));
  std::string known = "auto";
  for (const auto name : std::span(kAlgorithmNames).first(kAlgorithms))
    known += ", " + std::string(name);
  return Status(Code::invalid_argument,
                fmt::format("RINGFOLD_ALGORITHM=\"{}\": expected one of {}", word, known));
}

Result<Numerics> numerics_from(const std::string& word) {
  if (word == "exact") return Numerics::exact;
  if (word == "nccl") return Numerics::nccl;
  return Status(Code::invalid_argument,
                fmt::format("RINGFOLD_NUMERICS=\"{}\": expected exact or nccl", word));
}

Result<cuda::Way> way_from(const std::string& word) {
  constexpr std::array<std::string_view, 4> kWords = {"auto", "direct", "ucx", "staged"};
  for (size_t i = 0; i < kWords.size(); ++i)
    if (word == kWords[i]) return static_cast<cuda::Way>(i);
  return Status(
      Code::invalid_argument,
      fmt::format("RINGFOLD_CUDA_PATH=\"{}\": expected auto, direct, ucx or staged", word));
}

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
  return fmt::format("{} {}", getpid(), static_cast<const void*>(&hubs()));
}

bool on_loopback(const std::string& coordinator) {
  return coordinator.starts_with("127.") || coordinator.starts_with("localhost") ||
         coordinator.starts_with("[::1]");
}

bool has_device(std::string_view text) {
  return text == kDevice || text == kDeviceWithUcx;
}

const std::string* address_of(const Member& member, std::string_view transport) {
  for (const auto& [name, address] : member.addresses)
    if (name == transport) return &address;
  return nullptr;
}

}  // namespace

Result<Settled> settle(const Options& options) {
  Settled settled;
  for (const auto& [name, plain] :
       {std::pair<std::string_view, std::string_view>{"RINGFOLD_TRACE", ""},
        {"RINGFOLD_MACHINE", ""}})
    if (Status status = refuse_unfinished(name, plain); !status.ok()) return status;
  const auto timeout = setting_duration("RINGFOLD_TIMEOUT");
  if (!timeout.ok()) return timeout.status();
  settled.timeout = options.timeout.value_or(timeout->value_or(kDefaultTimeout));
  if (settled.timeout <= Nanoseconds(0))
    return Status(Code::invalid_argument, "the timeout must be longer than 0");
  const auto piece = setting_bytes("RINGFOLD_PIECE");
  if (!piece.ok()) return piece.status();
  settled.piece_bytes = options.piece_bytes != 0 ? options.piece_bytes : piece->value_or(0);
  if (settled.piece_bytes % 8 != 0)
    return Status(Code::invalid_argument,
                  fmt::format("piece of {} bytes: expected a multiple of 8", settled.piece_bytes));
  const auto algorithm = algorithm_from(setting("RINGFOLD_ALGORITHM").value_or("auto"));
  if (!algorithm.ok()) return algorithm.status();
  settled.algorithm = options.algorithm ? options.algorithm : *algorithm;
  settled.transports = !options.transports.empty() ? options.transports
                                                   : setting("RINGFOLD_TRANSPORTS").value_or("all");
  if (settled.transports == "all" || settled.transports == "auto")
    settled.transports = kAllTransports;
  if (Status status = check_transports(settled.transports); !status.ok()) return status;
  const auto numerics = numerics_from(setting("RINGFOLD_NUMERICS").value_or("exact"));
  if (!numerics.ok()) return numerics.status();
  settled.numerics = options.numerics.value_or(*numerics);
  const auto way =
      way_from(!options.cuda_path.empty() ? options.cuda_path
                                          : setting("RINGFOLD_CUDA_PATH").value_or("auto"));
  if (!way.ok()) return way.status();
  settled.way = *way;
  const auto spin = setting_duration("RINGFOLD_SPIN");
  if (!spin.ok()) return spin.status();
  settled.spin_given = spin->has_value();
  settled.spin = spin->value_or(kDefaultSpin);
  return settled;
}

// The control connections, looked after by the engine.
class World::ControlSource final : public Source {
 public:
  explicit ControlSource(Control& control) : control_(control) {}
  bool progress() override { return control_.progress(); }
  int arm() override { return control_.arm(); }

 private:
  Control& control_;
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
                        {"cuda path", std::to_string(static_cast<int>(settled.way))},
                        {"numerics", settled.numerics == Numerics::nccl ? "nccl" : "exact"}});
  if (!met.ok()) return met.status();
  world->members_ = std::move(met->members);
  world->control_ = std::move(met->control);
  world->listen();
  if (Status status = world->make_routes(settled); !status.ok()) return status;
  std::vector<Cores> here;
  for (const Member& member : world->members_)
    if (const auto* cores = address_of(member, "cores"); cores && member.host == mine.host)
      here.push_back(Cores::decode(*cores).value_or(Cores()));
  const bool crowded = ringfold::crowded(here);
  world->crowded_ = crowded;
  if (crowded || settled.spin == Nanoseconds(0)) world->patience_ = {0, kCrowdedYields};
  world->thread_ = std::make_unique<EngineThread>(
      world->engine_, crowded && !settled.spin_given ? Nanoseconds(0) : settled.spin);
  return world;
}

// Makes what this rank may be reached by, before it is known where the others are.
Status World::make_transports(const Rendezvous& where, const Settled& settled, Member* mine) {
  std::array<unsigned char, 16> nonce;
  if (sodium_init() < 0) return {Code::system, "libsodium cannot start"};
  randombytes_buf(nonce.data(), nonce.size());
  mine->addresses.emplace_back("cores", Cores{allowed_cores(), granted_cores()}.encode());
  mine->addresses.emplace_back("nonce", std::string(nonce.begin(), nonce.end()));
  if (allowed(settled.transports, "loopback"))
    mine->addresses.emplace_back("loopback", loopback_address());
  const bool shares = allowed(settled.transports, "region");
  if (shares) {
    auto regions = RegionHost::make(engine_);
    if (regions.ok()) {
      regions_ = std::move(*regions);
      mine->addresses.emplace_back("region", regions_->address());
    } else {
      log_line(LogLevel::warn, "no shared regions: " + regions.status().message());
    }
  }
  // Regions carry collectives; messages between the same ranks go by rings.
  if (shares || allowed(settled.transports, "shm")) {
    auto shm = make_shm(rank_, steady_clock());
    if (shm.ok()) {
      shm_ = std::move(*shm);
      mine->addresses.emplace_back("shm", shm_->address());
    } else {
      log_line(LogLevel::warn, "no shared memory: " + shm.status().message());
    }
  }
  // Ranks that meet on this host's own loopback need no network, unless shared memory fails them.
  const bool wanted = !on_loopback(where.coordinator) || !shm_ || settled.way == cuda::Way::ucx;
  if (allowed(settled.transports, "ucx") && wanted) {
    auto ucx = make_ucx(rank_, steady_clock());
    if (ucx.ok()) {
      ucx_ = std::move(*ucx);
      mine->addresses.emplace_back("ucx", ucx_->address());
    } else {
      log_line(LogLevel::warn, "no UCX: " + ucx.status().message());
    }
  }
  // Whether devices of this rank can take part, and if not and it matters, why.
  const Status devices = cuda::has_device();
  if (devices.ok())
    mine->addresses.emplace_back(
        "cuda", ucx_ && ucx_->reaches(MemoryKind::cuda) ? kDeviceWithUcx : kDevice);
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
  std::string lacks = !near                                ? "UCX is needed between hosts"
                      : allowed(settled.transports, "shm") ? "shared memory failed on one of them"
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
  const auto device = [](const Member& member) -> std::string_view {
    const std::string* text = address_of(member, "cuda");
    return text != nullptr ? *text : std::string_view();
  };
  const std::string_view mine = device(members_[static_cast<size_t>(rank_)]);
  for (const Member& member : members_) {
    const std::string_view theirs = device(member);
    const auto peer = static_cast<size_t>(member.rank);
    if (member.rank == rank_) continue;
    if (mine == kDeviceWithUcx && theirs == kDeviceWithUcx) {
      device_ucx_[peer] = ucx_.get();
      const std::string* address = address_of(member, "ucx");
      if (routes_[peer] != ucx_.get())
        if (Status status = ucx_->connect(member.rank, *address); !status.ok()) return status;
    }
    if (!has_device(mine) || !has_device(theirs) || routes_[peer] == ucx_.get()) continue;
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
    const std::string* text = address_of(members_[static_cast<size_t>(peer)], "cuda");
    if (text != nullptr && has_device(*text)) continue;
    return {Code::unsupported,
            fmt::format("{}: {}", who(peer), text != nullptr ? *text : "it has no CUDA device")};
  }
  return {};
}

// ---- news of failures -------------------------------------------------------------------------

void World::listen() {
  if (!control_) return;
  control_->on_notice = [this](const Notice& notice) { on_notice(notice); };
  control_source_ = std::make_unique<ControlSource>(*control_);
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
    case Notice::Kind::failed:
      break;
  }
  if (notice.code != Code::ok) {
    failed_ = true;
    engine_.fail(notice.comm, Status(notice.code, notice.text), false);
    return;
  }
  const auto channel = engine_.find(notice.comm);
  if (!channel) return;
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

// ---- the rest ---------------------------------------------------------------------------------

uint64_t World::bytes_sent() const {
  uint64_t sum = regions_ ? regions_->bytes_written() : 0;
  for (const Transport* transport : {loopback_.get(), shm_.get(), ucx_.get(),
                                     static_cast<Transport*>(loopback_references_.get()),
                                     static_cast<Transport*>(shm_references_.get())})
    if (transport != nullptr) sum += transport->bytes_sent();
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
  const Nanoseconds until = clock.now() + kFlush;
  const auto flushed = [this] {
    return std::ranges::all_of(
        std::array<const Transport*, 3>{loopback_.get(), shm_.get(), ucx_.get()},
        [](const Transport* transport) { return transport == nullptr || transport->flushed(); });
  };
  while ((engine_.busy() || !flushed()) && clock.now() < until)
    if (!engine_.poll()) std::this_thread::yield();
  const Nanoseconds linger = clock.now() + kHandshakes;
  while (failed_ && ucx_ && clock.now() < linger)
    if (!engine_.poll()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (control_) control_->leave();
}

}  // namespace ringfold
