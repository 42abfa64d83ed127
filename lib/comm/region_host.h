// The shared regions of a world, as the engine sees them: one source of news. It also carries the
// regions' memory from rank to rank when they are made, and later what users allocate for their
// buffers, and rings the engines that sleep.
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
  // For a region of these ranks, by rank. Outlived by this.
  [[nodiscard]] std::unique_ptr<region::Neighbours> neighbours(std::vector<Peer> peers);
  // Whether these ranks have mapped the memory; those that were not asked yet are.
  bool share(const region::Memory& memory, const std::vector<Peer>& peers);
  [[nodiscard]] uint64_t bytes_written() const;

  bool progress() override;
  int arm() override;
  [[nodiscard]] Nanoseconds deadline() const override { return deadline_; }

 private:
  class Neighbours;
  // What a rank of the world has made of memory that is to be mapped there.
  enum class Standing : uint8_t { unasked, asked, mapped, refused };
  struct Unsent {
    Peer to;
    shm::Post::News::What what;
    uint32_t id;
  };

  explicit RegionHost(Engine& engine, shm::Post post) : engine_(engine), post_(std::move(post)) {}
  void ring(Peer peer);
  std::shared_ptr<const region::Mapping> mapping(Peer peer, uint32_t id);
  bool read_post();
  void tell(Peer to, shm::Post::News::What what, uint32_t id);
  void take_memory();
  void take(shm::Post::News news);
  void freed(uint32_t id);

  Engine& engine_;
  mutable std::mutex lock_;  // guards what follows
  shm::Post post_;
  std::vector<std::optional<shm::Address>> addresses_;             // by rank of the world
  std::map<std::pair<uint32_t, shm::Token>, Descriptor> arrived_;  // by region and sender
  std::vector<std::shared_ptr<region::Region>> regions_;
  uint64_t bytes_of_removed_ = 0;
  // Memory of users: this process's by allocation, with every rank's standing, and the others'.
  std::map<uint32_t, std::vector<Standing>> exported_;
  std::map<std::pair<Peer, uint32_t>, std::shared_ptr<const region::Mapping>> imported_;
  std::vector<shm::Post::News> of_memory_;  // not looked at yet
  std::vector<Unsent> unsent_;              // to be tried again

  // The turn's holder only:
  std::vector<std::shared_ptr<region::Region>> polled_;
  Nanoseconds deadline_ = Nanoseconds::max();
  bool armed_ = false;

  const region::MemoryWatch watch_{[this](uint32_t id) { freed(id); }};  // last: it ends first
};

}  // namespace ringfold
