#include "ringfold/model.h"

#include <algorithm>
#include <array>
#include <cmath>

// How the formulas come about. A rank's sends leave in step order. Within a segment a step that
// sends what the step before received waits for it, piece by piece where both are the same range,
// else for all of it; the first step of a segment sends input and waits for the link only. So a
// segment has a *span*, from its first send to the moment the next segment's first send may leave,
// and only the last one a *tail*, until all has arrived:
//
//   seconds = sum of the spans + tail of the last
//
// Exact without contention for N = 2^k on one host while gamma <= beta, but for halving_doubling
// with cut blocks; test/model_test.cpp holds it against a timeline of all pieces, test/sim_test.cpp
// against the executor itself, and both say how far off the other cases are. Where adding is
// slower than the link, a ring of two or three ranks is predicted up to half too slow.
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
        far_{machine.remote.alpha, machine.remote.beta, machine.remote.beta},
        crowded_{far_.alpha, far_.beta * machine.sharers, far_.narrowest * machine.sharers} {}

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
  // Link and adder work at once but for one piece: the first to arrive, or the last to be added. If
  // that is a short one, it may have to wait for what is left of the full one before it.
  [[nodiscard]] double unhidden(const Path& path, double chunk, double gamma) const {
    const double full = piece(chunk);
    if (full == chunk || gamma > path.narrowest) return full * std::min(path.narrowest, gamma);
    const double last = chunk - (std::ceil(chunk / full) - 1) * full;
    return last * gamma + std::max(0.0, full * gamma - last * path.narrowest);
  }
  // A step that the next one waits for entirely.
  [[nodiscard]] double whole(const Path& path, double chunk, double gamma) const {
    return path.alpha + busy(path, chunk, gamma) + unhidden(path, chunk, gamma);
  }

  // Between ranks up to `reach` positions apart in blocks of 2 * reach: all of them on one host, or
  // the slowest pair decides.
  [[nodiscard]] bool is_near(int reach) const {
    return n_ <= machine_.per_host || machine_.per_host % (2 * reach) == 0;
  }
  // Where one rank of a host sends to another host at a time.
  [[nodiscard]] const Path& link(int reach) const { return is_near(reach) ? near_ : far_; }
  // Where all do.
  [[nodiscard]] const Path& exchange(int reach) const { return is_near(reach) ? near_ : crowded_; }
  // Of doubling among members 2^i apart. Those that stand for a pair are twice as far apart.
  [[nodiscard]] const Path& round(int i) const {
    const int reach = 1 << i, extras = steps::Members(n_).extras;
    if (extras == 0) return exchange(reach);
    return extras % (2 * reach) == 0 || n_ <= machine_.per_host ? exchange(2 * reach) : crowded_;
  }
  // Between the ranks of all pairs, of which a host's edge splits one at most if per_host is odd.
  [[nodiscard]] const Path& pair() const {
    return 2 * steps::Members(n_).extras <= machine_.per_host ? near_ : exchange(1);
  }
  // Round the ring one hop in per_host leaves the host (of a single walk, rounded up). While links
  // are busy the narrowest decides; while steps wait, what a chunk meets on its way.
  [[nodiscard]] Path ring() const {
    const int locals = machine_.per_host;
    if (n_ <= locals) return near_;
    const int hops = steps::count_per_segment(s_);
    const bool once = steps::segment_count(s_) == 1;
    const int far_hops = (hops + locals - 1) / locals;
    const double far =
        once ? static_cast<double>(far_hops) / hops : 1 / static_cast<double>(locals);
    return {far * far_.alpha + (1 - far) * near_.alpha, far * far_.beta + (1 - far) * near_.beta,
            locals == 1 ? far_.beta : std::max(far_.beta, near_.beta)};
  }

  // N-1 or 2(N-1) pipelined steps: N-1 that add, whose last is followed by a copying one in an
  // all-reduce; the first send of all waits for nothing.
  [[nodiscard]] double ring_span(const Path& path, int n, double chunk) const {
    const double adding = step(path, chunk, machine_.gamma), copying = step(path, chunk, 0);
    const double last = busy(path, chunk, 0);
    switch (s_.collective) {
      case Collective::reduce_scatter:
        return (n - 2) * adding + busy(path, chunk, machine_.gamma);
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
    const double remote = ring_span(crowded_, hosts, part) + far_.alpha;
    const double adding = (locals - 2) * step(near_, shard, machine_.gamma);
    const double copying = (locals - 2) * step(near_, shard, 0);
    return adding + whole(near_, shard, machine_.gamma) + remote + copying + busy(near_, shard, 0);
  }

  // Rounds of all the bytes, each pipelined into the next; with extra ranks one more step, in which
  // the pairs get the result. What the pairs give in the beginning comes in one hop before (tail).
  // In the last round a member that waited for its pair waits again only if the other did, too.
  [[nodiscard]] double recursive_doubling_span(double all) const {
    const steps::Members members(n_);
    double sum = 0;
    for (int i = 0; i + 1 < members.doublings(); ++i) {
      sum += step(round(i), all, machine_.gamma);
    }
    const Path& last = round(members.doublings() - 1);
    if (members.extras == 0) return sum + busy(last, all, machine_.gamma);
    const bool waits = members.extras > members.count / 2;
    return sum + (waits ? step(last, all, machine_.gamma) : busy(last, all, machine_.gamma)) +
           busy(pair(), all, 0);
  }
  [[nodiscard]] double recursive_doubling_tail(double all) const {
    const steps::Members members(n_);
    if (members.extras > 0) return hop(pair(), piece(all), machine_.gamma) + pair().alpha;
    const Path& last = round(members.doublings() - 1);
    return last.alpha + unhidden(last, all, machine_.gamma);
  }

  // Blocks of B = D/2, D/4, ... and back. What a halving round sends is one half of what arrives in
  // the round before, if need be the later half: its first piece is there alpha + (B/2 + piece) *
  // beta after that round began, when the link may be free, for it has sent B. The last halving and
  // the first doubling work on the same block, and a doubling round sends first what arrived first:
  // these are pipelined piece by piece. While latency dominates and blocks are cut, this is up to a
  // few percent high: not all of these waits follow one another on any one way through the ranks.
  // Extra ranks give (tail) and get all the bytes.
  [[nodiscard]] double halving_doubling_span(const steps::Segment& segment) const {
    const steps::Members members(n_);
    const double all = bytes(segment.range.count), gamma = machine_.gamma;
    const double part = chunk(segment, members.count);
    const int rounds = members.doublings();
    const auto block = [&](int i) { return std::min(all, part * (members.count >> (i + 1))); };
    double start = 0;  // of a round
    for (int i = 0; i + 1 < rounds; ++i) {
      start += std::max(busy(round(i), block(i), gamma),
                        later_half(round(i), block(i), block(i + 1), gamma));
    }
    start += step(round(rounds - 1), block(rounds - 1), gamma);
    double end = 0, arrived = 0;
    for (int i = rounds - 1; i >= 0; --i) {
      const double own = i + 1 < rounds ? block(i + 1) : 0;  // may come after what arrived last
      end = std::max(start + busy(round(i), block(i), 0),
                     arrived + std::min(block(i), piece(block(i)) + own) * round(i).beta);
      arrived = end + round(i).alpha;
      start += step(round(i), block(i), 0);
    }
    return members.extras == 0 ? end : start + busy(pair(), all, 0);
  }
  // Until the first piece of the later half of a block is there and added.
  [[nodiscard]] double later_half(const Path& path, double block, double half, double gamma) const {
    const double each = piece(block);
    if (each == 0) return path.alpha;
    const double wanted = std::ceil((block - half + piece(half)) / each) * each;
    if (wanted < block) return path.alpha + wanted * path.beta + each * gamma;
    return path.alpha + block * path.beta + unhidden(path, block, gamma);
  }
  [[nodiscard]] double halving_doubling_tail(double all) const {
    if (steps::Members(n_).extras == 0) return round(0).alpha;
    return pair().alpha + whole(pair(), all, machine_.gamma);
  }

  // The root's link is busy ceil(log2 N) times; meanwhile, on the longest way down, floor(log2 N)
  // hops, of which the waiting that exceeds the root's is in the tail. In a reduce it hides behind
  // the segments `before`, which take so many seconds: there all but the root run ahead.
  [[nodiscard]] double tree_span(double chunk, double gamma) const {
    double sum = 0;
    for (int i = 0; i < steps::tree_depth(n_); ++i) sum += busy(link(1 << i), chunk, gamma);
    return sum;
  }
  [[nodiscard]] double tree_tail(double chunk, double gamma, double before) const {
    const int hops = steps::Members(n_).doublings();
    double waiting = 0;
    for (int i = 1; i < hops; ++i) {
      waiting += step(link(1 << i), chunk, gamma) - busy(link(1 << i), chunk, gamma);
    }
    return whole(link(1), chunk, gamma) - busy(link(1), chunk, gamma) +
           std::max(0.0, waiting - before);
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
        return busy(exchange(n_), (n_ - 1) * all, 0);  // one busy link
      case Algorithm::region:
        break;
    }
    return 0;
  }

  // After the last arrival: a reduce-scatter adds that piece; the others copy the rank's own part,
  // after what is left of the copy in the segment before. (The root of a scatter need not wait.)
  [[nodiscard]] double own_part(double chunk) const {
    const double gamma = machine_.gamma;
    if (s_.collective == Collective::reduce_scatter) return unhidden(ring(), chunk, gamma);
    if (s_.collective == Collective::all_reduce || s_.collective == Collective::scatter) return 0;
    if (steps::segment_count(s_) == 1) return chunk * gamma;
    const double before = this->chunk(steps::segment_at(s_, 0), n_);
    return chunk * gamma + std::max(0.0, before * gamma - (n_ - 1) * chunk * ring().narrowest);
  }

  [[nodiscard]] double tail(const steps::Segment& segment) const {
    const double all = bytes(segment.range.count);
    switch (s_.algorithm) {
      case Algorithm::ring:
        return ring().alpha + own_part(chunk(segment, n_));
      case Algorithm::two_level:
        return one_level() ? ring().alpha : near_.alpha;
      case Algorithm::recursive_doubling:
        return recursive_doubling_tail(all);
      case Algorithm::halving_doubling:
        return halving_doubling_tail(all);
      case Algorithm::chain: {  // the last full piece goes on to the end, a short one close behind
        const double full = piece(bytes(steps::segment_at(s_, 0).range.count));
        return (n_ - 2) * hop(ring(), full, adding()) + ring().alpha +
               unhidden(ring(), all, adding());
      }
      case Algorithm::tree:
        return tree_tail(
            all, adding(),
            s_.collective == Collective::reduce
                ? static_cast<double>(steps::segment_count(s_) - 1) * span(steps::segment_at(s_, 0))
                : 0);
      case Algorithm::direct:
        return exchange(n_).alpha + own_part(all);
      case Algorithm::region:
        break;
    }
    return 0;
  }

  [[nodiscard]] bool one_level() const { return s_.per_host == 1 || s_.per_host == n_; }

  const Schedule& s_;
  const int n_;
  const double element_, piece_bytes_;
  const Machine& machine_;
  const Path near_, far_, crowded_;
};

// Ranks that share a segment of the schedule's frame, a chunk each.
size_t chunks_of(const Schedule& s) {
  switch (s.algorithm) {
    case Algorithm::ring:
    case Algorithm::direct:
      return static_cast<size_t>(s.size);
    case Algorithm::two_level:
      return static_cast<size_t>(s.per_host);
    case Algorithm::chain:
    case Algorithm::tree:
    case Algorithm::halving_doubling:
    case Algorithm::recursive_doubling:
    case Algorithm::region:
      break;
  }
  return 1;
}

// Rings and reductions with a root work in segments whose chunks fit the slots (and the caches).
// The others have no transit, and gain nothing by it; but the pieces of a step are numbered.
size_t pieces_in_chunk(const Schedule& s) {
  const bool slots = s.algorithm == Algorithm::ring || s.algorithm == Algorithm::two_level ||
                     s.collective == Collective::reduce;
  return static_cast<size_t>(slots ? kMaxTransitPieces : kMaxPieces);
}

// Sets the segment for pieces of that size. False if the executor could not do it.
bool fit(Schedule* s, size_t element_bytes, size_t piece_bytes) {
  if (s->cut == Cut::rounded_up) return legal(*s);  // it has no transit, so any chunk will do
  const size_t chunk = pieces_in_chunk(*s) * (piece_bytes / element_bytes) / s->grain * s->grain;
  const size_t segment = chunk * chunks_of(*s);
  s->segment = segment < s->count ? segment : 0;
  return chunk > 0 && legal(*s);
}

void cut_as_nccl(Schedule* s, size_t element_bytes) {
  s->cut = Cut::rounded_up;
  s->grain = std::max<size_t>(1, kNcclGrainBytes / element_bytes);
  const size_t segment = static_cast<size_t>(s->size) * (kNcclChunkBytes / element_bytes);
  s->segment = segment < s->count ? segment : 0;
}

// Predictions that differ by less are not worth more messages, or leaving the first algorithm.
constexpr double kAboutTheSame = 1.05;

// In this order: those that work in cache-sized segments first.
constexpr std::array kPreference = {Algorithm::ring,
                                    Algorithm::two_level,
                                    Algorithm::halving_doubling,
                                    Algorithm::recursive_doubling,
                                    Algorithm::chain,
                                    Algorithm::tree,
                                    Algorithm::direct};
static_assert(kPreference.size() == kAlgorithms);

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
  if (wanted > 0) {  // grows if there would be too many to number
    for (size_t bytes = std::min(wanted, kMaxPieceBytes); n == 0 && bytes <= kMaxPieceBytes;
         bytes *= 2) {
      attempt(bytes);
    }
  } else {
    const size_t all = s.count * element_bytes;
    // Two levels have short chunks between hosts, and segments that follow from the piece.
    const bool remote = s.algorithm != Algorithm::two_level && machine.per_host < s.size;
    const size_t wished = remote ? kMaxRemotePieceBytes : kMaxPieceBytes;
    for (size_t bytes = kMinPieceBytes; bytes <= kMaxPieceBytes; bytes *= 2) {
      if (bytes > wished && n > 0) break;  // larger ones only where these are too many
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

double predict_by_hosts(int hosts, double bytes, double segment, const Machine& machine) {
  Machine between = machine;
  between.per_host = between.sharers = 1;
  Schedule ring{Collective::all_reduce, Algorithm::ring, hosts, 1};
  ring.count = static_cast<size_t>(bytes);
  const double inside = machine.local.alpha + segment * (machine.local.beta + machine.gamma);
  return 2 * inside + predict_seconds(ring, 1, kMaxRemotePieceBytes, between);
}

std::optional<Choice> choose(Collective collective, int size, size_t count, size_t element_bytes,
                             const Machine& machine, const Constraints& constraints) {
  const std::optional<Algorithm> wanted = constraints.algorithm;
  const bool free = !wanted.has_value() || !offers(collective, *wanted);
  const bool several =
      machine.per_host > 1 && machine.per_host < size;  // hosts, with several ranks
  const bool hosts = several && size % machine.per_host == 0;
  std::optional<Choice> best;
  for (const Algorithm algorithm : kPreference) {
    Schedule s{collective, algorithm, size, 1, constraints.root, count, constraints.grain, 0};
    if (!offers(collective, s.algorithm) || (!free && *wanted != s.algorithm)) continue;
    if (s.algorithm == Algorithm::two_level) {
      if (free && !hosts) continue;  // would be the ring
      s.per_host = hosts ? machine.per_host : 1;
    }
    if (constraints.nccl_chunks && s.algorithm == Algorithm::ring &&
        collective == Collective::all_reduce)
      cut_as_nccl(&s, element_bytes);
    const std::optional<Choice> choice =
        best_piece(s, element_bytes, machine, constraints.piece_bytes);
    if (choice.has_value() &&
        (!best.has_value() || choice->seconds * kAboutTheSame < best->seconds))
      best = choice;
  }
  if (best.has_value() || free) return best;
  Constraints others = constraints;  // the wanted one would take too many steps
  others.algorithm.reset();
  return choose(collective, size, count, element_bytes, machine, others);
}

}  // namespace ringfold
