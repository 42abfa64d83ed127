#include "lib/region/memory.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

namespace ringfold::region {
namespace {

struct Registry {
  std::atomic<size_t> count{0};
  std::mutex lock;                                           // guards what follows
  std::map<const std::byte*, std::shared_ptr<Memory>> live;  // by where it begins
  uint32_t latest_id = 0;
  std::vector<const MemoryWatch*> watches;
};

Registry& registry() {
  static auto& one = *new Registry;  // never destroyed: other threads may still run at exit
  return one;
}

}  // namespace

Status Memory::part_from_others(std::byte* begin, size_t bytes) {
  parted_.store(true);
  return mapping_.part_from_others(begin, bytes);
}

std::shared_ptr<Memory> find_memory(const void* begin, size_t bytes) {
  Registry& all = registry();
  if (all.count.load(std::memory_order_acquire) == 0 || bytes == 0) return nullptr;
  const auto* const at = static_cast<const std::byte*>(begin);
  const std::lock_guard guard(all.lock);
  auto next = all.live.upper_bound(at);
  if (next == all.live.begin()) return nullptr;
  const std::shared_ptr<Memory>& memory = std::prev(next)->second;
  const auto offset = static_cast<size_t>(at - memory->begin());
  const bool inside = offset < memory->bytes() && bytes <= memory->bytes() - offset;
  return inside && !memory->parted() ? memory : nullptr;
}

MemoryWatch::MemoryWatch(std::function<void(uint32_t)> freed) : freed_(std::move(freed)) {
  const std::lock_guard guard(registry().lock);
  registry().watches.push_back(this);
}

MemoryWatch::~MemoryWatch() {
  const std::lock_guard guard(registry().lock);
  std::erase(registry().watches, this);
}

}  // namespace ringfold::region

namespace ringfold {

using region::registry;

Result<void*> allocate_memory(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes == 0 || bytes > SIZE_MAX / 2)
    return Status(Code::invalid_argument, fmt::format("{} bytes of memory are asked for", bytes));
  const size_t whole = (bytes + page - 1) / page * page;
  auto fd = region::make_shared("ringfold-memory", whole);
  if (!fd.ok()) return fd.status();
  auto mapping = region::Mapping::map(*fd, whole, region::Mapping::InChildren::shared);
  if (!mapping.ok()) return mapping.status();
  mapping->enlarge_pages();
  std::byte* const begin = mapping->begin();
  auto& all = registry();
  const std::lock_guard guard(all.lock);
  all.live[begin] =
      std::make_shared<region::Memory>(++all.latest_id, std::move(*fd), std::move(*mapping));
  all.count.store(all.live.size(), std::memory_order_release);
  return static_cast<void*>(begin);
}

Status free_memory(void* memory) {
  if (memory == nullptr) return {};
  auto& all = registry();
  std::shared_ptr<region::Memory> gone;  // not unmapped under the lock
  const std::lock_guard guard(all.lock);
  const auto found = all.live.find(static_cast<std::byte*>(memory));
  if (found == all.live.end())
    return {Code::invalid_argument,
            fmt::format("{} is not memory that allocate_memory() gave and nobody freed", memory)};
  if (found->second.use_count() > 1)
    return {Code::invalid_argument,
            fmt::format("{} is a buffer of an operation that is not done: wait for it before "
                        "freeing its memory",
                        memory)};
  gone = std::move(found->second);
  all.live.erase(found);
  all.count.store(all.live.size(), std::memory_order_release);
  for (const region::MemoryWatch* watch : all.watches) watch->tell(gone->id());
  return {};
}

}  // namespace ringfold
