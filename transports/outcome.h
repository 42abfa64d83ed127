// What the transports have in common: the sentences of their errors, and completions that were
// decided where done() may not be called.
#pragma once

#include <fmt/core.h>

#include <deque>

#include "lib/engine/transport.h"

namespace ringfold {

inline Status different_operation(Peer peer, const MessageId& theirs, uint32_t expected) {
  return {Code::mismatch,
          fmt::format("rank {} started another operation: communicator {}, seq {}, message {} has "
                      "fingerprint {:08x}, expected {:08x}",
                      peer, theirs.comm, theirs.seq, theirs.index, theirs.fingerprint, expected)};
}

inline Status different_length(Peer peer, const MessageId& id, size_t theirs, size_t expected) {
  return {Code::mismatch,
          fmt::format("rank {} sent {} bytes, expected {}: communicator {}, seq {}, message {}",
                      peer, theirs, expected, id.comm, id.seq, id.index)};
}

// Completions decided inside send() or recv(), called from the next progress() or cancel().
class Deferred {
 public:
  void add(uint32_t comm, Completion* completion, Status status) {
    waiting_.push_back({comm, completion, std::move(status)});
  }

  // From progress(): only those that are there now, for done() may add more.
  bool run() {
    const size_t now = waiting_.size();
    for (size_t i = 0; i < now && !waiting_.empty(); ++i) {
      const Entry entry = std::move(waiting_.front());
      waiting_.pop_front();
      entry.completion->done(entry.completion, entry.status);
    }
    return now != 0;
  }

  // From cancel(): nothing of the communicator stays pending.
  void run(uint32_t comm) {
    std::deque<Entry> all;
    all.swap(waiting_);
    for (Entry& entry : all)
      if (entry.comm != comm) waiting_.push_back(std::move(entry));
    for (const Entry& entry : all)
      if (entry.comm == comm) entry.completion->done(entry.completion, entry.status);
  }

  [[nodiscard]] bool empty() const { return waiting_.empty(); }

 private:
  struct Entry {
    uint32_t comm;
    Completion* completion;
    Status status;
  };
  std::deque<Entry> waiting_;
};

}  // namespace ringfold
