// The only thread of an engine, and how waiting callers take its place.
//
// Somebody must poll the engine. While nobody waits, a thread does: it polls while anything moves,
// spins for a moment, then sleeps until a descriptor, the doorbell or the next deadline. A caller
// that waits for its operation drives the engine itself instead, in the same way, and the thread
// stands aside; so a blocking call crosses no thread, and a waiting rank sleeps rather than spins.
//
// Threads: all functions from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "lib/base/cores.h"
#include "lib/engine/engine.h"

namespace ringfold {

class EngineThread {
 public:
  // `spin`: how long to poll without news before sleeping, where news used to come in that time; 0
  // when the ranks of this host outnumber its cores. Installs itself as engine.on_request.
  EngineThread(Engine& engine, Nanoseconds spin);
  ~EngineThread();  // stops polling; REQUIRES that nobody helps
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // Drives the engine until `done` is true, or the clock passes `until`, or another caller already
  // drives it: then the caller shall sleep until it is told. Returns whether it drove.
  bool help(const std::atomic<bool>& done, Nanoseconds until);

  // Whether what this caller's thread submits next will be waited for at once, as its last
  // operation was: then the thread need not be woken for it. If it comes otherwise it is late by a
  // moment.
  static void caller_waits(bool expected) { caller_waits_ = expected; }

 private:
  template <class Stop>
  bool drive(std::unique_lock<std::mutex>& driver, Stop stop, Nanoseconds until);
  void park();
  void run();
  void ring();

  static thread_local bool caller_waits_;

  Engine& engine_;
  const Nanoseconds spin_;
  int doorbell_ = -1;  // eventfd: ends the sleep of whoever drives

  std::mutex driver_;     // held by whoever polls; released while asleep
  Nanoseconds patience_;  // of the driver: all of spin_, or little where it did not pay of late
  Courtesy courtesy_;     // the driver's
  std::atomic<int> helpers_{0};
  std::atomic<uint32_t> helped_{0};
  std::atomic<int> asleep_{0};  // drivers inside poll(2)
  std::atomic<uint32_t> meeting_{0};
  std::atomic<bool> thread_drives_{false};
  std::atomic<bool> stop_{false};

  std::mutex aside_;  // the thread waits here while others drive
  std::condition_variable changed_;
  bool parked_ = false;  // under aside_
  std::thread thread_;
};

}  // namespace ringfold
