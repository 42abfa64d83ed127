// A hash map for small trivially copyable values: open addressing, no allocation except to grow.
// Used where a node a message would cost more than the message.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringfold {

// Key: has operator== and `uint64_t hash() const`. Pointers into the map are valid until the next
// insert or erase.
template <class Key, class Value>
class FlatMap {
 public:
  [[nodiscard]] size_t size() const { return used_; }

  Value* find(const Key& key) {
    if (used_ == 0) return nullptr;
    for (size_t i = home(key); slots_[i].used; i = next(i))
      if (slots_[i].key == key) return &slots_[i].value;
    return nullptr;
  }

  // REQUIRES that the key is absent.
  Value& insert(const Key& key, const Value& value) {
    if ((used_ + 1) * 2 > slots_.size()) grow();
    size_t i = home(key);
    while (slots_[i].used) {
      assert(!(slots_[i].key == key));
      i = next(i);
    }
    slots_[i] = {key, value, true};
    ++used_;
    return slots_[i].value;
  }

  bool erase(const Key& key) {
    if (used_ == 0) return false;
    size_t i = home(key);
    while (slots_[i].used && !(slots_[i].key == key)) i = next(i);
    if (!slots_[i].used) return false;
    close_gap(i);
    --used_;
    return true;
  }

  // Visits every entry and removes those for which `f(key, value)` is true. `f` must not touch the
  // map.
  template <class F>
  void erase_if(F f) {
    std::vector<Key> gone;
    for (Slot& slot : slots_)
      if (slot.used && f(slot.key, slot.value)) gone.push_back(slot.key);
    for (const Key& key : gone) erase(key);
  }

 private:
  struct Slot {
    Key key{};
    Value value{};
    bool used = false;
  };

  [[nodiscard]] size_t home(const Key& key) const { return key.hash() & (slots_.size() - 1); }
  [[nodiscard]] size_t next(size_t i) const { return (i + 1) & (slots_.size() - 1); }

  // Moves later entries of the probe chain back, so that lookups never need tombstones.
  void close_gap(size_t hole) {
    for (size_t i = next(hole); slots_[i].used; i = next(i)) {
      const size_t want = home(slots_[i].key), mask = slots_.size() - 1;
      if (((i - want) & mask) >= ((i - hole) & mask)) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole].used = false;
  }

  void grow() {
    std::vector<Slot> old(slots_.empty() ? 16 : slots_.size() * 2);
    old.swap(slots_);
    used_ = 0;
    for (const Slot& slot : old)
      if (slot.used) insert(slot.key, slot.value);
  }

  std::vector<Slot> slots_;
  size_t used_ = 0;
};

}  // namespace ringfold
