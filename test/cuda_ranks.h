// Ranks with device memory, as threads of this process on one emulated device: each with a
// communicator and a stream of its own.
#pragma once

#include <fmt/core.h>

#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ringfold/communicator.h"
#include "test/cuda_device.h"
#include "test/processes.h"

namespace ringfold::test {

// What went wrong, from any thread (Catch2's checks are for one thread only).
class Problems {
 public:
  void add(std::string text) {
    const std::lock_guard guard(lock_);
    if (count_++ < 10) text_ += std::move(text) + "\n";
  }
  void check(bool good, std::string_view what) {
    if (!good) add(std::string(what));
  }
  void ok(const Status& status, std::string_view what) {
    if (!status.ok()) add(fmt::format("{}: {}", what, status.to_string()));
  }
  [[nodiscard]] std::string text() const { return text_; }

 private:
  std::mutex lock_;
  int count_ = 0;
  std::string text_;
};

struct CudaRank {
  const CudaWorld& world;
  Communicator& comm;
  const CudaStream& stream;
  Problems& problems;
  [[nodiscard]] Stream handle() const { return {stream.get()}; }
  [[nodiscard]] size_t rank() const { return static_cast<size_t>(comm.rank()); }
  [[nodiscard]] size_t size() const { return static_cast<size_t>(comm.size()); }
};

// A device with room for the workers of all ranks at once, and a queue for each of their streams:
// what several ranks on one device need. (Without, they time out; see "does not fit" in
// cuda_comm_test.cpp.)
inline EmulatedOptions roomy(uint64_t seed = 1) {
  EmulatedOptions options;
  options.seed = seed;
  options.hardware_queues = 8;
  options.resident_blocks = 32;
  return options;
}

// Runs `body` once a rank; returns what went wrong.
inline std::string run_cuda_ranks(const CudaWorld& world, int ranks, const Options& options,
                                  const std::function<void(const CudaRank&)>& body) {
  Problems problems;
  const uint16_t port = free_port();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      world.enter();
      Rendezvous where;
      where.rank = rank;
      where.size = ranks;
      where.coordinator = fmt::format("127.0.0.1:{}", port);
      where.secret = "a secret";
      auto comm = Communicator::create(where, options);
      problems.ok(comm.status(), fmt::format("rank {} create", rank));
      if (!comm.ok()) return;
      const CudaStream stream(world);
      body({world, *comm, stream, problems});
    });
  for (std::thread& thread : threads) thread.join();
  return problems.text();
}

}  // namespace ringfold::test
