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
#include "lib/comm/ways.h"
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
