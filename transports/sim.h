// A network in virtual time: N ranks' transports in one thread, driven by one event queue.
//
// What is modelled, so that without contention it costs what ringfold/model.h says:
//
//   ports   Every rank has a port for its own host (Machine::local) and one for other hosts
//           (Machine::remote); each sends one message after another and, independently, receives
//           one after another.
//   link    A message of b bytes occupies the sender's port for b * beta. It begins to arrive alpha
//           after it began to leave, or when the receiver's port is done with those that left
//           earlier, and occupies that port for b * beta as well (cut-through): alone, it is there
//           alpha after its last byte has left.
//   sends   eager: complete when the last byte has left. rendezvous: complete when the receiver has
//           taken the message, plus alpha for the notice of it.
//   early   A message that nobody has asked for waits at the receiver. Senders hold back by
//           credits, as everywhere (lib/engine/credits.h); credit travels back in alpha, and takes
//           no time of a port. Messages above kCreditBatchBytes are charged for their header only.
//   adder   A rank adds up one piece after another, besides and at the same time as its ports work.
//
// With one alpha for a class of links, messages come to a receiver's port in the order in which
// they began to leave. One that a fault makes late keeps its place in that order, and the others
// wait for it.
//
// The network does nothing by itself. Its owner calls next(), which moves to the next instant at
// which anything happens, and then progress() of the ranks that take_ready() names: work is done
// only where something has come. Buffers with data are copied for good; null data only takes time.
//
// Memory: about 1 KiB a rank, and 96 bytes a message that is under way.
//
// Threads: one, for the network and all its endpoints. The network outlives them.
#pragma once

#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "lib/base/base.h"
#include "lib/engine/credits.h"
#include "lib/engine/transport.h"
#include "ringfold/model.h"
#include "transports/sim_events.h"

namespace ringfold {

// What goes wrong, when, on the network's clock; chance is drawn from the seed.
struct SimFaults {
  struct Slow {
    Peer from, to;
    double factor;  // alpha and beta of this direction are so many times larger
  };
  struct Loss {
    Peer rank;
    Nanoseconds when;  // it dies: what has not left by then never will
  };
  struct Stall {
    Peer rank;
    Nanoseconds begin, end;  // its program stands still; what it handed over goes on
  };

  uint64_t seed = 1;
  Nanoseconds jitter{0};  // each message is late by up to this much, and what follows it waits
  std::vector<Slow> slow;
  std::vector<Loss> lost;
  std::vector<Stall> stalled;
  Nanoseconds notice = std::chrono::milliseconds(20);  // until the others know of a loss
};

struct SimOptions {
  Machine machine;
  bool rendezvous = false;
  SimFaults faults;
};

// One bar of a trace.
struct SimSpan {
  enum class Kind : uint8_t { send, receive, add } kind;
  Peer rank, peer;  // add: peer is -1
  Picoseconds begin, end;
  uint64_t bytes;
  uint32_t index;  // of the message; add: 0
};

struct SimMessage;
class SimEndpoint;

class SimNetwork {
 public:
  static constexpr Picoseconds kForever = std::numeric_limits<Picoseconds>::max();

  SimNetwork(int ranks, const SimOptions& options);
  ~SimNetwork();
  SimNetwork(const SimNetwork&) = delete;
  SimNetwork& operator=(const SimNetwork&) = delete;

  // Once a rank. Destroying it is that rank leaving: the others lose it.
  std::unique_ptr<Transport> endpoint(Peer rank);
  // The rank's adder works on it for `seconds`, after all that it was given before; then done() is
  // called from the progress() of the rank's endpoint.
  void add_up(Peer rank, double seconds, uint64_t bytes, Completion* completion);

  // Everything that happens at the next instant; false if there is none up to `until`.
  bool next(Picoseconds until = kForever);
  // A rank whose endpoint has something to do in progress(); -1: none, now.
  Peer take_ready();
  void wake(Peer rank);
  void resume(Peer rank);  // its stall ends
  void lose(Peer rank);    // it dies, now
  // The connection between two living ranks breaks, now: each loses the other.
  void reset(Peer a, Peer b);

  [[nodiscard]] bool alive(Peer rank) const { return ranks_[at(rank)].alive; }
  [[nodiscard]] bool stalled(Peer rank) const { return ranks_[at(rank)].stalled; }
  [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }
  [[nodiscard]] Picoseconds now() const { return now_; }
  void pass_until(Picoseconds time);  // nothing happens meanwhile: after next(time) was false
  [[nodiscard]] Clock& clock() { return clock_; }
  [[nodiscard]] uint64_t events() const { return events_handled_; }
  // From now on, every bar is added there. Owned by the caller.
  void trace_into(std::vector<SimSpan>* spans) { trace_ = spans; }

 private:
  friend class SimEndpoint;

  enum class Kind : uint32_t { left, arrived, taken, credit, added, loss, notice, stall, resume };
  static constexpr uint32_t kKindBits = 4;

  // What an endpoint has to look at in its next progress().
  struct News {
    enum class Kind : uint8_t { done, arrived, credit, lost } kind;
    Peer peer = -1;
    uint32_t comm = 0;
    Credit credit{};
    Completion* completion = nullptr;
    SimMessage* message = nullptr;
  };
  struct Port {
    SimMessage *first = nullptr, *last = nullptr;  // waiting to leave
    bool sending = false;
    Picoseconds receives_from = 0;  // when it is done with what has been announced to it
  };
  struct Rank {
    std::array<Port, 2> ports;  // local, remote
    std::vector<News> news;
    Picoseconds adds_from = 0;
    size_t open_sends = 0;  // whose completion was not called yet
    bool alive = true, ready = false, stalled = false;
  };
  struct Path {
    double alpha, beta;  // in picoseconds
    size_t port;
  };
  class VirtualClock final : public Clock {
   public:
    explicit VirtualClock(const SimNetwork& network) : network_(network) {}
    [[nodiscard]] Nanoseconds now() const override { return Nanoseconds(network_.now_ / 1000); }

   private:
    const SimNetwork& network_;
  };
  struct Added {
    Peer rank;
    Completion* completion;
  };
  struct Returning {
    Peer from, to;  // from the receiver to the sender
    uint32_t comm;
    Credit credit{};
  };
  template <class T>
  struct Pool {
    uint32_t add(const T& item) {
      if (free.empty()) {
        items.push_back(item);
        return static_cast<uint32_t>(items.size() - 1);
      }
      const uint32_t index = free.back();
      free.pop_back();
      items[index] = item;
      return index;
    }
    T take(uint32_t index) {
      free.push_back(index);
      return items[index];
    }
    std::vector<T> items;
    std::vector<uint32_t> free;
  };
  static constexpr uint32_t kBlock = 1024;

  static size_t at(Peer rank) { return static_cast<size_t>(rank); }
  [[nodiscard]] Path path(Peer from, Peer to) const;
  void push(Picoseconds time, Kind kind, uint32_t index);
  void tell(Peer rank, const News& news);
  void handle(uint32_t what);

  SimMessage* make_message();
  void release(SimMessage* message);
  void each_message(const std::function<void(SimMessage&)>& f);  // slow: for failures only

  void submit(SimMessage* message);
  void depart(SimMessage* message);
  void left(SimMessage* message);
  void arrived(SimMessage* message);
  void take(SimMessage* message);  // the receiver has no more use for it
  void taken(SimMessage* message);
  void give_credit(Peer from, Peer to, uint32_t comm, const Credit& credit);
  Completion* close(SimMessage* message);     // its sender is told now
  Completion* withdraw(SimMessage* message);  // ... and nobody shall see it

  const SimOptions options_;
  std::vector<Rank> ranks_;
  std::vector<Peer> ready_;
  size_t next_ready_ = 0;
  SimEvents events_;
  Picoseconds now_ = 0;
  uint64_t events_handled_ = 0;
  std::mt19937_64 random_;
  VirtualClock clock_{*this};
  std::vector<SimSpan>* trace_ = nullptr;

  std::vector<std::unique_ptr<SimMessage[]>> messages_;  // blocks, which stay where they are
  std::vector<uint32_t> free_messages_;
  Pool<Added> adding_;
  Pool<Returning> returning_;
};

}  // namespace ringfold
