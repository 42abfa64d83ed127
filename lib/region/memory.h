// The memory that allocate_memory() gives, as the regions see it: which allocation a buffer lies
// in, and whether it is in use.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "lib/base/base.h"
#include "lib/region/mapping.h"
#include "ringfold/memory.h"

namespace ringfold::region {

class Memory {
 public:
  Memory(uint32_t id, Descriptor fd, Mapping mapping)
      : id_(id), fd_(std::move(fd)), mapping_(std::move(mapping)) {}

  // Not 0, and never that of another allocation of this process.
  [[nodiscard]] uint32_t id() const { return id_; }
  [[nodiscard]] const Descriptor& fd() const { return fd_; }
  [[nodiscard]] std::byte* begin() const { return mapping_.begin(); }
  [[nodiscard]] size_t bytes() const { return mapping_.bytes(); }

  // From now on no other process sees or changes [begin, begin + bytes); see Mapping. None of it is
  // found any more.
  [[nodiscard]] Status part_from_others(std::byte* begin, size_t bytes);
  [[nodiscard]] bool parted() const { return parted_.load(); }

 private:
  const uint32_t id_;
  const Descriptor fd_;
  Mapping mapping_;
  std::atomic<bool> parted_{false};
};

// The allocation that has all of [begin, begin + bytes); null: none. It is not freed while somebody
// has this. Costs next to nothing as long as there are none.
[[nodiscard]] std::shared_ptr<Memory> find_memory(const void* begin, size_t bytes);

// As long as it lives, tells of every allocation that goes, before it does. Not in a child that was
// forked meanwhile.
class MemoryWatch {
 public:
  explicit MemoryWatch(std::function<void(uint32_t id)> freed);
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;
  ~MemoryWatch();
  void tell(uint32_t id) const {
    if (generation_ == fork_generation()) freed_(id);
  }

 private:
  const std::function<void(uint32_t)> freed_;
  const uint32_t generation_ = fork_generation();
};

}  // namespace ringfold::region
