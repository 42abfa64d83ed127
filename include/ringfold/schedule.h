// What every rank sends, receives and adds in every step: the algorithms, as pure functions.
//
// The ring, for four ranks
// ------------------------
// Every rank holds a gradient of D bytes and wants the sum over all ranks. Cut it into as many
// parts as there are ranks. Rank r sends only to its right neighbour r+1 and receives only from its
// left neighbour r-1 (rank 3's right neighbour is rank 0). Below, "301" means: the sum of what
// ranks 3, 0 and 1 contributed; [brackets] mark what has just arrived and been added.
//
//                  part 0   part 1   part 2   part 3
//   start  rank 0     0        0        0        0       everybody has its own contribution
//          rank 1     1        1        1        1
//          rank 2     2        2        2        2
//          rank 3     3        3        3        3
//
//   step 0 rank 0     0        0      [30]       0       rank r sends part r-1, so
//          rank 1     1        1        1      [01]      0 sends part 3, 1 sends part 0, ...
//          rank 2   [12]       2        2        2
//          rank 3     3      [23]       3        3      (as all do, all the time)
//
//   step 1 rank 0     0      [230]     30        0       each sends on what it has just added up
//          rank 1     1        1     [301]      01
//          rank 2    12        2        2     [012]
//          rank 3   [123]     23        3        3
//
//   step 2 rank 0  [1230]     230      30        0       part r is complete on rank r:
//          rank 1     1     [2301]    301       01       this was the reduce-scatter
//          rank 2    12        2    [3012]     012
//          rank 3   123       23        3    [0123]
//
//   step 3 rank 0   0123      230      30    [0123]      the same walk once more, but now
//          rank 1  [0123]    0123     301       01       complete parts are copied, not added
//          rank 2    12     [0123]   0123      012
//          rank 3   123       23    [0123]    0123
//
//   step 4 rank 0   0123      230   [0123]     0123
//          rank 1   0123     0123      301   [0123]
//          rank 2  [0123]    0123     0123     012
//          rank 3   123     [0123]    0123     0123
//
//   step 5 rank 0   0123    [0123]    0123     0123      everybody has everything:
//          rank 1   0123     0123   [0123]     0123      this was the all-gather
//          rank 2   0123     0123     0123   [0123]
//          rank 3  [0123]    0123     0123     0123
//
// Why 2(N-1)/N: there are N-1 steps that add and N-1 steps that copy, and in each step every rank
// sends one part of D/N bytes. So a rank sends 2(N-1) * D/N bytes: 1.5 D for 4 ranks, 1.75 D for 8,
// and never 2 D however many ranks there are. No rank sends more than another, all links work in
// every step, and no algorithm can do with less: every part must be sent by N-1 ranks to be added
// up, and N-1 ranks must be sent the result, 2(N-1) messages of D/N bytes for each of N parts,
// which N ranks share. All ranks end with the same bits, because each part is added up in one order
// only and then copied.
//
// Two words are used in one sense only:
//   chunk   what one step sends: 1/N of the data (of one segment, if there are several).
//   piece   what travels at once. The executor cuts each chunk into pieces, both sides alike:
//           a rank passes on the first piece while the next is still arriving. No schedule knows
//           of pieces; model.h tells how large they should be.
//
// Segments: a large collective repeats its steps over segments, one segment after another, so that
// a chunk stays small enough for the slots and the caches of the executor.
//
// Frames: ranges count elements of the collective's full frame, all ranks' parts together, though a
// rank's buffer may hold one part of it only; frame() tells which.
//
// Transit: sums that a rank only passes on never touch the user's memory. In a reduce-scatter the
// receive buffer of rank r holds part r and nothing else, so "30", "230" above live in transit:
// what a step ends `into` transit is picked up exactly once by a later step of the same rank, piece
// by piece, either to be sent or as the operand of one more addition.
//
// Thread-safety: plain values and pure constexpr functions; nothing is stored, a step costs some
// tens of nanoseconds. lib/plan/verify.h proves schedules right by symbolic execution.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringfold {

enum class Collective : uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  all_to_all,
  gather,
  scatter,
};
inline constexpr int kCollectives = 8;
inline constexpr std::array<std::string_view, kCollectives> kCollectiveNames = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast",
    "reduce",     "all_to_all",     "gather",     "scatter"};
constexpr std::string_view name(Collective collective) {
  return kCollectiveNames[static_cast<size_t>(collective)];
}

enum class Algorithm : uint8_t {
  ring,                // all_reduce, reduce_scatter, all_gather
  halving_doubling,    // all_reduce
  recursive_doubling,  // all_reduce
  two_level,           // all_reduce over hosts with per_host ranks each
  chain,               // broadcast, reduce
  tree,                // broadcast, reduce
  direct,              // all_to_all, gather, scatter
  region               // no schedule: the shared memory of one host, see lib/region
};
inline constexpr int kAlgorithms = 7;  // that have schedules
inline constexpr std::array<std::string_view, kAlgorithms + 1> kAlgorithmNames = {
    "ring",  "halving_doubling", "recursive_doubling", "two_level", "chain", "tree", "direct",
    "region"};
constexpr std::string_view name(Algorithm algorithm) {
  return kAlgorithmNames[static_cast<size_t>(algorithm)];
}

struct Range {  // elements [begin, begin + count) of the collective's full frame
  size_t begin = 0, count = 0;
  [[nodiscard]] constexpr size_t end() const { return begin + count; }
  [[nodiscard]] constexpr bool empty() const { return count == 0; }
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

enum class From : uint8_t {
  input,    // the user's input: this rank's own contribution, not yet reduced
  work,     // the user's output
  transit,  // what the latest earlier step of this rank that ended `into` transit produced; it is
            // used exactly once, piece by piece, and never lies in the user's memory
};
enum class Then : uint8_t { none, copy, reduce };

// What one rank does in one step. The send never depends on the receive of the same step.
struct Step {
  int to = -1, from = -1;  // positions; -1: does not send / does not receive
  Range send, recv;
  From send_from = From::work;
  Then then = Then::none;     // what happens to the bytes received
  From operand = From::work;  // reduce: into[recv] = operand[recv] op received
  From into = From::work;     // work or transit
  int mine = 1, theirs = 1;   // reduce: ranks that have contributed to the operand / the received
  // A step with to == from == -1 and then == copy is local: work[recv] = input[recv].
};

// Where one segment is cut into chunks.
enum class Cut : uint8_t {
  balanced,   // into chunks whose lengths differ by one grain at most
  rounded_up  // into equal chunks, rounded up to the grain: the last ones are shorter, or empty. As
              // NCCL cuts; the order in which an element is added up depends on its chunk.
};

struct Schedule {
  Collective collective = Collective::all_reduce;
  Algorithm algorithm = Algorithm::ring;
  int size = 1, per_host = 1, root = 0;
  size_t count = 0;    // elements of the full frame (all ranks' parts together)
  size_t grain = 1;    // boundaries of parts are multiples of this many elements
  size_t segment = 0;  // the steps repeat over segments of this many elements of the frame; 0: one
  Cut cut = Cut::balanced;
};

// At most this many steps, and this many pieces in a step: together they number the messages of an
// operation in 32 bits.
inline constexpr int kMaxSteps = 1 << 16;
inline constexpr int kMaxPieces = 1 << 16;

// Part i of `parts` balanced parts of `count` elements. Inner boundaries are multiples of `grain`;
// parts may be empty.
constexpr Range part(size_t count, size_t parts, size_t i, size_t grain) {
  const size_t grains = (count + grain - 1) / grain;
  const size_t each = grains / parts, larger = grains % parts;  // the first `larger` have one more
  const size_t first = i * each + (i < larger ? i : larger);
  const size_t last = first + each + (i < larger ? 1 : 0);
  const size_t begin = first * grain < count ? first * grain : count;
  const size_t end = last * grain < count ? last * grain : count;
  return {begin, end - begin};
}

// The same with Cut::rounded_up.
constexpr Range rounded_up_part(size_t count, size_t parts, size_t i, size_t grain) {
  const size_t even = (count + parts - 1) / parts;
  const size_t each = (even + grain - 1) / grain * grain;
  const size_t begin = i * each < count ? i * each : count;
  return {begin, each < count - begin ? each : count - begin};
}

// Collectives whose frame is size equal parts, one of each rank.
constexpr bool has_parts(Collective collective) {
  switch (collective) {
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::all_to_all:
    case Collective::gather:
    case Collective::scatter:
      return true;
    case Collective::all_reduce:
    case Collective::broadcast:
    case Collective::reduce:
      return false;
  }
  return false;
}
// Whether one rank, the root, plays another part than the rest.
constexpr bool has_root(Collective collective) {
  return collective == Collective::broadcast || collective == Collective::reduce ||
         collective == Collective::gather || collective == Collective::scatter;
}

namespace steps {

// The elements that one round of steps works on, and how they fall into chunks. Where the frame has
// parts, a segment is the same stretch of every part; else it is a stretch of the frame, cut anew.
struct Segment {
  Range range;  // of the frame, or (has parts) of each part
  bool parts = false;
  size_t stride = 0;  // has parts: elements of one part
  size_t grain = 1;
  Cut cut = Cut::balanced;

  // Chunk i of n. With parts there are as many chunks as ranks.
  [[nodiscard]] constexpr Range chunk(int n, int i) const {
    if (parts) return {static_cast<size_t>(i) * stride + range.begin, range.count};
    const auto parts_of_it = static_cast<size_t>(n), index = static_cast<size_t>(i);
    const Range r = cut == Cut::balanced ? part(range.count, parts_of_it, index, grain)
                                         : rounded_up_part(range.count, parts_of_it, index, grain);
    return {range.begin + r.begin, r.count};
  }
};

// Elements from one segment to the next: of the frame, or (has parts) of each part. 0: one segment.
constexpr size_t segment_stride(const Schedule& s) {
  if (s.segment == 0) return 0;
  const size_t n = has_parts(s.collective) ? static_cast<size_t>(s.size) : 1;
  return ((s.segment + n - 1) / n + s.grain - 1) / s.grain * s.grain;
}

constexpr size_t segment_count(const Schedule& s) {
  const size_t stride = segment_stride(s);
  const size_t all = has_parts(s.collective) ? s.count / static_cast<size_t>(s.size) : s.count;
  return stride == 0 || all <= stride ? 1 : (all + stride - 1) / stride;
}

constexpr Segment segment_at(const Schedule& s, int index) {
  const bool parts = has_parts(s.collective);
  const size_t all = parts ? s.count / static_cast<size_t>(s.size) : s.count;
  const size_t stride = segment_stride(s);
  if (stride == 0) return {{0, all}, parts, all, s.grain, s.cut};
  const size_t begin = static_cast<size_t>(index) * stride;
  return {{begin, begin + stride < all ? stride : all - begin}, parts, all, s.grain, s.cut};
}

constexpr int wrap(int x, int n) {  // into [0, n), for x in [-n, 2n)
  return x < 0 ? x + n : x < n ? x : x - n;
}

// The step that moves one's own contribution to its place.
constexpr Step local_copy(Range range) {
  Step step;
  step.recv = range;
  step.then = Then::copy;
  return step;
}

// Step i (0 to n-2) of half a ring among n members, of which I am r; everything large is built from
// it. Reducing: sends chunk r-1-i and adds chunk r-2-i, so that r ends with chunk r complete.
// Copying: sends chunk r-i and copies chunk r-1-i, so that r, who began with chunk r, has all.
constexpr Step half_ring(Then then, int n, int r, int i, const Segment& segment) {
  const int first = then == Then::reduce ? r - 1 : r;
  Step step;
  step.to = wrap(r + 1, n);
  step.from = wrap(r - 1, n);
  step.send = segment.chunk(n, wrap(first - i, n));
  step.recv = segment.chunk(n, wrap(first - 1 - i, n));
  step.then = then;
  step.theirs = i + 1;
  return step;
}

constexpr Step ring_reduce_scatter(const Schedule& s, int r, int i, const Segment& segment) {
  Step step = half_ring(Then::reduce, s.size, r, i, segment);
  step.send_from = i == 0 ? From::input : From::transit;
  step.operand = From::input;
  step.into = i == s.size - 2 ? From::work : From::transit;
  return step;
}

constexpr Step ring_all_gather(const Schedule& s, int r, int i, const Segment& segment) {
  if (i == s.size - 1) return local_copy(segment.chunk(s.size, r));  // last: the wire never waits
  Step step = half_ring(Then::copy, s.size, r, i, segment);
  step.send_from = i == 0 ? From::input : From::work;
  return step;
}

// The all-reduce is the one half after the other. Partial sums may lie in work: it holds the whole
// frame here.
constexpr Step ring_all_reduce(const Schedule& s, int r, int i, const Segment& segment) {
  const int half = s.size - 1;
  if (i >= half) return half_ring(Then::copy, s.size, r, i - half, segment);
  Step step = half_ring(Then::reduce, s.size, r, i, segment);
  step.send_from = i == 0 ? From::input : From::work;
  step.operand = From::input;
  return step;
}

// The other algorithms, in the headers included at the end of this one.
constexpr int two_level_count(const Schedule& s);
constexpr Step two_level(const Schedule& s, int r, int i, const Segment& segment);
constexpr int doubling_count(const Schedule& s);
constexpr Step doubling(const Schedule& s, int r, int i, const Segment& segment);
constexpr int rooted_count(const Schedule& s);
constexpr Step rooted(const Schedule& s, int r, int i, const Segment& segment);
constexpr Step all_to_all(const Schedule& s, int r, int i, const Segment& segment);

constexpr int count_per_segment(const Schedule& s) {
  if (s.size == 1) return s.collective == Collective::broadcast ? 0 : 1;
  switch (s.collective) {
    case Collective::reduce_scatter:
      return s.size - 1;
    case Collective::all_gather:
    case Collective::all_to_all:
      return s.size;  // the own part is copied in the last step
    case Collective::broadcast:
    case Collective::reduce:
    case Collective::gather:
    case Collective::scatter:
      return rooted_count(s);
    case Collective::all_reduce:
      break;
  }
  if (s.algorithm == Algorithm::ring) return 2 * (s.size - 1);
  return s.algorithm == Algorithm::two_level ? two_level_count(s) : doubling_count(s);
}

constexpr Step in_segment(const Schedule& s, int r, int i, const Segment& segment) {
  if (s.size == 1) return local_copy(segment.chunk(1, 0));
  switch (s.collective) {
    case Collective::reduce_scatter:
      return ring_reduce_scatter(s, r, i, segment);
    case Collective::all_gather:
      return ring_all_gather(s, r, i, segment);
    case Collective::all_to_all:
      return all_to_all(s, r, i, segment);
    case Collective::broadcast:
    case Collective::reduce:
    case Collective::gather:
    case Collective::scatter:
      return rooted(s, r, i, segment);
    case Collective::all_reduce:
      break;
  }
  if (s.algorithm == Algorithm::ring) return ring_all_reduce(s, r, i, segment);
  if (s.algorithm == Algorithm::two_level) return two_level(s, r, i, segment);
  return doubling(s, r, i, segment);
}

}  // namespace steps

// Steps of every rank: the same number for all, though in some of them a rank may have nothing to
// do. REQUIRES legal(s), as everything below.
constexpr int step_count(const Schedule& s) {
  return static_cast<int>(steps::segment_count(s)) * steps::count_per_segment(s);
}

// Step i, 0 <= i < step_count(s), of the rank at `position`. What one rank sends in step i the
// other receives in its step i, under the same length; also if that is 0.
constexpr Step step(const Schedule& s, int position, int i) {
  if (s.segment == 0) return steps::in_segment(s, position, i, steps::segment_at(s, 0));
  const int each = steps::count_per_segment(s);
  return steps::in_segment(s, position, i % each, steps::segment_at(s, i / each));
}

// Which elements of the full frame the buffers of a rank hold; empty: it has no such buffer. The
// one buffer of a broadcast is both on the root (input == work) and work on the others.
struct Frame {
  Range input, work;
};
constexpr Frame frame(const Schedule& s, int position) {
  const Range all{0, s.count}, none;
  const size_t each = s.count / static_cast<size_t>(s.size);
  const Range own{static_cast<size_t>(position) * each, each};
  const bool root = position == s.root;
  switch (s.collective) {
    case Collective::all_reduce:
    case Collective::all_to_all:
      return {all, all};
    case Collective::reduce_scatter:
      return {all, own};
    case Collective::all_gather:
      return {own, all};
    case Collective::broadcast:
      return {root ? all : none, all};
    case Collective::reduce:
      return {all, root ? all : none};
    case Collective::gather:
      return {own, root ? all : none};
    case Collective::scatter:
      return {root ? all : none, own};
  }
  return {};
}

// Whether an algorithm is one of a collective's.
constexpr bool offers(Collective collective, Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::ring:
      return collective == Collective::all_reduce || collective == Collective::reduce_scatter ||
             collective == Collective::all_gather;
    case Algorithm::halving_doubling:
    case Algorithm::recursive_doubling:
    case Algorithm::two_level:
      return collective == Collective::all_reduce;
    case Algorithm::chain:
    case Algorithm::tree:
      return collective == Collective::broadcast || collective == Collective::reduce;
    case Algorithm::direct:
      return collective == Collective::all_to_all || collective == Collective::gather ||
             collective == Collective::scatter;
    case Algorithm::region:
      break;
  }
  return false;
}

// Whether the functions above may be called: the algorithm is one of the collective's, the numbers
// fit together, and there are not too many steps.
constexpr bool legal(const Schedule& s) {
  if (s.size < 1 || s.root < 0 || s.root >= s.size || s.grain < 1) return false;
  if (s.per_host < 1 || s.size % s.per_host != 0) return false;
  if (!offers(s.collective, s.algorithm)) return false;
  if (has_parts(s.collective) && s.count % static_cast<size_t>(s.size) != 0) return false;
  const int each = steps::count_per_segment(s);
  return each == 0 || steps::segment_count(s) <= static_cast<size_t>(kMaxSteps / each);
}

}  // namespace ringfold

// Not before here: they are written in the terms above.
#include "ringfold/schedule_all_reduce.h"
#include "ringfold/schedule_rooted.h"
