// The shared regions of a world, as the engine sees them: one source of news. It also carries the
// regions' memory from rank to rank when they are made, and rings the engines that sleep.
//
// Threads: any, except for the functions of Source, which belong to the engine's turn.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/comm/control.h"
#include "lib/region/region.h"
#include "transports/shm_host.h"

namespace ringfold {

class RegionHost final : public Source {
 public:
  static Result<std::unique_ptr<RegionHost>> make(Engine& engine);

  // For Member::addresses, and what the others gave.
  [[nodiscard]] std::string address() const { return post_.address().encode(); }
  void meet(const std::vector<Member>& members);
  // Whether memory can be handed to that rank of the world.
  [[nodiscard]] bool reaches(Peer peer) const;

  // The memory of a new region with this id: made here and handed to the others, or received.
  // timeout: it did not come.
  [[nodiscard]] Result<region::Segment> make_segment(uint32_t id, const std::vector<Peer>& others);
  [[nodiscard]] Result<region::Segment> receive_segment(uint32_t id, Peer from, int ranks);

  void add(std::shared_ptr<region::Region> region);
  void remove(const region::Region* region);
  void ring(Peer peer);
  [[nodiscard]] uint64_t bytes_written() const;

  bool progress() override;
  int arm() override;
  [[nodiscard]] Nanoseconds deadline() const override { return deadline_; }

 private:
  explicit RegionHost(Engine& engine, shm::Post post) : engine_(engine), post_(std::move(post)) {}
  bool read_post();

  Engine& engine_;
  mutable std::mutex lock_;  // guards what follows
  shm::Post post_;
  std::vector<std::optional<shm::Address>> addresses_;             // by rank of the world
  std::map<std::pair<uint32_t, shm::Token>, Descriptor> arrived_;  // by region and sender
  std::vector<std::shared_ptr<region::Region>> regions_;
  uint64_t bytes_of_removed_ = 0;

  // The turn's holder only:
  std::vector<std::shared_ptr<region::Region>> polled_;
  Nanoseconds deadline_ = Nanoseconds::max();
  bool armed_ = false;
};

}  // namespace ringfold
