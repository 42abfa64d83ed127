// Memory in use and free memory, as ranges of addresses: the first that is large enough is divided,
// and what comes back is joined with its neighbours.
//
// Threads: one at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>

namespace ringfold::cuda {

class Ranges {
 public:
  // Sizes are rounded up to `unit`.
  explicit Ranges(size_t unit) : unit_(unit) {}

  void add(std::byte* memory, size_t bytes) { free_[memory] = bytes; }

  // Null if there is none.
  std::byte* take(size_t bytes) {
    bytes = (std::max<size_t>(bytes, 1) + unit_ - 1) / unit_ * unit_;
    const auto found =
        std::ranges::find_if(free_, [bytes](const auto& range) { return range.second >= bytes; });
    if (found == free_.end()) return nullptr;
    const auto [begin, size] = *found;
    free_.erase(found);
    if (size > bytes) free_[begin + bytes] = size - bytes;
    taken_[begin] = bytes;
    return begin;
  }

  void give(std::byte* memory) {
    const auto taken = taken_.find(memory);
    auto range = free_.emplace(memory, taken->second).first;
    taken_.erase(taken);
    const auto next = std::next(range);
    if (next != free_.end() && range->first + range->second == next->first) {
      range->second += next->second;
      free_.erase(next);
    }
    if (range == free_.begin()) return;
    const auto before = std::prev(range);
    if (before->first + before->second == range->first) {
      before->second += range->second;
      free_.erase(range);
    }
  }

 private:
  const size_t unit_;
  std::map<std::byte*, size_t> free_, taken_;
};

}  // namespace ringfold::cuda
