// The ranks that were bootstrapped together, as one of them sees them: its engine, its transports
// and which of them leads to which peer, and the control connections. Communicators are views of
// it.
//
// Threads: any, unless said otherwise.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "lib/comm/control.h"
#include "lib/comm/region_host.h"
#include "lib/comm/settled.h"
#include "lib/comm/standing.h"
#include "lib/cuda/path.h"
#include "lib/engine/compute_host.h"
#include "lib/engine/engine_thread.h"
#include "ringfold/communicator.h"
#include "transports/references.h"

namespace ringfold {

// Ids from here on belong to communicators whose members cannot ask one of them for a number.
inline constexpr uint32_t kAgreedIds = 1u << 29;

class World {
 public:
  // Blocks until all ranks are there. REQUIRES size > 1.
  [[nodiscard]] static Result<std::shared_ptr<World>> create(const Rendezvous& where,
                                                             const Settled& settled);
  // Says goodbye; waits a bounded time for what was sent to leave. Not on the engine's thread.
  ~World();

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(members_.size()); }
  // Tells this world from others; the same on all its ranks, and not 0.
  [[nodiscard]] uint64_t nonce() const { return nonce_; }
  [[nodiscard]] Engine& engine() { return engine_; }
  [[nodiscard]] EngineThread& thread() { return *thread_; }
  [[nodiscard]] SlotPool& slots() { return slots_; }
  [[nodiscard]] Transport* route(Peer peer) const { return routes_[static_cast<size_t>(peer)]; }
  // Equal for peers on one host.
  [[nodiscard]] const std::string& host(Peer peer) const {
    return members_[static_cast<size_t>(peer)].host;
  }
  // For device memory. Whether all these ranks have some: else which has not, and why.
  [[nodiscard]] Status have_devices(const std::vector<Peer>& peers) const;
  // Null where the peer is not on this host, or where not both ends have a CUDA-aware UCX.
  [[nodiscard]] References* references(Peer peer) const {
    return references_[static_cast<size_t>(peer)];
  }
  [[nodiscard]] Transport* device_ucx(Peer peer) const {
    return device_ucx_[static_cast<size_t>(peer)];
  }
  [[nodiscard]] uint64_t bytes_sent() const;
  // The regions, if these ranks can share memory; else null.
  [[nodiscard]] RegionHost* regions(const std::vector<Peer>& peers) const;
  void close_region(const region::Region& region) { regions_->remove(&region); }
  [[nodiscard]] region::Patience patience() const { return patience_; }
  // Whether the ranks of this host outnumber the cores they may use. The same on all of them.
  [[nodiscard]] bool crowded() const { return crowded_; }
  // Interfaces that every rank which uses UCX shares its messages out among.
  [[nodiscard]] size_t rails() const { return rails_; }
  // False in a child that was forked after the world was made: nothing here may be used there.
  [[nodiscard]] bool usable() const;
  // The same at less cost, for children made by fork() itself.
  [[nodiscard]] bool same_process() const { return fork_generation() == fork_generation_; }

  // A communicator id below kAgreedIds that no other rank gives out, and this one only once; 0 when
  // there are no more. Several threads may be making communicators at once, and each rank's in
  // another order.
  [[nodiscard]] uint32_t new_id();

 private:
  class ControlSource;

  explicit World(int rank);
  [[nodiscard]] SecondRound with_ucx(const Settled& settled);
  Status open_ucx(const std::vector<Member>& all, Member* mine);
  Status make_transports(const Rendezvous& where, const Settled& settled, Member* mine);
  Status make_routes(const Settled& settled);
  Status route_to(const Member& member, const Settled& settled, const std::string& nonce);
  Status make_device_routes();
  void listen();
  void on_notice(const Notice& notice);
  void given_up(const Notice& question);
  [[nodiscard]] std::string who(int rank) const;

  const int rank_;
  const int pid_;
  const uint32_t fork_generation_;
  std::vector<Member> members_;
  uint64_t nonce_ = 1;
  std::unique_ptr<Control> control_;
  std::unique_ptr<Standings> standings_;
  std::unique_ptr<Source> control_source_;
  std::unique_ptr<References> loopback_references_, shm_references_;  // outlive what is below them
  std::unique_ptr<Transport> loopback_, shm_, ucx_;
  bool wants_ucx_ = false;
  std::unique_ptr<RegionHost> regions_;
  region::Patience patience_{2000, 16};
  bool crowded_ = false;
  size_t rails_ = 1;
  std::vector<Transport*> routes_;  // by world rank; null for myself
  std::vector<References*> references_;
  std::vector<Transport*> device_ucx_;
  SlotPool slots_;
  Engine engine_;
  std::atomic<bool> failed_{false};  // some communicator of this world has failed
  std::unique_ptr<EngineThread> thread_;
  std::atomic<uint64_t> ids_given_{0};
};

}  // namespace ringfold
