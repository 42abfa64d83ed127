// Messages that only refer to device memory, over a loopback. The "device memory" is any: nobody
// reads it here.
#include "transports/references.h"

#include <array>
#include <catch2/catch.hpp>
#include <cstring>

#include "transports/transports.h"

using namespace ringfold;

namespace {

constexpr uint32_t kComm = 5, kOther = 6, kPrint = 77;

struct Request : Completion {
  Request() {
    done = [](Completion* self, const Status& why) noexcept {
      auto& request = static_cast<Request&>(*self);
      ++request.calls;
      request.status = why;
    };
  }
  int calls = 0;
  Status status;
};

// Two ranks, each with a pool that the other knows at another address.
struct Pair {
  static constexpr size_t kBytes = 4096;
  struct End {
    std::unique_ptr<References> references;  // destroyed after what is below it
    std::unique_ptr<Transport> below;
  };
  std::shared_ptr<LoopbackHub> hub = std::make_shared<LoopbackHub>();
  std::array<End, 2> ends;
  std::array<std::array<std::byte, kBytes>, 2> pools, images;

  Pair() {
    for (int me = 0; me < 2; ++me) {
      ends[me].below = make_loopback(hub, me, steady_clock());
      ends[me].references = std::make_unique<References>(*ends[me].below);
    }
    for (int me = 0; me < 2; ++me) {
      const int peer = 1 - me;
      REQUIRE(ends[me].below->connect(peer, fmt::format("loopback {}", peer)).ok());
      REQUIRE(ends[me].references->connect(peer, "").ok());
      ends[me].references->know(peer, reinterpret_cast<uintptr_t>(pools[peer].data()), kBytes,
                                images[peer].data());
    }
  }
  References& operator[](size_t rank) { return *ends[rank].references; }
  Buffer of(size_t rank, size_t offset, size_t bytes) {
    return {pools[rank].data() + offset, bytes, MemoryKind::cuda};
  }
  static Buffer anywhere(size_t bytes) { return {nullptr, bytes, MemoryKind::cuda}; }
  void progress() {
    for (int turn = 0; turn < 10; ++turn)
      for (End& end : ends) {
        end.below->progress();
        end.references->progress();
      }
  }
};

// A transport that does nothing but remember: the test plays the rest.
struct Remembering final : Transport {
  struct Asked {
    MessageId id;
    Buffer buffer;
    Completion* completion;
    void finish(const Status& why = {}) const { completion->done(completion, why); }
  };
  [[nodiscard]] const char* name() const override { return "remembering"; }
  [[nodiscard]] bool reaches(MemoryKind) const override { return true; }
  [[nodiscard]] std::string address() const override { return ""; }
  [[nodiscard]] Status connect(Peer, std::string_view) override { return {}; }
  void send(Peer, const MessageId& id, Buffer buffer, Completion* completion) override {
    sends.push_back({id, buffer, completion});
  }
  void recv(Peer, const MessageId& id, Buffer buffer, bool, Completion* completion) override {
    receives.push_back({id, buffer, completion});
  }
  void give_back(Completion*) override {}
  void open(uint32_t, uint32_t, uint32_t) override {}
  void finish(uint32_t, uint32_t) override {}
  void cancel(uint32_t, const Status&) override {}
  bool progress() override { return false; }
  int arm() override { return -1; }

  std::vector<Asked> sends, receives;
};

MessageId id(uint32_t index, uint32_t comm = kComm) {
  return {comm, 0, index, kPrint};
}

}  // namespace

TEST_CASE("a receive is lent the sender's memory, and the send ends when it is given back") {
  Pair pair;
  Request sent, received;
  pair[0].send(1, id(0), pair.of(0, 100, 64), &sent);
  pair.progress();
  CHECK(sent.calls == 0);
  pair[1].recv(0, id(0), Pair::anywhere(64), true, &received);
  pair.progress();
  REQUIRE(received.calls == 1);
  CHECK(received.status.ok());
  CHECK(received.view == pair.images[0].data() + 100);
  CHECK(received.lender != nullptr);
  CHECK(sent.calls == 0);  // it is being read
  CHECK(pair[0].bytes_sent() == 64);
  pair[1].give_back(&received);
  CHECK(received.lender == nullptr);
  pair.progress();
  REQUIRE(sent.calls == 1);
  CHECK(sent.status.ok());
}

TEST_CASE("loans come back in any order, in both directions at once") {
  Pair pair;
  constexpr size_t kMany = 100;
  std::array<std::array<Request, kMany>, 2> sent, received;
  for (uint32_t i = 0; i < kMany; ++i)
    for (size_t me = 0; me < 2; ++me) {
      pair[me].send(static_cast<Peer>(1 - me), id(i), pair.of(me, i, 8), &sent[me][i]);
      pair[me].recv(static_cast<Peer>(1 - me), id(i), Pair::anywhere(8), true, &received[me][i]);
    }
  pair.progress();
  for (size_t n = 0; n < kMany; ++n) {
    const size_t i = n * 37 % kMany;
    for (size_t me = 0; me < 2; ++me) {
      REQUIRE(received[me][i].calls == 1);
      CHECK(received[me][i].view == pair.images[1 - me].data() + i);
      pair[me].give_back(&received[me][i]);
    }
    pair.progress();
    CHECK(sent[0][i].calls == 1);
    CHECK(sent[1][i].calls == 1);
    if (n + 1 < kMany) CHECK(sent[0][(n + 1) * 37 % kMany].calls == 0);
  }
}

TEST_CASE("host memory and empty messages go through as they are") {
  Pair pair;
  std::array<std::byte, 16> from{std::byte{3}}, to{};
  Request sent, received, nothing_sent, nothing;
  pair[0].send(1, id(0), {from.data(), from.size()}, &sent);
  pair[1].recv(0, id(0), {to.data(), to.size()}, false, &received);
  pair[0].send(1, id(1), {}, &nothing_sent);
  pair[1].recv(0, id(1), {}, true, &nothing);
  pair.progress();
  CHECK(sent.calls == 1);
  CHECK(received.calls == 1);
  CHECK(to == from);
  CHECK(nothing.calls == 1);
  CHECK(nothing_sent.calls == 1);
  // A loan of the transport below is given back to it.
  Request lent_sent, lent;
  pair[0].send(1, id(2), {from.data(), from.size()}, &lent_sent);
  pair[1].recv(0, id(2), {to.data(), to.size()}, true, &lent);
  pair.progress();
  REQUIRE(lent.lender != nullptr);
  CHECK(lent.view == from.data());
  pair[1].give_back(&lent);
  pair.progress();
  CHECK(lent_sent.calls == 1);
}

TEST_CASE("only memory that was made known can be referred to, and only in its length") {
  Pair pair;
  const auto refused = [&](uint32_t index, Buffer buffer, size_t expected, Code code) {
    Request sent, received;
    pair[0].send(1, id(index), buffer, &sent);
    pair[1].recv(0, id(index), Pair::anywhere(expected), true, &received);
    pair.progress();
    REQUIRE(received.calls == 1);
    CHECK(received.status.code() == code);
    CHECK(received.lender == nullptr);
    pair[0].cancel(kComm, Status(Code::aborted, "over"));
  };
  SECTION("elsewhere") {
    refused(0, pair.of(1, 0, 8), 8, Code::internal);
  }
  SECTION("before it") {
    refused(0, {pair.pools[0].data() - 1, 8, MemoryKind::cuda}, 8, Code::internal);
  }
  SECTION("beyond its end") {
    refused(0, pair.of(0, Pair::kBytes - 4, 8), 8, Code::internal);
  }
  SECTION("another length") {
    refused(0, pair.of(0, 0, 8), 16, Code::mismatch);
  }
  SECTION("forgotten") {
    pair[1].forget(0, reinterpret_cast<uintptr_t>(pair.pools[0].data()));
    refused(0, pair.of(0, 0, 8), 8, Code::internal);
  }
}

TEST_CASE("a cancelled communicator ends what is lent out, and others go on") {
  Pair pair;
  Request unheard, lent, read, other, other_read, late;
  pair[0].send(1, id(0), pair.of(0, 0, 8), &unheard);
  pair[0].send(1, id(1), pair.of(0, 8, 8), &lent);
  pair[0].send(1, id(0, kOther), pair.of(0, 16, 8), &other);
  pair[1].recv(0, id(1), Pair::anywhere(8), true, &read);
  pair[1].recv(0, id(0, kOther), Pair::anywhere(8), true, &other_read);
  pair.progress();
  REQUIRE(read.calls == 1);
  const Status why(Code::aborted, "enough");
  const bool below_first = GENERATE(true, false);
  if (below_first) pair.ends[0].below->cancel(kComm, why);
  pair[0].cancel(kComm, why);
  if (!below_first) pair.ends[0].below->cancel(kComm, why);
  pair.progress();
  CHECK(unheard.calls == 1);
  CHECK(lent.calls == 1);
  CHECK(lent.status.code() == Code::aborted);
  CHECK(other.calls == 0);
  pair[0].send(1, id(2), pair.of(0, 0, 8), &late);
  pair[1].give_back(&read);  // of no interest any more
  pair[1].give_back(&other_read);
  pair.progress();
  CHECK(late.calls == 1);
  CHECK(late.status.code() == Code::aborted);
  CHECK(lent.calls == 1);
  REQUIRE(other.calls == 1);
  CHECK(other.status.ok());
}

TEST_CASE("with a peer that is lost, sends end that it was reading") {
  Pair pair;
  Request sent, read, later;
  pair[0].send(1, id(0), pair.of(0, 0, 8), &sent);
  pair[1].recv(0, id(0), Pair::anywhere(8), true, &read);
  pair.progress();
  REQUIRE(read.calls == 1);
  pair.hub->kill(1);
  pair.progress();
  REQUIRE(sent.calls == 1);
  CHECK(sent.status.code() == Code::peer_lost);
  pair[0].send(1, id(1), pair.of(0, 0, 8), &later);
  pair.progress();
  CHECK(later.status.code() == Code::peer_lost);
}

TEST_CASE("what comes of a send before the transport below is through with it, comes after that") {
  Remembering below;
  References references(below);
  REQUIRE(references.connect(1, "").ok());
  REQUIRE(below.receives.size() == 1);  // for a ticket
  std::array<std::byte, 8> memory{};
  Request sent;
  references.send(1, id(0), {memory.data(), memory.size(), MemoryKind::cuda}, &sent);
  REQUIRE(below.sends.size() == 1);
  const Status why(Code::aborted, "enough"), gone(Code::peer_lost, "gone");
  Code expected = Code::ok;
  SECTION("it is given back") {
    std::array<uint64_t, 3> reference{};
    REQUIRE(below.sends[0].buffer.bytes == sizeof(reference));
    std::memcpy(reference.data(), below.sends[0].buffer.data, sizeof(reference));
    std::memcpy(below.receives[0].buffer.data, &reference[2], sizeof(uint64_t));
    below.receives[0].finish();
    CHECK(below.receives.size() == 2);  // for the next
  }
  SECTION("its communicator is cancelled") {
    references.cancel(kComm, why);
    expected = Code::aborted;
  }
  SECTION("its peer is lost") {
    below.receives[0].finish(gone);
    expected = Code::peer_lost;
  }
  CHECK(sent.calls == 0);  // the reference may still be read
  below.sends[0].finish();
  REQUIRE(sent.calls == 1);
  CHECK(sent.status.code() == expected);
}
