// What one operation copies and folds in each of its phases. No waiting here, and no flags.
//
// The payload is cut into blocks. Each block goes through two or three stages, one phase apart, and
// while one block is in its second stage the next is in its first:
//
//   A  every rank copies what others need of its input into its pool (or beside its flag)
//   B  all_reduce and reduce of large payloads: each rank folds its own part of the block, from all
//      pools at once and in rank order, into its output and into its pool
//   C  everybody copies out, or folds, what it wants from the others' pools
//
// So a payload crosses from core to core as often as the algorithm demands and no oftener, and
// results do not depend on size, timing or path: the fold is always in rank order.
//
// Threads: one at a time.
#pragma once

#include <array>
#include <deque>

#include "lib/engine/engine.h"
#include "lib/region/segment.h"
#include "ringfold/communicator.h"

namespace ringfold::region {

// How an operation is cut. The same on every rank: it follows from the description alone.
struct Shape {
  bool small = false;   // the whole payload fits beside the flag
  bool folded = false;  // has stage B
  size_t total = 0;     // elements to be cut: of the payload, or of one rank's part
  size_t block = 0;     // elements of `total` in a block
  size_t blocks = 1;
  size_t area_a = 0, area_b = 0;  // bytes of pool a block takes in stage A and B
};
// From here an output of its own is not worth a place in the caches.
inline constexpr size_t kStreamBytes = 4 << 20;
// What it also depends on, the same on every rank.
struct Room {
  size_t pool_bytes = kPoolBytes;
  bool crowded = false;  // ranks outnumber cores
};
[[nodiscard]] Shape shape_of(const Schedule& what, size_t element_bytes, const Room& room);
// Whether each rank's input holds a part for every rank.
[[nodiscard]] bool part_to_each(Collective collective);
// Phases of an operation of this shape; after the last one there is only reading left.
[[nodiscard]] int phases_of(const Shape& shape);
// What a rank writes into shared memory for it; see Report::bytes_model.
[[nodiscard]] uint64_t bytes_written(const Schedule& what, const Shape& shape, int rank,
                                     size_t element_bytes);

// What it reads of what other ranks wrote there.
[[nodiscard]] uint64_t bytes_read(const Schedule& what, const Shape& shape, int rank,
                                  size_t element_bytes);

// Seconds it takes on an idle machine; orders of magnitude, as the constants of model.h.
[[nodiscard]] double predict_seconds(const Schedule& what, const Shape& shape, size_t element_bytes,
                                     const Room& room);

// All of a report that follows from the call.
[[nodiscard]] Report report_of(const Schedule& what, size_t element_bytes, int rank,
                               const Room& room);

// A part of each rank's pool, given out in turn. All ranks take the same in the same order, so they
// know each other's offsets. Turning through more memory than the private caches hold is the point:
// a line that a peer's cache still holds costs several times more to write.
class Ring {
 public:
  Ring(size_t begin, size_t bytes) : begin_(begin), bytes_(bytes) {}
  // The offset in the pool of `bytes` that everybody will have read when all have reached
  // `read_at`. `free_at` is raised to the phase that all must have reached before it is written.
  size_t take(size_t bytes, uint32_t read_at, uint32_t* free_at);

 private:
  struct Taken {
    uint64_t begin;
    uint32_t read_at;
  };
  const size_t begin_, bytes_;
  uint64_t next_ = 0;  // counts on for ever; modulo bytes_ it is the offset
  std::deque<Taken> taken_;
};

// How to write into a pool. While the cores are near, through the caches: the reader finds it
// there. Where a line takes long to come from another core's cache (far, or another socket),
// past them: then nothing need be fetched first. Virtual cores move, so it is measured again and
// again, and each rank decides for itself.
class WriteChoice {
 public:
  // Whether to write past the caches now.
  [[nodiscard]] bool streams() const { return streamed_left_ > 0; }
  // A copy of so many bytes begins. True: note() how long it takes.
  [[nodiscard]] bool begin(size_t bytes);
  void note(Nanoseconds time, size_t bytes);

 private:
  int streamed_left_ = 0, measured_ = 0, short_ = 0;
  double best_ = 0;  // nanoseconds a cache line, of the copies measured
};

class Moves {
 public:
  enum class Whom : uint8_t { nobody, everybody, root };
  struct Range {
    size_t begin = 0, count = 0;
  };
  // Of `count` elements the part that a rank folds: whole cache lines.
  [[nodiscard]] static Range part_of(size_t count, int ranks, int rank, size_t element_bytes);

  Moves(const Segment& segment, Ring& ring_a, Ring& ring_b, const Description& what,
        const Operation::Memory& memory, int rank, const Shape& shape, WriteChoice& choice);

  [[nodiscard]] int phases() const { return phases_of(shape_); }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  // Takes the pool that this phase writes (phase numbers: `base` is the operation's first). All
  // must have reached the phase returned before it may be written.
  uint32_t reserve(int step, uint32_t base, uint32_t oldest);
  // Stage A, into the pool or beside `flag`.
  void copy_in(int step, Flag& flag);
  // Whose data of the previous phase the next call reads.
  [[nodiscard]] Whom needs(int step) const;
  // Writes the checksums of what this phase shows, after copy_in() and consume(); and whether those
  // of what `rank` has shown in the phase before are right.
  void seal(int step, Flag& flag) const;
  [[nodiscard]] bool intact(int step, uint32_t base, int rank) const;
  // Stages B and C of earlier blocks; step == phases() is the last.
  void consume(int step, uint32_t base);

 private:
  struct Block {
    size_t begin, count;
    size_t a, b;  // offsets in the pools
  };
  static constexpr int kOpen = 4;  // blocks under way at once, at most

  [[nodiscard]] const Block& block(int step) const {
    return blocks_[static_cast<size_t>(step % kOpen)];
  }
  [[nodiscard]] Range part(const Block& block, int rank) const {
    return part_of(block.count, size_, rank, element_);
  }
  // The bytes of stage A that `reader` reads, from the beginning of the area.
  [[nodiscard]] Range bytes_for(const Block& block, int reader) const;
  [[nodiscard]] bool alike() const;
  [[nodiscard]] size_t small_bytes() const;
  [[nodiscard]] const std::byte* area_a(int rank, const Block& block, uint32_t phase) const;
  void copy_block(const Block& block, std::byte* area) const;
  void put(std::byte* to, size_t first, size_t count) const;
  void put_parts(std::byte* area, const Block& block) const;
  void get(size_t first, const std::byte* from, size_t count) const;
  void keep_own(size_t to, size_t first, size_t count) const;
  void fold_own(const Block& block);
  void fold_whole(const Block& block, uint32_t phase);
  void fold(const std::array<const void*, kMaxRanks>& sources, std::byte* out, std::byte* mirror,
            size_t count) const;
  void collect(const Block& block, uint32_t phase);
  void collect_parts(const Block& block, uint32_t phase);

  const Segment& segment_;
  Ring& ring_a_;
  Ring& ring_b_;
  WriteChoice& choice_;
  const Collective collective_;
  const DType type_;
  const size_t element_;
  const int rank_, size_, root_;
  const size_t each_;  // elements of one rank's part, for the collectives that have such parts
  const std::byte* const send_;
  std::byte* const recv_;
  const Reduction reduction_;
  const bool scales_;
  const Shape shape_;
  const bool stream_;  // the output is large and apart: writing it past the caches is quicker
  std::array<Block, kOpen> blocks_;  // set by reserve()
};

}  // namespace ringfold::region
