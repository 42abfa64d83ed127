#include "lib/engine/credits.h"

#include <catch2/catch.hpp>
#include <random>

using namespace ringfold;

namespace {
const auto nothing = [](int) { FAIL("nothing may go"); };
}

TEST_CASE("a sender waits at the limit of messages and goes on in order") {
  CreditAccounts<int> accounts;
  for (int i = 0; i < static_cast<int>(kCreditMessages); ++i)
    REQUIRE(accounts.charge(1, 5, 0, 0, i));
  CHECK_FALSE(accounts.charge(1, 5, 0, 0, 1000));
  CHECK_FALSE(accounts.charge(1, 5, 0, 0, 1001));
  CHECK(accounts.charge(1, 6, 0, 0, 0));  // neither another communicator
  CHECK(accounts.charge(2, 5, 0, 0, 0));  // nor another peer waits with it
  accounts.credited(1, 6, {1, 0}, nothing);
  std::vector<int> went;
  accounts.credited(1, 5, {1, 0}, [&](int item) { went.push_back(item); });
  CHECK(went == std::vector<int>{1000});
  accounts.credited(1, 5, {70, 0}, [&](int item) { went.push_back(item); });
  CHECK(went == std::vector<int>{1000, 1001});
  CHECK(accounts.waiting() == 0);
}

TEST_CASE("a sender waits at the limit of bytes; a small message does not overtake") {
  CreditAccounts<int> accounts;
  REQUIRE(accounts.charge(1, 5, 0, kCreditBytes / 2, 0));
  REQUIRE(accounts.charge(1, 5, 0, kCreditBytes / 2, 1));
  CHECK_FALSE(accounts.charge(1, 5, 0, 1, 2));
  CHECK_FALSE(accounts.charge(1, 5, 0, 0, 3));
  std::vector<int> went;
  accounts.credited(1, 5, {1, kCreditBytes / 2}, [&](int item) { went.push_back(item); });
  CHECK(went == std::vector<int>{2, 3});
}

TEST_CASE("a message longer than the limit goes when little is outstanding") {
  CreditAccounts<int> accounts;
  REQUIRE(accounts.charge(1, 5, 0, kCreditBatchBytes + 1, 0));
  CHECK_FALSE(accounts.charge(1, 5, 0, 10 * kCreditBytes, 1));
  int went = 0;
  accounts.credited(1, 5, {0, 1}, [&](int) { ++went; });
  CHECK(went == 1);
}

// A receiver may wait for the older before it calls the newer.
TEST_CASE("an operation that runs ahead does not use up what an older one needs") {
  CreditAccounts<int> accounts;
  accounts.open(5, 7);
  accounts.open(5, 8);
  const auto most = static_cast<int>(kCreditMessages);
  for (int i = 0; i < most; ++i) REQUIRE(accounts.charge(1, 5, 8, 0, 800 + i));
  CHECK_FALSE(accounts.charge(1, 5, 8, 0, 1800));
  for (int i = 0; i < most; ++i) REQUIRE(accounts.charge(1, 5, 7, 0, 700 + i));
  CHECK_FALSE(accounts.charge(1, 5, 7, 0, 1700));  // not for ever
  std::vector<int> went;
  const auto note = [&](int item) { went.push_back(item); };
  accounts.credited(1, 5, {1, 0}, note);
  CHECK(went == std::vector<int>{1700});
  accounts.finish(5, 7, [&](Peer, int item) { note(item); });
  CHECK(went == std::vector<int>{1700});
  accounts.credited(1, 5, {1, 0}, note);  // now 8 is the oldest
  CHECK(went == std::vector<int>{1700, 1800});

  REQUIRE(accounts.charge(2, 5, 9, kCreditBytes, 900));
  CHECK_FALSE(accounts.charge(2, 5, 9, 1, 901));
  CHECK(accounts.charge(2, 5, 8, 1, 801));
}

TEST_CASE("an operation that has become the oldest goes on at once") {
  CreditAccounts<int> accounts;
  accounts.open(5, 7);
  accounts.open(5, 8);
  for (int i = 0; i < static_cast<int>(kCreditMessages); ++i)
    REQUIRE(accounts.charge(1, 5, 8, 0, i));
  CHECK_FALSE(accounts.charge(1, 5, 8, 0, 1800));
  std::vector<std::pair<Peer, int>> went;
  accounts.finish(5, 7, [&](Peer peer, int item) { went.emplace_back(peer, item); });
  CHECK(went == std::vector{std::pair(Peer{1}, 1800)});
  CHECK(accounts.waiting() == 0);
}

TEST_CASE("cancelled and lost accounts are forgotten") {
  CreditAccounts<int> accounts;
  for (int i = 0; i < static_cast<int>(kCreditMessages); ++i) {
    REQUIRE(accounts.charge(1, 5, 0, 0, i));
    REQUIRE(accounts.charge(2, 6, 0, 0, i));
  }
  CHECK_FALSE(accounts.charge(1, 5, 0, 0, 100));
  CHECK_FALSE(accounts.charge(2, 6, 0, 0, 200));
  std::vector<int> dropped;
  accounts.cancel(5, [&](int item) { dropped.push_back(item); });
  CHECK(dropped == std::vector<int>{100});
  accounts.credited(1, 5, {100, 0}, nothing);
  accounts.lose(2, [&](int item) { dropped.push_back(item); });
  CHECK(dropped == std::vector<int>{100, 200});
  CHECK(accounts.waiting() == 0);
}

// A receiver that asks for whatever has arrived, sooner or later and in any order, gets everything,
// and never holds more than the limit and one message that went while little was outstanding.
TEST_CASE("credit always comes back and the receiver's memory is bounded") {
  const unsigned seed = GENERATE(1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u);
  CAPTURE(seed);
  std::mt19937 random(seed);
  constexpr uint64_t kLargest = 3 * kCreditBytes;
  struct Message {
    int number;
    uint64_t bytes;
  };
  CreditAccounts<Message> accounts;
  CreditReturns returns;
  std::vector<Message> held;
  std::vector<int> order;
  uint64_t held_bytes = 0, most = 0;
  const auto arrive = [&](const Message& message) {
    held.push_back(message);
    order.push_back(message.number);
    held_bytes += message.bytes;
    most = std::max(most, held_bytes);
    REQUIRE(held.size() <= kCreditMessages);
  };
  constexpr int kMessages = 5000;
  for (int sent = 0; sent < kMessages || !held.empty();) {
    const bool send = sent < kMessages && random() % 3 != 0;
    if (send) {
      const uint64_t scale = random() % 4 == 0 ? kLargest : 2000;
      const Message message{sent++, random() % scale};
      if (accounts.charge(3, 9, 0, message.bytes, message)) arrive(message);
    } else if (!held.empty()) {
      const size_t which = random() % held.size();
      const Message message = held[which];
      held.erase(held.begin() + static_cast<long>(which));
      held_bytes -= message.bytes;
      if (const auto credit = returns.matched(3, 9, message.bytes))
        accounts.credited(3, 9, *credit, arrive);
    }
  }
  CHECK(accounts.waiting() == 0);
  REQUIRE(order.size() == kMessages);
  CHECK(std::is_sorted(order.begin(), order.end()));
  CHECK(most <= kCreditBatchBytes + kLargest);
  CHECK(most > kCreditBytes / 2);
}
