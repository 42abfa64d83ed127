// How senders hold back: what a peer has not asked for yet costs it bounded memory, separately for
// every communicator, so that one that runs ahead never blocks another.
//
// The sender keeps an account per (peer, communicator): each message is charged when it goes and
// credited when the receiver has matched or dropped it. The receiver returns credit in batches of a
// quarter of the limit, so that a message rarely costs a message back. Up to a quarter may thus
// stay with the receiver for ever, and a message may always go while no more than that is
// outstanding, however long it is: whoever waits has more outstanding than can stay unreturned, so
// it is still waiting for the receiver's calls, never for a batch that does not fill.
//
// Operations of one communicator run side by side, and a later one may be far ahead of an earlier
// one: it must not use up what the earlier one needs, for the receiver may wait for that before it
// calls the later one. So the oldest operation that is open here may go as far again beyond the
// limit, and past what waits. Every rank that waits in the oldest operation of all has it as its
// own oldest: it always ends.
//
// A message is charged the bytes it costs a receiver that has not asked for it: nothing if only its
// header travels ahead.
//
// Threads: one at a time, as the transport they are part of.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lib/engine/transport.h"

namespace ringfold {

inline constexpr uint64_t kCreditBytes = 1 << 20;
inline constexpr uint32_t kCreditMessages = 256;
inline constexpr uint64_t kCreditBatchBytes = kCreditBytes / 4;
inline constexpr uint32_t kCreditBatchMessages = kCreditMessages / 4;

struct Credit {
  uint32_t messages = 0;
  uint64_t bytes = 0;
};

// (peer, communicator) as one word, for the maps below.
constexpr uint64_t credit_key(Peer peer, uint32_t comm) {
  return static_cast<uint64_t>(static_cast<uint32_t>(peer)) << 32 | comm;
}
constexpr Peer credit_peer(uint64_t key) {
  return static_cast<Peer>(key >> 32);
}

// The sender's accounts, and the messages that wait: Item is the transport's own note of one.
template <class Item>
class CreditAccounts {
 public:
  // True: charged, send it now. False: kept, in order; credited() hands it out.
  [[nodiscard]] bool charge(Peer peer, uint32_t comm, uint32_t seq, uint64_t bytes,
                            const Item& item) {
    Account& account = accounts_[credit_key(peer, comm)];
    if ((account.waiting.empty() && account.fits(bytes)) ||
        (account.fits_oldest(bytes) && oldest(comm) == seq && account.of(seq) == account.end())) {
      account.take(bytes);
      return true;
    }
    account.waiting.push_back({seq, bytes, item});
    ++waiting_;
    return false;
  }

  // Collectives begin, in order, and end: which is the oldest?
  void open(uint32_t comm, uint32_t seq) { open_[comm].push_back(seq); }
  // `send(peer, item)` is called for what may go now.
  template <class Send>
  void finish(uint32_t comm, uint32_t seq, Send send) {
    const auto known = open_.find(comm);
    if (known == open_.end()) return;
    std::erase(known->second, seq);
    if (waiting_ == 0) return;
    std::vector<uint64_t> keys;
    for (const auto& [key, account] : accounts_)
      if (static_cast<uint32_t>(key) == comm && !account.waiting.empty()) keys.push_back(key);
    for (const uint64_t key : keys)
      while (std::optional<Item> item = next(key)) send(credit_peer(key), *item);
  }

  // The peer returned credit: `send(item)` is called for what may go now, in order. It may charge()
  // more. Credit of a forgotten communicator is ignored.
  template <class Send>
  void credited(Peer peer, uint32_t comm, const Credit& credit, Send send) {
    const uint64_t key = credit_key(peer, comm);
    const auto found = accounts_.find(key);
    if (found == accounts_.end()) return;
    Credit& outstanding = found->second.outstanding;
    outstanding.messages -= std::min(outstanding.messages, credit.messages);
    outstanding.bytes -= std::min(outstanding.bytes, credit.bytes);
    while (std::optional<Item> item = next(key)) send(*item);
  }

  // `drop(item)` is called for each message that waits.
  template <class Drop>
  void cancel(uint32_t comm, Drop drop) {
    open_.erase(comm);
    forget([&](uint64_t key) { return static_cast<uint32_t>(key) == comm; }, drop);
  }
  template <class Drop>
  void lose(Peer peer, Drop drop) {
    forget([&](uint64_t key) { return credit_peer(key) == peer; }, drop);
  }

  [[nodiscard]] size_t waiting() const { return waiting_; }

 private:
  struct Held {
    uint32_t seq;
    uint64_t bytes;
    Item item;
  };
  struct Account {
    [[nodiscard]] bool fits(uint64_t bytes) const {
      if (outstanding.messages >= kCreditMessages) return false;
      return outstanding.bytes + bytes <= kCreditBytes || outstanding.bytes <= kCreditBatchBytes;
    }
    // What others may have used, what stays unreturned, and a message more.
    [[nodiscard]] bool fits_oldest(uint64_t bytes) const {
      if (outstanding.messages >= 2 * kCreditMessages) return false;
      return outstanding.bytes + bytes <= 2 * kCreditBytes ||
             outstanding.bytes <= kCreditBytes + 2 * kCreditBatchBytes;
    }
    void take(uint64_t bytes) {
      ++outstanding.messages;
      outstanding.bytes += bytes;
    }
    [[nodiscard]] auto of(uint32_t seq) {
      return std::find_if(waiting.begin(), waiting.end(),
                          [seq](const Held& held) { return held.seq == seq; });
    }
    [[nodiscard]] auto end() { return waiting.end(); }

    Credit outstanding;
    std::deque<Held> waiting;
  };

  [[nodiscard]] std::optional<uint32_t> oldest(uint32_t comm) const {
    const auto known = open_.find(comm);
    if (known == open_.end() || known->second.empty()) return std::nullopt;
    return known->second.front();
  }

  // Looked up anew each time: what the caller does with an item may add or forget accounts.
  std::optional<Item> next(uint64_t key) {
    const auto found = accounts_.find(key);
    if (found == accounts_.end() || found->second.waiting.empty()) return std::nullopt;
    Account& account = found->second;
    auto held = account.waiting.begin();
    if (!account.fits(held->bytes)) {
      const std::optional<uint32_t> first = oldest(static_cast<uint32_t>(key));
      held = first ? account.of(*first) : account.end();
      if (held == account.end() || !account.fits_oldest(held->bytes)) return std::nullopt;
    }
    const Item item = held->item;
    account.take(held->bytes);
    account.waiting.erase(held);
    --waiting_;
    return item;
  }

  template <class Which, class Drop>
  void forget(Which which, Drop drop) {
    std::vector<Item> dropped;
    for (auto it = accounts_.begin(); it != accounts_.end();) {
      if (!which(it->first)) {
        ++it;
        continue;
      }
      for (const Held& held : it->second.waiting) dropped.push_back(held.item);
      it = accounts_.erase(it);
    }
    waiting_ -= dropped.size();
    for (const Item& item : dropped) drop(item);
  }

  std::unordered_map<uint64_t, Account> accounts_;
  std::unordered_map<uint32_t, std::vector<uint32_t>> open_;  // by communicator, oldest first
  size_t waiting_ = 0;
};

// What a receiver owes its senders.
class CreditReturns {
 public:
  // A message charged with `bytes` was matched or dropped. A batch that is full is due now.
  [[nodiscard]] std::optional<Credit> matched(Peer peer, uint32_t comm, uint64_t bytes) {
    Credit& owed = owed_[credit_key(peer, comm)];
    ++owed.messages;
    owed.bytes += bytes;
    if (owed.messages <= kCreditBatchMessages && owed.bytes <= kCreditBatchBytes)
      return std::nullopt;
    return std::exchange(owed, {});
  }

  void cancel(uint32_t comm) {
    std::erase_if(owed_,
                  [&](const auto& entry) { return static_cast<uint32_t>(entry.first) == comm; });
  }
  void lose(Peer peer) {
    std::erase_if(owed_, [&](const auto& entry) { return credit_peer(entry.first) == peer; });
  }

 private:
  std::unordered_map<uint64_t, Credit> owed_;
};

}  // namespace ringfold
