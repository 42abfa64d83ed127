// The event queue of the simulated network. Ranks that do the same do it at the same instant, so
// events of equal time share a list, and only the lists are sorted, in a heap with four children a
// node. Where chance makes all times different, every list has one event.
//
// Threads: one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringfold {

using Picoseconds = int64_t;  // virtual time: a byte takes 5 ps at 200 GB/s, so nothing rounds away

class SimEvents {
 public:
  [[nodiscard]] bool empty() const { return heap_.empty(); }
  [[nodiscard]] Picoseconds next_time() const { return heap_.front().time; }

  // Equal times keep the order in which they were pushed.
  void push(Picoseconds time, uint32_t what) {
    const uint32_t node = take(nodes_, free_nodes_);
    nodes_[node] = {what, kNone};
    Recent& recent = recent_of(time);
    if (recent.time == time) {  // the latest list of that time
      List& list = lists_[recent.list];
      nodes_[list.last].next = node;
      list.last = node;
      return;
    }
    const uint32_t list = take(lists_, free_lists_);
    lists_[list] = {node, node};
    recent = {time, list};
    rise({time, order_++, list});
  }

  uint32_t pop() {
    const Entry entry = heap_.front();
    List& list = lists_[entry.list];
    const Node node = nodes_[list.first];
    free_nodes_.push_back(list.first);
    list.first = node.next;
    if (node.next != kNone) return node.what;
    if (Recent& recent = recent_of(entry.time); recent.list == entry.list) recent = {};
    free_lists_.push_back(entry.list);
    const Entry last = heap_.back();
    heap_.pop_back();
    if (!heap_.empty()) sink(last);
    return node.what;
  }

 private:
  static constexpr size_t kChildren = 4;
  static constexpr int kRecentBits = 4;
  static constexpr uint32_t kNone = ~0u;

  struct Node {
    uint32_t what, next;
  };
  struct List {
    uint32_t first, last;
  };
  struct Entry {
    Picoseconds time;
    uint32_t order;  // several lists may have one time: the older is the earlier
    uint32_t list;
  };
  struct Recent {  // where a time's next event goes
    Picoseconds time = -1;
    uint32_t list = kNone;
  };

  Recent& recent_of(Picoseconds time) {
    return recent_[static_cast<uint64_t>(time) * 0x9e3779b97f4a7c15u >> (64 - kRecentBits)];
  }

  template <class T>
  static uint32_t take(std::vector<T>& items, std::vector<uint32_t>& free) {
    if (free.empty()) {
      items.emplace_back();
      return static_cast<uint32_t>(items.size() - 1);
    }
    const uint32_t index = free.back();
    free.pop_back();
    return index;
  }

  // The order numbers wrap; those in the heap are never half the range apart.
  static bool before(const Entry& a, const Entry& b) {
    return a.time != b.time ? a.time < b.time : static_cast<int32_t>(a.order - b.order) < 0;
  }

  void rise(const Entry& entry) {
    size_t hole = heap_.size();
    heap_.push_back(entry);
    while (hole != 0) {
      const size_t parent = (hole - 1) / kChildren;
      if (!before(entry, heap_[parent])) break;
      heap_[hole] = heap_[parent];
      hole = parent;
    }
    heap_[hole] = entry;
  }

  void sink(const Entry& entry) {
    const size_t size = heap_.size();
    size_t hole = 0;
    for (;;) {
      const size_t first = hole * kChildren + 1;
      if (first >= size) break;
      const size_t end = first + kChildren < size ? first + kChildren : size;
      size_t least = first;
      for (size_t child = first + 1; child < end; ++child)
        if (before(heap_[child], heap_[least])) least = child;
      if (!before(heap_[least], entry)) break;
      heap_[hole] = heap_[least];
      hole = least;
    }
    heap_[hole] = entry;
  }

  std::vector<Entry> heap_;
  std::vector<List> lists_;
  std::vector<Node> nodes_;
  std::vector<uint32_t> free_lists_, free_nodes_;
  std::array<Recent, size_t{1} << kRecentBits> recent_;
  uint32_t order_ = 0;
};

}  // namespace ringfold
