// Messages between ranks of one process: posted pointer meets sent pointer.
//
// Every endpoint has an inbox, which is all that threads share. A message is one heap object with
// two owners, the sender and the receiver. Its state decides who may touch the sender's buffer:
//
//   sent ──────> copying ──> returned     the receiver copies at once
//     │ └──────> lent ─────> returned     the receiver's user reads it, until give_back()
//     └──> revoked                        the sender took it back before anybody looked
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <utility>
#include <variant>

#include "lib/engine/transport.h"

namespace ringfold {
namespace loopback {

struct Message {
  enum class State : uint8_t { sent, copying, lent, revoked };

  // Of the two owners, whoever lets go last frees it.
  void release() {
    if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  bool claim(State to) {
    State from = State::sent;
    return state.compare_exchange_strong(from, to, std::memory_order_acq_rel);
  }

  Peer from = -1, to = -1;
  MessageId id;
  const void* data = nullptr;
  size_t bytes = 0;
  std::atomic<State> state{State::sent};
  std::atomic<int> owners{2};
  // The sender's own.
  Completion* completion = nullptr;
  size_t place = 0;  // in its list of messages not returned yet
  Status why;        // what to say when it comes back
};

struct Arrived {
  Message* message;
};
struct Returned {
  Message* message;
};
struct Lost {
  Peer peer;
};
using Event = std::variant<Arrived, Returned, Lost>;

}  // namespace loopback

// What other threads see of an endpoint.
struct LoopbackInbox {
  LoopbackInbox() : doorbell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  ~LoopbackInbox() { close(doorbell); }

  // False if nobody will ever look at it.
  bool push(const loopback::Event& event) {
    const std::lock_guard lock(mutex);
    if (closed) return false;
    events.push_back(event);
    news.store(true, std::memory_order_release);
    if (std::exchange(asleep, false)) eventfd_write(doorbell, 1);
    return true;
  }

  std::mutex mutex;
  std::deque<loopback::Event> events;
  bool asleep = false, closed = false;
  const int doorbell;
  std::atomic<bool> news{false};  // a hint that spares a polling owner the lock
  std::atomic<bool> dead{false}, mute{false}, corrupt{false};
};

}  // namespace ringfold
