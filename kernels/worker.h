// What the engine and a running worker kernel say to each other, in pinned memory that both see.
//
// A worker is launched with some blocks, each serving one Lane. The host posts commands into the
// lane's ring, the lane carries them out in order and counts them in `done`. A lane serves until
// the host declares its launch ended, which happens after success, failure and abort alike: it is
// the only thing besides a command that a lane ever waits for, so no stream is left hanging. No
// lane waits for another: with a single resident block everything still works.
//
//   counters   All words count for ever (modulo 2^32) and are never reset: a launch captured in a
//              graph has constant arguments, and each replay is simply the next launch. The host
//              may start a lane's next launch only when `left` has caught up with `begun`.
//   ordering   Words are written with release and read with acquire at system scope.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/reduce.h"

namespace ringfold {

inline constexpr int kWorkerThreads = 256;     // of one block
inline constexpr uint32_t kLaneCommands = 16;  // posted to one lane and not done

// A ReduceCall that means one thing more: without `b` it is a copy, out = a * scale_a. A copy with
// a factor of 1 is one of bytes (dtype u8), and kernels of every type do it.
using Command = ReduceCall;
static_assert(sizeof(Command) % sizeof(uint64_t) == 0);

struct alignas(64) Lane {
  // Host: the commands posted, and in the upper half the latest launch that has ended.
  uint64_t orders = 0;
  // Device. Launches that this lane has begun and left, and commands it has carried out.
  alignas(64) uint32_t begun = 0;
  uint32_t left = 0;
  uint32_t done = 0;
  alignas(64) Command commands[kLaneCommands];
};

constexpr uint64_t orders_of(uint32_t posted, uint32_t ended) {
  return static_cast<uint64_t>(ended) << 32 | posted;
}

}  // namespace ringfold
