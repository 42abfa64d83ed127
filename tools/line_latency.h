// How near two cores are: the one-way time of a cache line between them. On a virtual machine the
// hypervisor moves the cores about, and a figure taken while they share a cache cannot be compared
// with one taken while they do not (2 to 5 times as long, with no trace in load or steal).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace ringfold::tools {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Both sides call it at about the same time, each on its core and with the same two words, which
// lie in different cache lines, hold the same number and are only used for this. The least of
// several batches, in ns: an interruption makes one longer, nothing makes one shorter.
inline double line_latency_ns(std::atomic<uint64_t>& first, std::atomic<uint64_t>& second,
                              bool am_first) {
  constexpr int kBatches = 60, kTrips = 50;
  using Clock = std::chrono::steady_clock;
  std::atomic<uint64_t>& mine = am_first ? first : second;
  const std::atomic<uint64_t>& other = am_first ? second : first;
  uint64_t turn = mine.load(std::memory_order_relaxed);
  double best = 1e9;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto start = Clock::now();
    for (int trip = 0; trip < kTrips; ++trip) {
      ++turn;
      if (am_first) mine.store(turn, std::memory_order_release);
      while (other.load(std::memory_order_acquire) < turn) {
      }
      if (!am_first) mine.store(turn, std::memory_order_release);
    }
    const std::chrono::duration<double, std::nano> spent = Clock::now() - start;
    best = std::min(best, spent.count() / (2 * kTrips));
  }
  return best;
}

}  // namespace ringfold::tools
