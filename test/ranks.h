// Ranks as threads of this process that meet over loopback.
#pragma once

#include <dirent.h>

#include <catch2/catch.hpp>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lib/base/base.h"
#include "lib/base/net.h"
#include "lib/comm/control.h"

namespace ringfold::test {

// A port of 127.0.0.1 that was free a moment ago.
inline uint16_t free_port() {
  const auto listener = listen_on(*Address::numeric("127.0.0.1", 0));
  REQUIRE(listener.ok());
  return local_port(*listener);
}

inline Rendezvous rendezvous(int rank, int size, uint16_t port,
                             Nanoseconds timeout = std::chrono::seconds(20)) {
  Rendezvous where;
  where.rank = rank;
  where.size = size;
  where.coordinator = "127.0.0.1:" + std::to_string(port);
  where.secret = "a secret";
  where.timeout = timeout;
  return where;
}

using Ranks = std::vector<Result<Bootstrapped>>;

// Runs `one` in a thread for each i below `count`; results by i.
inline Ranks in_threads(int count, const std::function<Result<Bootstrapped>(int)>& one) {
  std::vector<std::optional<Result<Bootstrapped>>> results(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] { results[static_cast<size_t>(i)].emplace(one(i)); });
  }
  for (std::thread& thread : threads) thread.join();
  Ranks ranks;
  for (auto& result : results) ranks.push_back(std::move(*result));
  return ranks;
}

inline Ranks meet(int size, uint16_t port = free_port()) {
  return in_threads(
      size, [=](int rank) { return bootstrap(rendezvous(rank, size, port), this_process(), {}); });
}

// All ranks say goodbye at once, as at the end of a program.
inline void leave_all(Ranks& ranks) {
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    if (rank.ok() && rank->control) threads.emplace_back([&] { rank->control->leave(); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Drives the controls until `done`, at most `limit`; false if it passed.
inline bool drive(std::vector<Control*> controls, const std::function<bool()>& done,
                  Nanoseconds limit = std::chrono::seconds(5)) {
  const Nanoseconds end = steady_clock().now() + limit;
  while (!done()) {
    if (steady_clock().now() >= end) return false;
    bool moved = false;
    for (Control* control : controls) moved = control->progress() || moved;
    if (!moved) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline int entries_of(const char* directory) {
  DIR* const open = opendir(directory);
  int count = 0;
  while (readdir(open) != nullptr) ++count;
  closedir(open);
  return count;
}
inline int open_descriptors() {
  return entries_of("/proc/self/fd");
}
inline int running_threads() {
  return entries_of("/proc/self/task");
}

}  // namespace ringfold::test
