// The rules of lib/engine/transport.h, run against every implementation.
#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <random>

#include "lib/engine/credits.h"
#include "test/transport_world.h"
#include "transports/transports.h"

using namespace ringfold;
using namespace ringfold::test;

namespace {

constexpr uint32_t kComm = 5, kOther = 6, kPrint = 0xabc;
// In the ring; in a slot; in several; announced; several times all the slots.
constexpr size_t kSizes[] = {0, 8, 4096, 65536, 300'000, 3'000'000, 9'000'001};

}  // namespace

TEST_CASE("messages and receives meet in either order") {
  const Kind kind = GENERATE(from_range(kinds()));
  const size_t bytes = GENERATE(from_range(std::begin(kSizes), std::end(kSizes)));
  const int to = GENERATE(0, 1);  // to oneself, to the other
  const bool early = GENERATE(false, true), lend = GENERATE(false, true);
  CAPTURE(kind.name, bytes, to, early, lend);
  World world(kind, 2);
  if (!world.here()) return;
  auto sent = pattern(bytes), got = Bytes(bytes);
  Request send, recv;
  const MessageId id{kComm, 0, 7, kPrint};
  const auto receive = [&] { world.ends[to]->recv(0, id, buffer(got), lend, &recv); };
  if (!early) receive();
  world.ends[0]->send(to, id, buffer(sent), &send);
  if (early) world.settle();
  if (early) receive();
  REQUIRE(world.until([&] { return recv.ended(); }));
  REQUIRE(recv.ok());
  CHECK(same(recv.view, sent));
  if (recv.lender != nullptr)
    world.ends[to]->give_back(&recv);
  else if (bytes != 0)
    CHECK(recv.view == got.data());
  CHECK(recv.lender == nullptr);
  REQUIRE(world.until([&] { return send.ended(); }));
  CHECK(send.ok());
  CHECK(world.until([&] { return world.ends[0]->flushed(); }));
  CHECK(world.ends[0]->bytes_sent() == bytes);
}

TEST_CASE("messages of one peer and communicator keep their order") {
  const Kind kind = GENERATE(from_range(kinds()));
  const unsigned seed = GENERATE(1u, 2u, 3u);
  CAPTURE(kind.name, seed);
  World world(kind, 2);
  if (!world.here()) return;
  std::mt19937 random(seed);
  constexpr uint32_t kCount = 200;
  std::deque<Request> sends(2 * kCount), recvs(2 * kCount);
  Bytes data(100'000), got(100'000);
  std::vector<uint32_t> arrived[2];
  std::vector<size_t> sizes(2 * kCount);
  for (uint32_t i = 0; i < 2 * kCount; ++i) {
    sizes[i] = random() % 4 == 0 ? random() % data.size() : random() % 100;
    recvs[i].then = [&, i](Request&) { arrived[i % 2].push_back(i); };
    world.ends[1]->recv(0, {kComm + i % 2, i, 0, kPrint}, {got.data(), sizes[i]}, false, &recvs[i]);
  }
  for (uint32_t i = 0; i < 2 * kCount; ++i)
    world.ends[0]->send(1, {kComm + i % 2, i, 0, kPrint}, {data.data(), sizes[i]}, &sends[i]);
  REQUIRE(world.until([&] { return all_ended(recvs) && all_ended(sends); }));
  for (const auto& order : arrived) {
    CHECK(order.size() == kCount);
    if (!kind.fetches) CHECK(std::is_sorted(order.begin(), order.end()));
  }
}

TEST_CASE("a message of another length is a mismatch and writes nothing outside the buffer") {
  const Kind kind = GENERATE(from_range(kinds()));
  const size_t bytes = GENERATE(size_t{100}, size_t{65536}, size_t{200'000}, size_t{2'000'000});
  const long more = GENERATE(-1L, 1L, -100L);
  const bool early = GENERATE(false, true), lend = GENERATE(false, true);
  CAPTURE(kind.name, bytes, more, early, lend);
  World world(kind, 2);
  if (!world.here()) return;
  auto sent = pattern(bytes + more);
  constexpr size_t kGuard = 256;
  Bytes got(bytes + 2 * kGuard, 0xee);
  Request send, recv;
  const MessageId id{kComm, 0, 0, kPrint};
  if (early) {
    world.ends[0]->send(1, id, buffer(sent), &send);
    world.settle();
  }
  world.ends[1]->recv(0, id, {got.data() + kGuard, bytes}, lend, &recv);
  CHECK_FALSE(recv.ended());
  if (!early) world.ends[0]->send(1, id, buffer(sent), &send);
  REQUIRE(world.until([&] { return recv.ended() && send.ended(); }));
  CHECK(recv.failed(Code::mismatch));
  CHECK(recv.lender == nullptr);
  CHECK(send.ok());
  const auto guarded = [](uint8_t byte) { return byte == 0xee; };
  CHECK(std::all_of(got.begin(), got.begin() + kGuard, guarded));
  CHECK(std::all_of(got.end() - kGuard, got.end(), guarded));
  // The way is clear for what follows.
  Request next_send, next_recv;
  world.ends[0]->send(1, {kComm, 1, 0, kPrint}, buffer(sent), &next_send);
  Bytes next(sent.size());
  world.ends[1]->recv(0, {kComm, 1, 0, kPrint}, buffer(next), false, &next_recv);
  REQUIRE(world.until([&] { return next_recv.ended(); }));
  CHECK(next == sent);
}

TEST_CASE("another fingerprint is a mismatch") {
  const Kind kind = GENERATE(from_range(kinds()));
  const size_t bytes = GENERATE(size_t{0}, size_t{100}, size_t{200'000}, size_t{2'000'000});
  const bool early = GENERATE(false, true);
  CAPTURE(kind.name, bytes, early);
  World world(kind, 2);
  if (!world.here()) return;
  auto sent = pattern(bytes);
  Bytes got(bytes, 0xee);
  Request send, recv;
  if (early) {
    world.ends[0]->send(1, {kComm, 0, 0, kPrint + 1}, buffer(sent), &send);
    world.settle();
  }
  world.ends[1]->open(kComm, 0, kPrint);
  world.ends[1]->recv(0, {kComm, 0, 0, kPrint}, buffer(got), true, &recv);
  if (!early) world.ends[0]->send(1, {kComm, 0, 0, kPrint + 1}, buffer(sent), &send);
  REQUIRE(world.until([&] { return recv.ended() && send.ended(); }));
  CHECK(recv.failed(Code::mismatch));
  CHECK(send.ok());
  CHECK(std::all_of(got.begin(), got.end(), [](uint8_t byte) { return byte == 0xee; }));
  REQUIRE(world.mismatches[1].size() == 1);
  CHECK(world.mismatches[1][0].peer == 0);
  CHECK(world.mismatches[1][0].theirs.fingerprint == kPrint + 1);
  CHECK(world.mismatches[1][0].expected == kPrint);
}

TEST_CASE("a contradiction is seen whatever the index of the message") {
  const Kind kind = GENERATE(from_range(kinds()));
  const bool early = GENERATE(false, true);
  CAPTURE(kind.name, early);
  World world(kind, 3);
  if (!world.here()) return;
  Request send, recv;
  Bytes got(10);
  if (!early) world.ends[1]->open(kComm, 4, kPrint);
  world.ends[1]->recv(0, {kComm, 4, 0, kPrint}, buffer(got), false, &recv);
  world.ends[2]->send(1, {kComm, 4, 99, kPrint + 1}, {}, &send);
  world.settle();
  if (early) {
    CHECK(world.mismatches[1].empty());
    world.ends[1]->open(kComm, 4, kPrint);
    CHECK(world.mismatches[1].empty());  // only from progress()
  }
  REQUIRE(world.until([&] { return !world.mismatches[1].empty(); }));
  CHECK(world.mismatches[1][0].peer == 2);
  CHECK(world.mismatches[1][0].theirs.index == 99);
  CHECK_FALSE(recv.ended());
  world.cancel(1, kComm);
  CHECK(recv.failed(Code::aborted));
  CHECK(world.until([&] { return send.ended(); }));
}

TEST_CASE("what comes too late, or was never asked for, is dropped and its sender is free") {
  const Kind kind = GENERATE(from_range(kinds()));
  const size_t bytes = GENERATE(size_t{100}, size_t{200'000}, size_t{2'000'000});
  CAPTURE(kind.name, bytes);
  World world(kind, 2);
  if (!world.here()) return;
  auto data = pattern(bytes);
  Request unasked, late, send, recv;
  world.ends[1]->open(kComm, 0, kPrint);
  world.ends[0]->send(1, {kComm, 0, 0, kPrint}, buffer(data), &unasked);
  world.settle();
  world.ends[1]->finish(kComm, 0);
  world.ends[0]->send(1, {kComm, 0, 1, kPrint}, buffer(data), &late);
  REQUIRE(world.until([&] { return unasked.ended() && late.ended(); }));
  CHECK(unasked.ok());
  CHECK(late.ok());
  CHECK(world.mismatches[1].empty());
  Bytes got(bytes);
  world.ends[1]->open(kComm, 1, kPrint);
  world.ends[0]->send(1, {kComm, 1, 0, kPrint}, buffer(data), &send);
  world.ends[1]->recv(0, {kComm, 1, 0, kPrint}, buffer(got), false, &recv);
  REQUIRE(world.until([&] { return recv.ended(); }));
  CHECK(got == data);
}

// A rank that runs ahead is held back, in its communicator alone, and costs bounded memory.
TEST_CASE("10,000 early messages wait for the receiver and block nobody else") {
  const Kind kind = GENERATE(from_range(kinds()));
  CAPTURE(kind.name);
  World world(kind, 2);
  if (!world.here()) return;
  constexpr uint32_t kCount = 10'000;
  constexpr size_t kBytes = 6000;
  auto data = pattern(kBytes + kCount);
  std::deque<Request> sends(kCount), recvs(kCount);
  for (uint32_t i = 0; i < kCount; ++i)
    world.ends[0]->send(1, {kComm, i, 0, kPrint}, {data.data() + i, kBytes}, &sends[i]);
  world.settle();
  world.settle();
  // What has left the sender is what the receiver may have to keep.
  const auto ok = [](const Request& request) { return request.ok(); };
  const auto left = static_cast<size_t>(std::count_if(sends.begin(), sends.end(), ok));
  CHECK(left <= kCreditMessages);
  CHECK(left * kBytes <= kind.rails * (kCreditBytes + kBytes));
  Request other_send, other_recv;
  Bytes other(100'000), sent = pattern(100'000);
  world.ends[0]->send(1, {kOther, 0, 0, kPrint}, buffer(sent), &other_send);
  world.ends[1]->recv(0, {kOther, 0, 0, kPrint}, buffer(other), false, &other_recv);
  REQUIRE(world.until([&] { return other_recv.ended(); }));
  CHECK(other == sent);
  std::vector<Bytes> got(kCount, Bytes(kBytes));
  for (uint32_t i = 0; i < kCount; ++i)
    world.ends[1]->recv(0, {kComm, i, 0, kPrint}, buffer(got[i]), false, &recvs[i]);
  REQUIRE(world.until([&] { return all_ended(recvs) && all_ended(sends); }));
  for (uint32_t i = 0; i < kCount; ++i) {
    REQUIRE(recvs[i].ok());
    REQUIRE(std::equal(got[i].begin(), got[i].end(), data.begin() + i));
  }
}

TEST_CASE("loans: many at once, given back in any order, hold up nobody") {
  const Kind kind = GENERATE(from_range(kinds()));
  const bool early = GENERATE(false, true);
  CAPTURE(kind.name, early);
  World world(kind, 2);
  if (!world.here()) return;
  std::mt19937 random(7);
  constexpr uint32_t kCount = 100;
  constexpr size_t kBytes = 60'000;
  for (uint32_t round = 0; round < 3; ++round) {
    std::vector<Bytes> data, got(kCount, Bytes(kBytes));
    std::deque<Request> sends(kCount), recvs(kCount);
    for (uint32_t i = 0; i < kCount; ++i) data.push_back(pattern(kBytes, round * 1000 + i));
    const auto post = [&] {
      for (uint32_t i = 0; i < kCount; ++i)
        world.ends[1]->recv(0, {kComm, round, i, kPrint}, buffer(got[i]), true, &recvs[i]);
    };
    if (!early) post();
    for (uint32_t i = 0; i < kCount; ++i)
      world.ends[0]->send(1, {kComm, round, i, kPrint}, buffer(data[i]), &sends[i]);
    if (early) world.settle();
    if (early) post();
    REQUIRE(world.until([&] { return all_ended(recvs); }));
    // While all loans are out: ten times the memory there is, on another communicator.
    Bytes sent = pattern(100'000), other(100'000);
    for (uint32_t i = 0; i < 200; ++i) {
      Request send, recv;
      world.ends[0]->send(1, {kOther, round, i, kPrint}, buffer(sent), &send);
      world.ends[1]->recv(0, {kOther, round, i, kPrint}, buffer(other), false, &recv);
      REQUIRE(world.until([&] { return recv.ended() && send.ended(); }));
      REQUIRE(other == sent);
    }
    std::vector<uint32_t> order(kCount);
    for (uint32_t i = 0; i < kCount; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    int loans = 0;
    for (const uint32_t i : order) {
      REQUIRE(recvs[i].ok());
      REQUIRE(same(recvs[i].view, data[i]));
      if (recvs[i].lender == nullptr) continue;
      ++loans;
      world.ends[1]->give_back(&recvs[i]);
    }
    CHECK((loans > 0 || kind.fetches));
    REQUIRE(world.until([&] { return all_ended(sends); }));
  }
}

TEST_CASE("cancel completes what is pending of the communicator, and nothing else") {
  const Kind kind = GENERATE(from_range(kinds()));
  const unsigned seed = GENERATE(range(1u, 9u));
  CAPTURE(kind.name, seed);
  World world(kind, 2);
  if (!world.here()) return;
  std::mt19937 random(seed);
  constexpr uint32_t kCount = 120;
  std::vector<Bytes> data(kCount), got(kCount), other_data(kCount), other_got(kCount);
  std::deque<Request> sends(kCount), recvs(kCount), other_sends(kCount), other_recvs(kCount);
  for (uint32_t i = 0; i < kCount; ++i) {
    const size_t bytes = i % 40 == 3 ? 5'000'000 : random() % (i % 3 == 0 ? 300'000 : 1000);
    data[i] = pattern(bytes, i);
    got[i].resize(bytes);
    other_data[i] = pattern(random() % 50'000, i + 1);
    other_got[i].resize(other_data[i].size());
  }
  const auto moves = [&] {
    for (uint32_t i = random() % 3; i-- > 0;) world.progress(static_cast<int>(random() % 2));
  };
  for (uint32_t i = 0; i < kCount; ++i) {
    // Some receives never find a message, some messages no receive.
    if (random() % 4 != 0)
      world.ends[1]->recv(0, {kComm, i, 0, kPrint}, buffer(got[i]), random() % 2 == 0, &recvs[i]);
    else
      recvs[i].calls = 1;
    if (random() % 4 != 0)
      world.ends[0]->send(1, {kComm, i, 0, kPrint}, buffer(data[i]), &sends[i]);
    else
      sends[i].calls = 1;
    world.ends[0]->send(1, {kOther, i, 0, kPrint}, buffer(other_data[i]), &other_sends[i]);
    world.ends[1]->recv(0, {kOther, i, 0, kPrint}, buffer(other_got[i]), false, &other_recvs[i]);
    moves();
  }
  const int first = static_cast<int>(random() % 2);
  world.cancel(first, kComm);
  for (uint32_t i = random() % 4; i-- > 0;) world.progress(static_cast<int>(random() % 2));
  world.cancel(1 - first, kComm);
  if (kind.fetches) REQUIRE(world.until([&] { return all_ended(recvs); }));
  for (Request& recv : recvs) REQUIRE(recv.calls != 0);  // nobody touches a receiver's buffer
  for (Request& recv : recvs)
    if (recv.lender != nullptr) world.ends[1]->give_back(&recv);
  REQUIRE(world.until(
      [&] { return all_ended(sends) && all_ended(other_sends) && all_ended(other_recvs); }));
  for (uint32_t i = 0; i < kCount; ++i) {
    CHECK((sends[i].ok() || sends[i].failed(Code::aborted)));
    CHECK((recvs[i].ok() || recvs[i].failed(Code::aborted)));
    REQUIRE(other_recvs[i].ok());
    REQUIRE(other_sends[i].ok());
    REQUIRE(other_got[i] == other_data[i]);
  }
  Request after_send, after_recv;  // for ever
  world.ends[0]->send(1, {kComm, kCount, 0, kPrint}, buffer(data[0]), &after_send);
  world.ends[1]->recv(0, {kComm, kCount, 0, kPrint}, buffer(got[0]), false, &after_recv);
  REQUIRE(world.until([&] { return after_send.ended() && after_recv.ended(); }));
  CHECK(after_send.failed(Code::aborted));
  CHECK(after_recv.failed(Code::aborted));
}

TEST_CASE("a cancelled message whose memory a peer reads completes when it was given back") {
  for (const Kind& kind : kinds()) {
    if (!kind.lends_the_senders_memory) continue;
    CAPTURE(kind.name);
    World world(kind, 2);
    auto data = pattern(1000);
    Bytes got(1000);
    Request send, recv;
    world.ends[0]->send(1, {kComm, 0, 0, kPrint}, buffer(data), &send);
    world.ends[1]->recv(0, {kComm, 0, 0, kPrint}, buffer(got), true, &recv);
    REQUIRE(world.until([&] { return recv.ended(); }));
    REQUIRE(recv.lender != nullptr);
    world.cancel(0, kComm);
    world.settle();
    CHECK_FALSE(send.ended());
    world.ends[1]->give_back(&recv);
    REQUIRE(world.until([&] { return send.ended(); }));
    CHECK(send.failed(Code::aborted));
  }
}

TEST_CASE("callbacks may send, receive and give back") {
  const Kind kind = GENERATE(from_range(kinds()));
  const size_t bytes = GENERATE(size_t{8}, size_t{50'000});
  CAPTURE(kind.name, bytes);
  World world(kind, 2);
  if (!world.here()) return;
  // Every receive answers with a send and posts the next receive.
  constexpr uint32_t kRounds = 500;
  Bytes data = pattern(bytes), got[2] = {Bytes(bytes), Bytes(bytes)};
  Request sends[2][kRounds], recvs[2];
  uint32_t round[2] = {0, 0};
  const auto receive = [&](int rank) {
    recvs[rank].calls = 0;
    world.ends[rank]->recv(1 - rank, {kComm, round[rank], 0, kPrint}, buffer(got[rank]), true,
                           &recvs[rank]);
  };
  for (int rank : {0, 1})
    recvs[rank].then = [&, rank](Request& recv) {
      if (recv.lender != nullptr) world.ends[rank]->give_back(&recv);
      const uint32_t now = round[rank]++;
      if (rank == 1)
        world.ends[1]->send(0, {kComm, now, 0, kPrint}, buffer(data), &sends[1][now]);
      else if (now + 1 < kRounds)
        world.ends[0]->send(1, {kComm, now + 1, 0, kPrint}, buffer(data), &sends[0][now + 1]);
      if (now + 1 < kRounds) receive(rank);
    };
  receive(0);
  receive(1);
  world.ends[0]->send(1, {kComm, 0, 0, kPrint}, buffer(data), &sends[0][0]);
  REQUIRE(world.until(
      [&] { return round[0] == kRounds && all_ended(sends[0]) && all_ended(sends[1]); }));
  CHECK_FALSE((recvs[0].misplaced || recvs[1].misplaced));
}

// Three ranks, any sizes, early and late, lent or not, in both directions at once.
TEST_CASE("random traffic arrives whole") {
  const Kind kind = GENERATE(from_range(kinds()));
  const unsigned seed = GENERATE(range(1u, 9u));
  CAPTURE(kind.name, seed);
  World world(kind, 3);
  if (!world.here()) return;
  std::mt19937 random(seed);
  struct Message {
    int from, to;
    MessageId id;
    Bytes data, got;
    Request send, recv;
    bool lend;
  };
  std::deque<Message> messages(300);
  std::deque<Message*> to_send, to_recv;
  std::vector<Message*> lent;
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < messages.size(); ++i) {
    Message& m = messages[i];
    m.from = static_cast<int>(random() % 3);
    m.to = static_cast<int>(random() % 3);
    m.id = {kComm + i % 3, i, i % 7, kPrint};
    const uint32_t scale = random() % 100;
    m.data = pattern(random() % (scale < 50 ? 100 : scale < 98 ? 200'000 : 4'000'000), i);
    m.got.resize(m.data.size());
    m.lend = random() % 2 == 0;
    m.recv.then = [&](Request& recv) {
      if (recv.lender != nullptr) lent.push_back(&m);
    };
    bytes += m.data.size();
    to_send.push_back(&m);
    to_recv.push_back(&m);
  }
  REQUIRE(world.until([&] {
    if (!to_send.empty() && random() % 2 == 0) {
      Message& m = *to_send.front();
      to_send.pop_front();
      world.ends[m.from]->send(m.to, m.id, buffer(m.data), &m.send);
    }
    if (!to_recv.empty() && random() % 2 == 0) {
      Message& m = *to_recv.front();
      to_recv.pop_front();
      world.ends[m.to]->recv(m.from, m.id, buffer(m.got), m.lend, &m.recv);
    }
    if (!lent.empty() && (random() % 4 == 0 || to_recv.empty())) {
      const size_t which = random() % lent.size();
      Message& m = *lent[which];
      lent.erase(lent.begin() + static_cast<long>(which));
      REQUIRE(same(m.recv.view, m.data));
      world.ends[m.to]->give_back(&m.recv);
    }
    return to_recv.empty() && to_send.empty() && lent.empty() &&
           std::all_of(messages.begin(), messages.end(),
                       [](const Message& m) { return m.send.ended() && m.recv.ended(); });
  }));
  for (const Message& m : messages) {
    REQUIRE(m.send.ok());
    REQUIRE(m.recv.ok());
    if (m.recv.view == m.got.data()) REQUIRE(m.got == m.data);
  }
  uint64_t counted = 0;
  for (const auto& end : world.ends) counted += end->bytes_sent();
  CHECK(counted == bytes);
}

TEST_CASE("a rank that leaves is lost, after what it has sent") {
  const Kind kind = GENERATE(from_range(kinds()));
  CAPTURE(kind.name);
  World world(kind, 3);
  if (!world.here()) return;
  auto data = pattern(kind.fetches ? 5'000 : 50'000);
  Bytes got(data.size()), more(2'000'000);
  Request said, heard, never, unread, early, hello, greeted;
  std::deque<Request> ahead(300);
  world.ends[1]->recv(0, {kComm, 9, 0, kPrint}, buffer(got), false, &early);
  world.ends[0]->send(1, {kComm, 9, 0, kPrint}, buffer(data), &said);
  world.ends[2]->send(1, {kComm, 9, 0, kPrint}, {}, &hello);  // whoever spoke with it will notice
  world.ends[1]->recv(2, {kComm, 9, 0, kPrint}, {}, false, &greeted);
  REQUIRE(world.until([&] { return said.ended() && early.ended() && greeted.ended(); }));
  if (!kind.lends_the_senders_memory) {
    Request last;
    world.ends[1]->send(0, {kComm, 0, 0, kPrint}, buffer(data), &last);
    const auto gone = [&] { return last.ended() && world.ends[1]->flushed(); };
    if (kind.fetches) REQUIRE(world.until(gone));
    while (!gone()) world.progress(1);
  }
  world.ends[0]->recv(1, {kComm, 1, 0, kPrint}, buffer(more), false, &never);
  world.ends[0]->send(1, {kComm, 2, 0, kPrint}, buffer(more), &unread);
  for (uint32_t i = 0; i < ahead.size(); ++i)
    world.ends[0]->send(1, {kOther, i, 0, kPrint}, {}, &ahead[i]);
  world.ends[1].reset();
  REQUIRE(world.until([&] {
    return !world.lost[0].empty() && !world.lost[2].empty() && unread.ended() && all_ended(ahead);
  }));
  CHECK(world.lost[0] == std::vector<Peer>{1});
  CHECK(never.failed(Code::peer_lost));
  CHECK(unread.failed(Code::peer_lost));
  CHECK(ahead.back().failed(Code::peer_lost));
  if (!kind.lends_the_senders_memory) {
    world.ends[0]->recv(1, {kComm, 0, 0, kPrint}, buffer(got), false, &heard);
    REQUIRE(world.until([&] { return heard.ended(); }));
    CHECK(heard.ok());
    CHECK(same(heard.view, data));
  }
  Request after_send, after_recv;
  world.ends[0]->send(1, {kComm, 3, 0, kPrint}, buffer(data), &after_send);
  world.ends[0]->recv(1, {kComm, 3, 0, kPrint}, buffer(got), false, &after_recv);
  REQUIRE(world.until([&] { return after_send.ended() && after_recv.ended(); }));
  CHECK(after_send.failed(Code::peer_lost));
  CHECK(after_recv.failed(Code::peer_lost));
  CHECK(world.lost[0].size() == 1);
  CHECK(world.lost[2].size() == 1);
}

TEST_CASE("an address that is none, of another host or of nobody is refused") {
  for (const Kind& kind : kinds()) {
    CAPTURE(kind.name);
    auto ends = kind.make(2);
    if (!ends.ok()) continue;
    for (const char* text : {"", " ", "nonsense", "ringfold-shm1 a b c d e", "loopback x"})
      CHECK((*ends)[0]->connect(1, text).code() == Code::invalid_argument);
  }
}

TEST_CASE("loopback: a killed rank is lost, a mute one is silent, a corrupt fingerprint is seen") {
  const auto hub = std::make_shared<LoopbackHub>();
  const Faults faults = GENERATE(Faults{}, Faults{3, 50us, true});
  World world({"loopback",
               [&](int size) -> Result<Ends> {
                 Ends ends;
                 for (int rank = 0; rank < size; ++rank)
                   ends.push_back(make_loopback(hub, rank, real_clock, faults));
                 return ends;
               },
               true,
               false,
               {}},
              3);
  auto data = pattern(100);
  Bytes got(100);
  Request sent, first, second, unread;

  hub->corrupt_next_fingerprint(1);
  world.ends[0]->recv(1, {kComm, 0, 0, kPrint}, buffer(got), false, &first);
  world.ends[1]->send(0, {kComm, 0, 0, kPrint}, buffer(data), &sent);
  REQUIRE(world.until([&] { return first.ended() && sent.ended(); }));
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
  REQUIRE(world.until([&] { return heard.ended(); }));
  CHECK(heard.ok());
  CHECK(got == data);

  hub->mute(2);
  Request swallowed, waiting;
  world.ends[2]->send(0, {kComm, 0, 5, kPrint}, buffer(data), &swallowed);
  world.ends[0]->recv(2, {kComm, 0, 5, kPrint}, buffer(got), false, &waiting);
  world.settle();
  CHECK_FALSE(waiting.ended());
  CHECK_FALSE(swallowed.ended());
  world.cancel(2, kComm);
  CHECK(swallowed.failed(Code::aborted));
}
