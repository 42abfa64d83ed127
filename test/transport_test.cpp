// The rules of lib/engine/transport.h, run against every implementation. A new transport joins by
// one entry in kinds().
#include "lib/engine/transport.h"

#include <fmt/core.h>
#include <poll.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "test/skip.h"
#include "transports/transports.h"

using namespace ringfold;
using namespace std::chrono_literals;

namespace {

class RealClock final : public Clock {
 public:
  [[nodiscard]] Nanoseconds now() const override {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
};
RealClock real_clock;

// Makes the endpoints of `size` ranks, all in this process and not connected yet.
struct Kind {
  const char* name;
  std::function<Result<std::vector<std::unique_ptr<Transport>>>(int size)> make;
};

std::vector<Kind> kinds() {
  const auto loopback = [](Faults faults) {
    return [faults](int size) -> Result<std::vector<std::unique_ptr<Transport>>> {
      const auto hub = std::make_shared<LoopbackHub>();
      std::vector<std::unique_ptr<Transport>> ends;
      for (int rank = 0; rank < size; ++rank)
        ends.push_back(make_loopback(hub, rank, real_clock, faults));
      return ends;
    };
  };
  const auto shm = [](int size) -> Result<std::vector<std::unique_ptr<Transport>>> {
    std::vector<std::unique_ptr<Transport>> ends;
    for (int rank = 0; rank < size; ++rank) {
      auto made = make_shm(rank, real_clock);
      if (!made.ok()) return made.status();
      ends.push_back(std::move(*made));
    }
    return ends;
  };
  return {
      {"shm", shm},
      {"loopback", loopback({})},
      {"loopback, late", loopback({1, 20us, false})},
      {"loopback, late and reordered", loopback({2, 20us, true})},
  };
}

thread_local bool may_call_back = false;

// One send or receive and how it ended.
struct Request : Completion {
  Request() {
    done = [](Completion* self, const Status& status) noexcept {
      Request& op = *static_cast<Request*>(self);
      op.misplaced |= !may_call_back;
      op.calls++;
      op.status = status;
      if (op.then) op.then(op);
    };
  }
  [[nodiscard]] bool ok() const { return calls == 1 && !misplaced && status.ok(); }
  [[nodiscard]] bool failed(Code code) const {
    return calls == 1 && !misplaced && status.code() == code;
  }

  Status status;
  int calls = 0;
  bool misplaced = false;  // done() was called from where it may not be
  std::function<void(Request&)> then;
};

struct Note {
  Peer peer;
  MessageId theirs;
  uint32_t expected;
};

// All ranks, driven by the test's own thread.
struct World {
  World(const Kind& kind, int size) {
    auto made = kind.make(size);
    if (!made.ok()) {
      ringfold::test::skip(fmt::format("{}: {}", kind.name, made.status().to_string()));
      return;
    }
    ends = std::move(*made);
    mismatches.resize(ends.size());
    lost.resize(ends.size());
    for (int rank = 0; rank < size; ++rank) {
      for (int peer = 0; peer < size; ++peer)
        REQUIRE(ends[rank]->connect(peer, ends[peer]->address()).ok());
      ends[rank]->on_mismatch = [this, rank](Peer peer, const MessageId& theirs,
                                             uint32_t expected) {
        mismatches[rank].push_back({peer, theirs, expected});
      };
      ends[rank]->on_lost = [this, rank](Peer peer, const Status&) { lost[rank].push_back(peer); };
    }
  }
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
  // Everybody moves until it holds; false after five seconds.
  template <class Until>
  bool until(Until done) {
    const auto limit = real_clock.now() + 5s;
    while (!done()) {
      for (size_t rank = 0; rank < ends.size(); ++rank)
        if (ends[rank]) progress(static_cast<int>(rank));
      if (real_clock.now() > limit) return false;
    }
    return true;
  }
  // Long enough for whatever is under way to arrive.
  void settle() {
    const auto limit = real_clock.now() + 2ms;
    until([&] { return real_clock.now() > limit; });
  }

  std::vector<std::unique_ptr<Transport>> ends;
  std::vector<std::vector<Note>> mismatches;
  std::vector<std::vector<Peer>> lost;
};

std::vector<uint8_t> pattern(size_t bytes, uint32_t salt = 0) {
  std::vector<uint8_t> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>((i + salt) * 2654435761u >> 24);
  return data;
}

Buffer buffer(std::vector<uint8_t>& data) {
  return {data.data(), data.size()};
}

constexpr uint32_t kComm = 5, kOther = 6, kPrint = 0xabc;

}  // namespace

TEST_CASE("messages and receives meet in either order") {
  const Kind kind = GENERATE(from_range(kinds()));
  const size_t bytes = GENERATE(size_t{0}, size_t{8}, size_t{1000}, size_t{65536}, size_t{300000});
  const int to = GENERATE(0, 1);  // to oneself, to the other
  const bool early = GENERATE(false, true), lend = GENERATE(false, true);
  CAPTURE(kind.name, bytes, to, early, lend);
  World world(kind, 2);
  if (world.ends.empty()) return;
  auto sent = pattern(bytes), got = std::vector<uint8_t>(bytes);
  Request send, recv;
  const MessageId id{kComm, 0, 7, kPrint};
  const auto receive = [&] { world.ends[to]->recv(0, id, buffer(got), lend, &recv); };
  if (!early) receive();
  world.ends[0]->send(to, id, buffer(sent), &send);
  world.settle();
  if (early) receive();
  REQUIRE(world.until([&] { return recv.calls != 0; }));
  REQUIRE(recv.ok());
  if (bytes != 0) CHECK(std::memcmp(recv.view, sent.data(), bytes) == 0);
  if (recv.lender != nullptr)
    world.ends[to]->give_back(&recv);
  else if (bytes != 0)
    CHECK(recv.view == got.data());
  CHECK(recv.lender == nullptr);
  REQUIRE(world.until([&] { return send.calls != 0; }));
  CHECK(send.ok());
  CHECK(world.until([&] { return world.ends[0]->flushed(); }));
  CHECK(world.ends[0]->bytes_sent() == bytes);
}

TEST_CASE("loopback: a killed rank is lost, a mute one is silent, a corrupt fingerprint is seen") {
  const auto hub = std::make_shared<LoopbackHub>();
  const Faults faults = GENERATE(Faults{}, Faults{3, 50us, true});
  Kind kind{"loopback", [&](int size) -> Result<std::vector<std::unique_ptr<Transport>>> {
              std::vector<std::unique_ptr<Transport>> ends;
              for (int rank = 0; rank < size; ++rank)
                ends.push_back(make_loopback(hub, rank, real_clock, faults));
              return ends;
            }};
  World world(kind, 3);
  auto data = pattern(100), got = std::vector<uint8_t>(100);
  Request sent, first, second, unread;

  hub->corrupt_next_fingerprint(1);
  world.ends[0]->recv(1, {kComm, 0, 0, kPrint}, buffer(got), false, &first);
  world.ends[1]->send(0, {kComm, 0, 0, kPrint}, buffer(data), &sent);
  REQUIRE(world.until([&] { return first.calls != 0 && sent.calls != 0; }));
  CHECK(first.failed(Code::mismatch));
  CHECK(world.mismatches[0].size() == 1);

  Request last_words, heard;
  world.ends[1]->send(0, {kComm, 0, 1, kPrint}, buffer(data), &last_words);
  world.ends[0]->send(1, {kComm, 0, 2, kPrint}, buffer(data), &unread);
  world.ends[0]->recv(1, {kComm, 0, 3, kPrint}, buffer(got), false, &second);
  hub->kill(1);
  REQUIRE(world.until([&] { return !world.lost[0].empty() && !world.lost[2].empty(); }));
  CHECK(world.lost[0] == std::vector<Peer>{1});
  CHECK(second.failed(Code::peer_lost));
  CHECK(unread.failed(Code::peer_lost));
  world.ends[0]->recv(1, {kComm, 0, 1, kPrint}, buffer(got), false, &heard);
  REQUIRE(world.until([&] { return heard.calls != 0; }));
  CHECK(heard.ok());
  CHECK(got == data);

  hub->mute(2);
  Request lost, waiting;
  world.ends[2]->send(0, {kComm, 0, 5, kPrint}, buffer(data), &lost);
  world.ends[0]->recv(2, {kComm, 0, 5, kPrint}, buffer(got), false, &waiting);
  world.settle();
  CHECK(waiting.calls == 0);
  CHECK(lost.calls == 0);
  world.cancel(2, kComm);
  CHECK(lost.failed(Code::aborted));
}
