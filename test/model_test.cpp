#include "ringfold/model.h"

#include <fmt/core.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "lib/plan/verify.h"

using namespace ringfold;

namespace {

constexpr double kGB = 1e9;

// The reference points that `ringfold model` prints.
static_assert(bus_factor(Collective::all_reduce, 4) == 1.5);
static_assert(bus_factor(Collective::all_reduce, 8) == 1.75);
static_assert(bus_factor(Collective::all_reduce, 64) == 1.96875);
static_assert(bus_factor(Collective::all_reduce, 1) == 0);
static_assert(model_bytes(Collective::all_reduce, 8, 4 * kGB) == 7 * kGB);
static_assert(model_bytes(Collective::all_reduce, 64, 4 * kGB) == 7.875 * kGB);
static_assert(hub_bytes(64, 4 * kGB) == 252 * kGB);

// When everything happens, piece by piece: links are busy beta a byte in each direction, bytes
// arrive alpha later, and each rank adds up one piece at a time. Sends leave in step order; a piece
// waits for the pieces that made it.
class Timeline {
 public:
  Timeline(const Schedule& s, size_t element_bytes, size_t piece_bytes, const Machine& machine)
      : s_(s),
        machine_(machine),
        element_(static_cast<double>(element_bytes)),
        piece_(piece_bytes / element_bytes),
        ranks_(static_cast<size_t>(s.size)) {
    for (Rank& rank : ranks_) rank.work.resize(s.count), rank.transit.resize(s.count);
  }

  double seconds() {
    double end = 0;
    for (int i = 0; i < step_count(s_); ++i) {
      for (int r = 0; r < s_.size; ++r) send(r, step(s_, r, i));
      for (int r = 0; r < s_.size; ++r) end = std::max(end, receive(r, step(s_, r, i)));
    }
    return end;
  }

 private:
  struct Rank {
    double sending = 0, receiving = 0, adding = 0;  // busy until
    std::vector<double> work, transit;              // when each element was made
    std::vector<double> arrivals;                   // of the current step's pieces
  };

  Rank& at(int r) { return ranks_[static_cast<size_t>(r)]; }
  std::vector<Range> pieces(Range range) const {
    std::vector<Range> all;
    for (size_t b = range.begin; b < range.end(); b += piece_) {
      all.push_back({b, std::min(piece_, range.end() - b)});
    }
    return all;
  }
  double ready(int r, From side, Range piece) {
    if (side == From::input) return 0;
    double when = 0;
    const auto& made = side == From::work ? at(r).work : at(r).transit;
    for (size_t e = piece.begin; e < piece.end(); ++e) when = std::max(when, made[e]);
    return when;
  }

  void send(int r, const Step& step) {
    if (step.to < 0) return;
    const LinkCost& link =
        r / machine_.per_host == step.to / machine_.per_host ? machine_.local : machine_.remote;
    Rank& me = at(r);
    Rank& other = at(step.to);
    other.arrivals.clear();
    for (const Range piece : pieces(step.send)) {
      const double busy = static_cast<double>(piece.count) * element_ * link.beta;
      const double start = std::max(me.sending, ready(r, step.send_from, piece));
      me.sending = start + busy;
      other.receiving = std::max(start + link.alpha, other.receiving) + busy;
      other.arrivals.push_back(other.receiving);
    }
  }

  // After all that was received before.
  double copy(int r, Range range) {
    Rank& me = at(r);
    me.adding = std::max(me.adding, me.receiving) +
                static_cast<double>(range.count) * element_ * machine_.gamma;
    return me.adding;
  }

  double receive(int r, const Step& step) {
    if (step.from < 0 && step.then != Then::copy) return 0;
    if (step.from < 0) return copy(r, step.recv);
    Rank& me = at(r);
    const std::vector<Range> all = pieces(step.recv);
    std::vector<double>& into = step.into == From::work ? me.work : me.transit;
    std::vector<double> done;
    for (size_t k = 0; k < all.size(); ++k) {
      double when = me.arrivals[k];
      if (step.then == Then::reduce) {
        when = std::max({when, me.adding, ready(r, step.operand, all[k])}) +
               static_cast<double>(all[k].count) * element_ * machine_.gamma;
        me.adding = when;
      }
      done.push_back(when);
    }
    const double last = done.empty() ? 0 : *std::max_element(done.begin(), done.end());
    for (size_t k = 0; k < all.size(); ++k) {
      for (size_t e = all[k].begin; e < all[k].end(); ++e) into[e] = done[k];
    }
    return last;
  }

  const Schedule s_;
  const Machine machine_;
  const double element_;
  const size_t piece_;
  std::vector<Rank> ranks_;
};

constexpr size_t kElement = 1024;  // large, to make timelines short

struct Ratios {  // of prediction to timeline
  double low = 1, high = 1;
  std::string where_low = "nowhere", where_high = "nowhere";

  void add(double ratio, const std::string& where) {
    if (ratio < low) low = ratio, where_low = where;
    if (ratio > high) high = ratio, where_high = where;
  }
};

// Over sizes, pieces and segments, where the schedule is made for segments.
Ratios compare(Collective collective, Algorithm algorithm, const std::vector<int>& sizes,
               const Machine& machine) {
  Ratios ratios;
  const bool doubling =
      algorithm == Algorithm::halving_doubling || algorithm == Algorithm::recursive_doubling;
  for (const int size : sizes) {
    const int per_host = algorithm == Algorithm::two_level ? machine.per_host : 1;
    for (const size_t chunk : {8, 64, 512}) {  // KiB for each rank
      Schedule s{collective, algorithm, size, per_host, 0, chunk * static_cast<size_t>(size), 1, 0};
      for (const size_t piece : {8, 64, 256}) {
        for (s.segment = 0; s.segment <= s.count / 4; s.segment += s.count / 4) {
          if (piece > chunk || (doubling && s.segment > 0)) break;
          const double predicted = predict_seconds(s, kElement, piece * kElement, machine);
          const double timed = Timeline(s, kElement, piece * kElement, machine).seconds();
          ratios.add(predicted / timed,
                     fmt::format("{} {}, {} ranks, {} KiB each, piece {}, segment {}",
                                 name(collective), name(algorithm), size, chunk, piece, s.segment));
        }
      }
    }
  }
  return ratios;
}

void expect_within(const Ratios& ratios, double low, double high) {
  INFO("lowest " << ratios.where_low << ", highest " << ratios.where_high);
  CHECK(ratios.low >= low);
  CHECK(ratios.high <= high);
}

constexpr Machine on_one_host(LinkCost link) {
  return {link, link, 2e-11, 1 << 20};
}
// `per_host` ranks share memory; other hosts are reached by TCP.
constexpr Machine on_hosts(int per_host) {
  return {kShmLink, kTcpLink, 2e-11, per_host};
}

Algorithm chosen(size_t bytes, int size, const Machine& machine) {
  return choose(Collective::all_reduce, size, bytes / 4, 4, machine)->schedule.algorithm;
}

}  // namespace

TEST_CASE("the bandwidth model's reference points") {
  constexpr double kPerByte = 1 / (200 * kGB);
  CHECK(model_bytes(Collective::all_reduce, 8, 4 * kGB) * kPerByte == Approx(0.035));
  CHECK(bus_factor(Collective::all_reduce, 64) == Approx(1.969).margin(0.0005));
  CHECK(bus_factor(Collective::all_reduce, 1000) == Approx(1.998));
  for (const Collective half : {Collective::reduce_scatter, Collective::all_gather,
                                Collective::all_to_all, Collective::gather, Collective::scatter}) {
    CHECK(bus_factor(half, 8) == 0.875);
    CHECK(bus_factor(half, 1) == 0);
  }
  CHECK(bus_factor(Collective::broadcast, 8) == 1);
  CHECK(bus_factor(Collective::reduce, 1) == 0);
  // 252 GB into the hub at 200 GB/s, and as many out again.
  CHECK(hub_seconds(64, 4 * kGB, {0, kPerByte}) == Approx(2 * 1.26));
  // The prediction of a long ring is that bound: 35 ms.
  const Machine machine = on_one_host({5e-6, kPerByte});
  const Choice choice = *choose(Collective::all_reduce, 8, 1000000000, 4,
                                {machine.local, machine.remote, 0, machine.per_host});
  CHECK(choice.schedule.algorithm == Algorithm::ring);
  CHECK(choice.seconds == Approx(0.035).epsilon(0.01));
}

TEST_CASE("what ranks send is what the model says") {
  for (const int n : {1, 2, 3, 8, 17}) {
    for (const size_t count : {0, 1, 7, 1000, 4099}) {
      for (const size_t segment : {0, 100}) {
        INFO(n << " ranks, " << count << " elements, segment " << segment);
        const Schedule s{Collective::all_reduce, Algorithm::ring, n, 1, 0, count, 1, segment};
        uint64_t all = 0;
        for (int r = 0; r < n; ++r) {
          const uint64_t sent = bytes_per_rank(s, r, 4);
          const double model = model_bytes(Collective::all_reduce, n, 4.0 * count);
          // Each chunk is rounded to an element.
          CHECK(std::abs(static_cast<double>(sent) - model) <= 4.0 * step_count(s));
          all += sent;
        }
        CHECK(all == 2 * static_cast<uint64_t>(n - 1) * count * 4);  // exactly, over all ranks
      }
    }
  }
  // The halves send exactly (N-1)/N, halving-doubling as much as the ring.
  const Schedule half{Collective::all_gather, Algorithm::ring, 8, 1, 0, 8000, 1, 0};
  CHECK(bytes_per_rank(half, 3, 4) == 28000);
  const Schedule halving{Collective::all_reduce, Algorithm::halving_doubling, 8, 1, 0, 8000, 1, 0};
  CHECK(bytes_per_rank(halving, 5, 4) == 56000);
  const Schedule chain{Collective::broadcast, Algorithm::chain, 4, 1, 1, 1000, 1, 0};
  CHECK(bytes_per_rank(chain, 1, 4) == 4000);
  CHECK(bytes_per_rank(chain, 0, 4) == 0);  // the last of the chain
}

TEST_CASE("predictions on one host agree with the timeline") {
  for (const LinkCost link : {kShmLink, kTcpLink, kLoopbackLink}) {
    const Machine machine = on_one_host(link);
    const std::vector<int> powers = {2, 4, 8, 16};
    for (const Algorithm algorithm : {Algorithm::ring, Algorithm::recursive_doubling}) {
      expect_within(compare(Collective::all_reduce, algorithm, powers, machine), 0.999, 1.001);
    }
    // Cut blocks: not all the waits that the formula adds follow one another.
    expect_within(compare(Collective::all_reduce, Algorithm::halving_doubling, powers, machine),
                  0.999, 1.1);
    const std::vector<int> sizes = {2, 3, 4, 5, 7, 8, 13};
    const auto within = [&](Collective collective, Algorithm algorithm, double high) {
      expect_within(compare(collective, algorithm, sizes, machine), 0.999, high);
    };
    within(Collective::all_reduce, Algorithm::ring, 1.001);
    // Pairs run ahead of what the formula lets them: it is an upper bound.
    within(Collective::all_reduce, Algorithm::halving_doubling, 1.2);
    within(Collective::all_reduce, Algorithm::recursive_doubling, 1.25);
    within(Collective::reduce_scatter, Algorithm::ring, 1.001);
    within(Collective::all_gather, Algorithm::ring, 1.001);
    within(Collective::broadcast, Algorithm::chain, 1.001);
    within(Collective::broadcast, Algorithm::tree, 1.001);
    // The last piece of a segment may be smaller than the others.
    within(Collective::reduce, Algorithm::chain, 1.03);
    // The timeline lets no segment overtake another at the root's port; the executor does.
    expect_within(compare(Collective::reduce, Algorithm::tree, sizes, machine), 0.7, 1.03);
    within(Collective::all_to_all, Algorithm::direct, 1.001);
    within(Collective::gather, Algorithm::direct, 1.001);
    within(Collective::scatter, Algorithm::direct, 1.001);
  }
}

TEST_CASE("predictions over several hosts agree with the timeline") {
  for (const int per_host : {2, 4}) {
    const Machine machine = on_hosts(per_host);
    const std::vector<int> sizes = {2 * per_host, 4 * per_host};
    const auto within = [&](Algorithm algorithm, double low, double high) {
      expect_within(compare(Collective::all_reduce, algorithm, sizes, machine), low, high);
    };
    within(Algorithm::recursive_doubling, 0.999, 1.001);
    // Near rounds end with what came over far links; which of it is late, it does not follow.
    within(Algorithm::halving_doubling, 0.89, 1.06);
    within(Algorithm::two_level, 0.999, 1.07);  // of several segments, some pieces run ahead
    within(Algorithm::ring, 0.94, 1.05);        // a mean over near and far hops
  }
  const Machine odd = on_hosts(3);  // pairs and blocks that straddle hosts: bounds only
  expect_within(compare(Collective::all_reduce, Algorithm::recursive_doubling, {6, 9}, odd), 0.8,
                1.5);
  expect_within(compare(Collective::all_reduce, Algorithm::halving_doubling, {6, 9}, odd), 0.8,
                1.5);
  expect_within(compare(Collective::all_reduce, Algorithm::two_level, {6, 9, 12}, odd), 0.999,
                1.07);
}

TEST_CASE("ranks that share their host's link are as much slower where all of them send at once") {
  const size_t bytes = size_t{64} << 20;
  const auto seconds = [&](Algorithm algorithm, int sharers) {
    Machine machine{{0, 0}, {0, 8e-9}, 0, 4};
    machine.sharers = sharers;
    Constraints only;
    only.algorithm = algorithm;
    return choose(Collective::all_reduce, 8, bytes / 4, 4, machine, only)->seconds;
  };
  // 4 + 4 ranks: one of the rounds, of the segment in two levels, is between the hosts.
  CHECK(seconds(Algorithm::recursive_doubling, 4) ==
        Approx(4 * seconds(Algorithm::recursive_doubling, 1)));
  CHECK(seconds(Algorithm::two_level, 4) == Approx(4 * seconds(Algorithm::two_level, 1)));
  CHECK(seconds(Algorithm::ring, 4) == Approx(seconds(Algorithm::ring, 1)));
}

TEST_CASE("host by host the links carry the bytes once, whatever happens inside") {
  Machine machine{{0, 1e-10}, {0, 8e-9}, 0, 4};
  machine.sharers = 4;
  const double bytes = 64e6, links = 2.0 * 2 / 3 * bytes * 8e-9;
  CHECK(predict_by_hosts(3, bytes, 0, machine) == Approx(links).epsilon(1e-3));
  CHECK(predict_by_hosts(3, bytes, 1e6, machine) == Approx(links + 2e6 * 1e-10).epsilon(1e-3));
}

TEST_CASE("a single rank only copies") {
  const Machine machine;
  const Schedule copy{Collective::all_reduce, Algorithm::ring, 1, 1, 0, 1000, 1, 0};
  CHECK(predict_seconds(copy, 4, 0, machine) == Approx(4000 * machine.gamma));
  const Schedule nothing{Collective::broadcast, Algorithm::chain, 1, 1, 0, 1000, 1, 0};
  CHECK(predict_seconds(nothing, 4, 0, machine) == 0);
}

TEST_CASE("small messages double, large ones go round the ring") {
  for (const LinkCost link : {kShmLink, kTcpLink, kLoopbackLink}) {
    const Machine machine = on_one_host(link);
    for (const int size : {4, 8, 64}) {
      CHECK(chosen(8, size, machine) == Algorithm::recursive_doubling);
      CHECK(chosen(size_t{1} << 30, size, machine) == Algorithm::ring);
    }
    CHECK(chosen(256 << 10, 64, machine) == Algorithm::halving_doubling);
  }
  CHECK(chosen(size_t{1} << 30, 64, on_hosts(8)) == Algorithm::two_level);
}

TEST_CASE("the choice changes where two predictions cross, by no more than is about the same") {
  const Machine machine = on_one_host(kTcpLink);
  const auto best_of = [&](Algorithm algorithm, size_t count) {
    Constraints only;
    only.algorithm = algorithm;
    return choose(Collective::all_reduce, 16, count, 4, machine, only)->seconds;
  };
  bool rings = false;
  for (size_t count = 1; count < size_t{1} << 28; count = count * 5 / 4 + 1) {
    const Choice choice = *choose(Collective::all_reduce, 16, count, 4, machine);
    const double ring = best_of(Algorithm::ring, count);
    const double fastest = std::min({ring, best_of(Algorithm::halving_doubling, count),
                                     best_of(Algorithm::recursive_doubling, count)});
    INFO(count << " elements by " << name(choice.schedule.algorithm));
    CHECK(choice.seconds <= fastest * 1.05 * 1.05);  // once for the piece, once for the algorithm
    if (ring <= fastest) CHECK(choice.schedule.algorithm == Algorithm::ring);
    CHECK((!rings || choice.schedule.algorithm == Algorithm::ring));  // one crossing only
    rings = choice.schedule.algorithm == Algorithm::ring;
  }
  CHECK(rings);
}

TEST_CASE("every choice is legal and within the executor's limits") {
  const unsigned seed = 20240229;
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 4000; ++trial) {
    const auto collective = static_cast<Collective>(random() % kCollectives);
    const int size = 1 + static_cast<int>(random() % (trial % 2 == 0 ? 24 : 4096));
    size_t count = random() >> (32 + random() % 32);
    if (has_parts(collective))
      count = count / static_cast<size_t>(size) * static_cast<size_t>(size);
    const size_t element = size_t{1} << random() % 4;
    Constraints given;
    given.root = static_cast<int>(random() % static_cast<size_t>(size));
    given.grain = random() % 2 == 0 ? 1 : 16;
    if (random() % 4 == 0) given.algorithm = static_cast<Algorithm>(random() % kAlgorithms);
    const Machine machine = random() % 2 == 0 ? on_one_host(kShmLink) : on_hosts(8);
    const std::optional<Choice> choice = choose(collective, size, count, element, machine, given);
    INFO(name(collective) << " of " << count << " x " << element << " bytes on " << size);
    REQUIRE(choice.has_value());
    const Schedule& s = choice->schedule;
    CHECK(legal(s));
    CHECK((s.count == count && s.size == size && s.root == given.root && s.grain == given.grain));
    if (given.algorithm && offers(collective, *given.algorithm) && count < 1000000) {
      CHECK(s.algorithm == *given.algorithm);
    }
    CHECK(choice->piece_bytes % element == 0);
    CHECK(choice->piece_bytes >= kMinPieceBytes);
    CHECK(choice->piece_bytes <= kMaxPieceBytes);
    const size_t piece = choice->piece_bytes / element;
    for (int k = 0; k < 64; ++k) {  // steps here and there
      const int steps = step_count(s);
      if (steps == 0) break;
      const Step now = step(s, static_cast<int>(random() % static_cast<size_t>(size)),
                            static_cast<int>(random() % static_cast<size_t>(steps)));
      const bool transit = now.send_from == From::transit || now.into == From::transit;
      const size_t limit = transit ? kMaxTransitPieces : kMaxPieces;
      if (now.to >= 0) CHECK((now.send.count + piece - 1) / piece <= limit);
      if (now.from >= 0) CHECK((now.recv.count + piece - 1) / piece <= limit);
    }
  }
}

TEST_CASE("choices, cut small, verify") {
  const Machine machine = on_hosts(4);
  for (int c = 0; c < kCollectives; ++c) {
    for (const int size : {1, 3, 8, 12}) {
      Constraints given;
      given.root = size - 1;
      given.piece_bytes = 8;  // two elements: many segments
      const auto count = static_cast<size_t>(size) * 50;
      const Choice choice = *choose(static_cast<Collective>(c), size, count, 4, machine, given);
      CHECK(choice.piece_bytes == 8);
      const Status status = verify(choice.schedule, false);
      INFO(status.to_string());
      CHECK(status.ok());
    }
  }
}

TEST_CASE("a given piece grows when the messages could not be numbered") {
  Constraints given;
  given.piece_bytes = 16;
  given.algorithm = Algorithm::ring;
  const Choice choice = *choose(Collective::all_reduce, 8, 1 << 28, 4, Machine{}, given);
  CHECK(choice.piece_bytes > 16);
  CHECK(legal(choice.schedule));
  Schedule smaller = choice.schedule;
  smaller.segment /= 2;
  CHECK_FALSE(legal(smaller));  // not larger than it must be
  given.piece_bytes = size_t{1} << 30;
  CHECK(choose(Collective::all_reduce, 8, 1 << 28, 4, Machine{}, given)->piece_bytes ==
        kMaxPieceBytes);
}

TEST_CASE("there is no choice for a root outside, or beyond all limits") {
  Constraints given;
  given.root = 4;
  CHECK_FALSE(choose(Collective::reduce, 4, 100, 4, Machine{}, given).has_value());
  CHECK(choose(Collective::reduce, 5, 100, 4, Machine{}, given).has_value());
  CHECK_FALSE(choose(Collective::reduce, 4096, size_t{1} << 40, 4, Machine{}).has_value());
}
