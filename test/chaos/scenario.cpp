#include "test/chaos/scenario.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <random>

namespace ringfold::test::chaos {
namespace {

using namespace std::chrono_literals;

constexpr std::array<std::string_view, Fault::kKinds> kFaultNames = {
    "kill", "pause", "stop", "silence", "abort", "mismatch", "corruption", "reset", "leave"};

// Schedule and piece of a collective, by the model for a machine of no interest: what matters is
// that all algorithms, segments and cuts come.
void choose_schedule(Call& call, Collective collective, int ranks, size_t count, int root,
                     Algorithm algorithm, size_t piece_bytes) {
  Constraints wish;
  wish.root = root;
  wish.algorithm = algorithm;
  wish.piece_bytes = piece_bytes / size_of(call.type) * size_of(call.type);
  Machine machine;
  machine.per_host = ranks % 2 == 0 ? 2 : 1;
  const auto choice = choose(collective, ranks, count, size_of(call.type), machine, wish);
  if (!choice) std::abort();
  call.schedule = choice->schedule;
  call.piece = choice->piece_bytes / size_of(call.type);
}

class Maker {
 public:
  explicit Maker(uint64_t seed) : random_(seed) { made_.seed = seed; }
  Scenario make();

 private:
  [[nodiscard]] uint64_t below(uint64_t limit) { return random_() % limit; }
  [[nodiscard]] bool chance(uint64_t percent) { return below(100) < percent; }
  [[nodiscard]] size_t random_count();
  void network();
  void comms();
  void phase();
  void add_call(int comm);
  void split(int comm);
  void collective(Call& call, int ranks);
  void message(Call& call, int ranks);
  void programs();
  void faults();
  Fault fault();

  std::mt19937_64 random_;
  Scenario made_;
  std::vector<std::vector<int>> phases_;  // calls that a rank starts before it waits for them
};

size_t Maker::random_count() {
  const uint64_t kind = below(10);
  if (kind == 0) return 0;
  if (kind == 1) return 1;
  if (kind < 8) return 1 + below(60);
  return 1 + below(1500);
}

void Maker::network() {
  NetworkPlan& plan = made_.network;
  plan.seed = random_();
  plan.simulated = chance(40);
  plan.late = Nanoseconds(chance(30) ? 0 : below(2'000'000));
  plan.reorder = chance(50);
  plan.rendezvous = chance(50);
  plan.alpha = 1e-6 * static_cast<double>(1 + below(200));
  plan.beta = 1e-10 * static_cast<double>(1 + below(50));
  made_.slowest_news = Nanoseconds(below(50'000'000));
  made_.timeout = 2s + Nanoseconds(below(8'000'000'000));
}

void Maker::comms() {
  made_.ranks = static_cast<int>(chance(80) ? 2 + below(4) : 2 + below(7));
  Comm all;
  for (int r = 0; r < made_.ranks; ++r) all.members.push_back(r);
  made_.comms.push_back(all);
  for (uint64_t more = below(3); more > 0; --more) {
    Comm some = all;
    if (chance(60)) {
      std::ranges::shuffle(some.members, random_);
      some.members.resize(2 + below(some.members.size() - 1));
    }
    made_.comms.push_back(some);
  }
}

void Maker::collective(Call& call, int ranks) {
  const auto kind = static_cast<Collective>(below(kCollectives));
  call.type = static_cast<DType>(below(kDTypes));
  call.op = static_cast<Op>(below(6));
  call.in_place = chance(50) && kind != Collective::all_to_all;
  const size_t count = random_count() * (has_parts(kind) ? static_cast<size_t>(ranks) : 1);
  const auto algorithm = static_cast<Algorithm>(below(kAlgorithms));
  const int root = has_root(kind) ? static_cast<int>(below(static_cast<uint64_t>(ranks))) : 0;
  choose_schedule(call, kind, ranks, count, root, algorithm, 8 << below(9));
  if (!call.reduces()) call.op = Op::sum;
}

void Maker::message(Call& call, int ranks) {
  call.message = true;
  call.from = static_cast<int>(below(static_cast<uint64_t>(ranks)));
  call.to = (call.from + 1 + static_cast<int>(below(static_cast<uint64_t>(ranks - 1)))) % ranks;
  call.type = static_cast<DType>(below(kDTypes));
  choose_schedule(call, Collective::broadcast, 2, random_count(), 0, Algorithm::chain,
                  8 << below(9));
}

void Maker::add_call(int comm) {
  Call call;
  call.comm = comm;
  const auto ranks = static_cast<int>(made_.comms[static_cast<size_t>(comm)].members.size());
  if (chance(15))
    message(call, ranks);
  else
    collective(call, ranks);
  phases_.back().push_back(static_cast<int>(made_.calls.size()));
  made_.calls.push_back(call);
}

// An all-gather of the colours, as Communicator::split() does it; then two parts.
void Maker::split(int comm) {
  const std::vector<int> members = made_.comms[static_cast<size_t>(comm)].members;
  const auto ranks = static_cast<int>(members.size());
  Call call;
  call.comm = comm;
  call.type = DType::i64;
  call.splits_into = static_cast<int>(made_.comms.size());
  choose_schedule(call, Collective::all_gather, ranks, members.size() * 3, 0, Algorithm::ring,
                  1 << 10);
  Comm half[2];
  for (const int member : members) half[below(2)].members.push_back(member);
  for (Comm& part : half) {
    part.made_by = static_cast<int>(made_.calls.size());
    if (part.members.size() > 1) made_.comms.push_back(part);
  }
  phases_.back().push_back(static_cast<int>(made_.calls.size()));
  made_.calls.push_back(call);
}

void Maker::phase() {
  phases_.emplace_back();
  const auto comm = [&] { return static_cast<int>(below(made_.comms.size())); };
  if (made_.comms.size() < 6 && chance(15)) return split(comm());
  for (uint64_t calls = chance(40) ? 1 : 1 + below(7); calls > 0; --calls) add_call(comm());
}

// Every rank starts the calls of a phase in an order of its own that keeps each communicator's.
void Maker::programs() {
  made_.programs.resize(static_cast<size_t>(made_.ranks));
  for (int r = 0; r < made_.ranks; ++r) {
    auto& program = made_.programs[static_cast<size_t>(r)];
    std::vector<int> open;  // started and not waited for
    for (std::vector<int> calls : phases_) {
      std::erase_if(calls, [&](int index) {
        const Call& call = made_.calls[static_cast<size_t>(index)];
        const auto& members = made_.comms[static_cast<size_t>(call.comm)].members;
        const auto me = std::ranges::find(members, r) - members.begin();
        if (me == static_cast<ptrdiff_t>(members.size())) return true;
        return call.message && call.from != me && call.to != me;
      });
      for (size_t swaps = calls.size(); swaps > 1; --swaps) {
        const size_t i = below(calls.size() - 1);
        const auto comm_of = [&](int call) { return made_.calls[static_cast<size_t>(call)].comm; };
        if (comm_of(calls[i]) != comm_of(calls[i + 1])) std::swap(calls[i], calls[i + 1]);
      }
      bool splits = false;
      for (const int call : calls) {
        program.push_back({Action::Kind::start, call});
        open.push_back(call);
        splits |= made_.calls[static_cast<size_t>(call)].splits_into >= 0;
      }
      if (!splits && chance(25)) continue;
      for (const int call : open) program.push_back({Action::Kind::wait, call});
      open.clear();
    }
    for (const int call : open) program.push_back({Action::Kind::wait, call});
  }
}

Fault Maker::fault() {
  Fault f;
  do f.kind = static_cast<Fault::Kind>(below(Fault::kKinds));
  while (f.kind == (made_.network.simulated ? Fault::Kind::corruption : Fault::Kind::reset));
  f.comm = static_cast<int>(below(made_.comms.size()));
  const auto& members = made_.comms[static_cast<size_t>(f.comm)].members;
  f.rank = members[below(members.size())];
  do f.other = static_cast<int>(below(static_cast<uint64_t>(made_.ranks)));
  while (f.other == f.rank);
  f.step = below(uint64_t{4} << below(9));
  f.length = f.kind == Fault::Kind::pause ? Nanoseconds(1 + below(1'000'000'000))
                                          : made_.timeout + 1s + Nanoseconds(below(5'000'000'000));
  f.variant = random_();
  return f;
}

void Maker::faults() {
  if (chance(20)) return;
  made_.faults.push_back(fault());
  if (chance(20)) made_.faults.push_back(fault());
}

Scenario Maker::make() {
  network();
  comms();
  for (uint64_t phases = 1 + below(5); phases > 0; --phases) phase();
  programs();
  faults();
  return std::move(made_);
}

}  // namespace

Scenario make_scenario(uint64_t seed) {
  return Maker(seed).make();
}

Call differing(const Call& call, int ranks, uint64_t variant) {
  Call other = call;
  const Schedule& was = call.schedule;
  const auto with = [&](Collective collective, size_t count, int root) {
    choose_schedule(other, collective, ranks, count, root, was.algorithm,
                    call.piece * size_of(call.type));
  };
  const size_t more = has_parts(was.collective) ? static_cast<size_t>(ranks) : 1;
  switch (variant % 6) {
    case 0:
      with(was.collective, was.count + more, was.root);
      break;
    case 1:
      other.type = static_cast<DType>((static_cast<int>(call.type) + 1) % kDTypes);
      with(was.collective, was.count, was.root);
      break;
    case 2:
      if (call.reduces()) other.op = static_cast<Op>((static_cast<int>(call.op) + 1) % 6);
      break;
    case 3:
      if (has_root(was.collective)) with(was.collective, was.count, (was.root + 1) % ranks);
      break;
    case 4: {
      const auto next = static_cast<Collective>(
          (static_cast<int>(was.collective) + 1 + static_cast<int>(variant / 6 % 7)) %
          kCollectives);
      other.in_place = false;
      with(next, was.count * static_cast<size_t>(ranks), has_root(next) ? was.root : 0);
      if (!other.reduces()) other.op = Op::sum;
      break;
    }
    case 5:
      other.piece *= 2;
      break;
  }
  const auto print = [](const Call& c) {
    return Description{c.schedule, c.type, c.op, c.piece, false}.fingerprint();
  };
  if (print(other) == print(call)) with(was.collective, was.count + more, was.root);
  return other;
}

std::string_view name(Fault::Kind kind) {
  return kFaultNames[static_cast<size_t>(kind)];
}

bool may_end(Fault::Kind kind, Code code) {
  switch (kind) {
    case Fault::Kind::pause:
      return false;
    case Fault::Kind::kill:
    case Fault::Kind::reset:
      return code == Code::peer_lost;
    case Fault::Kind::stop:
    case Fault::Kind::silence:
      return code == Code::timeout;
    case Fault::Kind::abort:
      return code == Code::aborted;
    case Fault::Kind::mismatch:
    case Fault::Kind::corruption:
      return code == Code::mismatch;
    case Fault::Kind::leave:  // in mid-operation, or before it
      return code == Code::aborted || code == Code::peer_lost;
  }
  return false;
}

std::string Scenario::describe() const {
  std::string text = fmt::format(
      "{} ranks over {}{}{}, messages late by up to {} us, news by {} us, time-out {} ms\n", ranks,
      network.simulated ? "sim" : "loopback",
      network.simulated && network.rendezvous ? ", rendezvous" : "",
      !network.simulated && network.reorder ? ", reordering" : "", network.late.count() / 1000,
      slowest_news.count() / 1000, timeout.count() / 1'000'000);
  for (size_t c = 0; c < comms.size(); ++c) {
    text += fmt::format("  communicator {}: ranks", c);
    for (const int member : comms[c].members) text += fmt::format(" {}", member);
    text += comms[c].made_by < 0 ? "\n" : fmt::format(", by call {}\n", comms[c].made_by);
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    const Call& call = calls[i];
    const Description what{call.schedule, call.type, call.op, call.piece, call.message};
    text += fmt::format("  call {} on {}: {}{}{}\n", i, call.comm, what.text(),
                        call.message ? fmt::format(" from {} to {}", call.from, call.to) : "",
                        call.in_place ? ", in place" : "");
  }
  for (size_t r = 0; r < programs.size(); ++r) {
    text += fmt::format("  rank {}:", r);
    for (const Action& action : programs[r])
      text += fmt::format(" {}{}", action.kind == Action::Kind::start ? '+' : '-', action.call);
    text += '\n';
  }
  for (const Fault& fault : faults)
    text += fmt::format("  fault: {} of rank {} (other {}, communicator {}, {} ms) in turn {}\n",
                        name(fault.kind), fault.rank, fault.other, fault.comm,
                        fault.length.count() / 1'000'000, fault.step);
  return text;
}

}  // namespace ringfold::test::chaos
