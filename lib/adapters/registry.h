// The live handles of one kind. A handle names a slot and how often that has been used, so that one
// that has been given up never becomes valid again.
//
// To look one up costs two atomic additions and no lock: it is in the way of every call. Each slot
// counts its users in the same word that says whether its object is live, so nobody begins to use
// what is being given up, and the last one to leave ends it.
//
// Thread-safety: any thread.
#pragma once

#include <fmt/core.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "ringfold/status.h"

namespace ringfold {

template <class Handle, class T>
class Registry {
  struct Slot;

 public:
  explicit Registry(const char* kind) : kind_(kind) {}

  // An object in use: it stays when another thread gives the handle up meanwhile.
  class Use {
   public:
    Use(Registry& registry, Handle handle) : registry_(registry), slot_(registry.enter(handle)) {
      if (slot_ == nullptr) why_ = registry.unknown(handle);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() {
      if (slot_ != nullptr) registry_.leave(*slot_);
    }
    [[nodiscard]] bool ok() const { return slot_ != nullptr; }
    [[nodiscard]] const Status& status() const { return why_; }
    T& operator*() const { return *slot_->object; }
    T* operator->() const { return &*slot_->object; }

   private:
    Registry& registry_;
    Slot* const slot_;
    Status why_;
  };

  Handle add(T object) {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) grow();
    const uint64_t index = free_.back();
    free_.pop_back();
    Slot& slot = *at(index);
    slot.object.emplace(std::move(object));
    const uint64_t word = slot.word.fetch_add(kLive, std::memory_order_release);
    const uint64_t handle = word >> kGenerationShift << kIndexBits | index;
    return reinterpret_cast<Handle>(handle);  // NOLINT(performance-no-int-to-ptr)
  }
  // A copy.
  Result<T> find(Handle handle) {
    const Use found(*this, handle);
    if (!found.ok()) return found.status();
    return *found;
  }
  Status remove(Handle handle) {
    Slot* const slot = enter(handle);
    if (slot == nullptr) return unknown(handle);
    uint64_t word = slot->word.load(std::memory_order_relaxed);
    while ((word & kLive) != 0 && !slot->word.compare_exchange_weak(word, word - kLive + kEnding,
                                                                    std::memory_order_acq_rel)) {
    }
    leave(*slot);
    return (word & kLive) != 0 ? Status() : unknown(handle);
  }

 private:
  // How often it was used | is live | is to end when nobody uses it | users
  static constexpr uint64_t kGenerationShift = 24;
  static constexpr uint64_t kLive = uint64_t{1} << 23, kEnding = uint64_t{1} << 22;
  static constexpr uint64_t kUsers = kEnding - 1;
  static constexpr uint64_t kOnce = uint64_t{1} << kGenerationShift;
  // A handle: how often its slot was used, which is never 0 | which slot
  static constexpr uint64_t kIndexBits = 26;
  static constexpr uint64_t kFirst = 64;  // slots of the first block; each is twice the one before

  struct Slot {
    std::atomic<uint64_t> word{kOnce};
    uint64_t index = 0;
    std::optional<T> object;
  };

  // Blocks never move, so that slots are found without a lock.
  [[nodiscard]] Slot* at(uint64_t index) const {
    const auto block = static_cast<size_t>(std::bit_width(index / kFirst + 1) - 1);
    if (block >= blocks_.size()) return nullptr;
    Slot* const slots = blocks_[block].load(std::memory_order_acquire);
    return slots == nullptr ? nullptr : slots + (index - kFirst * ((uint64_t{1} << block) - 1));
  }

  // Under the lock. The blocks live as long as the process: so do registries.
  void grow() {
    const uint64_t count = kFirst << used_, begin = kFirst * ((uint64_t{1} << used_) - 1);
    auto* const slots = new Slot[count];
    for (uint64_t i = count; i-- > 0;) {
      slots[i].index = begin + i;
      free_.push_back(begin + i);
    }
    blocks_[used_++].store(slots, std::memory_order_release);
  }

  // The slot of a live handle, with one more user; else null.
  Slot* enter(Handle handle) {
    const auto number = reinterpret_cast<uint64_t>(handle);
    Slot* const slot = at(number & ((uint64_t{1} << kIndexBits) - 1));
    if (slot == nullptr) return nullptr;
    const uint64_t word = slot->word.fetch_add(1, std::memory_order_acq_rel);
    if ((word & kLive) != 0 && word >> kGenerationShift == number >> kIndexBits) return slot;
    leave(*slot);
    return nullptr;
  }

  void leave(Slot& slot) {
    uint64_t word = slot.word.fetch_sub(1, std::memory_order_acq_rel) - 1;
    if ((word & (kEnding | kUsers)) != kEnding) return;
    // Others may have come, found it ending, and be about to leave: the last one sees to it.
    if (!slot.word.compare_exchange_strong(word, word - kEnding + kOnce, std::memory_order_acq_rel))
      return;
    std::optional<T> gone = std::move(slot.object);
    slot.object.reset();
    {
      const std::lock_guard lock(mutex_);
      free_.push_back(slot.index);
    }
    // `gone` ends here, without the lock: it may take a while.
  }

  Status unknown(Handle handle) const {
    if (handle == nullptr)
      return {Code::invalid_argument, fmt::format("the {} handle is null", kind_)};
    return {Code::invalid_argument,
            fmt::format("{0} handle {1} is not live: it was given up already or never made", kind_,
                        reinterpret_cast<uintptr_t>(handle))};
  }

  const char* kind_;
  std::array<std::atomic<Slot*>, kIndexBits - 6> blocks_{};
  std::mutex mutex_;  // guards what follows, and the making of blocks
  std::vector<uint64_t> free_;
  size_t used_ = 0;  // blocks
};

}  // namespace ringfold
