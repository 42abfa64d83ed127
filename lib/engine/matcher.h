// Where receives that were posted meet messages that arrived, in either order. Every transport has
// one; it decides, the transport moves the bytes.
//
// It also knows which operations are open, so that ranks which called different things find out at
// the first message they exchange, whatever its index: an arrival for an open or finished operation
// with another fingerprint is a mismatch. Messages of finished operations and of cancelled
// communicators are dropped.
//
// Threads: one at a time, as its transport.
#pragma once

#include <array>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "lib/base/flat_map.h"
#include "lib/engine/transport.h"

namespace ringfold {

// Communicator ids with this bit carry point-to-point messages: they are numbered per pair and
// direction, so they are never opened or finished as operations.
inline constexpr uint32_t kPointToPoint = 1u << 31;
// Operations of one communicator that may be open at once, or finished and still remembered.
inline constexpr uint32_t kOperationHistory = 64;

class Matcher {
 public:
  struct Posted {
    Buffer buffer;
    bool may_lend = false;
    Completion* completion = nullptr;
    uint32_t fingerprint = 0;
  };
  // A message nobody has asked for yet; `message` is the transport's own handle of its bytes.
  struct Early {
    uint32_t fingerprint = 0;
    size_t bytes = 0;
    void* message = nullptr;
  };
  enum class Verdict : uint8_t {
    matched,   // *posted is filled and removed: deliver to it
    early,     // nobody asked yet: keep() it
    drop,      // finished or cancelled: forget it
    mismatch,  // contradicts this rank's operation: *posted is filled if it answered that very
               // message
  };

  // Operations of a communicator are opened in order of seq.
  void open(uint32_t comm, uint32_t seq, uint32_t fingerprint) {
    Operations& known = comms_[comm];
    known.entry(seq) = {fingerprint, seq, true};
    if (static_cast<int32_t>(seq + 1 - known.opened) > 0) known.opened = seq + 1;
  }

  // Messages that came before the operation was opened and contradict it: `report(peer, theirs)`.
  // They stay, to answer the receive that may still be posted for them.
  template <class Report>
  void contradictions(uint32_t comm, uint32_t seq, uint32_t fingerprint, Report report) {
    early_.erase_if([&](const Key& key, const Early& early) {
      if (key.comm == comm && key.seq == seq && early.fingerprint != fingerprint)
        report(key.peer, MessageId{comm, seq, key.index, early.fingerprint});
      return false;
    });
  }

  // `drop(peer, id, early)` frees each message that came for it and was never asked for.
  template <class Drop>
  void finish(uint32_t comm, uint32_t seq, Drop drop) {
    const auto known = comms_.find(comm);
    if (known == comms_.end()) return;  // cancelled
    known->second.entry(seq).open = false;
    if (early_.size() != 0)
      sweep(
          early_, [&](const Key& key) { return key.comm == comm && key.seq == seq; }, drop);
  }

  // The message if it is already there: the caller delivers it (or reports a mismatch of
  // fingerprints). Otherwise remembers the receive.
  std::optional<Early> post(Peer peer, const MessageId& id, const Posted& posted) {
    const Key key{peer, id.comm, id.seq, id.index};
    if (Early* found = early_.find(key)) {
      const Early early = *found;
      early_.erase(key);
      return early;
    }
    posted_.insert(key, posted);
    return std::nullopt;
  }

  Verdict arrive(Peer peer, const MessageId& id, Posted* posted) {
    const Key key{peer, id.comm, id.seq, id.index};
    *posted = {};
    if (Posted* found = posted_.find(key)) {
      *posted = *found;
      posted_.erase(key);
      return posted->fingerprint == id.fingerprint ? Verdict::matched : Verdict::mismatch;
    }
    if (cancelled_.contains(id.comm)) return Verdict::drop;
    if ((id.comm & kPointToPoint) != 0) return Verdict::early;
    const auto comm = comms_.find(id.comm);
    if (comm == comms_.end()) return Verdict::early;
    const Operation& operation = comm->second.entry(id.seq);
    const bool known = static_cast<int32_t>(id.seq - comm->second.opened) < 0;
    if (!known) return Verdict::early;
    if (operation.seq != id.seq) return Verdict::drop;  // finished long ago
    if (operation.fingerprint != id.fingerprint) return Verdict::mismatch;
    return operation.open ? Verdict::early : Verdict::drop;
  }

  void keep(Peer peer, const MessageId& id, const Early& early) {
    early_.insert(Key{peer, id.comm, id.seq, id.index}, early);
  }

  // What this rank takes the operation to be; 0 if it does not know it.
  [[nodiscard]] uint32_t expected(const MessageId& id) {
    const auto comm = comms_.find(id.comm);
    if (comm == comms_.end() || comm->second.entry(id.seq).seq != id.seq) return 0;
    return comm->second.entry(id.seq).fingerprint;
  }

  // Forgets everything of a communicator, for ever: `fail(peer, id, posted)` and `drop(peer, id,
  // early)` get what was pending.
  template <class Fail, class Drop>
  void cancel(uint32_t comm, Fail fail, Drop drop) {
    comms_.erase(comm);
    cancelled_.insert(comm);
    const auto its = [&](const Key& key) { return key.comm == comm; };
    sweep(posted_, its, fail);
    sweep(early_, its, drop);
  }

  // The peer is gone: nothing will come from it any more. What it sent before stays.
  template <class Fail>
  void lose(Peer peer, Fail fail) {
    sweep(
        posted_, [&](const Key& key) { return key.peer == peer; }, fail);
  }

  // Forgets every message that nobody asked for: the transport is being destroyed.
  template <class Drop>
  void drop_early(Drop drop) {
    early_.erase_if([&](const Key&, const Early& early) {
      drop(early);
      return true;
    });
  }

  [[nodiscard]] bool has_early(Peer peer, const MessageId& id) {
    return early_.find(Key{peer, id.comm, id.seq, id.index}) != nullptr;
  }
  [[nodiscard]] bool has_posted(Peer peer, const MessageId& id) {
    return posted_.find(Key{peer, id.comm, id.seq, id.index}) != nullptr;
  }
  [[nodiscard]] size_t posted() const { return posted_.size(); }
  [[nodiscard]] size_t early() const { return early_.size(); }

 private:
  struct Key {
    Peer peer = -1;
    uint32_t comm = 0, seq = 0, index = 0;
    friend bool operator==(const Key&, const Key&) = default;
    [[nodiscard]] uint64_t hash() const {
      uint64_t h = (static_cast<uint64_t>(comm) << 32 | seq) * 0x9e3779b97f4a7c15u;
      h ^= (static_cast<uint64_t>(static_cast<uint32_t>(peer)) << 32 | index) * 0xc2b2ae3d27d4eb4fu;
      return h ^ (h >> 29);
    }
  };
  struct Operation {
    uint32_t fingerprint = 0, seq = ~0u;
    bool open = false;
  };
  struct Operations {
    std::array<Operation, kOperationHistory> recent;
    uint32_t opened = 0;  // every seq below has been opened
    Operation& entry(uint32_t seq) { return recent[seq % kOperationHistory]; }
  };

  // Removes the entries that `which` selects, then calls `f` for each: f may post again.
  template <class Value, class Which, class F>
  void sweep(FlatMap<Key, Value>& map, Which which, F f) {
    std::vector<std::pair<Key, Value>> gone;
    map.erase_if([&](const Key& key, const Value& value) {
      if (which(key)) gone.emplace_back(key, value);
      return which(key);
    });
    for (auto& [key, value] : gone)
      f(key.peer, MessageId{key.comm, key.seq, key.index, value.fingerprint}, value);
  }

  FlatMap<Key, Posted> posted_;
  FlatMap<Key, Early> early_;
  std::unordered_map<uint32_t, Operations> comms_;
  std::unordered_set<uint32_t> cancelled_;
};

}  // namespace ringfold
