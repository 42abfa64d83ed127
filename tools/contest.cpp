#include "tools/contest.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "tools/bench_ranks.h"

namespace ringfold::tools {
namespace {

// So long one round of one contestant takes, where a call is shorter, after a quarter of that for
// warming up: a link that was idle may carry a burst faster than it can go on.
constexpr double kRoundSeconds = 0.03;
constexpr int kMostCalls = 2000;

void call(Contestant& contestant, std::vector<float>& data, size_t count) {
  Work work = contestant.comm.all_reduce(data.data(), data.data(), count, DType::f32, Op::sum);
  must(work.wait());
  contestant.report = work.report();
}

// Seconds of so many calls on the slowest rank.
double timed(Communicator& base, Contestant& contestant, std::vector<float>& data, size_t count,
             int calls) {
  must(base.barrier().wait());
  const double start = seconds_now();
  if (contestant.comm.valid())
    for (int i = 0; i < calls; ++i) call(contestant, data, count);
  return largest(base, seconds_now() - start);
}

}  // namespace

Result<Communicator> told(Communicator& base, Algorithm algorithm) {
  UniqueId id{};
  if (base.rank() == 0) {
    const auto made = Rendezvous::unique_id();
    if (!made.ok()) return made.status();
    id = *made;
  }
  if (Status status = base.broadcast(&id, sizeof(id), DType::u8, 0).wait(); !status.ok())
    return status;
  const auto where = Rendezvous::from_id(id, base.rank(), base.size());
  if (!where.ok()) return where.status();
  Options options;
  options.algorithm = algorithm;
  return Communicator::create(*where, options);
}

Layout layout_of(Communicator& comm) {
  std::array<char, 256> mine{};
  gethostname(mine.data(), mine.size() - 1);
  std::vector<char> all(mine.size() * static_cast<size_t>(comm.size()));
  must(comm.all_gather(mine.data(), all.data(), mine.size(), DType::i8).wait());
  std::vector<std::string> hosts;
  for (size_t at = 0; at < all.size(); at += mine.size()) hosts.emplace_back(&all[at]);
  return lay_out(hosts, comm.rank());
}

std::vector<Algorithm> ways(bool two_levels) {
  std::vector<Algorithm> all;
  for (int i = 0; i < kAlgorithms; ++i) {
    const auto algorithm = static_cast<Algorithm>(i);
    if (!offers(Collective::all_reduce, algorithm)) continue;
    if (algorithm != Algorithm::two_level || two_levels) all.push_back(algorithm);
  }
  return all;
}

void hold(Communicator& base, std::vector<Contestant>& contestants, size_t bytes, int rounds) {
  const size_t count = bytes / sizeof(float);
  std::vector<float> data(count);
  for (Contestant& contestant : contestants) contestant.seconds.clear();
  std::vector<int> calls;
  for (Contestant& contestant : contestants) {
    timed(base, contestant, data, count, 1);  // the first makes connections
    const double once = std::max(1e-7, timed(base, contestant, data, count, 2) / 2);
    calls.push_back(std::clamp(static_cast<int>(kRoundSeconds / once), 1, kMostCalls));
  }
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < contestants.size(); ++i) {
      timed(base, contestants[i], data, count, (calls[i] + 3) / 4);
      contestants[i].seconds.push_back(timed(base, contestants[i], data, count, calls[i]) /
                                       calls[i]);
    }
  }
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

double undisturbed(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 4];
}

double predicted(Algorithm algorithm, int ranks, size_t bytes, size_t piece_bytes,
                 const Machine& machine) {
  Constraints given;
  given.algorithm = algorithm;
  given.grain = 64 / sizeof(float);
  given.piece_bytes = piece_bytes;
  const auto choice =
      choose(Collective::all_reduce, ranks, bytes / sizeof(float), sizeof(float), machine, given);
  return choice ? choice->seconds : 0;
}

LinkCost fit(const std::vector<Point>& points, double gamma) {
  const auto error = [&](const LinkCost& link) {
    const Machine machine{link, link, gamma, 1};
    double sum = 0;
    for (const Point& p : points) {
      const double says = predicted(p.algorithm, p.ranks, p.bytes, p.piece_bytes, machine);
      sum += std::abs(std::log(p.seconds / says));
    }
    return sum;
  };
  const auto [small, large] = std::ranges::minmax(points, {}, &Point::bytes);
  LinkCost best{small.seconds / 2, large.seconds / (2 * static_cast<double>(large.bytes))};
  double least = error(best);
  for (double factor = 2; factor > 1.001;) {  // downhill, with ever smaller steps
    const LinkCost from = best;
    for (const double a : {1 / factor, 1.0, factor}) {
      for (const double b : {1 / factor, 1.0, factor}) {
        const LinkCost tried{from.alpha * a, from.beta * b};
        if (const double e = error(tried); e < least) least = e, best = tried;
      }
    }
    if (best.alpha == from.alpha && best.beta == from.beta) factor = std::sqrt(factor);
  }
  return best;
}

}  // namespace ringfold::tools
