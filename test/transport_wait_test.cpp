// Sleeping and waking, and peers that end: transports driven by threads and processes of their own.
#include <fmt/core.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <filesystem>
#include <random>
#include <string_view>
#include <thread>

#include "test/skip.h"
#include "test/transport_world.h"

using namespace ringfold;
using namespace ringfold::test;

namespace {

constexpr uint32_t kComm = 5, kPrint = 0xabc;

// Drives one endpoint and sleeps whenever nothing moves. False if nothing came for five seconds,
// as when a wake-up was lost.
template <class Until>
bool sleep_until(Transport& end, Until holds) {
  while (!holds()) {
    may_call_back = true;
    const bool moved = end.progress();
    may_call_back = false;
    if (moved) continue;
    pollfd sleep{end.arm(), POLLIN, 0};
    if (sleep.fd >= 0 && poll(&sleep, 1, 5000) == 0) return false;
  }
  return true;
}

// Rank 0 sends, rank 1 answers with the same; sizes and pauses from the seed, the same on both.
// Empty, or what went wrong.
std::string ping_pong(Transport& end, int rank, uint32_t rounds, unsigned seed, bool pauses) {
  std::mt19937 random(seed), own(seed + static_cast<unsigned>(rank));
  for (uint32_t i = 0; i < rounds; ++i) {
    const uint32_t scale = random() % 100;
    const size_t bytes = random() % (scale < 90 ? 64 : scale < 99 ? 100'000 : 3'000'000);
    Bytes data = pattern(bytes, i), got(bytes);
    Request send, recv;
    const auto start_send = [&] {
      end.send(1 - rank, {kComm, i, 0, kPrint}, {data.data(), bytes}, &send);
    };
    if (rank == 0) start_send();
    // Sometimes the other is asleep by now, sometimes just about to be.
    if (pauses && own() % 4 == 0) std::this_thread::sleep_for(Nanoseconds(own() % 60'000));
    end.recv(1 - rank, {kComm, i, 0, kPrint}, {got.data(), bytes}, false, &recv);
    if (!sleep_until(end, [&] { return recv.ended(); })) return fmt::format("stuck in round {}", i);
    if (!recv.ok()) return fmt::format("round {}: {}", i, recv.status.to_string());
    if (got != data) return fmt::format("round {}: wrong bytes", i);
    if (rank == 1) start_send();
    if (!sleep_until(end, [&] { return send.ended(); })) return fmt::format("send {} stuck", i);
    if (!send.ok()) return fmt::format("send {}: {}", i, send.status.to_string());
  }
  if (!sleep_until(end, [&] { return end.flushed(); })) return "never flushed";
  return {};
}

// A process of its own at the other end, which runs `body` and exits with 0 if that is empty.
class Pair {
 public:
  Pair(const Kind& kind, const std::function<std::string(Transport&)>& body) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
    child_ = fork();
    if (child_ == 0) {
      close(ends[0]);
      std::string wrong = meet(kind, 1, ends[1]);
      if (wrong.empty()) wrong = body(*end_);
      end_.reset();
      if (!wrong.empty()) fmt::print(stderr, "child: {}\n", wrong);
      _exit(wrong.empty() ? 0 : 1);
    }
    close(ends[1]);
    problem = meet(kind, 0, ends[0]);
    close(ends[0]);
  }
  ~Pair() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    exit_status();
  }
  // Waits for the child to end by itself.
  int exit_status() {
    int status = -1;
    if (!end_) waitpid(child_, &status, 0);
    // Who leaves may wait for this end to say that everything has arrived.
    while (end_ && waitpid(child_, &status, WNOHANG) == 0) {
      may_call_back = true;
      end_->progress();
      may_call_back = false;
      std::this_thread::sleep_for(100us);
    }
    child_ = 0;
    return status;
  }
  [[nodiscard]] Transport& end() { return *end_; }
  [[nodiscard]] pid_t child() const { return child_; }

  std::string problem;  // why there is no pair

 private:
  std::string meet(const Kind& kind, Peer me, int other) {
    auto made = kind.make_one(me);
    if (!made.ok()) return made.status().to_string();
    end_ = std::move(*made);
    std::string address = end_->address();  // any bytes; its length, and all the same length
    const size_t length = address.size();
    address.insert(0, reinterpret_cast<const char*>(&length), sizeof(length));
    address.resize(4096);
    std::string theirs(address.size(), 0);
    if (write(other, address.data(), address.size()) != static_cast<ssize_t>(address.size()) ||
        recv(other, theirs.data(), theirs.size(), MSG_WAITALL) !=
            static_cast<ssize_t>(theirs.size()))
      return "addresses could not be exchanged";
    size_t their_length = 0;
    std::memcpy(&their_length, theirs.data(), sizeof(their_length));
    return end_->connect(1 - me, theirs.substr(sizeof(their_length), their_length)).ok()
               ? ""
               : "not connected";
  }

  std::unique_ptr<Transport> end_;
  pid_t child_ = 0;
};

// Entries of a folder whose name contains `part`: others may be at work beside us.
size_t entries(const char* folder, std::string_view part) {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().filename().string().find(part) != std::string::npos) ++count;
  return count;
}

}  // namespace

// The two moments at which a wake-up could be lost, met on purpose.
TEST_CASE("news just before arm() and just after it are both seen") {
  const Kind kind = GENERATE(from_range(sleeping_kinds()));
  const bool after = GENERATE(false, true);
  CAPTURE(kind.name, after);
  World world(kind, 2);
  if (!world.here()) return;
  Request first, heard;  // connects: later the sender need not move for its message to go
  world.ends[0]->send(1, {kComm, 5, 0, kPrint}, {}, &first);
  world.ends[1]->recv(0, {kComm, 5, 0, kPrint}, {}, false, &heard);
  REQUIRE(world.until([&] { return first.ended() && heard.ended(); }));
  world.settle();
  for (uint32_t i = 0; i < 5; ++i) {
    Bytes data = pattern(100), got(100);
    Request send, recv;
    world.ends[1]->recv(0, {kComm, i, 0, kPrint}, buffer(got), false, &recv);
    world.settle();
    const auto start = [&] { world.ends[0]->send(1, {kComm, i, 0, kPrint}, buffer(data), &send); };
    if (!after) start();
    pollfd sleep{world.ends[1]->arm(), POLLIN, 0};
    if (after) start();
    while (!recv.ended()) {
      if (sleep.fd >= 0) REQUIRE(poll(&sleep, 1, 2000) == 1);
      world.progress(1);
      sleep.fd = world.ends[1]->arm();
    }
    CHECK(recv.ok());
    REQUIRE(world.until([&] { return send.ended(); }));
  }
}

TEST_CASE("shm: space that comes just before arm() and just after it is seen") {
  const bool after = GENERATE(false, true);
  const size_t bytes = GENERATE(size_t{100}, size_t{60'000});  // the ring is full; the slots are
  CAPTURE(after, bytes);
  World world(process_kinds().front(), 2);
  if (!world.here()) return;
  constexpr uint32_t kCount = 4000;
  Bytes data = pattern(bytes), got(bytes);
  std::deque<Request> sends(kCount), recvs(kCount);
  for (uint32_t i = 0; i < kCount; ++i) {  // many communicators, so that no credit is in the way
    world.ends[1]->recv(0, {kComm + i, 0, 0, kPrint}, buffer(got), false, &recvs[i]);
    world.ends[0]->send(1, {kComm + i, 0, 0, kPrint}, buffer(data), &sends[i]);
  }
  for (int i = 0; i < 200; ++i) world.progress(0);
  REQUIRE_FALSE(all_ended(sends));
  const auto drain = [&] {
    for (int i = 0; i < 1000; ++i) world.progress(1);
  };
  if (!after) drain();
  pollfd sleep{world.ends[0]->arm(), POLLIN, 0};
  if (after) {
    REQUIRE(sleep.fd >= 0);
    drain();
  }
  if (sleep.fd >= 0) CHECK(poll(&sleep, 1, 2000) == 1);
  REQUIRE(world.until([&] { return all_ended(sends) && all_ended(recvs); }));
}

TEST_CASE("threads that sleep are woken, thousands of times") {
  const Kind kind = GENERATE(from_range(sleeping_kinds()));
  const unsigned seed = GENERATE(1u, 2u);
  CAPTURE(kind.name, seed);
  World world(kind, 2);
  if (!world.here()) return;
  std::string wrong[2];
  std::vector<std::thread> threads;
  std::atomic<int> running{2};
  for (int rank : {0, 1})
    threads.emplace_back([&, rank] {
      wrong[rank] = ping_pong(*world.ends[rank], rank, 1500, seed, seed == 2);
      // The other may still ask whether everything has arrived.
      for (running--; running != 0; std::this_thread::yield()) world.progress(rank);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong[0] == "");
  CHECK(wrong[1] == "");
}

TEST_CASE("threads: a sender that outruns its receiver sleeps for want of space") {
  const Kind kind = GENERATE(from_range(sleeping_kinds()));
  CAPTURE(kind.name);
  World world(kind, 2);
  if (!world.here()) return;
  constexpr uint32_t kCount = 2000;
  constexpr size_t kBytes = 20'000;
  const Bytes data = pattern(kBytes + kCount);
  std::deque<Request> sends(kCount);
  bool sent = false;
  std::thread sender([&] {
    for (uint32_t i = 0; i < kCount; ++i)
      world.ends[0]->send(1, {kComm, i, 0, kPrint}, {const_cast<uint8_t*>(data.data()) + i, kBytes},
                          &sends[i]);
    sent = sleep_until(*world.ends[0], [&] { return all_ended(sends); });
  });
  bool received = true;
  for (uint32_t i = 0; i < kCount && received; ++i) {
    Request recv;
    Bytes got(kBytes);
    world.ends[1]->recv(0, {kComm, i, 0, kPrint}, buffer(got), i % 2 == 0, &recv);
    received = sleep_until(*world.ends[1], [&] { return recv.ended(); }) && recv.ok() &&
               std::memcmp(recv.view, data.data() + i, kBytes) == 0;
    if (recv.lender != nullptr) world.ends[1]->give_back(&recv);
  }
  // Whoever has nothing more to receive still hands back what it was lent.
  std::atomic<bool> over{false};
  std::thread last([&] {
    while (!over) {
      world.ends[1]->progress();
      std::this_thread::yield();
    }
  });
  sender.join();
  over = true;
  last.join();
  CHECK(received);
  CHECK(sent);
}

TEST_CASE("processes that sleep are woken, and leave nothing behind") {
  const size_t descriptors = entries("/proc/self/fd", "");
  const size_t shared = entries("/dev/shm", "ringfold");
  for (const Kind& kind : process_kinds()) {
    CAPTURE(kind.name);
    for (const unsigned seed : {1u, 2u}) {
      CAPTURE(seed);
      Pair pair(kind, [&](Transport& end) { return ping_pong(end, 1, 1500, seed, seed == 2); });
      if (!pair.problem.empty()) {
        ringfold::test::skip(fmt::format("{}: {}", kind.name, pair.problem));
        continue;
      }
      CHECK(ping_pong(pair.end(), 0, 1500, seed, seed == 2) == "");
      CHECK(pair.exit_status() == 0);
    }
  }
  CHECK(entries("/proc/self/fd", "") == descriptors);
  CHECK(entries("/dev/shm", "ringfold") == shared);
}

// A killed process is noticed within a second, by a sleeper, after all that it had sent.
TEST_CASE("processes: a killed peer is lost") {
  const Kind kind = GENERATE(from_range(process_kinds()));
  const size_t bytes = GENERATE(size_t{8}, size_t{100'000});
  const bool amid = GENERATE(false, true);  // in the middle of a message that cannot end
  CAPTURE(kind.name, bytes, amid);
  const Bytes data = pattern(bytes);
  const Bytes endless(50'000'000);
  Pair pair(kind, [&](Transport& end) {
    std::deque<Request> sends(11);
    for (uint32_t i = 0; i < 10; ++i)
      end.send(0, {kComm, i, 0, kPrint}, {const_cast<uint8_t*>(data.data()), bytes}, &sends[i]);
    if (amid)
      end.send(0, {kComm, 10, 0, kPrint}, {const_cast<uint8_t*>(endless.data()), endless.size()},
               &sends[10]);
    sleep_until(end, [&] { return amid ? all_ended(sends) : end.flushed(); });
    raise(SIGKILL);
    return std::string("still alive");
  });
  if (!pair.problem.empty()) return ringfold::test::skip(pair.problem);
  Transport& end = pair.end();
  int lost = 0;
  end.on_lost = [&](Peer peer, const Status& why) {
    if (peer == 1 && why.code() == Code::peer_lost) ++lost;
  };
  std::deque<Request> recvs(11);
  Bytes got(bytes), much(endless.size());
  for (uint32_t i = 0; i < 10; ++i) {
    end.recv(1, {kComm, i, 0, kPrint}, buffer(got), false, &recvs[i]);
    REQUIRE(sleep_until(end, [&] { return recvs[i].ended(); }));
    CHECK(recvs[i].ok());
    CHECK(got == data);
  }
  end.recv(1, {kComm, 10, 0, kPrint}, buffer(much), false, &recvs[10]);
  if (amid) {
    // One look: what a ring holds, and far from the end.
    sleep_until(end, [once = 0]() mutable { return once++ != 0; });
    kill(pair.child(), SIGKILL);
  }
  const auto killed = real_clock.now();
  REQUIRE(sleep_until(end, [&] { return lost != 0 && recvs[10].ended(); }));
  CHECK(real_clock.now() - killed < 1s);
  CHECK(recvs[10].failed(Code::peer_lost));
  may_call_back = true;
  for (int i = 0; i < 1000; ++i) end.progress();
  may_call_back = false;
  CHECK(lost == 1);
}

TEST_CASE("processes: a profiler's signals do no harm") {
  struct sigaction before {
  }, count{};
  static std::atomic<int> ticks{0};
  ticks = 0;
  count.sa_handler = [](int) { ticks++; };
  REQUIRE(sigaction(SIGPROF, &count, &before) == 0);  // without SA_RESTART
  const auto profiled = [](auto body) {
    timer_t timer;
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGPROF;
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) return std::string("no timer");
    const itimerspec period{{0, 1'000'000}, {0, 1'000'000}};
    timer_settime(timer, 0, &period, nullptr);
    const std::string wrong = body();
    timer_delete(timer);
    return wrong;
  };
  for (const Kind& kind : process_kinds()) {
    CAPTURE(kind.name);
    Pair pair(kind, [&](Transport& end) {
      return profiled([&] { return ping_pong(end, 1, 5000, 3, false); });
    });
    if (!pair.problem.empty()) {
      ringfold::test::skip(fmt::format("{}: {}", kind.name, pair.problem));
      continue;
    }
    CHECK(profiled([&] { return ping_pong(pair.end(), 0, 5000, 3, false); }) == "");
    CHECK(pair.exit_status() == 0);
    CHECK(ticks > 10);
  }
  sigaction(SIGPROF, &before, nullptr);
}

TEST_CASE("processes: a forked child's copy of the transport says nothing") {
  for (const Kind& kind : process_kinds()) {
    CAPTURE(kind.name);
    World world(kind, 2);
    if (!world.here()) continue;
    Request send, recv;
    Bytes data = pattern(100), got(100);
    world.ends[0]->send(1, {kComm, 0, 0, kPrint}, buffer(data), &send);
    world.ends[1]->recv(0, {kComm, 0, 0, kPrint}, buffer(got), false, &recv);
    REQUIRE(world.until([&] { return recv.ended() && send.ended(); }));
    const pid_t child = fork();
    if (child == 0) {
      world.ends.clear();
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
    world.settle();
    CHECK(world.lost[0].empty());
    CHECK(world.lost[1].empty());
  }
}

// Where the system refuses pidfd_open, death is noticed all the same.
TEST_CASE("shm: a killed peer is lost without pidfds") {
  const Kind kind = process_kinds().front();
  REQUIRE(std::string(kind.name) == "shm");
  const pid_t child = fork();
  if (child == 0) {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{4, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
      _exit(77);
    if (syscall(SYS_pidfd_open, getpid(), 0) >= 0) _exit(3);
    Pair pair(kind, [](Transport& end) {
      sleep_until(end, [] { return false; });
      return std::string();
    });
    if (!pair.problem.empty()) _exit(4);
    int lost = 0;
    pair.end().on_lost = [&](Peer, const Status&) { ++lost; };
    std::this_thread::sleep_for(20ms);
    kill(pair.child(), SIGKILL);
    const auto killed = real_clock.now();
    const bool noticed = sleep_until(pair.end(), [&] { return lost != 0; });
    _exit(noticed && real_clock.now() - killed < 1s ? 0 : 5);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WEXITSTATUS(status) == 77) return ringfold::test::skip("no seccomp filters here");
  CHECK(status == 0);
}
