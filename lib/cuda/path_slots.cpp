// The slots of a communicator's operations on device memory: who has them, and whose turn is next.
#include <algorithm>

#include "lib/cuda/compute_slots.h"
#include "lib/cuda/device.h"
#include "lib/cuda/pool.h"

namespace ringfold::cuda {

Path::Path(std::shared_ptr<Pool> pool, int at_once)
    : pool_(std::move(pool)), device_(pool_->device()), at_once_(at_once) {}

Path::~Path() {
  if (pool_) return;
  for (const Block& block : blocks_) device_.give_pinned(block.memory);
}

Status Path::reserve(size_t piece_bytes) {
  const size_t bytes = SlotCompute::slots_bytes(piece_bytes, kind());
  const std::lock_guard guard(lock_);
  if (bytes <= bytes_) return {};
  for (int i = 0; i < at_once_; ++i) {
    Result<std::byte*> memory = pool_ ? pool_->take(bytes) : device_.take_pinned(bytes);
    if (!memory.ok()) return memory.status();
    if (*memory == nullptr) return {Code::unsupported, "the pool of device memory is used up"};
    blocks_.push_back({*memory, bytes, false});
  }
  bytes_ = bytes;
  return {};
}

uint64_t Path::enter() {
  const std::lock_guard guard(lock_);
  waiting_.push_back(entered_);
  return entered_++;
}

std::byte* Path::take_slots(uint64_t turn) {
  const std::lock_guard guard(lock_);
  if (waiting_.front() != turn) return nullptr;
  const auto free = std::ranges::find_if(
      blocks_, [this](const Block& block) { return !block.taken && block.bytes == bytes_; });
  if (free == blocks_.end()) return nullptr;
  free->taken = true;
  waiting_.pop_front();
  return free->memory;
}

void Path::leave(uint64_t turn, std::byte* slots) {
  const std::lock_guard guard(lock_);
  std::erase(waiting_, turn);
  const auto block =
      std::ranges::find_if(blocks_, [slots](const Block& b) { return b.memory == slots; });
  if (slots != nullptr) block->taken = false;
  // Blocks that are too small by now.
  std::erase_if(blocks_, [this](const Block& b) {
    if (b.taken || b.bytes == bytes_) return false;
    if (!pool_) device_.give_pinned(b.memory);
    return true;
  });
}

}  // namespace ringfold::cuda
