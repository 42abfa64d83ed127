// What a Communicator handle points to: a view of a World, or of this rank alone.
//
// Threads: any.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lib/comm/layout.h"
#include "lib/comm/work.h"
#include "lib/cuda/path.h"
#include "lib/cuda/pool.h"
#include "lib/record/picture.h"
#include "ringfold/communicator.h"
#include "ringfold/model.h"

namespace ringfold {

// The arguments of a collective, alike for all.
struct Call {
  Collective collective;
  const void* send;
  void* recv;
  size_t count;  // of the full frame; part_wise() takes that of one part
  DType type;
  Reduction reduction;
  int root = 0;
  Stream stream = {};               // for device memory
  size_t stands_for = 0, part = 0;  // see Description
};

class TwoLevel;

// The ways of collectives on device memory, where these are not those of host memory. Lives as long
// as an operation that uses it, or a graph.
class DeviceRoutes {
 public:
  DeviceRoutes(std::shared_ptr<World> world, std::shared_ptr<cuda::Pool> pool)
      : world_(std::move(world)), pool_(std::move(pool)) {}
  ~DeviceRoutes();
  DeviceRoutes(const DeviceRoutes&) = delete;
  DeviceRoutes& operator=(const DeviceRoutes&) = delete;

  [[nodiscard]] Transport* route(cuda::Way way, Peer peer) const;
  Status know(Peer peer, const cuda::Offer& theirs);
  void take(cuda::Way way, const std::vector<Peer>& peers);
  Status reserve();

  // In the order of the peers; null for this rank.
  [[nodiscard]] std::vector<Transport*> to(const std::vector<Peer>& peers) const;
  [[nodiscard]] const std::string& names() const { return names_; }
  [[nodiscard]] std::shared_ptr<cuda::Path>& path() { return path_; }

 private:
  struct Known {
    References* references;
    Peer peer;
    uint64_t begin;
  };
  const std::shared_ptr<World> world_;  // owns the transports
  const std::shared_ptr<cuda::Pool> pool_;
  std::shared_ptr<cuda::Path> path_;
  cuda::Way way_ = cuda::Way::direct;
  std::string names_;
  std::vector<Known> known_;
};

struct Communicator::Impl : std::enable_shared_from_this<Impl> {
 public:
  explicit Impl(const Settled& settled);  // one rank
  // `family`: of the communicator that this one is a part of; its own id if it is none.
  Impl(const Settled& settled, std::shared_ptr<World> world, uint32_t id, uint32_t family,
       std::vector<Peer> peers, int rank);
  ~Impl();

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] World* world() const { return world_.get(); }
  [[nodiscard]] std::string transport() const;
  [[nodiscard]] std::string message_transport() const;  // also where collectives use a region
  [[nodiscard]] record::CommunicatorView view() const;  // with what its parts have counted

  Work collective(const Call& call);
  // A small all_reduce in a state of rest. None: it is left to the ordinary way, which also finds
  // the words for what is wrong with a call. `takes_longer`: set if it was started only. `waits`:
  // the caller is about to wait for it.
  region::Region::Quick quick(const Operation::Memory& memory, size_t count, DType type,
                              Stream stream, bool waits,
                              std::shared_ptr<Work::State>* takes_longer);
  // For an operation by messages that is about to be started.
  void note_region_calls(UserOperation& operation) const;
  // Finds out, together with all its ranks, whether they can share memory, and makes the region.
  void open_region();
  // The same for ranks of several hosts, after open_region(): the parts of TwoLevel.
  void open_two_level();
  // Finds out, together with all its ranks, whether their devices reach each other.
  void open_device_routes();
  Work part_wise(Call call);
  Work message(bool sends, void* buffer, size_t count, DType type, int partner, Stream stream);
  [[nodiscard]] std::shared_ptr<Impl> sub(uint32_t id, const std::vector<int>& members) const;
  [[nodiscard]] Result<Communicator> shrink(std::span<const int> exclude);
  [[nodiscard]] Options options() const;  // to make another like it
  Status register_memory(const void* memory, size_t bytes);
  void abort(const std::string& why);
  void fail(const Status& status);
  [[nodiscard]] Status health() const;
  [[nodiscard]] Status usable() const;

 private:
  // A message to oneself whose other half has not been called yet.
  struct SelfMessage {
    bool sends;
    void* buffer;
    size_t count;
    DType type;
    Stream stream;
    std::shared_ptr<Work::State> state;
  };
  struct Known {
    Choice choice;
    size_t element_bytes = 0;
  };

  [[nodiscard]] Status check(const Call& call) const;
  [[nodiscard]] static Status check_buffer(const char* what, const void* buffer, size_t count,
                                           DType type);
  [[nodiscard]] Result<Choice> choice(Collective collective, int size, size_t count,
                                      size_t element_bytes, int root);
  [[nodiscard]] Description region_description(const Call& call) const;
  [[nodiscard]] Work::Brief brief_of(const Call& call) const;
  [[nodiscard]] Work::Brief brief_of(const Call& call, Nanoseconds begun, bool direct) const;
  std::shared_ptr<Work::State> region_state(const Description& what);
  std::unique_ptr<UserOperation> region_operation(const Call& call, const Description& what,
                                                  const std::shared_ptr<Work::State>& state);
  Work in_region(const Call& call);
  // What such a call answers. REQUIRES how != none; `begun`: Nanoseconds::min() if it is not timed.
  Work after(region::Region::Quick how, const Call& call, Nanoseconds begun,
             std::shared_ptr<Work::State> started) const;
  [[nodiscard]] std::vector<std::string> hosts() const;
  [[nodiscard]] std::shared_ptr<Impl> part(uint32_t id, uint32_t family,
                                           const std::vector<int>& members) const;
  Work in_two_levels(const Call& call);
  std::shared_ptr<Work::State> compare_calls(const Call& call);
  void order_by_host(UserOperation& operation) const;
  [[nodiscard]] Reduction arithmetic(const Call& call) const;
  void run_alone(Work::State& state, const Call& call);
  void record_alone(const Work::State& state, const Call& call, Nanoseconds now);
  static Status run_alone_on_device(const Schedule& schedule, const Call& call);
  Work self_message(bool sends, void* buffer, size_t count, DType type, Stream stream);
  void meet_self(const SelfMessage& message);
  static Status move_to_self(const SelfMessage& from, const SelfMessage& to);
  Status place(UserOperation& operation, const void* input, void* work, Reduction reduction,
               Stream stream);
  Status capture(UserOperation& operation, const void* input, void* work, Reduction reduction,
                 Stream stream);
  void without_device_routes(const std::string& why);
  void fail_self_messages(const Status& why);
  [[nodiscard]] Nanoseconds deadline() const;

  const Settled settled_;
  std::shared_ptr<World> world_;  // null: one rank
  const int rank_ = 0, size_ = 1;
  Layout layout_;
  Machine machine_;
  std::shared_ptr<record::Record> record_;
  std::shared_ptr<Channel> channel_;
  std::shared_ptr<region::Region> region_;  // null: collectives go by messages
  std::shared_ptr<TwoLevel> two_level_;     // null: all ranks are on one host, or one on each
  std::shared_ptr<Pending> pending_ = std::make_shared<Pending>();

  std::mutex choices_lock_;
  std::array<Known, 32> choices_;  // the latest, by call
  size_t next_choice_ = 0;

  std::atomic<uint32_t> captured_{0};  // collectives, in graphs
  std::mutex path_lock_;
  std::shared_ptr<cuda::Path> path_;             // null before the first operation that is staged
  std::shared_ptr<DeviceRoutes> device_routes_;  // null: collectives on device memory are staged
  Status no_device_routes_;                      // those that were asked for cannot be had

  mutable std::mutex self_lock_;
  std::deque<SelfMessage> self_messages_;
  Status alone_;              // health of one rank
  uint32_t alone_calls_ = 0;  // its collectives
  std::atomic<uint32_t> shrinks_{0};
};

}  // namespace ringfold
