// How to make each transport. What they all promise is in lib/engine/transport.h.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "lib/base/base.h"
#include "lib/engine/transport.h"

namespace ringfold {

// What goes wrong on a loopback on purpose, drawn from the seed (and the endpoint's number).
struct Faults {
  uint64_t seed = 1;
  Nanoseconds max_delay{0};  // each message is late by up to this much, on the endpoint's clock
  bool reorder = false;      // messages of different peers or communicators overtake each other
};

struct LoopbackInbox;

// The meeting point of the endpoints of one process. Any thread.
class LoopbackHub {
 public:
  // The rank dies: it sends and receives nothing more, and all others notice, after a delay of
  // theirs. What it sent before still arrives.
  void kill(Peer peer);
  // The rank stalls: what it sends from now on never arrives.
  void mute(Peer peer);
  // The next message this rank sends carries another fingerprint than it was given.
  void corrupt_next_fingerprint(Peer peer);

  // For the endpoints themselves.
  std::shared_ptr<LoopbackInbox> join(Peer peer);  // also before the peer itself has come
  std::shared_ptr<LoopbackInbox> find(Peer peer);
  void leave(Peer me);

 private:
  void tell_others(Peer gone);

  std::mutex mutex_;
  std::map<Peer, std::shared_ptr<LoopbackInbox>> inboxes_;
};

// Ranks of one process, each endpoint driven by a thread of its own or all by one. A sent pointer
// is lent to the receiver, so a send completes when the receiver has copied it or given it back.
// Destroying an endpoint is that rank leaving: the others lose it. `clock` must outlive the
// endpoint; arm() is -1 while a delayed message is under way.
std::unique_ptr<Transport> make_loopback(std::shared_ptr<LoopbackHub> hub, Peer me, Clock& clock,
                                         Faults faults = {});

// Between processes of one host, by memory segments without a name: nothing is left behind
// whatever happens. connect() answers Code::unsupported for an address of another host, network
// namespace or pid namespace: take another transport for that peer. In a forked child the transport
// must not be used; destroying it there is harmless. `clock` must outlive the transport.
Result<std::unique_ptr<Transport>> make_shm(Peer me, Clock& clock);

}  // namespace ringfold
