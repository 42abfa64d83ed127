// What the files of Region share: the order of phases, the system call to sleep on one, the turn.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>

#include "lib/region/region.h"

namespace ringfold::region {

// Phases count on for ever and wrap round.
inline bool at_or_after(uint32_t phase, uint32_t other) {
  return static_cast<int32_t>(phase - other) >= 0;
}

inline long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value,
                  const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), operation, value, timeout,
                 nullptr, 0);
}

// The turn, if it was free.
class Region::Turn {
 public:
  explicit Turn(std::atomic<bool>& taken)
      : taken_(taken),
        mine_(!taken.load(std::memory_order_relaxed) &&
              !taken.exchange(true, std::memory_order_acquire)) {}
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (mine_) taken_.store(false, std::memory_order_release);
  }
  explicit operator bool() const { return mine_; }

 private:
  std::atomic<bool>& taken_;
  const bool mine_;
};

inline bool Region::reached(int rank, uint32_t phase) const {
  return at_or_after(segment_.flag(rank, phase).phase.load(std::memory_order_acquire), phase);
}

}  // namespace ringfold::region
