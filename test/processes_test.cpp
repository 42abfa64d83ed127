#include "test/processes.h"

#include <atomic>
#include <set>

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;
using Catch::Contains;

namespace {

[[noreturn]] void sleep_for_ever() {
  for (;;) pause();
}

bool exists(pid_t pid) {
  return ::kill(pid, 0) == 0;
}

bool becomes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000; ++i) {
    if (condition()) return true;
    usleep(5000);
  }
  return false;
}

}  // namespace

TEST_CASE("each rank runs once and knows itself and the meeting point") {
  struct Seen {
    int rank, size;
    std::array<char, 64> coordinator, secret;
  };
  const Shared<std::array<Seen, 4>> seen;
  CHECK(run_ranks(4, 10s, [&](const Rendezvous& me) {
          Seen& mine = (*seen)[static_cast<size_t>(me.rank)];
          mine.rank = me.rank + 1;
          mine.size += me.size;
          me.coordinator.copy(mine.coordinator.data(), 63);
          me.secret.copy(mine.secret.data(), 63);
          return 0;
        }) == "");
  for (int rank = 0; rank < 4; ++rank) {
    const Seen& one = (*seen)[static_cast<size_t>(rank)];
    CHECK(one.rank == rank + 1);
    CHECK(one.size == 4);
    CHECK_THAT(one.coordinator.data(), Contains("127.0.0.1:"));
    CHECK(one.coordinator == (*seen)[0].coordinator);
    CHECK(std::string(one.secret.data()).size() == 32);
    CHECK(one.secret == (*seen)[0].secret);
  }
}

TEST_CASE("two runs have different secrets") {
  const Shared<std::array<std::array<char, 64>, 2>> secrets;
  for (size_t run = 0; run < 2; ++run) {
    CHECK(run_ranks(1, 10s, [&](const Rendezvous& me) {
            me.secret.copy((*secrets)[run].data(), 63);
            return 0;
          }) == "");
  }
  CHECK((*secrets)[0] != (*secrets)[1]);
}

TEST_CASE("the free port can be listened on") {
  const uint16_t port = free_port();
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  CHECK(listen(fd, 1) == 0);
  close(fd);
}

TEST_CASE("a failed check reaches the parent with expression, values and place") {
  const std::string report = run_ranks(3, 10s, [](const Rendezvous& me) {
    RANK_CHECK(me.size == 3);
    const int answer = 40 + me.rank;
    if (!RANK_CHECK(answer != 41)) rank_fail("in words");
    return 0;
  });
  CHECK_THAT(report, Contains("rank 1 ended with 99"));
  CHECK_THAT(report, Contains("processes_test.cpp:"));
  CHECK_THAT(report, Contains("answer != 41 is false: 41 != 41"));
  CHECK_THAT(report, Contains("in words"));
  CHECK_THAT(report, !Contains("rank 0") && !Contains("rank 2") && !Contains("me.size"));
}

TEST_CASE("a failed status reaches the parent in its own words") {
  const std::string report = run_ranks(1, 10s, [](const Rendezvous&) {
    RANK_CHECK(rank_ok(Status()));
    rank_ok(Status(Code::timeout, "rank 2 did not answer"));
    return 0;
  });
  CHECK_THAT(report, Contains("timeout: rank 2 did not answer"));
  CHECK_THAT(report, Contains("processes_test.cpp:"));
}

TEST_CASE("return values, exceptions and crashes are told apart") {
  Processes ranks(4, [](const Rendezvous& me) {
    if (me.rank == 1) return 7;
    if (me.rank == 2) throw std::runtime_error("out of luck");
    if (me.rank == 3) abort();
    return 0;
  });
  const std::vector<Outcome> outcomes = ranks.wait(10s);
  REQUIRE(outcomes.size() == 4);
  CHECK(outcomes[0].ok());
  CHECK(outcomes[0].to_string() == "ok");
  CHECK(outcomes[1].exit_code == 7);
  CHECK_FALSE(outcomes[1].ok());
  CHECK_FALSE(outcomes[2].ok());
  CHECK_THAT(outcomes[2].text, Contains("out of luck"));
  CHECK(outcomes[3].signal == SIGABRT);
  CHECK(outcomes[3].exit_code == -1);
  CHECK_THAT(outcomes[3].to_string(), Contains("signal 6"));
}

TEST_CASE("a crashing rank dies of its signal at once, without a report of the test runner") {
  CHECK(run_ranks(1, 10s, [](const Rendezvous&) {
          for (const int number : {SIGABRT, SIGSEGV, SIGTERM}) {
            RANK_CHECK((signal(number, SIG_DFL) == SIG_DFL));
          }
          return 0;
        }) == "");
}

TEST_CASE("a flood of failures neither blocks the rank nor the parent") {
  const std::string report = run_ranks(2, 10s, [](const Rendezvous&) {
    const std::string padding(8000, '.');
    for (int i = 0; i < 1000; ++i) rank_fail(padding);
    return 0;
  });
  CHECK_THAT(report, Contains("and 980 more") && Contains("rank 0") && Contains("rank 1"));
}

TEST_CASE("ranks that hang are killed at the deadline and named; the others are not blamed") {
  const auto start = std::chrono::steady_clock::now();
  Processes ranks(3, [](const Rendezvous& me) {
    if (me.rank == 1) sleep_for_ever();
    return 0;
  });
  const pid_t hanging = ranks.pid(1);
  const std::vector<Outcome> outcomes = ranks.wait(200ms);
  CHECK(std::chrono::steady_clock::now() - start < 5s);
  CHECK(outcomes[0].ok());
  CHECK(outcomes[2].ok());
  CHECK(outcomes[1].hung);
  CHECK_FALSE(outcomes[1].ok());
  CHECK(outcomes[1].to_string() == "did not end in time");
  CHECK_FALSE(exists(hanging));
}

TEST_CASE("the parent can kill, stop and resume a rank") {
  const Shared<std::array<std::atomic<int>, 3>> beats;
  const auto beat = [&](int rank) { return (*beats)[static_cast<size_t>(rank)].load(); };
  Processes ranks(3, [&](const Rendezvous& me) {
    for (; beat(0) >= 0; usleep(1000)) ++(*beats)[static_cast<size_t>(me.rank)];
    return 0;
  });
  for (int rank = 0; rank < 3; ++rank) CHECK(becomes_true([&] { return beat(rank) > 0; }));

  ranks.kill(1);
  ranks.stop(2);
  usleep(50000);
  const int killed = beat(1), stopped = beat(2), running = beat(0);
  usleep(50000);
  CHECK(beat(1) == killed);
  CHECK(beat(2) == stopped);
  CHECK(beat(0) > running);
  ranks.resume(2);
  CHECK(becomes_true([&] { return beat(2) > stopped; }));

  (*beats)[0] = -1000000;
  const std::vector<Outcome> outcomes = ranks.wait(10s);
  CHECK(outcomes[0].ok());
  CHECK(outcomes[1].signal == SIGKILL);
  CHECK_FALSE(outcomes[1].hung);
  CHECK(outcomes[2].ok());
  ranks.kill(0);  // of one that has ended: nothing happens
}

TEST_CASE("a stopped rank is killed at the deadline, too") {
  Processes ranks(1, [](const Rendezvous&) -> int { sleep_for_ever(); });
  const pid_t pid = ranks.pid(0);
  ranks.stop(0);
  CHECK(ranks.wait(50ms)[0].hung);
  CHECK_FALSE(exists(pid));
}

TEST_CASE("no rank outlives the object, waited for or not") {
  std::set<pid_t> pids;
  try {
    Processes ranks(3, [](const Rendezvous&) -> int { sleep_for_ever(); });
    for (int rank = 0; rank < 3; ++rank) pids.insert(ranks.pid(rank));
    throw std::logic_error("as a failed REQUIRE does");
  } catch (const std::logic_error&) {
  }
  CHECK(pids.size() == 3);
  for (const pid_t pid : pids) CHECK_FALSE(exists(pid));
}

TEST_CASE("no rank outlives the program, even when that is killed") {
  // This process adopts the orphans, so that it can see them end.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const Shared<std::array<std::atomic<pid_t>, 2>> orphans;
  Processes programs(1, [&](const Rendezvous&) -> int {
    Processes ranks(2, [&](const Rendezvous& me) -> int {
      (*orphans)[static_cast<size_t>(me.rank)] = getpid();
      sleep_for_ever();
    });
    ranks.wait(60s);
    return 0;
  });
  CHECK(becomes_true([&] { return (*orphans)[0] > 0 && (*orphans)[1] > 0; }));
  programs.kill(0);
  CHECK(programs.wait(10s)[0].signal == SIGKILL);
  for (const std::atomic<pid_t>& orphan : *orphans) {
    REQUIRE(orphan > 0);
    int status = 0;
    CHECK(becomes_true([&] { return waitpid(orphan, &status, WNOHANG) == orphan; }));
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGKILL);
  }
  prctl(PR_SET_CHILD_SUBREAPER, 0);
}
