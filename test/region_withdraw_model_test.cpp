// How a rank takes its memory back while others may write to it (lib/region/direct.h), run through
// every interleaving of 2 and 3 ranks, any of which may fail at any moment.
//
// Each rank is a small machine whose steps are the single accesses to shared memory: those to
// Desk::inside and Desk::withdrawn, which are sequentially consistent, so one total order of them
// is what hardware may do, and the writes into the other ranks' outputs. Each rule is then broken,
// and the search must find it out.
#include <array>
#include <catch2/catch.hpp>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

constexpr int kRanks = 3;

enum class Broken {
  nothing,
  looks_before_entering,     // reads who has withdrawn, then says that it is inside
  looks_before_withdrawing,  // reads who is inside, then withdraws
  leaves_early,              // says that it has left before its last write
  waits_for_one,             // looks for one rank inside, not for all
};

enum class At : uint8_t {
  look_early,  // only where that is broken
  enter,
  look,
  write,
  leave,
  wait,  // for the others to be through
  withdraw_early,
  withdraw,
  see_who_is_inside,
  released,  // its owner does with its memory what it likes
  refused,   // somebody had withdrawn: it will fail
};

struct Rank {
  At at = At::enter;
  uint8_t other = 0;  // the rank it is looking at, or writing to
  bool inside = false, withdrawn = false, shown = false, parted = false;
};

struct State {
  std::array<Rank, kRanks> rank;
  [[nodiscard]] std::string key() const {
    return {reinterpret_cast<const char*>(this), sizeof(*this)};
  }
};
static_assert(std::has_unique_object_representations_v<Rank>);

class Search {
 public:
  Search(int ranks, Broken broken) : ranks_(ranks), broken_(broken) {}

  // What is wrong; empty: nothing, in any interleaving.
  std::string run() {
    State first;
    for (Rank& rank : first.rank)
      if (broken_ == Broken::looks_before_entering) rank.at = At::look_early;
    visit(first);
    while (!open_.empty() && fault_.empty()) {
      const State state = open_.back();
      open_.pop_back();
      for (int r = 0; r < ranks_; ++r) {
        for (const auto move : {&Search::step, &Search::fail, &Search::lose_patience}) {
          State next = state;
          if ((this->*move)(next, next.rank[at(r)], r)) visit(next);
        }
      }
    }
    return fault_;
  }
  [[nodiscard]] size_t states() const { return seen_.size(); }
  // How often a rank had to part its memory from a copy that might still be written to.
  [[nodiscard]] size_t partings() const { return partings_; }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }

  void visit(const State& state) {
    if (seen_.insert(state.key()).second) open_.push_back(state);
  }

  // Goes to the next other rank; false if there is none.
  bool next_other(Rank& me, int r) const {
    do ++me.other;
    while (me.other == r);
    return me.other < ranks_;
  }
  void begin(Rank& me, int r, At what) const {
    me.at = what;
    me.other = r == 0 ? 1 : 0;
  }

  // One access by a rank that goes on; false: it waits, or is through.
  bool step(State& s, Rank& me, int r) {
    switch (me.at) {
      case At::look_early:
        if (s.rank[me.other].withdrawn)
          me.at = At::refused;
        else if (!next_other(me, r))
          me.at = At::enter;
        return true;
      case At::enter:
        me.inside = true;
        begin(me, r, broken_ == Broken::looks_before_entering ? At::write : At::look);
        return true;
      case At::look:
        if (s.rank[me.other].withdrawn)
          me.inside = false, me.at = At::refused;
        else if (!next_other(me, r))
          begin(me, r, At::write);
        return true;
      case At::write:
        if (broken_ == Broken::leaves_early) me.inside = false;
        if (s.rank[me.other].at == At::released && !s.rank[me.other].parted)
          fault_ = "memory is written after its owner had it back";
        if (!next_other(me, r)) me.at = At::leave;
        return true;
      case At::leave:
        me.inside = false;
        me.shown = true;
        me.at = At::wait;
        return true;
      case At::wait:
        for (int o = 0; o < ranks_; ++o)
          if (!s.rank[at(o)].shown) return false;
        me.at = At::released;
        return true;
      case At::withdraw_early:
        if (s.rank[me.other].inside) return false;
        if (!next_other(me, r)) me.at = At::withdraw;
        return true;
      case At::withdraw:
        me.withdrawn = true;
        if (broken_ == Broken::looks_before_withdrawing)
          me.at = At::released;
        else
          begin(me, r, At::see_who_is_inside);
        return true;
      case At::see_who_is_inside:
        if (s.rank[me.other].inside) return false;
        if (broken_ == Broken::waits_for_one || !next_other(me, r)) me.at = At::released;
        return true;
      case At::released:
      case At::refused:
        return false;
    }
    return false;
  }

  // The rank finds that the operation has failed: a dead peer, a deadline, an abort.
  bool fail(State&, Rank& me, int r) {
    if (me.at >= At::withdraw_early && me.at != At::refused) return false;
    me.inside = false;  // it stops writing
    begin(me, r, broken_ == Broken::looks_before_withdrawing ? At::withdraw_early : At::withdraw);
    return true;
  }

  // Somebody stays inside: a stopped process. What it writes from now on goes to a copy.
  bool lose_patience(State& s, Rank& me, int) {
    if (me.at != At::see_who_is_inside || !s.rank[me.other].inside) return false;
    ++partings_;
    me.parted = true;
    me.at = At::released;
    return true;
  }

  const int ranks_;
  const Broken broken_;
  std::vector<State> open_;
  std::unordered_set<std::string> seen_;
  std::string fault_;
  size_t partings_ = 0;
};

}  // namespace

TEST_CASE("whoever has its memory back is written to by nobody, in every interleaving") {
  Search search(GENERATE(2, 3), Broken::nothing);
  CHECK(search.run() == "");
  CHECK(search.states() > 40);
  CHECK(search.partings() > 0);
}

TEST_CASE("each rule of taking memory back is needed") {
  const std::string fault = "memory is written after its owner had it back";
  CHECK(Search(2, Broken::looks_before_entering).run() == fault);
  CHECK(Search(2, Broken::looks_before_withdrawing).run() == fault);
  CHECK(Search(3, Broken::leaves_early).run() == fault);
  CHECK(Search(3, Broken::waits_for_one).run() == fault);
}
