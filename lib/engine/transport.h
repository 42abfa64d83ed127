// The contract between the engine and whatever moves bytes. One header, a handful of functions;
// test/transport_test.cpp runs these rules against every implementation.
//
//   Matching    A message from one peer is matched by (comm, seq, index). Posted receives and
//               arrivals meet in either order. A message whose fingerprint differs from the posted
//               receive's completes that receive with Code::mismatch; see also Matcher.
//   Order       Messages of one (peer, comm) are sent in the order of send(); nothing is promised
//               between peers or communicators, and one communicator never blocks another.
//   Length      Both sides give the same length. A longer or shorter message completes the receive
//               with Code::mismatch and writes nothing outside the buffer.
//   Ownership   A buffer given to send() or recv() belongs to the transport until done() is called.
//               done(ok) of a send means the buffer may be reused, not that the peer has it.
//   Callbacks   done() is called exactly once, and only from inside progress() or cancel(), never
//               from inside send() or recv(). It may call send(), recv() and give_back().
//   Blocking    Nothing blocks. Senders hold back by credits per (peer, comm): a message that the
//               peer has not asked for yet costs the receiver bounded memory.
//   Threads     One thread at a time. address(), name() and bytes_sent() may be read by any thread.
//   Failure     A dead peer completes everything pending with it with Code::peer_lost, and is
//               reported once through on_lost. A transport never kills the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "ringfold/status.h"
#include "ringfold/types.h"

namespace ringfold {

using Peer = int;  // a rank of the world that was bootstrapped together, not a communicator rank

struct MessageId {     // 16 bytes; the header of every message
  uint32_t comm = 0;   // the communicator; ids are unique per process and agreed by its members
  uint32_t seq = 0;    // number of the operation within the communicator
  uint32_t index = 0;  // number of the message within the operation
  uint32_t fingerprint = 0;  // hash of what the rank believes the operation to be
};
static_assert(sizeof(MessageId) == 16);

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  MemoryKind kind = MemoryKind::host;
};

// Owned by the caller; must stay at its address until done() was called (and, when lent, until
// give_back()).
struct Completion {
  void (*done)(Completion*, const Status&) noexcept = nullptr;
  // Receive: where the bytes lie: the buffer given, or memory lent by the transport.
  const void* view = nullptr;
  void* lender = nullptr;  // the transport's own mark while it lends; null otherwise
};

class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  [[nodiscard]] virtual const char* name() const = 0;
  [[nodiscard]] virtual bool reaches(MemoryKind kind) const = 0;  // may buffers lie there?
  // Opaque bytes that let a peer connect; travel through the bootstrap.
  [[nodiscard]] virtual std::string address() const = 0;
  // Makes `peer` known. Cheap: real connections are made by the first send. Call once a peer.
  [[nodiscard]] virtual Status connect(Peer peer, std::string_view address) = 0;

  virtual void send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) = 0;
  // With may_lend the transport may leave the bytes where they are and set completion->view and
  // completion->lender instead of filling the buffer (whose data may then be null if the transport
  // always_lends()); the loan ends with give_back().
  virtual void recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
                    Completion* completion) = 0;
  virtual void give_back(Completion* completion) = 0;
  // An operation of a communicator begins (in order of seq) and ends on this rank: lets the
  // transport recognise arrivals that contradict it and drop those that come too late. Not called
  // for point-to-point messages.
  virtual void open(uint32_t comm, uint32_t seq, uint32_t fingerprint) = 0;
  virtual void finish(uint32_t comm, uint32_t seq) = 0;
  // Completes everything pending of that communicator with `why`, and drops what has arrived for it
  // and what will arrive. A completion that a peer may still be touching is completed later, from
  // progress(), as soon as nobody can touch its buffer any more.
  virtual void cancel(uint32_t comm, const Status& why) = 0;

  virtual bool progress() = 0;  // true if anything moved
  // A descriptor that becomes readable on news, valid until the next progress(); -1: poll again
  // now.
  virtual int arm() = 0;
  // True when everything sent has left this process's responsibility: safe to destroy.
  [[nodiscard]] virtual bool flushed() const { return true; }
  virtual Status registered(Buffer buffer, bool add) {  // hint: a long-lived buffer
    (void)buffer, (void)add;
    return {};
  }

  // Payload bytes handed over so far, counted where they are sent.
  [[nodiscard]] uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

  // Set once by the owner before use; called from progress(), at most once a peer.
  std::function<void(Peer, const Status&)> on_lost;
  // In its place where the peer has said goodbye, which is no reason for others to give up.
  std::function<void(Peer)> on_left;
  // Called from progress() when an arrival for an operation contradicts what is posted for the
  // same (comm, seq), whoever sent it and whatever its index.
  std::function<void(Peer, const MessageId& theirs, uint32_t expected_fingerprint)> on_mismatch;

 protected:
  void count_sent(size_t bytes) {
    bytes_sent_.store(bytes_sent_.load(std::memory_order_relaxed) + bytes,
                      std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> bytes_sent_{0};
};

}  // namespace ringfold
