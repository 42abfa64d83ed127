#include "test/chaos/play.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <ranges>

#include "lib/engine/compute_host.h"
#include "test/chaos/memory.h"

namespace ringfold::test::chaos {
namespace {

using namespace std::chrono_literals;

// How long after its deadline a call may end, at most: the engine's grace for a goodbye, and news.
constexpr Nanoseconds kGrace = 1500ms;
// How long after its cause a failure that is no time-out may come.
// (A goodbye is believed after a second, on one communicator after another.)
constexpr Nanoseconds kPrompt = 1s, kPromptAfterLeaving = 5s;
constexpr uint64_t kMostTurns = 1'000'000;

// One rank's part of one call.
struct Part {
  Call call;  // another than the others', if this rank differs
  bool differs = false;
  std::optional<Memory> memory;
  std::shared_ptr<Channel> channel;
  Nanoseconds started{}, ended{};
  bool done = false;
  Status status;
  std::string wrong;
};

class PartOperation final : public Operation {
 public:
  PartOperation(Part& part, const Clock& clock, int& living)
      : part_(part), clock_(clock), living_(living) {
    ++living_;
  }
  ~PartOperation() override { --living_; }
  void completed(const Status& status) noexcept override {
    part_.wrong = part_.done ? "ended twice" : "";
    part_.done = true;
    part_.status = status;
    part_.ended = clock_.now();
    if (status.ok() && !part_.differs && part_.wrong.empty()) part_.wrong = part_.memory->judge();
    part_.memory->take_back();
  }

 private:
  Part& part_;
  const Clock& clock_;
  int& living_;
};

class Play {
 public:
  Play(const Scenario& scenario, Tally& tally);
  std::string run();

 private:
  struct Rank {
    size_t next = 0;                                 // action
    std::vector<std::unique_ptr<Part>> parts;        // by call; null: not started
    std::vector<std::shared_ptr<Channel>> channels;  // by communicator; null: not (yet) there
    std::vector<bool> silent;                        // by communicator
    Nanoseconds until{};                             // it stands still
    Nanoseconds resumed{};
  };
  static size_t at(int i) { return static_cast<size_t>(i); }

  [[nodiscard]] bool acts(int rank) const { return world_.living(rank) && !world_.stopped(rank); }
  bool act(int rank);
  void start(int rank, int index);
  void submit(int rank, Part& part);
  void open_parts(int rank, int call);
  void strike(const Fault& fault);
  void wake_up();
  [[nodiscard]] bool finished() const;
  std::string live();
  std::string check_part(int rank, int index);
  std::string check_end(int rank, int index, const Part& part) const;
  std::string check_comm(int comm);
  std::string recover();
  [[nodiscard]] bool explained(int comm, Code code) const;
  [[nodiscard]] bool incomplete(int comm) const;
  [[nodiscard]] bool unheard() const;
  [[nodiscard]] bool struck_by(Fault::Kind kind) const {
    return std::ranges::any_of(scenario_.faults, [&](const Fault& f) { return f.kind == kind; });
  }

  const Scenario& scenario_;
  Tally& tally_;
  int operations_ = 0;  // that exist; outlives the world
  SlotPool slots_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Part>> later_;  // of the new communicator
  VirtualWorld world_;
  std::vector<const Fault*> to_come_;
  std::vector<const Fault*> differs_next_;
  Nanoseconds struck_{};  // when the latest fault was
  uint64_t turns_ = 0;
  bool over_ = false;
};

Play::Play(const Scenario& scenario, Tally& tally)
    : scenario_(scenario),
      tally_(tally),
      ranks_(at(scenario.ranks)),
      world_(scenario.network, scenario.ranks, scenario.slowest_news) {
  for (int r = 0; r < scenario.ranks; ++r) {
    Rank& rank = ranks_[at(r)];
    rank.parts.resize(scenario.calls.size());
    rank.channels.resize(scenario.comms.size());
    rank.silent.resize(scenario.comms.size());
    for (size_t c = 0; c < scenario.comms.size(); ++c) {
      const Comm& comm = scenario.comms[c];
      if (comm.made_by < 0 && std::ranges::find(comm.members, r) != comm.members.end())
        rank.channels[c] = world_.open(r, static_cast<uint32_t>(c), comm.members);
    }
  }
  for (const Fault& fault : scenario.faults) to_come_.push_back(&fault);
}

// ---- what the ranks do ------------------------------------------------------------------------

// As far as this rank's program goes without waiting; true if it did anything.
bool Play::act(int r) {
  Rank& rank = ranks_[at(r)];
  const auto& program = scenario_.programs[at(r)];
  bool moved = false;
  for (; rank.next < program.size(); ++rank.next, moved = true) {
    const Action& action = program[rank.next];
    if (action.kind == Action::Kind::start) {
      start(r, action.call);
      continue;
    }
    const auto& part = rank.parts[at(action.call)];
    if (part != nullptr && !part->done) break;
    if (part != nullptr && part->status.ok()) open_parts(r, action.call);
  }
  return moved;
}

void Play::start(int r, int index) {
  Rank& rank = ranks_[at(r)];
  const Call& agreed = scenario_.calls[at(index)];
  const auto& channel = rank.channels[at(agreed.comm)];
  // A communicator that it could not make, or does not use any more.
  if (channel == nullptr || rank.silent[at(agreed.comm)]) return;
  auto part = std::make_unique<Part>();
  part->call = agreed;
  part->channel = channel;
  const auto odd = std::ranges::find_if(differs_next_, [&](const Fault* fault) {
    return fault->rank == r && fault->comm == agreed.comm && !agreed.message;
  });
  if (odd != differs_next_.end()) {
    const auto size = static_cast<int>(channel->peers.size());
    part->call = differing(agreed, size, (*odd)->variant);
    part->differs = true;
    struck_ = world_.now();
    differs_next_.erase(odd);
  }
  submit(r, *part);
  rank.parts[at(index)] = std::move(part);
}

void Play::submit(int r, Part& part) {
  const Call& call = part.call;
  const int position =
      call.message ? (part.channel->rank == call.from ? 0 : 1) : part.channel->rank;
  part.memory.emplace(call, position, scenario_.seed);
  part.started = world_.now();
  auto operation = std::make_unique<PartOperation>(part, world_.network().clock(), operations_);
  operation->channel = part.channel;
  operation->what = {call.schedule, call.type, call.op, call.piece, call.message};
  operation->position = position;
  if (call.message) {
    operation->partner = position == 0 ? call.to : call.from;
    operation->transports.assign(2, &world_.network().of(r));
    operation->peers.assign(2, part.channel->peers[at(operation->partner)]);
  }
  operation->compute = std::make_unique<HostCompute>(call.schedule, position, part.memory->input(),
                                                     part.memory->work(), call.type,
                                                     part.memory->reduction(), call.piece, slots_);
  operation->deadline = part.started + scenario_.timeout;
  world_.engine(r).submit(std::move(operation));
  ++tally_.calls;
}

// The communicators that a split makes, on one of its ranks.
void Play::open_parts(int r, int call) {
  Rank& rank = ranks_[at(r)];
  for (size_t c = 0; c < scenario_.comms.size(); ++c) {
    const Comm& comm = scenario_.comms[c];
    if (comm.made_by != call || rank.channels[c] != nullptr) continue;
    if (std::ranges::find(comm.members, r) != comm.members.end())
      rank.channels[c] = world_.open(r, static_cast<uint32_t>(c), comm.members);
  }
}

// ---- what happens to them ---------------------------------------------------------------------

void Play::strike(const Fault& fault) {
  struck_ = world_.now();
  const bool there = world_.living(fault.rank);
  Rank& rank = ranks_[at(fault.rank)];
  switch (fault.kind) {
    case Fault::Kind::kill:
      if (there) world_.kill(fault.rank);
      return;
    case Fault::Kind::pause:
    case Fault::Kind::stop:
      if (there) world_.stop(fault.rank);
      rank.until = std::max(rank.until, world_.now() + fault.length);
      return;
    case Fault::Kind::silence:
      rank.silent[at(fault.comm)] = true;
      return;
    case Fault::Kind::abort:
      if (acts(fault.rank) && rank.channels[at(fault.comm)] != nullptr)
        world_.engine(fault.rank)
            .fail(rank.channels[at(fault.comm)]->id, Status(Code::aborted, "enough"), true);
      return;
    case Fault::Kind::mismatch:
      differs_next_.push_back(&fault);
      return;
    case Fault::Kind::corruption:
      world_.network().corrupt(fault.rank);
      return;
    case Fault::Kind::reset:
      world_.network().reset(fault.rank, fault.other);
      return;
    case Fault::Kind::leave:
      if (acts(fault.rank)) world_.leave(fault.rank);
      return;
  }
}

void Play::wake_up() {
  for (int r = 0; r < scenario_.ranks; ++r) {
    Rank& rank = ranks_[at(r)];
    if (!world_.stopped(r) || rank.until > world_.now()) continue;
    world_.resume(r);
    rank.resumed = world_.now();
  }
}

bool Play::finished() const {
  for (int r = 0; r < scenario_.ranks; ++r) {
    const Rank& rank = ranks_[at(r)];
    if (world_.dead(r)) continue;
    if (world_.stopped(r)) return false;
    for (const auto& part : rank.parts)
      if (part != nullptr && !part->done) return false;
    if (world_.living(r) && rank.next < scenario_.programs[at(r)].size()) return false;
  }
  return true;
}

// Until all is over and has settled.
std::string Play::live() {
  std::optional<Nanoseconds> settled;
  for (;; ++turns_) {
    if (turns_ > kMostTurns) return "it never ends";
    if (settled) to_come_.clear();  // too late to hit anything
    while (!to_come_.empty() && std::ranges::min(to_come_, {}, &Fault::step)->step <= turns_) {
      const auto next = std::ranges::min_element(to_come_, {}, &Fault::step);
      strike(**next);
      to_come_.erase(next);
    }
    wake_up();
    bool moved = false;
    for (int r = 0; r < scenario_.ranks; ++r)
      if (acts(r)) moved |= act(r);
    moved |= world_.turn();
    if (!finished()) settled.reset();
    if (finished() && !settled) settled = world_.now() + 2 * kPromptAfterLeaving;
    if (settled && world_.now() >= *settled) return {};
    if (moved) continue;
    Nanoseconds until = settled.value_or(world_.now() + 60s);
    for (int r = 0; r < scenario_.ranks; ++r)
      if (world_.stopped(r)) until = std::min(until, ranks_[at(r)].until);
    world_.pass(until);
  }
}

// ---- what must hold ---------------------------------------------------------------------------

// Another root or another collective, not the same with another count or type.
bool changes_roles(const Fault& fault) {
  return fault.variant % 6 == 3 || fault.variant % 6 == 4;
}

// Some of its ranks could not make it: the others wait for them in vain.
bool Play::incomplete(int comm) const {
  const Comm& c = scenario_.comms[at(comm)];
  return std::ranges::any_of(c.members,
                             [&](int r) { return ranks_[at(r)].channels[at(comm)] == nullptr; });
}

// News travel through rank 0. Once it has left, a rank that nobody waits for hears nothing: the
// others' deadlines end what they began.
bool Play::unheard() const {
  const bool two = scenario_.faults.size() > 1;
  return world_.left(0) || (two && world_.dead(0));
}

bool Play::explained(int comm, Code code) const {
  const auto& members = scenario_.comms[at(comm)].members;
  const auto concerns = [&](int rank) { return std::ranges::find(members, rank) != members.end(); };
  // Whoever waits in vain on a communicator that some could not make is late on others, too.
  const auto all = std::views::iota(0, static_cast<int>(scenario_.comms.size()));
  if (code == Code::timeout &&
      (unheard() || std::ranges::any_of(all, [&](int c) { return incomplete(c); })))
    return true;
  return std::ranges::any_of(scenario_.faults, [&](const Fault& fault) {
    // Two collectives in which everybody waits for a message and nobody sends one: no rank hears
    // what another called before its deadline.
    if (fault.kind == Fault::Kind::mismatch && code == Code::timeout && changes_roles(fault))
      return true;
    if (!may_end(fault.kind, code)) return false;
    switch (fault.kind) {
      case Fault::Kind::stop:
      case Fault::Kind::silence:
        return true;  // whoever waits for them is late elsewhere
      case Fault::Kind::abort:
      case Fault::Kind::mismatch:
        return fault.comm == comm;
      case Fault::Kind::reset:
        return concerns(fault.rank) && concerns(fault.other);
      case Fault::Kind::kill:
      case Fault::Kind::leave:
      case Fault::Kind::corruption:
      case Fault::Kind::pause:
        break;
    }
    return concerns(fault.rank);
  });
}

std::string Play::check_end(int r, int index, const Part& part) const {
  // On loopback, memory that was lent comes back when whoever reads it goes on.
  Nanoseconds resumed = ranks_[at(r)].resumed;
  for (const Rank& rank : ranks_)
    if (!scenario_.network.simulated) resumed = std::max(resumed, rank.resumed);
  const Nanoseconds late = part.ended - std::max(part.started + scenario_.timeout, resumed);
  // ... which may be at its own deadline, if it has not heard.
  if (late > kGrace && (scenario_.network.simulated || !unheard()))
    return fmt::format("rank {}, call {} ended {} ms after its deadline", r, index,
                       late.count() / 1'000'000);
  const bool prompt = part.status.code() != Code::timeout && scenario_.faults.size() == 1 &&
                      !incomplete(part.call.comm);
  if (part.status.ok() || !prompt) return {};
  const Nanoseconds took = part.ended - std::max({part.started, struck_, resumed});
  const bool leaving = scenario_.faults[0].kind == Fault::Kind::leave;
  if (took <= (leaving ? kPromptAfterLeaving : kPrompt)) return {};
  return fmt::format("rank {}, call {} failed only {} ms after its cause: {}", r, index,
                     took.count() / 1'000'000, part.status.to_string());
}

std::string Play::check_part(int r, int index) {
  const auto& part = ranks_[at(r)].parts[at(index)];
  if (part == nullptr || !world_.living(r)) return {};
  ++(part->status.ok() ? tally_.right : tally_.failed);
  if (!part->wrong.empty()) return fmt::format("rank {}, call {}: {}", r, index, part->wrong);
  if (!part->memory->left_alone())
    return fmt::format("rank {}, call {}: its memory was written after its end", r, index);
  const Code code = part->status.code();
  if (code != Code::ok && part->channel->health().code() != code)
    return fmt::format("rank {}, call {}: ended with {}, its communicator with {}", r, index,
                       part->status.to_string(), part->channel->health().to_string());
  return check_end(r, index, *part);
}

std::string Play::check_comm(int comm) {
  std::optional<Code> all;
  for (const int r : scenario_.comms[at(comm)].members) {
    const auto& channel = ranks_[at(r)].channels[at(comm)];
    if (channel == nullptr || !world_.living(r)) continue;
    const Status health = channel->health();
    if (!health.ok() && !explained(comm, health.code()))
      return fmt::format("communicator {}, rank {}: ends without a reason: {}", comm, r,
                         health.to_string());
    if (scenario_.faults.size() < 2 && !unheard() && all && *all != health.code())
      return fmt::format("communicator {}: ends with {} on rank {}, with {} on another", comm,
                         health.to_string(), r, ringfold::to_string(*all));
    all = health.code();
  }
  if (!all || *all == Code::ok) return {};
  for (const Fault& fault : scenario_.faults)
    if (may_end(fault.kind, *all)) ++tally_.struck[static_cast<size_t>(fault.kind)];
  return {};
}

// Those that are left, as after Communicator::shrink().
std::string Play::recover() {
  std::vector<int> members;
  for (int r = 0; r < scenario_.ranks; ++r)
    if (world_.living(r)) members.push_back(r);
  const auto size = static_cast<int>(members.size());
  // A broken connection stays broken; and what was to go wrong once might still.
  if (size < 2 || struck_by(Fault::Kind::reset) || struck_by(Fault::Kind::corruption)) return {};
  Call call;
  call.type = DType::i32;
  call.schedule = choose(Collective::all_reduce, size, 1000, 4, Machine())->schedule;
  call.piece = 100;
  for (const int r : members) {
    auto part = std::make_unique<Part>();
    part->call = call;
    part->channel = world_.open(r, 1000, members);
    submit(r, *part);
    later_.push_back(std::move(part));
  }
  const Nanoseconds limit = world_.now() + scenario_.timeout;
  while (!std::ranges::all_of(later_, [](const auto& part) { return part->done; })) {
    if (world_.now() > limit) return "afterwards: no end";
    if (!world_.turn()) world_.pass(limit + 1s);
  }
  for (const auto& part : later_) {
    if (!part->status.ok()) return "afterwards: " + part->status.to_string();
    if (!part->wrong.empty()) return "afterwards: " + part->wrong;
  }
  ++tally_.recovered;
  return {};
}

std::string Play::run() {
  if (std::string wrong = live(); !wrong.empty()) return wrong;
  for (const Fault& fault : scenario_.faults) ++tally_.faults[static_cast<size_t>(fault.kind)];
  for (int comm = 0; comm < static_cast<int>(scenario_.comms.size()); ++comm)
    if (std::string wrong = check_comm(comm); !wrong.empty()) return wrong;
  std::string wrong = recover();
  for (int r = 0; r < scenario_.ranks && wrong.empty(); ++r)
    for (int index = 0; index < static_cast<int>(scenario_.calls.size()) && wrong.empty(); ++index)
      wrong = check_part(r, index);
  while (world_.turn()) continue;  // what came in during the last turn
  for (int r = 0; r < scenario_.ranks && wrong.empty(); ++r)
    if (world_.living(r) && world_.engine(r).busy()) wrong = "something stays pending";
  return wrong;
}

}  // namespace

std::string play(const Scenario& scenario, Tally& tally) {
  ++tally.scenarios;
  return Play(scenario, tally).run();
}

}  // namespace ringfold::test::chaos
