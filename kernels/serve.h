// The body of the worker kernel: one block serving one lane, see worker.h. Also compiled for the
// host, for tests, where a block is one thread.
#pragma once

#include "kernels/range.h"
#include "kernels/words.h"

namespace ringfold {

// What the threads of a block tell each other.
struct ServeShared {
  bool serving;
  Command command;
};

// Waits for the next command of this launch; false if it has ended instead. Commands that were
// posted before the end are still carried out.
template <class Block>
RINGFOLD_HD bool wait_for_command(const Block& block, Lane& lane, uint32_t done, uint32_t launch) {
  for (;;) {
    const uint64_t orders = load_acquire(lane.orders);
    if (static_cast<uint32_t>(orders) != done) return true;
    if (static_cast<int32_t>(static_cast<uint32_t>(orders >> 32) - launch) >= 0) return false;
    block.pause();
  }
}

// Block: thread() and threads() of this block, sync() between them, pause() while polling, and
// reach(command) with the addresses by which it reaches the ranges.
template <class T, class Block>
RINGFOLD_HD void serve(const Block& block, Lane& lane, ServeShared& shared) {
  const bool first = block.thread() == 0;
  uint32_t launch = 0;
  if (first) {
    launch = load_relaxed(lane.begun) + 1;
    store_release(lane.begun, launch);
  }
  for (uint32_t done = load_relaxed(lane.done);; ++done) {
    if (first) shared.serving = wait_for_command(block, lane, done, launch);
    block.sync();
    if (!shared.serving) break;
    // Past the caches, which may hold what the ring held before.
    constexpr size_t kWords = sizeof(Command) / sizeof(uint64_t);
    auto* const from = reinterpret_cast<uint64_t*>(&lane.commands[done % kLaneCommands]);
    auto* const to = reinterpret_cast<uint64_t*>(&shared.command);
    for (size_t i = block.thread(); i < kWords; i += block.threads()) to[i] = load_relaxed(from[i]);
    block.sync();
    const Command command = block.reach(shared.command);  // in registers, whatever is written
    carry_out<T>(command, Share{block.thread(), block.threads()});
    block.sync();
    if (first) store_release(lane.done, done + 1);
  }
  if (first) store_release(lane.left, launch);
}

}  // namespace ringfold
