// Messages whose bytes stay where they are: between ranks that can read each other's device memory,
// the transport below carries only a reference, and the receiver is lent what it refers to.
//
//   reference   24 bytes in place of a message of device memory: the sender's address, its length,
//               and a ticket. Messages of host memory, and empty ones, go through unchanged.
//   return      The receiver gives the loan back by the ticket, in a message of a communicator of
//               its own (kReturns); then the sender's buffer may be reused, and its send is done.
//   ranges      What a peer's references may point to is made known beforehand, with the address
//               by which this rank reaches it. Anything else fails the receive.
//   failure     Who is lent memory only reads it, and nobody uses what comes of a failed operation.
//               So a send ends with its communicator, or its peer, though the peer may still be
//               reading. Hence: the memory sent from must be such that it stays mapped, and that
//               writing to it later harms nobody; pools of the library, never the user's buffers.
//
// Threads: as Transport; know() and forget() from any.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "lib/engine/transport.h"
#include "transports/outcome.h"

namespace ringfold {

// No other communicator has this id.
inline constexpr uint32_t kReturns = ~0u;

class References final : public Transport {
 public:
  // Everything travels by `below`, whose owner looks after it as before, and destroys it first.
  // REQUIRES that `below` is connected to a peer before connect() here.
  explicit References(Transport& below);
  ~References() override;

  // From now on references of that peer into `bytes` from `theirs` on mean `mine`.
  void know(Peer peer, uintptr_t theirs, size_t bytes, const std::byte* mine);
  void forget(Peer peer, uintptr_t theirs);

  // What `below` counts as payload, and is none: references and returns. Any thread.
  [[nodiscard]] uint64_t bytes_below() const {
    return below_bytes_.load(std::memory_order_relaxed);
  }

  [[nodiscard]] const char* name() const override { return "direct"; }
  [[nodiscard]] bool reaches(MemoryKind) const override { return true; }
  [[nodiscard]] std::string address() const override { return {}; }
  [[nodiscard]] Status connect(Peer peer, std::string_view address) override;
  void send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) override;
  // REQUIRES may_lend for device memory.
  void recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
            Completion* completion) override;
  void give_back(Completion* completion) override;
  void open(uint32_t, uint32_t, uint32_t) override {}  // `below` is told by its owner
  void finish(uint32_t, uint32_t) override {}
  void cancel(uint32_t comm, const Status& why) override;
  bool progress() override;
  int arm() override { return bell_; }

 private:
  struct Reference {
    uint64_t address = 0, bytes = 0, ticket = 0;
  };
  struct Sent {
    Completion message;
    References* owner = nullptr;
    Peer peer = -1;
    uint32_t comm = 0;
    Reference reference;
    bool left = false;      // `below` is through with it
    bool returned = false;  // perhaps before `below` says so
    Completion* completion = nullptr;
  };
  struct Received {
    Completion message;
    References* owner = nullptr;
    Peer peer = -1;
    MessageId id;
    Reference reference;
    size_t bytes = 0;
    Completion* completion = nullptr;
  };
  // Of one peer: the tickets that come back, and those on their way to it.
  struct Link {
    Completion message;
    References* owner = nullptr;
    Peer peer = -1;
    uint32_t received = 0, sent = 0;  // returns, which number them
    uint64_t ticket = 0;              // where the next lands
    Status lost;                      // nothing will come from it any more
  };
  struct Return {
    Completion message;
    References* owner = nullptr;
    uint64_t ticket = 0;
  };
  struct Range {
    size_t bytes = 0;
    const std::byte* mine = nullptr;
  };

  void send_below(Peer peer, const MessageId& id, Buffer message, Completion* completion);
  void await_return(Link& link);
  [[nodiscard]] const std::byte* translate(Peer peer, const Reference& reference);
  void end(uint64_t ticket, const Status& why);
  template <class Which>
  void end_all(Which which, const Status& why);
  static void on_left(Completion* message, const Status& status) noexcept;
  static void on_arrived(Completion* message, const Status& status) noexcept;
  static void on_returned(Completion* message, const Status& status) noexcept;
  static void on_return_left(Completion* message, const Status& status) noexcept;

  Transport& below_;
  const int bell_;  // never rings: news are those of `below`
  std::atomic<uint64_t> below_bytes_{0};
  uint64_t next_ticket_ = 1;
  std::unordered_map<uint64_t, std::unique_ptr<Sent>> sent_;  // by ticket
  std::unordered_map<Received*, std::unique_ptr<Received>> received_;
  std::unordered_map<Return*, std::unique_ptr<Return>> returns_;
  std::map<Peer, std::unique_ptr<Link>> links_;
  std::map<uint32_t, Status> cancelled_;

  std::mutex lock_;  // guards ranges_
  std::map<std::pair<Peer, uintptr_t>, Range> ranges_;
};

}  // namespace ringfold
