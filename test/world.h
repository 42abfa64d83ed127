// N ranks in one thread, in virtual time, from one seed: engines over the loopback transport, with
// delays, reordering and lost peers drawn from the seed. The same seed gives the same run.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "lib/engine/compute_host.h"
#include "lib/engine/engine.h"
#include "ringfold/model.h"
#include "transports/transports.h"

namespace ringfold::test {

class VirtualClock final : public Clock {
 public:
  [[nodiscard]] Nanoseconds now() const override { return now_; }
  void pass(Nanoseconds time) { now_ += time; }

 private:
  Nanoseconds now_{std::chrono::seconds(1)};
};

// What became of one operation; outlives it.
struct Outcome {
  bool done = false;
  Status status;
};

class World {
 public:
  struct Call {
    Schedule schedule;
    size_t piece = 1 << 20;  // elements
    DType type = DType::i64;
    Reduction reduction;
    const void* input = nullptr;
    void* work = nullptr;
    Nanoseconds timeout = std::chrono::seconds(60);
    bool point_to_point = false;
    int partner = -1;
  };

  World(int ranks, uint64_t seed, Faults faults = {}) : random_(seed) {
    faults.seed = seed;
    for (int r = 0; r < ranks; ++r) {
      transports_.push_back(make_loopback(hub_, r, clock_, faults));
      engines_.push_back(std::make_unique<Engine>(clock_));
    }
    for (int r = 0; r < ranks; ++r) {
      for (int p = 0; p < ranks; ++p)
        if (!transports_[at(r)]->connect(p, "loopback " + std::to_string(p)).ok()) std::abort();
      engines_[at(r)]->add(*transports_[at(r)]);
      engines_[at(r)]->on_failed = [this, r](const Channel& channel, const Status& why) {
        tell(r, channel, why);
      };
    }
  }

  ~World() {
    for (auto& channels : channels_)
      for (size_t r = 0; r < channels.size(); ++r)
        if (channels[r]) engines_[r]->close(channels[r]);
    (void)run([&] { return std::ranges::none_of(engines_, [](auto& e) { return e->busy(); }); },
              std::chrono::seconds(1));
  }

  [[nodiscard]] int size() const { return static_cast<int>(engines_.size()); }
  LoopbackHub& hub() { return *hub_; }
  VirtualClock& clock() { return clock_; }
  Engine& engine(int rank) { return *engines_[at(rank)]; }
  Transport& transport(int rank) { return *transports_[at(rank)]; }

  // A communicator of the given ranks; returns its number.
  size_t open(const std::vector<int>& members) {
    std::vector<std::shared_ptr<Channel>> channels(engines_.size());
    for (size_t i = 0; i < members.size(); ++i) {
      auto channel = std::make_shared<Channel>();
      channel->id = static_cast<uint32_t>(channels_.size());
      channel->rank = static_cast<int>(i);
      for (const int member : members) {
        channel->peers.push_back(member);
        channel->transports.push_back(transports_[at(members[i])].get());
      }
      engines_[at(members[i])]->open(channel);
      channels[at(members[i])] = channel;
    }
    channels_.push_back(channels);
    return channels_.size() - 1;
  }
  size_t open_all() {
    std::vector<int> all;
    for (int r = 0; r < size(); ++r) all.push_back(r);
    return open(all);
  }
  Channel& channel(size_t comm, int rank) { return *channels_[comm][at(rank)]; }

  std::shared_ptr<Outcome> submit(size_t comm, int rank, const Call& call) {
    auto outcome = std::make_shared<Outcome>();
    auto operation = std::make_unique<TestOperation>(outcome);
    operation->channel = channels_[comm][at(rank)];
    operation->what = {call.schedule, call.type, call.reduction.op, call.piece,
                       call.point_to_point};
    operation->position = operation->channel->rank;
    if (call.point_to_point) {
      operation->position = call.input != nullptr ? 0 : 1;
      operation->partner = call.partner;
      operation->transports.assign(2, transports_[at(rank)].get());
      operation->peers.assign(2, operation->channel->peers[at(call.partner)]);
    }
    operation->compute =
        std::make_unique<HostCompute>(call.schedule, operation->position, call.input, call.work,
                                      call.type, call.reduction, call.piece, slots_);
    operation->deadline = clock_.now() + call.timeout;
    engines_[at(rank)]->submit(std::move(operation));
    return outcome;
  }

  // One round: every engine that is not paused gets a turn, in a random order.
  bool round() {
    order_.resize(engines_.size());
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = i;
    std::shuffle(order_.begin(), order_.end(), random_);
    bool moved = false;
    for (const size_t r : order_)
      if (std::ranges::find(paused_, static_cast<int>(r)) == paused_.end())
        moved |= engines_[r]->poll();
    return moved;
  }

  // Runs until `done` or until `limit` of virtual time has passed; true if done.
  template <class Done>
  bool run(Done done, Nanoseconds limit) {
    const Nanoseconds until = clock_.now() + limit;
    while (!done()) {
      if (round()) continue;
      if (clock_.now() >= until) return false;
      clock_.pass(std::chrono::microseconds(50));
    }
    return true;
  }
  void settle(Nanoseconds limit) {
    (void)run([] { return false; }, limit);
  }
  static bool all_done(const std::vector<std::shared_ptr<Outcome>>& outcomes) {
    return std::ranges::all_of(outcomes, [](const auto& outcome) { return outcome->done; });
  }
  // The rank stands still until resumed.
  void pause(int rank) { paused_.push_back(rank); }
  void resume(int rank) { std::erase(paused_, rank); }

 private:
  class TestOperation final : public Operation {
   public:
    explicit TestOperation(std::shared_ptr<Outcome> outcome) : outcome_(std::move(outcome)) {}
    void completed(const Status& status) noexcept override {
      outcome_->done = true;
      outcome_->status = status;
    }

   private:
    std::shared_ptr<Outcome> outcome_;
  };

  static size_t at(int rank) { return static_cast<size_t>(rank); }

  // The control star, without its delays.
  void tell(int origin, const Channel& channel, const Status& why) {
    for (const Peer peer : channel.peers)
      if (peer != origin) engines_[at(peer)]->fail(channel.id, why, false);
  }

  VirtualClock clock_;
  std::mt19937_64 random_;
  SlotPool slots_;
  std::shared_ptr<LoopbackHub> hub_ = std::make_shared<LoopbackHub>();
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::vector<std::shared_ptr<Channel>>> channels_;
  std::vector<size_t> order_;
  std::vector<int> paused_;
};

}  // namespace ringfold::test
