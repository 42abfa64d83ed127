// The memory that the ranks of one host share: for each rank a few flags that carry small payloads
// themselves, and a pool for larger ones. One unnamed file, so nothing is left behind whoever dies.
//
//   | geometry | desk 0 .. desk N-1 | flags 0 .. flags N-1 | pool 0 | .. | pool N-1 |
//
// Only rank r writes the flags and the pool of r; its desk is where the others say that they sleep.
//
// Threads: as said for the Region, which owns it; the memory itself is shared by design.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lib/base/net.h"
#include "lib/region/mapping.h"
#include "ringfold/status.h"

namespace ringfold::region {

// More ranks than this on one host use messages.
inline constexpr int kMaxRanks = 64;
// Phases a rank may be ahead of the slowest one. A power of two.
inline constexpr uint32_t kDepth = 8;
// Payload that fits beside a flag.
inline constexpr size_t kInline = 4096;
// Payloads up to here go there. Between two ranks longer ones are quicker through the pools.
constexpr size_t inline_bytes(int ranks) {
  return ranks == 2 ? kInline / 2 : kInline;
}
// What the pools may take by default; see Segment::pool_bytes_for.
inline constexpr size_t kPoolBytes = 4 << 20;
inline constexpr size_t kPoolBytesOfAll = 16 << 20;

// What a rank says in one phase of one operation. `phase` is written last and makes the rest
// visible; it is also the word that others sleep on.
struct alignas(128) Flag {
  std::atomic<uint32_t> phase;
  uint32_t fingerprint;  // of the operation, as its rank understands it
  uint64_t check;        // with RINGFOLD_VERIFY: the checksum of a payload that lies here

  // Where a payload of so many bytes lies: what fits into the flag's own cache line, there.
  [[nodiscard]] std::byte* payload(size_t bytes) { return bytes <= sizeof near_ ? near_ : far_; }
  [[nodiscard]] const std::byte* payload(size_t bytes) const {
    return bytes <= sizeof near_ ? near_ : far_;
  }

 private:
  alignas(32) std::byte near_[32];
  std::byte far_[kInline];
};
static_assert(sizeof(Flag) % 128 == 0 && sizeof(Flag) <= 64 + kInline + 64);

// Who sleeps until this rank says something.
struct alignas(128) Desk {
  std::atomic<uint32_t> sleepers;  // inside futex(2), on a flag of this rank
  std::atomic<uint64_t> bells;     // ranks whose engine sleeps and wants its bell rung, by bit
  // See direct.h.
  std::atomic<uint32_t> inside;     // this rank may be writing to others' memory
  std::atomic<uint32_t> withdrawn;  // nobody may write to this rank's memory any more
};
static_assert(kMaxRanks <= 64);

// With RINGFOLD_VERIFY, in place of the payload, where that lies in the pools.
struct Checks {
  std::array<uint64_t, kMaxRanks>
      a;       // of what each rank reads of stage A; alike for all: the first
  uint64_t b;  // of what all read of stage B
};
static_assert(sizeof(Checks) <= kInline);

struct Geometry {
  uint32_t magic = 0x52464752, version = 3;
  uint32_t ranks = 0, unused = 0;
  uint64_t pool_bytes = 0;
  bool operator==(const Geometry&) const = default;
};

class Segment {
 public:
  // New; `fd` is what to hand over. system: says how many bytes could not be had.
  [[nodiscard]] static Result<Segment> create(int ranks, Descriptor* fd);
  // One that another rank made; whatever is not exactly as create() makes it is refused.
  [[nodiscard]] static Result<Segment> adopt(const Descriptor& fd, int ranks);

  [[nodiscard]] static size_t pool_bytes_for(int ranks);
  [[nodiscard]] static size_t bytes_for(int ranks);

  [[nodiscard]] int ranks() const { return ranks_; }
  [[nodiscard]] size_t pool_bytes() const { return pool_bytes_; }
  [[nodiscard]] Desk& desk(int rank) const;
  [[nodiscard]] Flag& flag(int rank, uint32_t phase) const {
    return reinterpret_cast<Flag*>(flags_ +
                                   static_cast<size_t>(rank) * kFlagsBytes)[phase % kDepth];
  }
  [[nodiscard]] std::byte* pool(int rank) const;

 private:
  static Result<Segment> map(const Descriptor& fd, int ranks);
  [[nodiscard]] static size_t pools_begin(int ranks);

  // Each rank's flags start on a page of their own.
  static constexpr size_t kFlagsBytes = (kDepth * sizeof(Flag) + 4095) / 4096 * 4096;

  Mapping memory_;
  std::byte* flags_ = nullptr;
  int ranks_ = 0;
  size_t pool_bytes_ = 0;
};

}  // namespace ringfold::region
