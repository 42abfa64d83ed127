// What the shared-memory transport makes of peers that are broken or hostile.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <random>

#include "test/processes.h"
#include "test/transport_world.h"
#include "transports/shm_host.h"
#include "transports/transports.h"

using namespace ringfold;
using namespace ringfold::shm;
using namespace ringfold::test;

namespace {

constexpr uint32_t kComm = 5, kPrint = 0xabc;

// A segment file as create() makes it, but for what the test changes.
struct Forged {
  off_t bytes = sizeof(Segment);
  bool allocate = true;
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  Geometry geometry;

  [[nodiscard]] Fd make() const {
    Fd fd(memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(ftruncate(fd.get(), bytes) == 0);
    if (allocate) REQUIRE(posix_fallocate(fd.get(), 0, bytes) == 0);
    REQUIRE(pwrite(fd.get(), &geometry, sizeof(geometry), 0) == sizeof(geometry));
    if (seals != 0) REQUIRE(fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
    return fd;
  }
};

// A transport and a peer that is only a socket and a segment, filled by the test.
struct Liar {
  Liar()
      : victim(std::move(*make_shm(0, real_clock))),
        post(std::move(*Post::make())),
        segment(std::move(*Mapping::create(&fd))) {
    REQUIRE(victim->connect(1, post.address().encode()).ok());
    victim->on_lost = [this](Peer, const Status& status) { lost = status; };
    victim->recv(1, {kComm, 0, 0, kPrint}, {got.data() + kGuard, 100'000}, true, &recv);
    writer.attach(segment.get());
  }
  void hand_over() {
    const Address to = *Address::decode(victim->address());
    REQUIRE(post.hand_over(to, fd.get()) == Post::Sent::yes);
  }
  bool found_out() {
    const auto limit = real_clock.now() + 5s;
    may_call_back = true;
    while (lost.ok() && real_clock.now() < limit) victim->progress();
    may_call_back = false;
    return lost.code() == Code::peer_lost;
  }
  [[nodiscard]] bool guarded() const {
    const auto free = [](uint8_t byte) { return byte == 0xee; };
    return std::all_of(got.begin(), got.begin() + kGuard, free) &&
           std::all_of(got.end() - kGuard, got.end(), free);
  }

  static constexpr size_t kGuard = 4096;
  std::unique_ptr<Transport> victim;
  Post post;
  Fd fd;
  Mapping segment;
  RingWriter writer;
  Bytes got = Bytes(100'000 + 2 * kGuard, 0xee);
  Request recv;
  Status lost;
};

Record record(shm::Kind kind, uint64_t total, uint32_t here, uint16_t slot = kNoSlot) {
  Record made;
  made.kind = kind;
  made.total = total;
  made.here = here;
  made.slot = slot;
  made.id = {kComm, 0, 0, kPrint};
  return made;
}

}  // namespace

TEST_CASE("a segment that is not exactly as expected is refused before it is mapped") {
  CHECK(Mapping::adopt(Forged{}.make()).ok());
  Forged forged;
  SECTION("shorter") {
    forged.bytes = sizeof(Segment) - 4096;
  }
  SECTION("longer") {
    forged.bytes = sizeof(Segment) + 4096;
  }
  SECTION("may shrink") {
    forged.seals = F_SEAL_GROW | F_SEAL_SEAL;
  }
  SECTION("no seals") {
    forged.seals = 0;
  }
  SECTION("without memory") {
    forged.allocate = false;
  }
  SECTION("no segment") {
    forged.geometry.magic ^= 1;
  }
  SECTION("another version") {
    forged.geometry.version++;
  }
  SECTION("a larger ring") {
    forged.geometry.ring_bytes *= 2;
  }
  SECTION("more slots") {
    forged.geometry.slots++;
  }
  SECTION("larger slots") {
    forged.geometry.slot_bytes *= 2;
  }
  const auto refused = Mapping::adopt(forged.make());
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().code() == Code::invalid_argument);
}

TEST_CASE("what is no file is refused") {
  int pipe[2];
  REQUIRE(pipe2(pipe, O_CLOEXEC) == 0);
  const Fd reading(pipe[0]), writing(pipe[1]);
  CHECK_FALSE(Mapping::adopt(reading).ok());
  CHECK_FALSE(Mapping::adopt(Fd()).ok());
}

TEST_CASE("a peer that hands over a wrong segment is lost") {
  Liar liar;
  Forged forged;
  forged.geometry.slots = 1;
  liar.fd = forged.make();
  liar.hand_over();
  CHECK(liar.found_out());
  CHECK(liar.recv.failed(Code::peer_lost));
}

TEST_CASE("a letter with another token is ignored") {
  Liar liar;
  Address to = *Address::decode(liar.victim->address());
  to.token[3] ^= 1;
  REQUIRE(liar.post.hand_over(to, liar.fd.get()) == Post::Sent::yes);
  liar.post.say_goodbye(to);
  may_call_back = true;
  for (int i = 0; i < 10'000; ++i) liar.victim->progress();
  may_call_back = false;
  CHECK(liar.lost.ok());
}

TEST_CASE("a peer that breaks the rules of the ring is lost, and nothing is overwritten") {
  Liar liar;
  RingWriter& writer = liar.writer;
  Segment& segment = *liar.segment.get();
  bool publish = true;
  SECTION("more bytes than the message has") {
    writer.write(record(shm::Kind::message, 100'000, kSlotBytes, 0));
    writer.write(record(shm::Kind::part, 100'000, kSlotBytes, 1));
  }
  SECTION("a slot that does not exist") {
    writer.write(record(shm::Kind::message, 100'000, 100, kSlots));
  }
  SECTION("more than a slot") {
    writer.write(record(shm::Kind::message, 100'000, kSlotBytes + 1, 0));
  }
  SECTION("a part of nothing") {
    writer.write(record(shm::Kind::part, 100'000, 100, 0));
  }
  SECTION("parts without bytes") {
    writer.write(record(shm::Kind::message, 100'000, 100, 0));
    writer.write(record(shm::Kind::part, 100'000, 0, 0));
  }
  SECTION("a message within another") {
    writer.write(record(shm::Kind::message, 100'000, 100, 0));
    writer.write(record(shm::Kind::message, 100'000, 100, 1));
  }
  SECTION("a long message unasked") {
    writer.write(record(shm::Kind::message, 1ull << 40, 100, 0));
  }
  SECTION("an answer to nothing") {
    writer.write(record(shm::Kind::answer, 100'000, 100, 0));
  }
  SECTION("unknown kind") {
    writer.write(record(static_cast<shm::Kind>(99), 0, 0));
  }
  SECTION("a skip and nothing behind it") {
    writer.write(record(shm::Kind::skip, 0, 0));
  }
  SECTION("a slot on loan") {
    Request second;
    for (uint32_t index : {0u, 1u}) {
      Record lent = record(shm::Kind::message, 10'000, 10'000, 3);
      lent.id.index = index + 10;
      liar.victim->recv(1, lent.id, {liar.got.data() + Liar::kGuard, 10'000}, true,
                        index == 0 ? &liar.recv : &second);
      writer.write(lent);
    }
    if (writer.publish()) FAIL();
    liar.hand_over();
    CHECK(liar.found_out());
    return;
  }
  SECTION("a tail beyond the ring") {
    segment.tail = kRingBytes + kLine;
    publish = false;
  }
  SECTION("a tail that is no record's") {
    segment.tail = 1;
    publish = false;
  }
  if (publish) CHECK_FALSE(writer.publish());
  liar.hand_over();
  CHECK(liar.found_out());
  CHECK(liar.recv.failed(Code::peer_lost));
  CHECK(liar.guarded());
}

TEST_CASE("random records never harm more than their sender") {
  const unsigned seed = GENERATE(range(1u, 41u));
  CAPTURE(seed);
  Liar liar;
  std::mt19937 random(seed);
  auto* words = reinterpret_cast<uint32_t*>(liar.segment.get()->ring);
  for (size_t i = 0; i < kRingBytes / 4; ++i) words[i] = random();
  for (size_t at = 0; at < kRingBytes; at += kLine) {
    Record made = record(static_cast<shm::Kind>(random() % 10), random() % 5 == 0 ? 100'000 : 20,
                         random() % 3 == 0 ? random() : 20, random() % 2 == 0 ? kNoSlot : 5);
    made.id.index = random() % 3;
    made.number = random() % 3;
    std::memcpy(liar.segment.get()->ring + at, &made, sizeof(made));
  }
  liar.segment.get()->tail = kRingBytes;
  liar.hand_over();
  liar.found_out();
  CHECK(liar.guarded());
}

TEST_CASE("addresses are checked") {
  const std::string good = (*make_shm(0, real_clock))->address();
  REQUIRE(Address::decode(good));
  CHECK(Address::decode(good)->encode() == good);
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string bad = good;
    if (i % 2 == 0) bad.resize(random() % bad.size());
    if (i % 2 == 1) bad[random() % bad.size()] = static_cast<char>(random());
    if (const auto address = Address::decode(bad)) CHECK(address->socket.size() < 108);
  }
}

TEST_CASE("another host, another namespace and a process that is gone are told apart") {
  const auto shm = std::move(*make_shm(0, real_clock));
  Address address = *Address::decode((*make_shm(1, real_clock))->address());
  SECTION("another host") {
    address.host += "1";
    CHECK(shm->connect(1, address.encode()).code() == Code::unsupported);
  }
  SECTION("nobody at the socket any more") {
    CHECK(shm->connect(1, address.encode()).code() == Code::peer_lost);
  }
  SECTION("the pid is another process's by now") {
    address.started++;
    CHECK(shm->connect(1, address.encode()).code() == Code::peer_lost);
  }
  SECTION("no such process") {
    address.pid = 0x7ffffffe;
    CHECK(shm->connect(1, address.encode()).code() == Code::peer_lost);
  }
}

TEST_CASE("a rank that has died before it is connected is lost, to messages too") {
  Shared<std::array<char, 512>> address;
  CHECK(run_ranks(1, 10s, [&](const Rendezvous&) {
          auto gone = make_shm(1, real_clock);
          if (!rank_ok(gone.status())) return 1;
          (*gone)->address().copy(address->data(), 511);
          fflush(nullptr);
          _exit(0);
        }) == "");
  auto shm = make_shm(0, real_clock);
  REQUIRE(shm.ok());
  CHECK((*shm)->connect(1, address->data()).code() == Code::peer_lost);
  Request request;
  int x = 0;
  (*shm)->send(1, MessageId{1, 0, 0, 7}, {&x, sizeof x}, &request);
  may_call_back = true;
  while (!request.ended()) (*shm)->progress();
  may_call_back = false;
  CHECK(request.failed(Code::peer_lost));
}
