// Ranks of a world in one thread and virtual time: the library's own engines over one of its
// virtual networks, and a star of control connections with delays of its own. Ranks die, stand
// still, leave and lose connections when they are told to. The same seed gives the same run.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <vector>

#include "lib/base/base.h"
#include "lib/comm/control.h"
#include "lib/engine/engine.h"
#include "ringfold/model.h"

namespace ringfold::test::chaos {

struct NetworkPlan {
  bool simulated = false;  // transports/sim, else loopback
  uint64_t seed = 1;
  Nanoseconds late{0};      // each message by up to this much
  bool reorder = false;     // loopback: messages of different peers or communicators overtake
  bool rendezvous = false;  // simulated: messages are fetched
  double alpha = 1e-5, beta = 1e-10;
};

// What carries the messages, and its clock.
class Network {
 public:
  Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;
  virtual ~Network() = default;
  virtual Clock& clock() = 0;
  virtual Transport& of(int rank) = 0;
  virtual void kill(int rank) = 0;
  // The connection of two ranks breaks, and what is on it is lost. REQUIRES resets().
  virtual void reset(int a, int b) = 0;
  [[nodiscard]] virtual bool resets() const = 0;
  // The rank's next message has other bits in its header. REQUIRES !resets().
  virtual void corrupt(int rank) = 0;
  // To the next instant at which something may come to one of the ranks that are `awake`, at most
  // to `until`.
  virtual void pass(Nanoseconds until, const std::vector<int>& awake) = 0;
};
std::unique_ptr<Network> make_network(const NetworkPlan& plan, int ranks);

class VirtualWorld {
 public:
  VirtualWorld(const NetworkPlan& plan, int ranks, Nanoseconds slowest_news);
  // Everybody goes on, as far as is needed to give everything back.
  ~VirtualWorld();
  VirtualWorld(const VirtualWorld&) = delete;
  VirtualWorld& operator=(const VirtualWorld&) = delete;

  [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }
  [[nodiscard]] Nanoseconds now() const { return network_->clock().now(); }
  Network& network() { return *network_; }
  Engine& engine(int rank) { return *ranks_[at(rank)].engine; }
  [[nodiscard]] bool dead(int rank) const { return ranks_[at(rank)].dead; }
  [[nodiscard]] bool left(int rank) const { return ranks_[at(rank)].leaving; }
  [[nodiscard]] bool stopped(int rank) const { return ranks_[at(rank)].stopped; }
  // There to the end, though maybe standing still.
  [[nodiscard]] bool living(int rank) const { return !dead(rank) && !left(rank); }

  // This rank's view of a communicator.
  std::shared_ptr<Channel> open(int rank, uint32_t id, const std::vector<int>& members);

  void kill(int rank);
  void stop(int rank) { ranks_[at(rank)].stopped = true; }
  void resume(int rank) { ranks_[at(rank)].stopped = false; }
  // Gives up all communicators and says goodbye as soon as nothing is pending.
  void leave(int rank);

  // Everybody who can moves, in a random order; false if nothing did.
  bool turn();
  // To the next instant at which something may happen, at most to `until`.
  void pass(Nanoseconds until);

 private:
  struct Rank {
    std::unique_ptr<Engine> engine;
    std::vector<std::shared_ptr<Channel>> channels;
    bool dead = false, stopped = false, leaving = false, gone = false;
  };
  struct Letter {
    int from, to;
    Notice notice;
  };

  static size_t at(int rank) { return static_cast<size_t>(rank); }
  [[nodiscard]] bool runs(const Rank& rank) const {
    return !rank.dead && !rank.stopped && !rank.gone;
  }
  void tell(int origin, const Channel& channel, Code code, std::string text,
            std::vector<Peer> members);
  void post(int from, int to, const Notice& notice);
  void forward(const Notice& notice);
  bool deliver(int rank);
  void hear(int rank, const Notice& notice);
  void finish_leaving(int rank);

  std::mt19937_64 random_;
  Nanoseconds slowest_news_;
  std::unique_ptr<Network> network_;
  std::vector<Rank> ranks_;
  std::multimap<Nanoseconds, Letter> letters_;
  std::map<std::pair<int, int>, Nanoseconds> latest_;  // letters of one connection keep their order
  std::vector<size_t> order_;
};

}  // namespace ringfold::test::chaos
