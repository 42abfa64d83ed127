#include "ringfold/model.h"

#include <algorithm>
#include <array>

// How the formulas come about. A rank's sends leave in step order. Within a segment a step that
// sends what the step before received waits for it, piece by piece where both are the same range,
// else for all of it; the first step of a segment sends input and waits for the link only. So a
// segment has a *span*, from its first send to the moment the next segment's first send may leave,
// and only the last one a *tail*, until all has arrived:
//
//   seconds = sum of the spans + tail of the last
//
// For S pipelined steps, span = (S-1) * step + chunk * beta and tail = alpha, which for one segment
// is the formula of model.h. The comment at each span below says what its steps are.

namespace ringfold {
namespace {

// The links that a message may meet on its way: the average one, and the narrowest.
struct Path {
  double alpha, beta;
  double narrowest;
};

class Predictor {
 public:
  Predictor(const Schedule& schedule, size_t element_bytes, size_t piece_bytes,
            const Machine& machine)
      : s_(schedule),
        n_(schedule.size),
        element_(static_cast<double>(element_bytes)),
        piece_bytes_(static_cast<double>(piece_bytes)),
        machine_(machine),
        near_{machine.local.alpha, machine.local.beta, machine.local.beta},
        far_{machine.remote.alpha, machine.remote.beta, machine.remote.beta} {}

  [[nodiscard]] double seconds() const {
    const size_t segments = steps::segment_count(s_);
    const steps::Segment first = steps::segment_at(s_, 0);
    const steps::Segment last = steps::segment_at(s_, static_cast<int>(segments) - 1);
    if (n_ == 1) {
      const double copied = static_cast<double>(s_.count) * element_ * machine_.gamma;
      return s_.collective == Collective::broadcast ? 0 : copied;
    }
    return static_cast<double>(segments - 1) * span(first) + span(last) + tail(last);
  }

 private:
  [[nodiscard]] double bytes(size_t elements) const {
    return static_cast<double>(elements) * element_;
  }
  // The largest of n chunks.
  [[nodiscard]] double chunk(const steps::Segment& segment, int n) const {
    return bytes(segment.chunk(n, 0).count);
  }
  [[nodiscard]] double piece(double chunk) const {
    return piece_bytes_ == 0 ? chunk : std::min(piece_bytes_, chunk);
  }

  // A pipelined step: link or adder busy all the time, or waiting for the first piece.
  [[nodiscard]] double step(const Path& path, double chunk, double gamma) const {
    return std::max(busy(path, chunk, gamma), hop(path, piece(chunk), gamma));
  }
  static double busy(const Path& path, double bytes, double gamma) {
    return bytes * std::max(path.narrowest, gamma);
  }
  static double hop(const Path& path, double bytes, double gamma) {
    return path.alpha + bytes * (path.beta + gamma);
  }
  // A step that the next one waits for entirely.
  [[nodiscard]] double whole(const Path& path, double chunk, double gamma) const {
    return path.alpha + busy(path, chunk, gamma) + piece(chunk) * gamma;
  }

  // Between ranks `distance` positions apart.
  [[nodiscard]] const Path& link(int distance) const {
    return distance < machine_.per_host || n_ <= machine_.per_host ? near_ : far_;
  }
  // All round the ring one hop in per_host leaves the host. While links are busy the narrowest
  // decides; while steps wait, what a piece meets on its way round, that is the average.
  [[nodiscard]] Path ring() const {
    if (n_ <= machine_.per_host) return near_;
    const double hosts = (n_ + machine_.per_host - 1) / machine_.per_host;
    const double far = machine_.per_host == 1 ? 1 : hosts / n_;
    return {far * far_.alpha + (1 - far) * near_.alpha, far * far_.beta + (1 - far) * near_.beta,
            far == 1 ? far_.beta : std::max(far_.beta, near_.beta)};
  }

  // N-1 or 2(N-1) pipelined steps: N-1 that add, whose last is followed by a copying one in an
  // all-reduce; the first send of all waits for nothing.
  [[nodiscard]] double ring_span(const Path& path, int n, double chunk) const {
    const double adding = step(path, chunk, machine_.gamma), copying = step(path, chunk, 0);
    const double last = busy(path, chunk, 0);
    switch (s_.collective) {
      case Collective::reduce_scatter:
        return (n - 2) * adding + last;
      case Collective::all_gather:
        return (n - 2) * copying + last;
      case Collective::all_reduce:
      case Collective::broadcast:
      case Collective::reduce:
      case Collective::all_to_all:
      case Collective::gather:
      case Collective::scatter:
        break;
    }
    return (n - 1) * adding + (n - 2) * copying + last;
  }

  // Three rings, one after the other: between them the ranges differ, so each waits for the whole
  // of the one before. N-1 is L-1 on the host and H-1 between hosts.
  [[nodiscard]] double two_level_span(const steps::Segment& segment) const {
    const int locals = s_.per_host, hosts = n_ / locals;
    const double shard = chunk(segment, locals);
    const steps::Segment between{segment.chunk(locals, 0), false, 0, s_.grain};
    const double part = chunk(between, hosts);
    const double remote = ring_span(far_, hosts, part) + far_.alpha;
    const double adding = (locals - 2) * step(near_, shard, machine_.gamma);
    const double copying = (locals - 2) * step(near_, shard, 0);
    return adding + whole(near_, shard, machine_.gamma) + remote + copying + busy(near_, shard, 0);
  }

  // Rounds of all the bytes, each pipelined into the next. With extra ranks the pieces of the pairs
  // come in one hop before, and go out in one step afterwards.
  [[nodiscard]] double recursive_doubling_span(double all) const {
    const steps::Members members(n_);
    const double gamma = machine_.gamma;
    double sum = 0;
    for (int i = 0; i + 1 < members.doublings(); ++i) sum += step(link(1 << i), all, gamma);
    const Path& last = link(members.count / 2);
    if (members.extras == 0) return sum + busy(last, all, 0);
    const Path& pair = link(1);
    return hop(pair, piece(all), gamma) + sum + step(last, all, gamma) + busy(pair, all, 0);
  }

  // Blocks of D/2, D/4, ... and back: no two steps have the same range, so nothing is pipelined.
  [[nodiscard]] double halving_doubling_span(const steps::Segment& segment) const {
    const steps::Members members(n_);
    const double all = bytes(segment.range.count), gamma = machine_.gamma;
    const double part = chunk(segment, members.count);
    double sum = 0;
    for (int i = 0; i < members.doublings(); ++i) {
      const double block = std::min(all, part * (members.count >> (i + 1)));
      sum += whole(link(1 << i), block, gamma) + whole(link(1 << i), block, 0);
    }
    if (members.extras > 0) sum += whole(link(1), all, gamma) + whole(link(1), all, 0);
    return sum - link(1).alpha;  // of the last step: in the tail
  }

  // The root's link is busy ceil(log2 N) times; meanwhile, on the longest way down, floor(log2 N)
  // hops, of which the waiting that exceeds the root's is in the tail.
  [[nodiscard]] double tree_span(double chunk, double gamma) const {
    double sum = 0;
    for (int i = 0; i < steps::tree_depth(n_); ++i) sum += busy(link(1 << i), chunk, gamma);
    return sum;
  }
  [[nodiscard]] double tree_tail(double chunk, double gamma) const {
    const int hops = steps::Members(n_).doublings();
    double sum = whole(link(1), chunk, gamma) - busy(link(1), chunk, gamma);
    for (int i = 1; i < hops; ++i) {
      sum += step(link(1 << i), chunk, gamma) - busy(link(1 << i), chunk, gamma);
    }
    return sum;
  }

  [[nodiscard]] double adding() const {
    return s_.collective == Collective::reduce ? machine_.gamma : 0;
  }

  [[nodiscard]] double span(const steps::Segment& segment) const {
    const double all = bytes(segment.range.count);
    switch (s_.algorithm) {
      case Algorithm::ring:
        return ring_span(ring(), n_, chunk(segment, n_));
      case Algorithm::two_level:
        if (one_level()) return ring_span(ring(), n_, chunk(segment, n_));
        return two_level_span(segment);
      case Algorithm::recursive_doubling:
        return recursive_doubling_span(all);
      case Algorithm::halving_doubling:
        return halving_doubling_span(segment);
      case Algorithm::chain:
        return busy(ring(), all, adding());  // the others work meanwhile
      case Algorithm::tree:
        return tree_span(all, adding());
      case Algorithm::direct:
        return busy(link(n_ - 1), (n_ - 1) * all, 0);  // one busy link
    }
    return 0;
  }

  [[nodiscard]] double tail(const steps::Segment& segment) const {
    const double all = bytes(segment.range.count);
    switch (s_.algorithm) {
      case Algorithm::ring:
        return ring().alpha + (s_.collective == Collective::reduce_scatter
                                   ? piece(chunk(segment, n_)) * machine_.gamma
                                   : 0);
      case Algorithm::two_level:
        return one_level() ? ring().alpha : near_.alpha;
      case Algorithm::recursive_doubling: {
        const steps::Members members(n_);
        if (members.extras > 0) return link(1).alpha;
        return link(members.count / 2).alpha + piece(all) * machine_.gamma;
      }
      case Algorithm::halving_doubling:
        return link(1).alpha;
      case Algorithm::chain:  // the last piece goes on to the end
        return (n_ - 2) * hop(ring(), piece(all), adding()) + ring().alpha + piece(all) * adding();
      case Algorithm::tree:
        return tree_tail(all, adding());
      case Algorithm::direct:
        return link(n_ - 1).alpha;
    }
    return 0;
  }

  [[nodiscard]] bool one_level() const { return s_.per_host == 1 || s_.per_host == n_; }

  const Schedule& s_;
  const int n_;
  const double element_, piece_bytes_;
  const Machine& machine_;
  const Path near_, far_;
};

// Ranks that share a segment of the schedule's frame, a chunk each.
size_t chunks_of(const Schedule& s) {
  switch (s.algorithm) {
    case Algorithm::ring:
      return static_cast<size_t>(s.size);
    case Algorithm::two_level:
      return static_cast<size_t>(s.per_host);
    case Algorithm::chain:
    case Algorithm::tree:
    case Algorithm::halving_doubling:
    case Algorithm::recursive_doubling:
    case Algorithm::direct:
      break;
  }
  return 1;
}

// Rings and reductions with a root work in segments, whose chunks fit the slots (and the caches).
// The others have no transit, and gain nothing by it.
bool wants_segments(const Schedule& s) {
  return s.algorithm == Algorithm::ring || s.algorithm == Algorithm::two_level ||
         s.collective == Collective::reduce;
}

// Sets the segment for pieces of that size. False if the executor could not do it.
bool fit(Schedule* s, size_t element_bytes, size_t piece_bytes) {
  s->segment = 0;
  const size_t piece = piece_bytes / element_bytes;
  if (wants_segments(*s)) {
    const size_t chunk = kMaxTransitPieces * piece / s->grain * s->grain;
    if (chunk == 0) return false;
    const size_t segment = chunk * chunks_of(*s);
    if (segment < s->count) s->segment = segment;
  } else if (s->count / piece >= static_cast<size_t>(kMaxPieces)) {
    return false;
  }
  return legal(*s);
}

constexpr double kAboutTheSame = 1.02;

// The best piece for one schedule: the largest whose prediction is about that of the fastest.
std::optional<Choice> best_piece(Schedule s, size_t element_bytes, const Machine& machine,
                                 size_t wanted) {
  std::array<Choice, 16> tried;
  size_t n = 0;
  double fastest = 0;
  const auto attempt = [&](size_t bytes) {
    const size_t piece = std::max(bytes / element_bytes, size_t{1}) * element_bytes;
    if (!fit(&s, element_bytes, piece)) return;
    tried[n] = {s, piece, predict_seconds(s, element_bytes, piece, machine)};
    fastest = n == 0 ? tried[n].seconds : std::min(fastest, tried[n].seconds);
    ++n;
  };
  if (wanted > 0) {
    attempt(wanted);
  } else {
    const size_t all = s.count * element_bytes;
    for (size_t bytes = kMinPieceBytes; bytes <= kMaxPieceBytes; bytes *= 2) {
      attempt(bytes);
      if (bytes >= all) break;  // larger ones would not cut either
    }
  }
  while (n > 0) {
    if (tried[--n].seconds <= fastest * kAboutTheSame) return tried[n];
  }
  return std::nullopt;
}

}  // namespace

uint64_t bytes_per_rank(const Schedule& schedule, int position, size_t element_bytes) {
  uint64_t sum = 0;
  const int steps = step_count(schedule);
  for (int i = 0; i < steps; ++i) sum += step(schedule, position, i).send.count;
  return sum * element_bytes;
}

double predict_seconds(const Schedule& schedule, size_t element_bytes, size_t piece_bytes,
                       const Machine& machine) {
  return Predictor(schedule, element_bytes, piece_bytes, machine).seconds();
}

std::optional<Choice> choose(Collective collective, int size, size_t count, size_t element_bytes,
                             const Machine& machine, const Constraints& constraints) {
  std::optional<Choice> best;
  for (int a = 0; a < kAlgorithms; ++a) {
    Schedule s;
    s.collective = collective;
    s.algorithm = static_cast<Algorithm>(a);
    s.size = size;
    s.root = constraints.root;
    s.count = count;
    s.grain = constraints.grain;
    if (!offers(collective, s.algorithm)) continue;
    if (constraints.algorithm.has_value() && *constraints.algorithm != s.algorithm) continue;
    if (s.algorithm == Algorithm::two_level && size % machine.per_host == 0) {
      s.per_host = machine.per_host;
    }
    const std::optional<Choice> choice =
        best_piece(s, element_bytes, machine, constraints.piece_bytes);
    if (choice.has_value() && (!best.has_value() || choice->seconds < best->seconds)) best = choice;
  }
  return best;
}

}  // namespace ringfold
