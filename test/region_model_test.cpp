// The flag protocol of lib/region/region.h, run through every interleaving of 2 and 3 ranks.
//
// Each rank is a small machine whose steps are the single accesses to shared memory. The search
// visits every reachable state. Atomics are interleaved in one total order; happens-before is
// tracked apart from that order, by vector clocks that grow only where the real code synchronises
// (a flag set, a flag read). So a payload access that is correct only because of the order in which
// this machine happens to run things is reported as a race. Reading an old value of a flag, as a
// weaker machine may, is the same as reading it earlier: ranks read flags in order to wait, and the
// pairs where a missed value would matter are sequentially consistent in the real code.
//
// Every rule of the protocol is then broken, one at a time, and the search must find it out.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

constexpr int kRanks = 3, kDepth = 2, kNoRank = -1;

enum class Broken {
  nothing,
  no_reuse_wait,         // writes a flag's memory before all have read it
  flag_before_payload,   // sets the flag first
  read_before_flag,      // reads the payload without waiting
  sleepers_before_flag,  // looks for sleepers before it sets the flag
  no_look_before_sleep,  // sleeps without reading the flag again
  greets_before_flag     // compares with the others before it sets its own flag
};

struct Plan {
  int ranks = 2, phases = 4;
  // By phase: the rank whose payload is read; kNoRank: everybody reads everybody's. In such a phase
  // the root itself waits for nobody.
  std::vector<int> root;
  int odd_one = kNoRank;  // calls another operation than the others in the first phase
  Broken broken = Broken::nothing;
};

enum class At : uint8_t {
  reuse,
  greet_early,
  check_early,
  flag_early,
  write,
  flag,
  check,
  wake,
  greet,
  wait,
  count,
  look,
  asleep,
  uncount,
  read,
  done
};

struct Rank {
  At at = At::reuse;
  uint8_t phase = 1;  // under way
  uint8_t other = 0;  // the rank it is looking at
  bool sleepers_seen = false, noticed = false, reading = false;
  std::array<uint8_t, kRanks> clock{};  // flags of each rank that happened before
};

struct State {
  std::array<Rank, kRanks> rank;
  std::array<std::array<uint8_t, kDepth>, kRanks> flag{};
  std::array<std::array<std::array<uint8_t, kRanks>, kDepth>, kRanks> flag_clock{};
  std::array<std::array<uint8_t, kDepth>, kRanks> payload{};  // the phase it was written for
  std::array<std::array<uint8_t, kDepth>, kRanks> written{};  // own flags set before, plus one
  std::array<std::array<std::array<uint8_t, kRanks>, kDepth>, kRanks>
      read{};  // the same, by reader
  std::array<uint8_t, kRanks> sleepers{};

  [[nodiscard]] std::string key() const {
    return {reinterpret_cast<const char*>(this), sizeof(*this)};
  }
};
static_assert(std::has_unique_object_representations_v<Rank>);

class Search {
 public:
  explicit Search(Plan plan) : plan_(std::move(plan)) {}

  // What is wrong; empty: nothing, in any interleaving.
  std::string run() {
    std::vector<State> open = {State()};
    seen_.insert(open.back().key());
    while (!open.empty() && fault_.empty()) {
      const State state = open.back();
      open.pop_back();
      bool stuck = true, over = true;
      for (int r = 0; r < plan_.ranks; ++r) {
        over &= state.rank[at(r)].at == At::done;
        State next = state;
        if (!step(next, r)) continue;
        stuck = false;
        if (seen_.insert(next.key()).second) open.push_back(next);
      }
      if (stuck && !over) fault_ = "deadlock";
      if (over && plan_.odd_one != kNoRank && !somebody_noticed(state))
        fault_ = "nobody noticed that the operations differ";
    }
    return fault_;
  }
  [[nodiscard]] size_t states() const { return seen_.size(); }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }
  static size_t slot(int phase) { return static_cast<size_t>(phase) % kDepth; }

  [[nodiscard]] bool somebody_noticed(const State& s) const {
    return std::any_of(s.rank.begin(), s.rank.begin() + plan_.ranks,
                       [](const Rank& r) { return r.noticed; });
  }
  // Whether `r` reads what `other` shows in this phase.
  [[nodiscard]] bool wants(int r, int other, int phase) const {
    const int root = plan_.root.empty() ? kNoRank : plan_.root[at(phase - 1) % plan_.root.size()];
    return other != r && (root == kNoRank || other == root);
  }

  // The next rank that `me` looks at, from `me.other` on, or -1.
  [[nodiscard]] int next_other(const Rank& me, int r, bool all) const {
    for (int o = me.other; o < plan_.ranks; ++o)
      if (o != r && (all || wants(r, o, me.phase))) return o;
    return kNoRank;
  }

  void see(State& s, int r, int other, int phase) {
    for (int i = 0; i < plan_.ranks; ++i)
      s.rank[at(r)].clock[at(i)] =
          std::max(s.rank[at(r)].clock[at(i)], s.flag_clock[at(other)][slot(phase)][at(i)]);
  }

  void write_payload(State& s, int r) {
    Rank& me = s.rank[at(r)];
    const size_t k = slot(me.phase);
    for (int q = 0; q < plan_.ranks; ++q)
      if (q != r && s.read[at(r)][k][at(q)] > me.clock[at(q)])
        fault_ = "race: memory is written while another rank may still read it";
    s.payload[at(r)][k] = me.phase;
    s.written[at(r)][k] = static_cast<uint8_t>(me.clock[at(r)] + 1);
  }

  void read_payload(State& s, int r, int other) {
    Rank& me = s.rank[at(r)];
    const size_t k = slot(me.phase);
    if (s.written[at(other)][k] > me.clock[at(other)])
      fault_ = "race: memory is read while its rank may still write it";
    else if (s.payload[at(other)][k] != me.phase)
      fault_ = "wrong data";
    s.read[at(other)][k][at(r)] = static_cast<uint8_t>(me.clock[at(r)] + 1);
  }

  void set_flag(State& s, int r) {
    Rank& me = s.rank[at(r)];
    ++me.clock[at(r)];
    s.flag[at(r)][slot(me.phase)] = me.phase;
    s.flag_clock[at(r)][slot(me.phase)] = me.clock;
  }

  // Compares with one other rank; true when there is none left.
  bool greet(State& s, int r) {
    Rank& me = s.rank[at(r)];
    const int other = me.phase == 1 ? next_other(me, r, true) : kNoRank;
    if (other == kNoRank) return true;
    if (s.flag[at(other)][slot(me.phase)] == me.phase) {
      see(s, r, other, me.phase);
      me.noticed |= (r == plan_.odd_one) != (other == plan_.odd_one);
    }
    me.other = static_cast<uint8_t>(other + 1);
    return false;
  }

  void go(Rank& me, At next) {
    me.at = next;
    me.other = 0;
  }

  void end_phase(Rank& me) {
    me.sleepers_seen = false;
    if (me.phase == plan_.phases) return go(me, At::done);
    ++me.phase;
    go(me, At::reuse);
  }

  // One access to shared memory by rank r; false: it cannot move.
  bool step(State& s, int r) {
    Rank& me = s.rank[at(r)];
    switch (me.at) {
      case At::reuse:
        return step_reuse(s, r);
      case At::greet_early:
        if (greet(s, r)) go(me, At::write);
        return true;
      case At::check_early:
        me.sleepers_seen = s.sleepers[at(r)] != 0;
        go(me, At::write);
        return true;
      case At::flag_early:
        set_flag(s, r);
        go(me, At::write);
        return true;
      case At::write:
        write_payload(s, r);
        go(me, plan_.broken == Broken::flag_before_payload ? At::check : At::flag);
        return true;
      case At::flag:
        set_flag(s, r);
        go(me, plan_.broken == Broken::sleepers_before_flag ? At::wake : At::check);
        return true;
      case At::check:
        me.sleepers_seen = s.sleepers[at(r)] != 0;
        go(me, At::wake);
        return true;
      case At::wake:
        if (me.sleepers_seen) wake(s, r);
        go(me, plan_.broken == Broken::greets_before_flag ? At::wait : At::greet);
        return true;
      case At::greet:
        if (greet(s, r)) go(me, At::wait);
        return true;
      case At::wait:
      case At::count:
      case At::look:
      case At::asleep:
      case At::uncount:
      case At::read:
        return step_wait(s, r);
      case At::done:
        return false;
    }
    return false;
  }

  bool step_reuse(State& s, int r) {
    Rank& me = s.rank[at(r)];
    const int old = me.phase - kDepth + 1;
    const int other = next_other(me, r, true);
    if (other == kNoRank || old < 1 || plan_.broken == Broken::no_reuse_wait) {
      go(me, plan_.broken == Broken::greets_before_flag     ? At::greet_early
             : plan_.broken == Broken::sleepers_before_flag ? At::check_early
             : plan_.broken == Broken::flag_before_payload  ? At::flag_early
                                                            : At::write);
      return true;
    }
    if (s.flag[at(other)][slot(old)] < old) return false;  // spins; its sleep is that of step_wait
    see(s, r, other, old);
    me.other = static_cast<uint8_t>(other + 1);
    return true;
  }

  void wake(State& s, int r) {
    for (Rank& q : s.rank)
      if (q.at == At::asleep && q.other == r) q.at = At::uncount;
  }

  // Waits for the flag of each rank that is wanted, then reads what it shows.
  bool step_wait(State& s, int r) {
    Rank& me = s.rank[at(r)];
    const int other = next_other(me, r, false);
    if (other == kNoRank) {
      end_phase(me);
      return true;
    }
    me.other = static_cast<uint8_t>(other);
    const bool there = s.flag[at(other)][slot(me.phase)] >= me.phase;
    switch (me.at) {
      case At::wait:
        if (plan_.broken == Broken::read_before_flag)
          me.at = At::read;
        else if (there)
          see(s, r, other, me.phase), me.at = At::read;
        else
          me.at = At::count;
        return true;
      case At::count:
        ++s.sleepers[at(other)];
        me.at = plan_.broken == Broken::no_look_before_sleep ? At::asleep : At::look;
        return true;
      case At::look:  // futex(2) looks and falls asleep in one
        me.at = there ? At::uncount : At::asleep;
        return true;
      case At::asleep:
        return false;
      case At::uncount:
        --s.sleepers[at(other)];
        me.at = At::wait;
        return true;
      default:
        read_payload(s, r, other);
        ++me.other;
        me.at = At::wait;
        return true;
    }
  }

  const Plan plan_;
  std::unordered_set<std::string> seen_;
  std::string fault_;
};

std::string fault_of(const Plan& plan) {
  return Search(plan).run();
}

}  // namespace

TEST_CASE("the flag protocol holds in every interleaving") {
  Plan plan;
  plan.ranks = GENERATE(2, 3);
  plan.phases = plan.ranks == 2 ? 6 : 3;
  const int pattern = GENERATE(0, 1, 2);
  if (pattern == 1) plan.root = {0};              // a root that nobody holds up
  if (pattern == 2) plan.root = {kNoRank, 1, 0};  // all sorts of operations in turn
  Search search(plan);
  INFO(plan.ranks << " ranks, pattern " << pattern);
  CHECK(search.run() == "");
  INFO(search.states() << " states");
  CHECK(search.states() > 1000);
}

TEST_CASE("of ranks whose operations differ, one notices in every interleaving") {
  Plan plan;
  plan.ranks = GENERATE(2, 3);
  plan.phases = 1;
  plan.root = {GENERATE(kNoRank, 0)};
  plan.odd_one = GENERATE(0, 1);
  CHECK(fault_of(plan) == "");
  plan.broken = Broken::greets_before_flag;
  plan.root = {0};
  plan.ranks = 2;
  CHECK(fault_of(plan) == "nobody noticed that the operations differ");
}

TEST_CASE("each rule of the flag protocol is needed") {
  Plan plan;
  plan.phases = 4;
  const auto broken = [&](Broken rule, std::vector<int> root = {}) {
    plan.broken = rule;
    plan.root = std::move(root);
    return fault_of(plan);
  };
  CHECK(broken(Broken::no_reuse_wait, {0}) ==
        "race: memory is written while another rank may still read it");
  CHECK(broken(Broken::flag_before_payload) ==
        "race: memory is read while its rank may still write it");
  CHECK(broken(Broken::read_before_flag) == "wrong data");
  CHECK(broken(Broken::sleepers_before_flag) == "deadlock");
  CHECK(broken(Broken::no_look_before_sleep) == "deadlock");
}
