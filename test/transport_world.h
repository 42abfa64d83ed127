// What the transport tests share: the implementations, requests that watch how they end, and ranks
// driven by one thread. A new transport joins by an entry in transport_kinds.cpp.
#pragma once

#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lib/base/base.h"
#include "lib/engine/transport.h"

namespace ringfold::test {

using namespace std::chrono_literals;

class RealClock final : public Clock {
 public:
  [[nodiscard]] Nanoseconds now() const override {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
};
inline RealClock real_clock;

using Ends = std::vector<std::unique_ptr<Transport>>;

struct Kind {
  const char* name;
  std::function<Result<Ends>(int size)> make;  // the ranks' endpoints, not connected yet
  bool lends_the_senders_memory;               // a send completes only when it was given back
  // The receiver fetches long messages, which end in any order, are hardly ever lent, and when
  // cancelled end as soon as the fetching does.
  bool fetches;
  // An endpoint for a process of its own; empty if ranks must share one.
  std::function<Result<std::unique_ptr<Transport>>(Peer me)> make_one;
  size_t rails = 1;  // each with the credit of one
};
std::vector<Kind> kinds();
std::vector<Kind> sleeping_kinds();  // those whose ranks may be threads, which sleep
std::vector<Kind> process_kinds();   // those with make_one

// True while this thread is inside progress() or cancel().
inline thread_local bool may_call_back = false;

// One send or receive, and how it ended.
struct Request : Completion {
  Request() {
    done = [](Completion* self, const Status& status) noexcept {
      Request& request = *static_cast<Request*>(self);
      request.misplaced |= !may_call_back;
      request.calls++;
      request.status = status;
      if (request.then) request.then(request);
    };
  }
  [[nodiscard]] bool ended() const { return calls != 0; }
  [[nodiscard]] bool ok() const { return calls == 1 && !misplaced && status.ok(); }
  [[nodiscard]] bool failed(Code code) const {
    return calls == 1 && !misplaced && status.code() == code;
  }

  Status status;
  int calls = 0;
  bool misplaced = false;  // done() was called from where it may not be
  std::function<void(Request&)> then;
};

template <class Range>
bool all_ended(const Range& requests) {
  for (const auto& request : requests)
    if (!request.ended()) return false;
  return true;
}

struct Note {
  Peer peer;
  MessageId theirs;
  uint32_t expected;
};

// All ranks, driven by the test's own thread.
struct World {
  World(const Kind& kind, int size);
  // All at once, for whoever leaves may wait for an answer of those that stay.
  ~World() {
    std::vector<std::thread> leaving;
    for (auto& end : ends) leaving.emplace_back([&end] { end.reset(); });
    for (std::thread& thread : leaving) thread.join();
  }
  [[nodiscard]] bool here() const { return !ends.empty(); }  // false: skipped
  bool progress(int rank) {
    may_call_back = true;
    const bool moved = ends[rank]->progress();
    may_call_back = false;
    return moved;
  }
  void cancel(int rank, uint32_t comm) {
    may_call_back = true;
    ends[rank]->cancel(comm, {Code::aborted, "cancelled"});
    may_call_back = false;
  }
  // Everybody moves until it holds; false after ten seconds.
  template <class Until>
  bool until(Until holds) {
    const auto limit = real_clock.now() + 10s;
    while (!holds()) {
      for (size_t rank = 0; rank < ends.size(); ++rank)
        if (ends[rank]) progress(static_cast<int>(rank));
      if (real_clock.now() > limit) return false;
    }
    return true;
  }
  // Long enough for whatever is under way to arrive.
  void settle() {
    const auto limit = real_clock.now() + 1ms;
    until([&] { return real_clock.now() > limit; });
  }

  Ends ends;
  std::vector<std::vector<Note>> mismatches;  // by rank
  std::vector<std::vector<Peer>> lost;        // by rank
};

using Bytes = std::vector<uint8_t>;
Bytes pattern(size_t bytes, uint32_t salt = 0);
inline Buffer buffer(Bytes& data) {
  return {data.data(), data.size()};
}
inline bool same(const void* view, const Bytes& expected) {
  return expected.empty() || std::memcmp(view, expected.data(), expected.size()) == 0;
}

}  // namespace ringfold::test
