#include "test/chaos/virtual_world.h"

#include <fmt/core.h>

#include <algorithm>
#include <cassert>
#include <charconv>

#include "transports/sim.h"
#include "transports/transports.h"

namespace ringfold::test::chaos {
namespace {

class StepClock final : public Clock {
 public:
  [[nodiscard]] Nanoseconds now() const override { return now_; }
  void go_to(Nanoseconds time) { now_ = time; }

 private:
  Nanoseconds now_{std::chrono::seconds(1)};
};

class LoopbackNetwork final : public Network {
 public:
  LoopbackNetwork(const NetworkPlan& plan, int ranks)
      : step_(std::max<Nanoseconds>(std::chrono::microseconds(1), plan.late / 8)) {
    const Faults faults{plan.seed, plan.late, plan.reorder};
    for (int r = 0; r < ranks; ++r) ends_.push_back(make_loopback(hub_, r, clock_, faults));
    for (auto& end : ends_)
      for (int peer = 0; peer < ranks; ++peer)
        if (!end->connect(peer, fmt::format("loopback {}", peer)).ok()) std::abort();
  }
  Clock& clock() override { return clock_; }
  Transport& of(int rank) override { return *ends_[static_cast<size_t>(rank)]; }
  void kill(int rank) override { hub_->kill(rank); }
  void reset(int, int) override { std::abort(); }
  [[nodiscard]] bool resets() const override { return false; }
  void corrupt(int rank) override { hub_->corrupt_next_fingerprint(rank); }
  void pass(Nanoseconds until, const std::vector<int>& awake) override {
    const auto is_late = [&](int rank) { return of(rank).arm() < 0; };
    const bool on_its_way = std::ranges::any_of(awake, is_late);
    clock_.go_to(on_its_way ? std::min(until, clock_.now() + step_) : until);
  }

 private:
  const Nanoseconds step_;
  StepClock clock_;
  std::shared_ptr<LoopbackHub> hub_ = std::make_shared<LoopbackHub>();
  std::vector<std::unique_ptr<Transport>> ends_;
};

SimOptions options_of(const NetworkPlan& plan) {
  SimOptions options;
  options.machine.local = options.machine.remote = {plan.alpha, plan.beta};
  options.rendezvous = plan.rendezvous;
  options.faults.seed = plan.seed;
  options.faults.jitter = plan.late;
  return options;
}

class SimulatedNetwork final : public Network {
 public:
  SimulatedNetwork(const NetworkPlan& plan, int ranks) : network_(ranks, options_of(plan)) {
    network_.pass_until(1'000'000'000'000);  // no deadline is near the origin of time
    for (int r = 0; r < ranks; ++r) ends_.push_back(network_.endpoint(r));
  }
  Clock& clock() override { return network_.clock(); }
  Transport& of(int rank) override { return *ends_[static_cast<size_t>(rank)]; }
  void kill(int rank) override { network_.lose(rank); }
  void reset(int a, int b) override { network_.reset(a, b); }
  [[nodiscard]] bool resets() const override { return true; }
  void corrupt(int) override { std::abort(); }
  void pass(Nanoseconds until, const std::vector<int>&) override {
    const Picoseconds limit = until.count() * 1000;
    if (!network_.next(limit)) network_.pass_until(limit);
    while (network_.take_ready() >= 0) continue;  // all ranks get their turn anyway
  }

 private:
  SimNetwork network_;
  std::vector<std::unique_ptr<Transport>> ends_;
};

}  // namespace

std::unique_ptr<Network> make_network(const NetworkPlan& plan, int ranks) {
  if (plan.simulated) return std::make_unique<SimulatedNetwork>(plan, ranks);
  return std::make_unique<LoopbackNetwork>(plan, ranks);
}

VirtualWorld::VirtualWorld(const NetworkPlan& plan, int ranks, Nanoseconds slowest_news)
    : random_(plan.seed),
      slowest_news_(slowest_news),
      network_(make_network(plan, ranks)),
      ranks_(at(ranks)) {
  for (int r = 0; r < ranks; ++r) {
    Rank& rank = ranks_[at(r)];
    order_.push_back(at(r));
    rank.engine = std::make_unique<Engine>(network_->clock());
    rank.engine->add(network_->of(r));
    rank.engine->on_failed = [this, r](const Channel& channel, const Status& why) {
      tell(r, channel, why.code(), why.message(), channel.peers);
    };
    rank.engine->on_mismatch = [this, r](const Channel& channel, Peer peer, uint32_t seq) {
      tell(r, channel, Code::ok, fmt::format("{} {}", seq, Engine::recall(channel, seq)), {peer});
    };
  }
}

VirtualWorld::~VirtualWorld() {
  for (Rank& rank : ranks_)
    for (const auto& channel : rank.channels) rank.engine->close(channel);
  const Nanoseconds limit = now() + std::chrono::seconds(5);
  const auto busy = [](const Rank& rank) { return rank.engine->busy(); };
  std::vector<int> all;
  for (int r = 0; r < size(); ++r) all.push_back(r);
  while (std::ranges::any_of(ranks_, busy) && now() < limit) {
    bool moved = false;
    for (Rank& rank : ranks_) moved |= rank.engine->poll();
    if (!moved) network_->pass(now() + std::chrono::milliseconds(1), all);
  }
}

std::shared_ptr<Channel> VirtualWorld::open(int rank, uint32_t id,
                                            const std::vector<int>& members) {
  auto channel = std::make_shared<Channel>();
  channel->id = id;
  channel->rank = static_cast<int>(std::ranges::find(members, rank) - members.begin());
  channel->peers = members;
  channel->transports.assign(members.size(), &network_->of(rank));
  ranks_[at(rank)].engine->open(channel);
  ranks_[at(rank)].channels.push_back(channel);
  return channel;
}

// ---- faults -----------------------------------------------------------------------------------

void VirtualWorld::kill(int rank) {
  ranks_[at(rank)].dead = true;
  network_->kill(rank);
  // The system closes its connections.
  const Notice lost{.kind = Notice::Kind::lost,
                    .origin = rank,
                    .code = Code::peer_lost,
                    .text = {},
                    .members = {}};
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank && (rank == 0 || peer == 0)) post(rank, peer, lost);
}

void VirtualWorld::leave(int rank) {
  Rank& leaver = ranks_[at(rank)];
  leaver.leaving = true;
  for (const auto& channel : leaver.channels) leaver.engine->close(channel);
  leaver.channels.clear();
}

void VirtualWorld::finish_leaving(int rank) {
  ranks_[at(rank)].gone = true;
  const Notice goodbye{.kind = Notice::Kind::left, .origin = rank, .text = {}, .members = {}};
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank && (rank == 0 || peer == 0)) post(rank, peer, goodbye);
  network_->kill(rank);
}

// ---- news -------------------------------------------------------------------------------------

void VirtualWorld::post(int from, int to, const Notice& notice) {
  const auto most = static_cast<uint64_t>(slowest_news_.count()) + 1;
  Nanoseconds& latest = latest_[{from, to}];
  latest = std::max(latest, now() + Nanoseconds(static_cast<int64_t>(random_() % most)));
  letters_.emplace(latest, Letter{from, to, notice});
}

void VirtualWorld::tell(int origin, const Channel& channel, Code code, std::string text,
                        std::vector<Peer> members) {
  const Notice notice{.origin = origin,
                      .comm = channel.id,
                      .code = code,
                      .text = std::move(text),
                      .members = std::move(members)};
  if (origin == 0)
    forward(notice);
  else
    post(origin, 0, notice);
}

// From rank 0 to everybody concerned.
void VirtualWorld::forward(const Notice& notice) {
  for (int to = 1; to < size(); ++to) {
    const bool concerned =
        notice.members.empty() || std::ranges::find(notice.members, to) != notice.members.end();
    if (to != notice.origin && concerned) post(0, to, notice);
  }
}

// What has come for this rank by now.
bool VirtualWorld::deliver(int rank) {
  std::vector<Letter> mine;
  const auto due = letters_.upper_bound(now());
  for (auto letter = letters_.begin(); letter != due;) {
    if (letter->second.to != rank) {
      ++letter;
      continue;
    }
    mine.push_back(std::move(letter->second));
    letter = letters_.erase(letter);
  }
  for (const Letter& letter : mine) {
    const Notice& notice = letter.notice;
    if (rank == 0) forward(notice);
    const bool concerned =
        notice.members.empty() || std::ranges::find(notice.members, rank) != notice.members.end();
    if (concerned) hear(rank, notice);
  }
  return !mine.empty();
}

// As a rank of lib/comm/world.cpp takes it.
void VirtualWorld::hear(int rank, const Notice& notice) {
  Engine& engine = *ranks_[at(rank)].engine;
  if (notice.kind == Notice::Kind::lost)
    return engine.lost(notice.origin,
                       Status(Code::peer_lost, fmt::format("rank {} died", notice.origin)));
  if (notice.kind == Notice::Kind::left) return engine.left(notice.origin);
  if (notice.code != Code::ok)
    return engine.fail(notice.comm, Status(notice.code, notice.text), false);
  const auto channel = engine.find(notice.comm);
  if (!channel) return;
  uint32_t seq = 0;
  (void)std::from_chars(notice.text.data(), notice.text.data() + notice.text.size(), seq);
  engine.fail(notice.comm,
              Status(Code::mismatch, notice.text + "; " + Engine::recall(*channel, seq)), true);
}

// ---- time -------------------------------------------------------------------------------------

bool VirtualWorld::turn() {
  std::ranges::shuffle(order_, random_);
  bool moved = false;
  for (const size_t r : order_) {
    Rank& rank = ranks_[r];
    if (!runs(rank)) continue;
    moved |= deliver(static_cast<int>(r));
    moved |= rank.engine->poll();
    if (rank.leaving && !rank.engine->busy()) finish_leaving(static_cast<int>(r));
  }
  return moved;
}

void VirtualWorld::pass(Nanoseconds until) {
  for (const auto& [when, letter] : letters_)
    if (runs(ranks_[at(letter.to)])) {
      until = std::min(until, when);
      break;
    }
  std::vector<int> awake;
  for (int r = 0; r < size(); ++r) {
    if (!runs(ranks_[at(r)])) continue;
    awake.push_back(r);
    Engine::Sleep sleep;
    engine(r).arm(&sleep);
    until = std::min(until, sleep.until);
  }
  network_->pass(std::max(until, now() + std::chrono::microseconds(1)), awake);
}

}  // namespace ringfold::test::chaos
