// How ranks meet: the good way, with ranks missing, with strangers at the door, with differing
// ranks. Ranks are threads of this process, over loopback.
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <catch2/catch.hpp>

#include "lib/base/auth.h"
#include "lib/comm/control.h"
#include "lib/comm/rendezvous.h"
#include "test/environment.h"
#include "test/ranks.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;
using Catch::Contains;

namespace {

Nanoseconds now() {
  return steady_clock().now();
}

Descriptor connect_here(uint16_t port) {
  auto socket = connect_to(*Address::numeric("127.0.0.1", port), now() + 2s);
  REQUIRE(socket.ok());
  return std::move(*socket);
}

void wait_until_listening(uint16_t port) {
  const Nanoseconds end = now() + 5s;
  while (!connect_to(*Address::numeric("127.0.0.1", port), end).ok()) {
    REQUIRE(now() < end);
    std::this_thread::sleep_for(5ms);
  }
}

Meeting meeting(int rank, int size, uint16_t port, Nanoseconds timeout = 5s) {
  Meeting made;
  made.rank = rank;
  made.size = size;
  made.coordinator = fmt::format("127.0.0.1:{}", port);
  made.key = key_of("a secret");
  made.begun = now();
  made.deadline = made.begun + timeout;
  return made;
}

Joined introduction(int rank) {
  Joined joined;
  joined.member = this_process();
  joined.member.rank = rank;
  joined.agreement = own_agreement();
  return joined;
}

}  // namespace

TEST_CASE("ranks meet and learn everything about each other") {
  const uint16_t port = free_port();
  const int size = GENERATE(2, 3, 7);
  const auto ranks = in_threads(size, [&](int rank) {
    Member mine = this_process();
    mine.cores = 10 + rank;
    mine.addresses = {{"shm", fmt::format("segment {}", rank)},
                      {"ucx", std::string("\0binary\xff", 8) + std::to_string(rank)}};
    return bootstrap(rendezvous(rank, size, port), mine, {{"a wish", "the same"}});
  });
  for (const auto& rank : ranks) {
    REQUIRE(rank.status().to_string() == "ok");
    REQUIRE(rank->control != nullptr);
    REQUIRE(rank->members.size() == static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) {
      const Member& member = rank->members[static_cast<size_t>(r)];
      CHECK(member.rank == r);
      CHECK(member.cores == 10 + r);
      CHECK(member.pid == getpid());
      CHECK(member.host == host_identity());
      CHECK(member.addresses.at(0).second == fmt::format("segment {}", r));
      CHECK(member.addresses.at(1).second == std::string("\0binary\xff", 8) + std::to_string(r));
    }
  }
}

TEST_CASE("one rank alone opens nothing (C55)") {
  const int descriptors = open_descriptors(), threads = running_threads();
  Rendezvous alone;
  const auto met = bootstrap(alone, this_process(), {});
  REQUIRE(met.ok());
  CHECK(met->control == nullptr);
  CHECK(met->members.size() == 1);
  CHECK(open_descriptors() == descriptors);
  CHECK(running_threads() == threads);
}

TEST_CASE("many ranks on one host through one listener (C35)") {
  const Nanoseconds begin = now();
  Ranks ranks = meet(64);
  for (const auto& rank : ranks) REQUIRE(rank.status().to_string() == "ok");
  CHECK(now() - begin < 10s);
  leave_all(ranks);
}

TEST_CASE("missing ranks are named on every rank that is there (C31)") {
  const uint16_t port = free_port();
  const Nanoseconds begin = now();
  const auto ranks = in_threads(3, [&](int i) {
    const int rank = i == 2 ? 4 : i;  // of six: 2, 3 and 5 never come
    return bootstrap(rendezvous(rank, 6, port, 1s), this_process(), {});
  });
  CHECK(now() - begin < 3s);
  CHECK(now() - begin >= 1s);
  for (const auto& rank : ranks) {
    CHECK(rank.status().code() == Code::timeout);
    CHECK_THAT(rank.status().message(), Contains("rank 2, 3, 5 did not come"));
  }
}

TEST_CASE("the shortest patience ends the wait, and all are told why") {
  const uint16_t port = free_port();
  const Nanoseconds begin = now();
  const auto ranks = in_threads(2, [&](int rank) {
    return bootstrap(rendezvous(rank, 3, port, rank == 1 ? 500ms : 60s), this_process(), {});
  });
  CHECK(now() - begin < 3s);
  for (const auto& rank : ranks) {
    CHECK(rank.status().code() == Code::timeout);
    CHECK_THAT(rank.status().message(), Contains("rank 2 did not come"));
  }
}

TEST_CASE("the deadline holds for the first connect too (C33)") {
  const uint16_t port = free_port();
  const Nanoseconds begin = now();
  const auto alone = bootstrap(rendezvous(1, 2, port, 1s), this_process(), {});
  CHECK(now() - begin >= 1s);
  CHECK(now() - begin < 3s);
  CHECK(alone.status().code() == Code::timeout);
  CHECK_THAT(alone.status().message(), Contains(fmt::format("127.0.0.1:{}", port)) &&
                                           Contains("refused") && Contains("rank 1"));
}

TEST_CASE("rank 0 may start late, and waiting for it costs no time (C34)") {
  const uint16_t port = free_port();
  double busy = 0;
  const auto ranks = in_threads(2, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(1500ms);
    auto met = bootstrap(rendezvous(rank, 2, port), this_process(), {});
    timespec used{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    if (rank == 1)
      busy = static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
    return met;
  });
  for (const auto& rank : ranks) CHECK(rank.status().to_string() == "ok");
  CHECK(busy < 0.1);
}

TEST_CASE("a taken port is named") {
  const auto occupant = listen_on(*Address::numeric("127.0.0.1", 0));
  const auto met = bootstrap(rendezvous(0, 2, local_port(*occupant), 1s), this_process(), {});
  CHECK(met.status().code() == Code::system);
  CHECK_THAT(met.status().message(),
             Contains(fmt::format("127.0.0.1:{}", local_port(*occupant))) && Contains("in use"));
}

TEST_CASE("IPv6 works as well (C39)") {
  const auto probe = listen_on(*Address::numeric("::1", 0));
  if (!probe.ok()) return skip("no IPv6 here: " + probe.status().message());
  const uint16_t port = local_port(*probe);
  const_cast<Descriptor&>(*probe).reset();
  const auto ranks = in_threads(2, [&](int rank) {
    Rendezvous where = rendezvous(rank, 2, port);
    where.coordinator = fmt::format("[::1]:{}", port);
    return bootstrap(where, this_process(), {});
  });
  for (const auto& rank : ranks) CHECK(rank.status().to_string() == "ok");
}

TEST_CASE("candidates that do not answer or are somebody else are passed over (C38)") {
  const uint16_t port = free_port(), closed = free_port();
  const auto foreign = listen_on(*Address::numeric("127.0.0.1", 0));
  std::thread web_server([&] {
    pollfd one{foreign->get(), POLLIN, 0};
    poll(&one, 1, 5000);
    auto taken = accept_from(*foreign);
    if (taken.ok() && *taken) {
      REQUIRE(send_all(*taken, std::string(200, 'x'), now() + 1s).ok());
      std::this_thread::sleep_for(100ms);
    }
  });
  const auto ranks = in_threads(2, [&](int rank) {
    Rendezvous where = rendezvous(rank, 2, port);
    if (rank == 1) {
      where.coordinator =
          fmt::format("127.0.0.1:{},127.0.0.1:{},127.0.0.1:{}", closed, local_port(*foreign), port);
    }
    return bootstrap(where, this_process(), {});
  });
  web_server.join();
  for (const auto& rank : ranks) CHECK(rank.status().to_string() == "ok");
}

TEST_CASE("strangers do not disturb start-up (C32)") {
  const std::string secret = GENERATE("a secret", "");
  const uint16_t port = free_port();
  std::vector<Descriptor> silent;
  const auto ranks = in_threads(3, [&](int rank) {
    if (rank == 2) {  // comes when all the strangers have been
      wait_until_listening(port);
      for (int i = 0; i < 20; ++i) {
        connect_here(port);
        for (const std::string& said :
             {std::string("abc"), std::string(64, '\x93'), std::string("RINGFOLD"),
              std::string("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), std::string(5000, '\0')}) {
          const Descriptor stranger = connect_here(port);
          [[maybe_unused]] const Status sent = send_all(stranger, said, now() + 1s);
        }
      }
      // More silent ones than are kept: the oldest make room, long before their time is up.
      for (int i = 0; i < 120; ++i) silent.push_back(connect_here(port));
      char nothing[1];
      CHECK(recv_all(silent.front(), nothing, now() + 5s).code() == Code::peer_lost);
      CHECK(recv_all(silent.back(), nothing, now() + 20ms).code() == Code::timeout);
    }
    Rendezvous where = rendezvous(rank, 3, port);
    where.secret = secret;
    return bootstrap(where, this_process(), {});
  });
  for (const auto& rank : ranks) CHECK(rank.status().to_string() == "ok");
}

TEST_CASE("a wrong secret is refused, told nothing, and mentioned when time is up") {
  const uint16_t port = free_port();
  const auto ranks = in_threads(3, [&](int i) {
    Rendezvous where = rendezvous(i == 0 ? 0 : 1, 2, port, 10s);
    if (i == 1) where.secret = "another secret";
    if (i == 2) std::this_thread::sleep_for(300ms);  // the true rank 1
    return bootstrap(where, this_process(), {});
  });
  CHECK(ranks[0].status().to_string() == "ok");
  CHECK(ranks[1].status().message() == fmt::format("127.0.0.1:{}: authentication failed", port));
  CHECK(ranks[2].status().to_string() == "ok");

  const uint16_t other = free_port();
  const auto alone = in_threads(2, [&](int rank) {
    Rendezvous where = rendezvous(rank, 2, other, 500ms);
    if (rank == 1) where.secret.clear();
    return bootstrap(where, this_process(), {});
  });
  CHECK(alone[0].status().code() == Code::timeout);
  CHECK_THAT(alone[0].status().message(),
             Contains("rank 1 did not come") && Contains("1 connection(s) were refused"));
}

TEST_CASE("a recorded handshake opens nothing") {
  const uint16_t port = free_port();
  Result<Met> met = Status(Code::internal, "not yet");
  std::thread rank_0([&] {
    met = coordinate(meeting(0, 2, port),
                     std::move(*listen_on(*Address::numeric("127.0.0.1", port))), introduction(0));
  });
  wait_until_listening(port);
  JoinerHandshake recorded(key_of("a secret"), Claim{kWireVersion, 1, 2});
  std::string challenge(kChallengeBytes, '\0'), proof;
  {
    const Descriptor first = connect_here(port);
    REQUIRE(send_all(first, recorded.hello(), now() + 1s).ok());
    REQUIRE(recv_all(first, challenge, now() + 1s).ok());
    proof = *recorded.answer(challenge);
  }
  std::string verdict(kVerdictBytes, '\0');
  const Descriptor second = connect_here(port);
  REQUIRE(send_all(second, recorded.hello(), now() + 1s).ok());
  REQUIRE(recv_all(second, challenge, now() + 1s).ok());
  REQUIRE(send_all(second, proof, now() + 1s).ok());
  REQUIRE(recv_all(second, verdict, now() + 1s).ok());
  CHECK(verdict == CoordinatorHandshake::verdict_for_stranger());
  // The true rank still gets in.
  const auto joined = join(meeting(1, 2, port), {{"127.0.0.1", port}}, introduction(1));
  CHECK(joined.status().to_string() == "ok");
  rank_0.join();
  CHECK(met.status().to_string() == "ok");
}

TEST_CASE("a forged handshake opens nothing, and the true rank still gets in") {
  const uint16_t port = free_port();
  Result<Met> met = Status(Code::internal, "not yet");
  std::thread rank_0([&] {
    met = coordinate(meeting(0, 2, port),
                     std::move(*listen_on(*Address::numeric("127.0.0.1", port))), introduction(0));
  });
  wait_until_listening(port);
  JoinerHandshake forger(key_of("a secret"), Claim{kWireVersion, 1, 2});
  for (size_t forged = 0; forged < 4; ++forged) {
    std::string challenge(kChallengeBytes, '\0'), verdict(kVerdictBytes, '\0');
    const Descriptor socket = connect_here(port);
    std::string hello = forger.hello();
    if (forged == 1) hello[12] ^= 1;  // another rank than the proof is for
    REQUIRE(send_all(socket, hello, now() + 1s).ok());
    REQUIRE(recv_all(socket, challenge, now() + 1s).ok());
    if (forged == 2) challenge.back() ^= 1;  // the answer to something else
    std::string proof = *forger.answer(challenge);
    if (forged == 0) proof[5] ^= 1;
    if (forged == 3) proof.assign(kProofBytes, '\0');
    REQUIRE(send_all(socket, proof, now() + 1s).ok());
    REQUIRE(recv_all(socket, verdict, now() + 1s).ok());
    INFO("forgery " << forged);
    CHECK(verdict == CoordinatorHandshake::verdict_for_stranger());
  }
  const auto joined = join(meeting(1, 2, port), {{"127.0.0.1", port}}, introduction(1));
  CHECK(joined.status().to_string() == "ok");
  rank_0.join();
  CHECK(met.status().to_string() == "ok");
}

TEST_CASE("a rank that introduces itself as another than it proved ends start-up") {
  const uint16_t port = free_port();
  Result<Met> liar = Status(Code::internal, "not yet");
  std::thread rank_1([&] {
    liar = join(meeting(1, 3, port, 10s), {{"127.0.0.1", port}}, introduction(2));
  });
  const auto rank_0 = bootstrap(rendezvous(0, 3, port, 10s), this_process(), {});
  rank_1.join();
  for (const Status& status : {rank_0.status(), liar.status()}) {
    CHECK(status.code() == Code::mismatch);
    CHECK_THAT(status.message(), Contains("rank 1 sent a malformed message"));
  }
}

TEST_CASE("a rank started twice ends start-up for all") {
  const uint16_t port = free_port();
  const Nanoseconds begin = now();
  const auto ranks = in_threads(4, [&](int i) {
    const int rank = i == 3 ? 1 : i;  // 0 1 2 1 of 4
    return bootstrap(rendezvous(rank, 4, port, 30s), this_process(), {});
  });
  CHECK(now() - begin < 5s);
  for (const auto& rank : ranks) {
    CHECK(rank.status().code() == Code::mismatch);
    CHECK_THAT(rank.status().message(), Contains("two processes claim rank 1"));
  }
}

TEST_CASE("a differing world size ends start-up for all, also for those who come later") {
  const uint16_t port = free_port();
  const auto ranks = in_threads(3, [&](int rank) {
    if (rank == 2) std::this_thread::sleep_for(500ms);
    return bootstrap(rendezvous(rank, rank == 1 ? 5 : 3, port, 30s), this_process(), {});
  });
  for (const auto& rank : ranks) {
    CHECK(rank.status().code() == Code::mismatch);
    CHECK_THAT(rank.status().message(), Contains("rank 1 was started for 5 ranks, rank 0 for 3"));
  }
}

TEST_CASE("an impossible rank is refused, and the others hear of it") {
  const uint16_t port = free_port();
  const auto ranks = in_threads(2, [&](int i) {
    return bootstrap(rendezvous(i == 0 ? 0 : 2, 2, port, 30s), this_process(), {});
  });
  CHECK(ranks[0].status().code() == Code::mismatch);
  CHECK_THAT(ranks[0].status().message(), Contains("a process claims rank 2 of 2"));
  CHECK(ranks[1].status().code() == Code::invalid_argument);
  for (const auto& [rank, size] : {std::pair(-1, 2), std::pair(0, 0), std::pair(1, 1)}) {
    const auto refused = bootstrap(rendezvous(rank, size, port), this_process(), {});
    CHECK(refused.status().code() == Code::invalid_argument);
  }
}

TEST_CASE("another wire version, older or newer, ends start-up for all and is named") {
  const uint32_t version = GENERATE(kWireVersion - 1, kWireVersion + 1);
  const uint16_t port = free_port();
  Result<Met> newer = Status(Code::internal, "not yet");
  std::thread rank_1([&] {
    Meeting pretended = meeting(1, 2, port, 10s);
    pretended.version = version;
    newer = join(pretended, {{"127.0.0.1", port}}, introduction(1));
  });
  const auto rank_0 = bootstrap(rendezvous(0, 2, port, 10s), this_process(), {});
  rank_1.join();
  for (const Status& status : {rank_0.status(), newer.status()}) {
    CHECK(status.code() == Code::mismatch);
    CHECK_THAT(status.message(), Contains(fmt::format("rank 1 speaks wire version {}", version)));
  }
}

TEST_CASE("what must agree is compared, and a difference is named on every rank") {
  const uint16_t port = free_port();
  const auto ranks = in_threads(5, [&](int rank) {
    return bootstrap(rendezvous(rank, 5, port), this_process(),
                     {{"the piece size", rank == 1 ? "1M" : "64K"}});
  });
  for (const auto& rank : ranks) {
    CHECK(rank.status().code() == Code::mismatch);
    CHECK(rank.status().message() ==
          "the ranks differ in the piece size: \"1M\" on rank 1; \"64K\" on rank 0, 2-4");
  }
}

TEST_CASE("comparing lists every value with its ranks") {
  CHECK(compare({{{"a", "1"}}, {{"a", "1"}}}).ok());
  CHECK(compare({{}, {}}).ok());
  CHECK(compare({{{"a", "1"}}, {}}).message() ==
        "the ranks differ in a: \"1\" on rank 0; nothing on rank 1");
  CHECK(rank_list({0, 2, 3, 5, 6, 7}) == "0, 2, 3, 5-7");
}

TEST_CASE("an authenticated rank that sends nonsense ends start-up with its name") {
  const uint16_t port = free_port();
  const std::string frame = GENERATE(std::string("nonsense"), std::string());
  Result<Bootstrapped> met = Status(Code::internal, "not yet");
  std::thread rank_0([&] { met = bootstrap(rendezvous(0, 2, port, 10s), this_process(), {}); });
  wait_until_listening(port);
  JoinerHandshake handshake(key_of("a secret"), Claim{kWireVersion, 1, 2});
  Descriptor socket = connect_here(port);
  std::string challenge(kChallengeBytes, '\0'), verdict(kVerdictBytes, '\0');
  REQUIRE(send_all(socket, handshake.hello(), now() + 1s).ok());
  REQUIRE(recv_all(socket, challenge, now() + 1s).ok());
  REQUIRE(send_all(socket, *handshake.answer(challenge), now() + 1s).ok());
  REQUIRE(recv_all(socket, verdict, now() + 1s).ok());
  REQUIRE(handshake.conclude(verdict).ok());
  Link link(std::move(socket), handshake.keys().to_coordinator, handshake.keys().to_joiner);
  if (!frame.empty()) {
    link.queue(frame);
    link.write();
  } else {  // a length beyond the limit
    link.write();
    REQUIRE(send_all(link.socket(), "\xff\xff\xff\x7f", now() + 1s).ok());
  }
  link.finish();
  rank_0.join();
  CHECK_FALSE(met.ok());
  CHECK_THAT(met.status().message(), Contains("rank 1"));
  CHECK_THAT(met.status().message(), Contains(frame.empty() ? "beyond the limit" : "malformed"));
}

TEST_CASE("a rank that dies during start-up is named at once on every other") {
  const uint16_t port = free_port();
  const pid_t child = fork();
  if (child == 0) {
    const auto met = bootstrap(rendezvous(1, 4, port), this_process(), {});
    _exit(met.ok() ? 0 : 1);
  }
  std::thread killer([&] {
    std::this_thread::sleep_for(300ms);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  });
  const Nanoseconds begin = now();
  const auto ranks = in_threads(3, [&](int i) {
    if (i == 2) std::this_thread::sleep_for(600ms);  // rank 3 comes when it has happened
    return bootstrap(rendezvous(i == 0 ? 0 : i + 1, 4, port), this_process(), {});
  });
  killer.join();
  CHECK(now() - begin < 4s);
  for (const auto& rank : ranks) {
    CHECK(rank.status().code() == Code::peer_lost);
    CHECK_THAT(rank.status().message(), Contains("rank 1 went away during start-up"));
  }
}

TEST_CASE("a unique id brings threads of one process together, once") {
  Environment environment;
  environment.set("RINGFOLD_INTERFACES", "lo");
  const auto id = Rendezvous::unique_id();
  REQUIRE(id.status().to_string() == "ok");
  const auto start = [&](int rank) -> Result<Bootstrapped> {
    auto where = Rendezvous::from_id(*id, rank, 3);
    if (!where.ok()) return where.status();
    where->timeout = 5s;
    if (rank == 0) std::this_thread::sleep_for(100ms);  // the id listens already
    return bootstrap(*where, this_process(), {});
  };
  Ranks ranks = in_threads(3, start);
  for (const auto& rank : ranks) CHECK(rank.status().to_string() == "ok");
  leave_all(ranks);
  const auto again = start(0);
  CHECK(again.status().code() == Code::invalid_argument);
  CHECK_THAT(again.status().message(), Contains("unique id"));
}

TEST_CASE("two ids in one process do not mix") {
  Environment environment;
  environment.set("RINGFOLD_INTERFACES", "lo");
  const auto first = Rendezvous::unique_id(), second = Rendezvous::unique_id();
  REQUIRE((first.ok() && second.ok()));
  CHECK(first->bytes != second->bytes);
  const auto ranks = in_threads(4, [&](int i) {
    auto where = Rendezvous::from_id(i < 2 ? *first : *second, i % 2, 2);
    where->timeout = 5s;
    Member mine = this_process();
    mine.cores = 1 + i / 2;
    return bootstrap(*where, mine, {});
  });
  for (int i = 0; i < 4; ++i) {
    const auto& rank = ranks[static_cast<size_t>(i)];
    REQUIRE(rank.status().to_string() == "ok");
    for (const Member& member : rank->members) CHECK(member.cores == 1 + i / 2);
  }
}

TEST_CASE("a damaged id is refused") {
  Environment environment;
  environment.set("RINGFOLD_INTERFACES", "lo");
  const auto id = Rendezvous::unique_id();
  REQUIRE(id.ok());
  for (size_t i = 0; i < id->bytes.size(); ++i) {
    UniqueId damaged = *id;
    damaged.bytes[i] ^= 0x40;
    INFO("byte " << i);
    CHECK(Rendezvous::from_id(damaged, 0, 2).status().code() == Code::invalid_argument);
  }
  CHECK_FALSE(Rendezvous::from_id(UniqueId{}, 0, 2).ok());
  CHECK_FALSE(Rendezvous::from_id(*id, 2, 2).ok());
  CHECK_FALSE(Rendezvous::from_id(*id, -1, 2).ok());
}

TEST_CASE("an unusable interface choice is an error that lists what exists (C40)") {
  Environment environment;
  environment.set("RINGFOLD_INTERFACES", "nosuch0");
  const auto id = Rendezvous::unique_id();
  CHECK(id.status().code() == Code::invalid_argument);
  CHECK_THAT(id.status().message(), Contains("nosuch0") && Contains("lo (127.0.0.1)"));
}
