// The two buffers of one rank's call, what must be in them afterwards, and fences around them.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "test/chaos/scenario.h"
#include "test/exact.h"

namespace ringfold::test::chaos {

class Memory {
 public:
  // `position` in the call's schedule, `seed` alike on all ranks.
  Memory(const Call& call, int position, uint64_t seed);

  [[nodiscard]] const void* input() const { return in_; }
  [[nodiscard]] void* work() const { return out_; }
  [[nodiscard]] Reduction reduction() const {
    return {call_.op, call_.op == Op::premul_sum ? premul_factor(position_) : 1.0};
  }

  // What is wrong with a call that ended well; empty: nothing.
  [[nodiscard]] std::string judge() const;
  // The caller's own from now on: written over, to be watched.
  void take_back();
  [[nodiscard]] bool left_alone() const;

 private:
  static constexpr size_t kFence = 64;
  static constexpr auto kPoison = std::byte{0xdd};

  struct Block {
    std::vector<std::byte> bytes;
    void make(size_t size) { bytes.assign(size + 2 * kFence, std::byte{0xa5}); }
    [[nodiscard]] std::byte* data() { return bytes.data() + kFence; }
    [[nodiscard]] bool fenced() const;
  };

  void fill(std::byte* to) const;
  [[nodiscard]] size_t wrong_elements() const;

  const Call& call_;
  const int position_;
  const uint64_t seed_;
  const size_t element_;
  Frame frame_;
  Block first_, second_;  // in place: the first only
  std::byte *in_ = nullptr, *out_ = nullptr;
};

}  // namespace ringfold::test::chaos
