// All-reduce of ranks on several hosts, where hosts have several ranks: added up inside each host
// by its shared memory, across by rings in which every host has one member, and handed out inside
// again. A host sends 2(H-1)/H of the bytes, however many ranks it has, also where the hosts have
// different numbers of ranks.
//
//   host a  ranks 0 1 2        host b  ranks 3 4      S = 2 shards, the fewest ranks of a host
//     0 gets the sum of shard 0         3 the same        reduce in each host
//     1              of shard 1         4
//     0 <------- ring of shard 0 -----> 3                 all_reduce between hosts, one of S
//     1 <------- ring of shard 1 -----> 4
//     0, 1 hand their shards on         3, 4 the same     broadcast in each host
//
// The bytes go through in segments, so that a host adds up and hands out one while the links carry
// another. Inside a host all ranks must start the same operations in the same order, whoever has
// news first: the order is that of the calls, and in each call the reductions of the first few
// segments, the broadcast of the first, one more reduction, one more broadcast, and so on; a
// broadcast whose root has not got the sum yet holds back what is behind it. Likewise the members
// of a ring start its operations in the order of calls and segments, also where the reductions
// before them are over in another.
//
// The message schedule Algorithm::two_level does the same by messages alone; this is what a
// communicator uses unless it was told an algorithm.
//
// Threads: any.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lib/comm/communicator_impl.h"

namespace ringfold {

class TwoLevel : public std::enable_shared_from_this<TwoLevel> {
 public:
  // `local`: the ranks of this host; null if this is the only one. `across`: the members of my
  // ring; null if I am in none.
  TwoLevel(std::shared_ptr<Communicator::Impl> local, std::shared_ptr<Communicator::Impl> across,
           int shards, int ranks)
      : local_(std::move(local)), across_(std::move(across)), shards_(shards), ranks_(ranks) {}

  // Whether it is the way for this call; the same on all ranks.
  [[nodiscard]] static bool suits(const Call& call);
  // Seconds that it should take.
  [[nodiscard]] static double predict(const Call& call, int hosts, const Machine& machine);
  // Starts it; `state` completes when it and what compares the ranks' calls are done.
  void start(const Call& call, std::shared_ptr<Work::State> state, Work::State& compared);

  // Bytes that this rank gives to its ring for a call, by the model.
  [[nodiscard]] uint64_t bytes_across(const Call& call, int hosts) const;
  // The communicators that do it; null: there is none.
  [[nodiscard]] std::array<const Communicator::Impl*, 2> parts() const {
    return {local_.get(), across_.get()};
  }
  // What the bytes of this rank go by: "region+ucx".
  [[nodiscard]] std::string transport() const;

 private:
  struct Running;
  // One operation inside the host, waiting for its turn.
  struct Entry {
    std::shared_ptr<Running> call;
    bool hands_out;  // broadcast; else reduce
    int segment, shard;
  };

  // An operation of my ring, waiting for its reduction.
  struct Crossing {
    std::shared_ptr<Running> call;
    int segment;
  };

  void pump();
  [[nodiscard]] bool may_start(const Entry& entry) const;
  [[nodiscard]] static bool may_start(const Crossing& crossing);
  void begin(const Entry& entry);
  void begin(const Crossing& crossing);
  template <class Waiting>
  void begin_those_that_may(std::deque<Waiting>& waiting, std::unique_lock<std::mutex>& guard);
  void reduced(const std::shared_ptr<Running>& call, int segment);
  void crossed(const std::shared_ptr<Running>& call, int segment);

  const std::shared_ptr<Communicator::Impl> local_, across_;
  const int shards_, ranks_;

  std::mutex lock_;  // guards what follows
  std::deque<Entry> queue_;
  std::deque<Crossing> crossings_;
  bool pumping_ = false, more_ = false;
};

}  // namespace ringfold
