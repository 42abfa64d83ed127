#include "ringfold/schedule.h"

#include <fmt/core.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "lib/plan/verify.h"

using namespace ringfold;

namespace {

constexpr Schedule make(Collective collective, Algorithm algorithm, int size, size_t count) {
  Schedule s;
  s.collective = collective;
  s.algorithm = algorithm;
  s.size = size;
  s.count = count;
  return s;
}

// The drawing in schedule.h: in step 1 rank 1 sends part 3 and completes "301" in part 2.
constexpr Schedule kDrawn = make(Collective::all_reduce, Algorithm::ring, 4, 400);
static_assert(step_count(kDrawn) == 6);
static_assert(step(kDrawn, 1, 1).to == 2 && step(kDrawn, 1, 1).from == 0);
static_assert(step(kDrawn, 1, 1).send == Range{300, 100});
static_assert(step(kDrawn, 1, 1).recv == Range{200, 100});
static_assert(step(kDrawn, 1, 1).mine == 1 && step(kDrawn, 1, 1).theirs == 2);
static_assert(sizeof(Schedule) <= 48);

// Elements of the frame (has_parts: of each part) that are worth trying on n ranks.
std::set<size_t> counts_for(Collective collective, int n) {
  const auto size = static_cast<size_t>(n);
  if (has_parts(collective)) return {0, 1, 2, 17, 32};
  if (has_root(collective)) return {0, 1, size + 1, 37};
  return {0, 1, 2, size - 1, size, size + 1, 31, 2 * size, 48, 97};
}

struct Tally {
  size_t cases = 0;
  std::vector<std::string> failures;

  void check(const Schedule& s) {
    for (const bool in_place : {false, true}) {
      if (in_place && s.collective == Collective::all_to_all) continue;
      ++cases;
      if (const Status status = verify(s, in_place); !status.ok()) {
        failures.push_back(fmt::format("{} (root {}, per host {}, grain {}, segment {}{})",
                                       status.message(), s.root, s.per_host, s.grain, s.segment,
                                       in_place ? ", in place" : ""));
      }
    }
  }
};

// All roots, host sizes, counts, grains and segments.
void check_all(Collective collective, Algorithm algorithm, int n, Tally* tally) {
  Schedule s = make(collective, algorithm, n, 0);
  for (s.per_host = 1; s.per_host <= n; ++s.per_host) {
    if (n % s.per_host != 0 || (s.per_host > 1 && algorithm != Algorithm::two_level)) continue;
    for (s.root = 0; s.root < (has_root(collective) ? n : 1); ++s.root) {
      for (const size_t count : counts_for(collective, n)) {
        s.count = has_parts(collective) ? count * static_cast<size_t>(n) : count;
        for (s.grain = 1; s.grain <= 16; s.grain += 15) {
          for (const size_t segment : {size_t{0}, size_t{19}, size_t{7} * static_cast<size_t>(n)}) {
            s.segment = segment;
            tally->check(s);
            if (collective != Collective::all_reduce || algorithm != Algorithm::ring) continue;
            s.cut = Cut::rounded_up;
            tally->check(s);
            s.cut = Cut::balanced;
          }
        }
      }
    }
  }
}

using Edit = std::function<void(int position, int i, Step*)>;

// The message for schedule `s` after `edit` has broken it; empty if it passes nevertheless.
std::string broken(const Schedule& s, const Edit& edit, bool in_place = false) {
  REQUIRE(verify(s, in_place).ok());
  return verify(s, in_place,
                [&](const Schedule& schedule, int position, int i) {
                  Step step = ringfold::step(schedule, position, i);
                  edit(position, i, &step);
                  return step;
                })
      .message();
}

using Catch::Matchers::Contains;

const Schedule kRing = make(Collective::all_reduce, Algorithm::ring, 4, 8);
const Schedule kScatter = make(Collective::reduce_scatter, Algorithm::ring, 4, 8);

}  // namespace

TEST_CASE("rounded-up parts cover the whole; the first ones are equal") {
  for (const size_t count : {0, 1, 2, 15, 16, 17, 97, 1000}) {
    for (const size_t parts : {1, 2, 3, 7, 24}) {
      for (const size_t grain : {1, 16}) {
        INFO(count << " elements, " << parts << " parts, grain " << grain);
        const size_t each = rounded_up_part(count, parts, 0, grain).count;
        size_t end = 0;
        for (size_t i = 0; i < parts; ++i) {
          const Range range = rounded_up_part(count, parts, i, grain);
          CHECK(range.begin == end);
          end = range.end();
          CHECK((range.count == each || end == count));
        }
        CHECK(end == count);
      }
    }
  }
  CHECK(rounded_up_part(20, 4, 0, 4) == Range{0, 8});  // 5 grains: 2, 2, 1, 0
  CHECK(rounded_up_part(20, 4, 2, 4) == Range{16, 4});
  CHECK(rounded_up_part(20, 4, 3, 4).empty());
}

TEST_CASE("parts cover the whole, in order, on grain boundaries, as evenly as can be") {
  for (const size_t count : {0, 1, 2, 15, 16, 17, 97, 1000}) {
    for (const size_t parts : {1, 2, 3, 7, 24}) {
      for (const size_t grain : {1, 16}) {
        INFO(count << " elements, " << parts << " parts, grain " << grain);
        size_t end = 0, largest = 0, smallest_full = count;
        for (size_t i = 0; i < parts; ++i) {
          const Range range = part(count, parts, i, grain);
          CHECK(range.begin == end);
          CHECK((range.begin % grain == 0 || range.begin == count));
          end = range.end();
          largest = std::max(largest, range.count);
          if (end < count) smallest_full = std::min(smallest_full, range.count);
        }
        CHECK(end == count);
        CHECK(largest <= smallest_full + grain);
        CHECK(largest <= ((count + parts - 1) / parts + grain - 1) / grain * grain);
      }
    }
  }
}

TEST_CASE("every schedule does what its collective promises") {
  Tally tally;
  for (int c = 0; c < kCollectives; ++c) {
    const size_t before = tally.cases;
    for (int a = 0; a < kAlgorithms; ++a) {
      if (!offers(static_cast<Collective>(c), static_cast<Algorithm>(a))) continue;
      for (int n = 1; n <= 24; ++n) {
        check_all(static_cast<Collective>(c), static_cast<Algorithm>(a), n, &tally);
      }
    }
    fmt::print("{:>15}: {} cases verified\n", name(static_cast<Collective>(c)),
               tally.cases - before);
    CHECK(tally.cases > before);
  }
  fmt::print("{:>15}: {} cases verified\n", "all", tally.cases);
  for (const std::string& failure : tally.failures) FAIL_CHECK(failure);
}

TEST_CASE("larger rings and doublings verify up to the verifier's limit") {
  Tally tally;
  for (const Algorithm algorithm : {Algorithm::ring, Algorithm::halving_doubling,
                                    Algorithm::recursive_doubling, Algorithm::two_level}) {
    for (const int n : {31, 33, 63, kMaxVerifiedSize}) {
      Schedule s = make(Collective::all_reduce, algorithm, n, 130);
      s.per_host = n % 3 == 0 ? 3 : 1;
      tally.check(s);
    }
  }
  for (const std::string& failure : tally.failures) FAIL_CHECK(failure);
}

TEST_CASE("a chunk is at most its share of a segment, and the segments cover the frame") {
  for (const Collective collective : {Collective::all_reduce, Collective::reduce_scatter}) {
    for (const size_t grain : {1, 16}) {
      Schedule s = make(collective, Algorithm::ring, 6, 6000);
      s.grain = grain;
      s.segment = 100;
      const size_t limit = (17 + grain - 1) / grain * grain;  // ceil(100 / 6), on a grain boundary
      std::vector<int> sent(s.count);
      for (int i = 0; i < step_count(s); ++i) {
        for (int r = 0; r < s.size; ++r) {
          const Step now = step(s, r, i);
          CHECK(now.send.count <= limit);
          for (size_t e = now.send.begin; e < now.send.end(); ++e) ++sent.at(e);
        }
      }
      const int times = collective == Collective::all_reduce ? 10 : 5;  // N-1 times each half
      CHECK(std::set<int>(sent.begin(), sent.end()) == std::set<int>{times});
    }
  }
}

TEST_CASE("a barrier is an all-reduce of nothing: its messages are empty but there") {
  for (int r = 0; r < 4; ++r) {
    for (int i = 0; i < 6; ++i) {
      const Step now = step(make(Collective::all_reduce, Algorithm::ring, 4, 0), r, i);
      CHECK(now.to == (r + 1) % 4);
      CHECK(now.from == (r + 3) % 4);
      CHECK(now.send.empty());
    }
  }
}

TEST_CASE("sums that are only passed on never touch work") {
  for (const Algorithm algorithm : {Algorithm::chain, Algorithm::tree}) {
    Schedule s = make(Collective::reduce, algorithm, 11, 50);
    s.root = 3;
    for (int r = 0; r < s.size; ++r) {
      for (int i = 0; i < step_count(s); ++i) {
        const Step now = step(s, r, i);
        if (r != s.root && now.then == Then::reduce) CHECK(now.into == From::transit);
        if (r != s.root && now.to >= 0) CHECK(now.send_from != From::work);
      }
    }
  }
}

TEST_CASE("legal refuses what the functions are not made for") {
  CHECK(legal(kRing));
  Schedule s = kRing;
  s.size = 0;
  CHECK_FALSE(legal(s));
  s = kRing;
  s.root = 4;
  CHECK_FALSE(legal(s));
  s = kRing;
  s.per_host = 3;
  CHECK_FALSE(legal(s));
  s = kRing;
  s.grain = 0;
  CHECK_FALSE(legal(s));
  s = kRing;
  s.algorithm = Algorithm::chain;
  CHECK_FALSE(legal(s));
  CHECK_FALSE(legal(make(Collective::all_gather, Algorithm::ring, 4, 9)));
  s = make(Collective::all_reduce, Algorithm::ring, 2, kMaxSteps / 2);
  s.segment = 1;  // exactly kMaxSteps steps
  CHECK(legal(s));
  CHECK(step_count(s) == kMaxSteps);
  ++s.count;
  CHECK_FALSE(legal(s));
}

TEST_CASE("the verifier refuses what it cannot judge") {
  Schedule s = kRing;
  s.size = 0;
  CHECK(verify(s, false).code() == Code::invalid_argument);
  s.size = kMaxVerifiedSize + 1;
  CHECK(verify(s, false).code() == Code::invalid_argument);
  const Schedule all_to_all = make(Collective::all_to_all, Algorithm::direct, 4, 8);
  CHECK(verify(all_to_all, false).ok());
  CHECK(verify(all_to_all, true).code() == Code::invalid_argument);
}

TEST_CASE("the verifier finds messages that do not meet") {
  CHECK_THAT(broken(kRing,
                    [](int r, int i, Step* s) {
                      if (r == 2 && i == 1) s->to = 4;
                    }),
             Contains("step 1, position 2: there is no peer 4"));
  CHECK_THAT(broken(kRing,
                    [](int r, int, Step* s) {
                      if (r == 2) s->to = 2;
                    }),
             Contains("there is no peer 2"));
  CHECK_THAT(broken(kRing,
                    [](int r, int i, Step* s) {
                      if (r == 2 && i == 3) s->to = -1;
                    }),
             Contains("position 3: waits for position 2, which does not send"));
  const auto deaf = [](int r, int i, Step* s) {
    if (r == 1 && i == 2) s->from = -1, s->then = Then::none;
  };
  CHECK_THAT(broken(kRing, deaf), Contains("sends to position 1, which does not receive"));
  CHECK_THAT(broken(kRing,
                    [](int r, int i, Step* s) {
                      if (r == 1 && i == 2) --s->send.count;
                    }),
             Contains("sends 1 elements, position 2 expects 2"));
  // One rank a step late: everybody would wait for ever.
  const auto late = [](int r, int i, Step* s) {
    if (r == 0) *s = i == 0 ? Step{} : step(kRing, 0, i - 1);
  };
  CHECK_THAT(broken(kRing, late), Contains("waits for position 0, which does not send"));
}

TEST_CASE("the verifier finds receives that make no sense") {
  CHECK_THAT(broken(kRing,
                    [](int r, int i, Step* s) {
                      if (r == 1 && i == 4) s->then = Then::none;
                    }),
             Contains("drops what it receives"));
  CHECK_THAT(broken(kRing,
                    [](int r, int i, Step* s) {
                      if (r == 1 && i == 4) s->from = -1;
                    }),
             Contains("uses a message that it does not receive"));
  CHECK_THAT(broken(kRing,
                    [](int, int i, Step* s) {
                      if (i == 4) s->into = From::input;
                    }),
             Contains("writes the input"));
  CHECK_THAT(broken(kRing,
                    [](int, int i, Step* s) {
                      if (i == 4) s->into = From::transit;
                    }),
             Contains("copies into transit"));
}

TEST_CASE("the verifier finds accesses outside frames and undefined reads") {
  CHECK_THAT(broken(kScatter,
                    [](int, int i, Step* s) {
                      if (i == 1) s->into = From::work;
                    }),
             Contains("touches"));
  CHECK_THAT(broken(kRing,
                    [](int, int i, Step* s) {
                      if (i == 0) s->send_from = From::work;
                    }),
             Contains("step 0, position 0: reads element 6, which is undefined"));
  CHECK_THAT(broken(kRing,
                    [](int, int i, Step* s) {
                      if (i == 0) s->operand = From::work;
                    }),
             Contains("which is undefined"));
  const Schedule gather = make(Collective::gather, Algorithm::direct, 3, 6);
  CHECK_THAT(broken(gather,
                    [](int r, int, Step* s) {
                      if (r == 2) s->send.begin = 0;
                    }),
             Contains("step 1, position 2: touches [0, 2) of its input, which holds [4, 6)"));
}

TEST_CASE("the verifier finds contributions that are missing, doubled, misplaced or miscounted") {
  const auto silent = [](int, int i, Step* s) {
    if (i == 5) *s = Step{};
  };
  CHECK_THAT(broken(kRing, silent), Contains("is incomplete at the end"));
  CHECK_THAT(broken(kRing, silent, true), Contains("is incomplete at the end"));
  const Schedule doubling = make(Collective::all_reduce, Algorithm::recursive_doubling, 4, 8);
  const auto again = [&](int r, int i, Step* s) {
    if (i == 1) *s = step(doubling, r, 0);
  };
  CHECK_THAT(broken(doubling, again, true), Contains("twice"));
  CHECK_THAT(broken(kRing,
                    [](int r, int i, Step* s) {
                      if (r == 1 && i == 1) s->recv.begin = 0;
                    }),
             Contains("adds element 4 to element 0"));
  CHECK_THAT(broken(kRing,
                    [](int r, int i, Step* s) {
                      if (r == 1 && i == 1) s->theirs = 3;
                    }),
             Contains("1 and 2 ranks have contributed, the step says 1 and 3"));
  CHECK_THAT(broken(kRing,
                    [](int r, int i, Step* s) {
                      if (r == 1 && i == 1) s->mine = 2;
                    }),
             Contains("the step says 2 and 2"));
  const auto swapped = [](int, int i, Step* s) {
    if (i == 5) s->recv.begin = 0;
  };
  CHECK_THAT(broken(kRing, swapped), Contains("is incomplete at the end"));
}

TEST_CASE("the verifier finds misuse of transit") {
  CHECK_THAT(broken(kScatter,
                    [](int, int i, Step* s) {
                      if (i == 0) s->send_from = From::transit;
                    }),
             Contains("uses transit that is not there"));
  CHECK_THAT(broken(kScatter,
                    [](int, int i, Step* s) {
                      if (i == 1) s->operand = From::transit;
                    }),
             Contains("uses transit that is not there"));  // its send has used it up
  const auto forget = [](int, int i, Step* s) {
    if (i == 1) s->send_from = From::input, s->theirs = 1;
  };
  CHECK_THAT(broken(kScatter, forget), Contains("overwrites transit that was never used"));
  const auto leave = [](int, int i, Step* s) {
    if (i == 2) s->send_from = From::input, s->theirs = 1;
  };
  CHECK_THAT(broken(kScatter, leave), Contains("leaves transit unused"));
  CHECK_THAT(broken(kScatter,
                    [](int, int i, Step* s) {
                      if (i == 1) s->send.begin += 1;
                    }),
             Contains("uses transit in another range than it was made"));
}

TEST_CASE("the verifier finds results that ranks add up in different orders") {
  // Three ranks pass their own inputs round: all sums are complete, but ((2+0)+1), ((0+1)+2), ...
  const auto rotate = [](const Schedule& s, int r, int i) {
    Step step;
    if (i > 1) return step;
    step.to = (r + 1 + i) % 3;
    step.from = (r + 2 - i) % 3;
    step.send = step.recv = {0, s.count};
    step.send_from = From::input;
    step.then = Then::reduce;
    step.operand = i == 0 ? From::input : From::work;
    step.mine = i + 1;
    return step;
  };
  const Status status = verify(make(Collective::all_reduce, Algorithm::ring, 3, 5), false, rotate);
  CHECK(status.code() == Code::internal);
  CHECK_THAT(status.message(), Contains("in another order"));
}
