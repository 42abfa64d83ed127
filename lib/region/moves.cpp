#include "lib/region/moves.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"
#include "lib/base/base.h"
#include "ringfold/model.h"

namespace ringfold::region {
namespace {

// Up to here everybody folds everything, which needs one phase less.
constexpr size_t kWholeOfTwo = 64 << 10, kWholeOfMore = 8 << 10;
// A block, in bytes of all parts together: long enough to be worth a phase, short enough for the
// caches between its stages.
constexpr size_t kLongestBlock = 256 << 10;
// Where ranks share cores a phase costs handing them over, so what has many has longer ones.
constexpr size_t kLongestCrowdedBlock = 1 << 20, kCrowdedBlocks = 4;
constexpr size_t kLine = 64;
// Copies into a pool tell how long a line takes to write; beyond so many nanoseconds it must have
// come from a distant cache. The best of a few counts: a rank may lose its core in between. Of
// shorter ones only some are measured, since looking at the clock would be a good part of them.
constexpr double kDistantLine = 12;
constexpr int kMeasured = 8, kStreamed = 256;
constexpr size_t kShortest = 1 << 10, kLong = 16 << 10;
constexpr int kShortPerMeasured = 8;

bool whole_payload(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce ||
         collective == Collective::broadcast;
}

size_t round_up(size_t value, size_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Elements of one rank's part of a block of `count`: whole cache lines.
size_t part_length(size_t count, size_t ranks, size_t element_bytes) {
  const size_t line = std::max<size_t>(1, kLine / element_bytes);
  return round_up((count + ranks - 1) / ranks, line);
}

}  // namespace

bool part_to_each(Collective collective) {
  return collective == Collective::reduce_scatter || collective == Collective::all_to_all ||
         collective == Collective::scatter;
}

Shape shape_of(const Schedule& what, size_t element_bytes, const Room& room) {
  Shape shape;
  const auto ranks = static_cast<size_t>(what.size);
  const bool whole = whole_payload(what.collective);
  const bool many = part_to_each(what.collective);
  shape.total = whole ? what.count : what.count / ranks;
  const size_t in_pool = many ? ranks : 1;  // parts of `total` that a rank copies in
  const size_t bytes = shape.total * in_pool * element_bytes;
  const bool reduces =
      what.collective == Collective::all_reduce || what.collective == Collective::reduce;
  shape.folded = reduces && bytes > (ranks == 2 ? kWholeOfTwo : kWholeOfMore);
  shape.small = bytes <= inline_bytes(what.size);
  const bool spread = what.collective == Collective::all_gather ||
                      what.collective == Collective::gather;  // others copy this from everybody
  const size_t most = room.crowded
                          ? std::clamp(bytes / kCrowdedBlocks, kLongestBlock, kLongestCrowdedBlock)
                          : kLongestBlock;
  const size_t longest = std::min(most / (spread ? ranks : 1), room.pool_bytes / 4);
  const size_t block_bytes = std::min(bytes, longest);
  const size_t line = std::max<size_t>(1, kLine / element_bytes);
  shape.block = shape.total;
  if (block_bytes < bytes)
    shape.block = std::max(line, block_bytes / in_pool / element_bytes / line * line);
  shape.blocks = shape.total == 0 ? 1 : (shape.total + shape.block - 1) / shape.block;
  if (!shape.small) shape.area_a = round_up(shape.block * in_pool * element_bytes, kLine);
  if (shape.folded) {
    // Rounded parts may need more than the block itself.
    const size_t own = part_length(shape.block, ranks, element_bytes) * element_bytes;
    shape.area_b = round_up(own, kLine);
  }
  return shape;
}

int phases_of(const Shape& shape) {
  return static_cast<int>(shape.blocks) + (shape.folded ? 1 : 0);
}

namespace {

// Elements of `rank`'s own parts of all blocks.
size_t own_elements(const Schedule& what, const Shape& shape, int rank, size_t element_bytes) {
  const auto own = [&](size_t block) {
    const size_t length = part_length(block, static_cast<size_t>(what.size), element_bytes);
    const size_t begin = std::min(block, static_cast<size_t>(rank) * length);
    return std::min(block, begin + length) - begin;
  };
  const size_t last = shape.total - (shape.blocks - 1) * shape.block;
  return (shape.blocks - 1) * own(shape.block) + own(last);
}

}  // namespace

uint64_t bytes_written(const Schedule& what, const Shape& shape, int rank, size_t element_bytes) {
  const auto ranks = static_cast<uint64_t>(what.size);
  const uint64_t bytes = shape.total * element_bytes;
  const bool root = rank == what.root;
  switch (what.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
      // Of each block all parts but the own one are copied in, and the own one is written folded.
      if (!shape.folded && what.collective == Collective::reduce && root) return 0;
      return shape.folded && root && what.collective == Collective::reduce
                 ? bytes - own_elements(what, shape, rank, element_bytes) * element_bytes
                 : bytes;
    case Collective::broadcast:
      return root ? bytes : 0;
    case Collective::gather:
      return root ? 0 : bytes;
    case Collective::all_gather:
      return bytes;
    case Collective::scatter:
      return root ? bytes * (ranks - 1) : 0;
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      return bytes * (ranks - 1);
  }
  return 0;
}

uint64_t bytes_read(const Schedule& what, const Shape& shape, int rank, size_t element_bytes) {
  const auto others = static_cast<uint64_t>(what.size) - 1;
  const uint64_t bytes = shape.total * element_bytes;
  const bool root = rank == what.root;
  switch (what.collective) {
    case Collective::all_reduce:
    case Collective::reduce: {
      const bool result = what.collective == Collective::all_reduce || root;
      if (!shape.folded) return result ? others * bytes : 0;
      const uint64_t own = own_elements(what, shape, rank, element_bytes) * element_bytes;
      return others * own + (result ? bytes - own : 0);
    }
    case Collective::broadcast:
    case Collective::scatter:
      return root ? 0 : bytes;
    case Collective::gather:
      return root ? others * bytes : 0;
    case Collective::all_gather:
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      return others * bytes;
  }
  return 0;
}

double predict_seconds(const Schedule& what, const Shape& shape, size_t element_bytes,
                       const Room& room) {
  constexpr double kPhase = 1e-7, kCrowdedPhase = 1e-6;    // a flag seen; a core handed over
  constexpr double kInCache = 1e-10, kInMemory = 2.5e-10;  // a byte written and read by another
  const double bytes = static_cast<double>(what.count * element_bytes);
  const double byte = bytes > kPoolBytes ? kInMemory : kInCache;
  // Ranks beyond the cores take their turns.
  const double turns = room.crowded ? what.size / 2.0 : 1.0;
  const double phase = room.crowded ? kCrowdedPhase * what.size : kPhase;
  return (phases_of(shape) + 1) * phase + bytes * byte * turns;
}

Report report_of(const Schedule& what, size_t element_bytes, int rank, const Room& room) {
  const Shape shape = shape_of(what, element_bytes, room);
  Report report;
  report.collective = what.collective;
  report.algorithm = Algorithm::region;
  report.transport = "region";
  report.steps = phases_of(shape);
  report.bus_factor = bus_factor(what.collective, what.size);
  report.bytes_model = bytes_written(what, shape, rank, element_bytes);
  report.chunk_bytes = report.piece_bytes = shape.block * element_bytes;
  report.predicted_seconds = predict_seconds(what, shape, element_bytes, room);
  return report;
}

// ---- the pool ---------------------------------------------------------------------------------

size_t Ring::take(size_t bytes, uint32_t read_at, uint32_t* free_at) {
  if (bytes == 0) return begin_;
  uint64_t begin = next_;
  if (begin % bytes_ + bytes > bytes_) begin = (begin / bytes_ + 1) * bytes_;
  next_ = begin + bytes;
  taken_.push_back({begin, read_at});
  while (next_ - taken_.front().begin > bytes_) {
    const uint32_t read = taken_.front().read_at;
    if (static_cast<int32_t>(read - *free_at) > 0) *free_at = read;
    taken_.pop_front();
  }
  return begin_ + begin % bytes_;
}

bool WriteChoice::begin(size_t bytes) {
  if (streamed_left_ > 0) {
    --streamed_left_;
    return false;
  }
  return bytes >= kLong || ++short_ % kShortPerMeasured == 0;
}

void WriteChoice::note(Nanoseconds time, size_t bytes) {
  const double line = static_cast<double>(time.count()) * kLine / static_cast<double>(bytes);
  best_ = measured_ == 0 ? line : std::min(best_, line);
  if (++measured_ < kMeasured) return;
  measured_ = 0;
  if (best_ > kDistantLine) streamed_left_ = kStreamed;
}

// ---- geometry ---------------------------------------------------------------------------------

Moves::Moves(const Segment& segment, Ring& ring_a, Ring& ring_b, const Description& what,
             const Operation::Memory& memory, int rank, const Shape& shape, WriteChoice& choice)
    : segment_(segment),
      ring_a_(ring_a),
      ring_b_(ring_b),
      choice_(choice),
      collective_(what.schedule.collective),
      type_(what.type),
      element_(size_of(what.type)),
      rank_(rank),
      size_(what.schedule.size),
      root_(what.schedule.root),
      each_(what.schedule.count / static_cast<size_t>(size_)),
      send_(static_cast<const std::byte*>(memory.send)),
      recv_(static_cast<std::byte*>(memory.recv)),
      reduction_(memory.reduction),
      scales_(reduction_.op == Op::premul_sum && reduction_.factor != 1.0),
      shape_(shape),
      stream_(send_ != recv_ && collective_ != Collective::broadcast &&
              what.schedule.count * element_ >= kStreamBytes) {}

Moves::Range Moves::part_of(size_t count, int ranks, int rank, size_t element_bytes) {
  const size_t length = part_length(count, static_cast<size_t>(ranks), element_bytes);
  const size_t begin = std::min(count, static_cast<size_t>(rank) * length);
  return {begin, std::min(count, begin + length) - begin};
}

const std::byte* Moves::area_a(int rank, const Block& block, uint32_t phase) const {
  return shape_.small ? segment_.flag(rank, phase).payload(small_bytes())
                      : segment_.pool(rank) + block.a;
}

uint32_t Moves::reserve(int step, uint32_t base, uint32_t oldest) {
  uint32_t free_at = oldest;
  const auto phase = base + static_cast<uint32_t>(step);
  if (static_cast<size_t>(step) < shape_.blocks) {
    Block& next = blocks_[static_cast<size_t>(step % kOpen)];
    next.begin = static_cast<size_t>(step) * shape_.block;
    next.count = std::min(shape_.block, shape_.total - next.begin);
    next.a = ring_a_.take(shape_.area_a, phase + 1, &free_at);
  }
  if (shape_.folded && step >= 1) {
    Block& last = blocks_[static_cast<size_t>((step - 1) % kOpen)];
    last.b = ring_b_.take(shape_.area_b, phase + 1, &free_at);
  }
  return free_at;
}

// ---- stage A ----------------------------------------------------------------------------------

// Input elements [first, first + count), as the others are to see them.
void Moves::put(std::byte* to, size_t first, size_t count) const {
  if (count == 0) return;
  const std::byte* from = send_ + first * element_;
  const size_t bytes = count * element_;
  if (scales_) return scale_host(type_, from, to, count, reduction_.factor);
  if (shape_.small || bytes < kShortest) return copy_host(to, from, bytes);
  const bool measured = choice_.begin(bytes);
  const Nanoseconds begun = measured ? steady_clock().now() : Nanoseconds(0);
  choice_.streams() ? copy_streaming(to, from, bytes) : copy_host(to, from, bytes);
  if (measured) choice_.note(steady_clock().now() - begun, bytes);
}

void Moves::put_parts(std::byte* area, const Block& block) const {
  for (int d = 1; d < size_; ++d) {
    const int to = (rank_ + d) % size_;
    put(area + static_cast<size_t>(to) * shape_.block * element_,
        static_cast<size_t>(to) * each_ + block.begin, block.count);
  }
}

void Moves::copy_in(int step, Flag& flag) {
  if (static_cast<size_t>(step) >= shape_.blocks) return;
  const Block& b = block(step);
  if (shape_.small) return copy_block(b, flag.payload(small_bytes()));
  copy_block(b, segment_.pool(rank_) + b.a);
}

void Moves::copy_block(const Block& b, std::byte* area) const {
  switch (collective_) {
    case Collective::all_reduce:
    case Collective::reduce:
      if (shape_.folded) {
        for (int d = 1; d < size_; ++d) {
          const Range p = part(b, (rank_ + d) % size_);
          put(area + p.begin * element_, b.begin + p.begin, p.count);
        }
      } else if (collective_ == Collective::all_reduce || rank_ != root_) {
        put(area, b.begin, b.count);
      }
      return;
    case Collective::broadcast:
      if (rank_ == root_) put(area, b.begin, b.count);
      return;
    case Collective::gather:
      if (rank_ != root_) put(area, b.begin, b.count);
      return;
    case Collective::all_gather:
      put(area, b.begin, b.count);
      return;
    case Collective::scatter:
      if (rank_ == root_) put_parts(area, b);
      return;
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      put_parts(area, b);
      return;
  }
}

// ---- stages B and C ---------------------------------------------------------------------------

Moves::Whom Moves::needs(int step) const {
  if (step == 0) return Whom::nobody;
  switch (collective_) {
    case Collective::broadcast:
    case Collective::scatter:
      return rank_ == root_ ? Whom::nobody : Whom::root;
    case Collective::gather:
      return rank_ == root_ ? Whom::everybody : Whom::nobody;
    case Collective::reduce:
      if (shape_.folded && static_cast<size_t>(step) <= shape_.blocks) return Whom::everybody;
      return rank_ == root_ ? Whom::everybody : Whom::nobody;
    case Collective::all_reduce:
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::all_to_all:
      return Whom::everybody;
  }
  return Whom::everybody;
}

void Moves::consume(int step, uint32_t base) {
  const auto blocks = static_cast<int>(shape_.blocks);
  const int lag = shape_.folded ? 2 : 1;
  if (shape_.folded && step >= 1 && step <= blocks) fold_own(block(step - 1));
  if (step >= lag && step - lag < blocks)
    collect(block(step - lag), base + static_cast<uint32_t>(step - 1));
}

// In rank order; my own input comes as it is, the others' scaled.
void Moves::fold(const std::array<const void*, kMaxRanks>& sources, std::byte* out,
                 std::byte* mirror, size_t count) const {
  static_assert(kMaxRanks <= kMostSources);
  FoldCall call;
  call.dtype = type_;
  call.op = reduction_.op;
  call.sources = sources.data();
  call.ranks = size_;
  call.own = rank_;
  call.factor = reduction_.factor;
  call.out = out;
  call.mirror = mirror;
  call.count = count;
  call.stream = stream_ && collective_ == Collective::all_reduce && !choice_.streams();
  fold_host(call);
}

void Moves::fold_own(const Block& b) {
  const Range p = part(b, rank_);
  if (p.count == 0) return;
  std::array<const void*, kMaxRanks> sources;
  for (int r = 0; r < size_; ++r)
    sources[static_cast<size_t>(r)] = r == rank_ ? send_ + (b.begin + p.begin) * element_
                                                 : segment_.pool(r) + b.a + p.begin * element_;
  std::byte* const pool = segment_.pool(rank_) + b.b;
  const bool is_output = collective_ == Collective::all_reduce || rank_ == root_;
  std::byte* const out = is_output ? recv_ + (b.begin + p.begin) * element_ : pool;
  const bool shown = collective_ == Collective::all_reduce;
  // Past the caches the copy for the others is a second pass, while the first is still in L2.
  const bool twice = shown && choice_.streams();
  fold(sources, out, shown && !twice ? pool : nullptr, p.count);
  if (twice) copy_streaming(pool, out, p.count * element_);
}

// Everybody's whole block, or everybody's part for me.
void Moves::fold_whole(const Block& b, uint32_t phase) {
  std::array<const void*, kMaxRanks> sources;
  const bool mine = collective_ == Collective::reduce_scatter;
  const size_t offset = mine ? static_cast<size_t>(rank_) * shape_.block * element_ : 0;
  const size_t own = (mine ? static_cast<size_t>(rank_) * each_ : 0) + b.begin;
  for (int r = 0; r < size_; ++r)
    sources[static_cast<size_t>(r)] =
        r == rank_ ? send_ + own * element_ : area_a(r, b, phase) + offset;
  fold(sources, recv_ + b.begin * element_, nullptr, b.count);
}

void Moves::get(size_t first, const std::byte* from, size_t count) const {
  if (count == 0) return;
  if (stream_)
    copy_streaming(recv_ + first * element_, from, count * element_);
  else
    copy_host(recv_ + first * element_, from, count * element_);
}

// What needs no other rank: my own part, unless it lies there already.
void Moves::keep_own(size_t to, size_t first, size_t count) const {
  const std::byte* const from = send_ + first * element_;
  if (count != 0 && from != recv_ + to * element_) get(to, from, count);
}

void Moves::collect(const Block& b, uint32_t phase) {
  const bool root = rank_ == root_;
  switch (collective_) {
    case Collective::all_reduce:
    case Collective::reduce:
      if (collective_ == Collective::reduce && !root) return;
      if (!shape_.folded) return fold_whole(b, phase);
      for (int d = 1; d < size_; ++d) {
        const int from = (rank_ + d) % size_;
        const Range p = part(b, from);
        get(b.begin + p.begin, segment_.pool(from) + b.b, p.count);
      }
      return;
    case Collective::reduce_scatter:
      return fold_whole(b, phase);
    case Collective::broadcast:
      if (!root) get(b.begin, area_a(root_, b, phase), b.count);
      return;
    case Collective::all_gather:
    case Collective::gather:
    case Collective::scatter:
    case Collective::all_to_all:
      return collect_parts(b, phase);
  }
}

void Moves::collect_parts(const Block& b, uint32_t phase) {
  const bool root = rank_ == root_;
  if (collective_ == Collective::scatter) {
    const size_t offset = static_cast<size_t>(rank_) * shape_.block * element_;
    if (root) return keep_own(b.begin, static_cast<size_t>(rank_) * each_ + b.begin, b.count);
    return get(b.begin, area_a(root_, b, phase) + offset, b.count);
  }
  if (collective_ == Collective::gather && !root) return;
  const bool exchanged = collective_ == Collective::all_to_all;
  const auto me = static_cast<size_t>(rank_);
  const size_t offset = exchanged ? me * shape_.block * element_ : 0;
  for (int d = 1; d < size_; ++d) {
    const int from = (rank_ + d) % size_;
    get(static_cast<size_t>(from) * each_ + b.begin, area_a(from, b, phase) + offset, b.count);
  }
  keep_own(me * each_ + b.begin, (exchanged ? me * each_ : 0) + b.begin, b.count);
}

}  // namespace ringfold::region
