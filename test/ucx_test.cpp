// What is particular to the ucx transport; the rules common to all are in transport_test.cpp.
#include "transports/ucx.h"

#include <dlfcn.h>
#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <thread>
#include <vector>

#include "test/skip.h"

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

constexpr uint32_t kComm = 5, kOther = 6, kPrint = 0xabc;
constexpr size_t kEager = 1000, kRendezvous = 8 << 20;
const Status kWhy(Code::aborted, "cancelled");

struct Request : Completion {
  Request() {
    done = [](Completion* self, const Status& status) noexcept {
      static_cast<Request*>(self)->status = status;
      static_cast<Request*>(self)->calls++;
    };
  }
  [[nodiscard]] bool ok() const { return calls == 1 && status.ok(); }
  [[nodiscard]] bool failed(Code code) const { return calls == 1 && status.code() == code; }
  Status status;
  int calls = 0;
};

// Bytes between guards.
struct Guarded {
  explicit Guarded(size_t n) : bytes(n), all(n + 128, 0xee) {}
  [[nodiscard]] uint8_t* data() { return all.data() + 64; }
  Buffer buffer() { return {data(), bytes}; }
  void fill(uint32_t salt) {
    for (size_t i = 0; i < bytes; ++i)
      data()[i] = static_cast<uint8_t>((i + salt) * 2654435761u >> 24);
  }
  [[nodiscard]] bool guards_intact() const {
    const auto intact = [](uint8_t byte) { return byte == 0xee; };
    return std::all_of(all.begin(), all.begin() + 64, intact) &&
           std::all_of(all.end() - 64, all.end(), intact);
  }
  [[nodiscard]] bool untouched() const {
    return std::all_of(all.begin(), all.end(), [](uint8_t byte) { return byte == 0xee; });
  }
  size_t bytes;
  std::vector<uint8_t> all;
};

// A UCX_* variable for one scope.
struct Variable {
  Variable(const char* n, const char* value) : name(n) {
    if (*value) setenv(name, value, 1);
  }
  ~Variable() { unsetenv(name); }
  const char* name;
};

std::unique_ptr<Transport> make(Peer me) {
  auto made = make_ucx(me, real_clock, {"lo"});
  if (made.ok()) return std::move(*made);
  test::skip(made.status().to_string());
  return nullptr;
}

template <class Until>
bool drive(std::vector<Transport*> ends, Until until, Nanoseconds limit = 5s) {
  const auto end = real_clock.now() + limit;
  while (!until()) {
    for (Transport* transport : ends) transport->progress();
    if (real_clock.now() > end) return false;
  }
  return true;
}

// Two ranks in this thread.
struct Pair {
  Pair() {
    for (Peer rank = 0; rank < 2; ++rank)
      if (!(ends[rank] = make(rank))) return;
    for (Peer rank = 0; rank < 2; ++rank) {
      REQUIRE(ends[rank]->connect(1 - rank, ends[1 - rank]->address()).ok());
      ends[rank]->on_lost = [this, rank](Peer, const Status&) { lost[rank]++; };
      ends[rank]->on_mismatch = [this, rank](Peer, const MessageId&, uint32_t) {
        mismatches[rank]++;
      };
    }
    ok = true;
  }
  // Both at once, for whoever leaves waits for an answer of the other.
  ~Pair() {
    std::thread other([&] { ends[1].reset(); });
    ends[0].reset();
    other.join();
  }
  template <class Until>
  bool until(Until done, Nanoseconds limit = 5s) {
    return drive({ends[0].get(), ends[1].get()}, done, limit);
  }
  void settle(Nanoseconds time = 3ms) {
    const auto limit = real_clock.now() + time;
    until([&] { return real_clock.now() > limit; });
  }
  // One message there and back: the connection is made.
  bool warm_up(uint32_t comm = kOther, uint32_t seq = 0) {
    Guarded data(8), got(8);
    Request send[2], recv[2];
    for (Peer rank = 0; rank < 2; ++rank) {
      ends[rank]->recv(1 - rank, {comm, seq, 0, kPrint}, got.buffer(), false, &recv[rank]);
      ends[rank]->send(1 - rank, {comm, seq, 0, kPrint}, data.buffer(), &send[rank]);
    }
    return until(
               [&] { return recv[0].calls && recv[1].calls && send[0].calls && send[1].calls; }) &&
           recv[0].ok() && recv[1].ok() && send[0].ok() && send[1].ok();
  }
  bool ok = false;
  std::unique_ptr<Transport> ends[2];
  int lost[2] = {}, mismatches[2] = {};
};

// Another process with rank 1, which runs `body`, and this one with rank 0. They are forked before
// either has a transport.
class TwoProcesses {
 public:
  template <class Body>
  explicit TwoProcesses(Body body) {
    int sockets[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    child_ = fork();
    const bool is_child = child_ == 0;
    close(sockets[is_child ? 0 : 1]);
    socket_ = sockets[is_child ? 1 : 0];
    auto made = make_ucx(is_child ? 1 : 0, real_clock, {"lo"});
    const bool connected = made.ok() && exchange(**made, is_child ? 0 : 1);
    if (is_child) {
      alarm(20);  // whatever happens, it does not stay behind
      if (connected) body(std::move(*made));
      _exit(connected ? 0 : 3);
    }
    if (connected) transport = std::move(*made);
  }
  ~TwoProcesses() {
    transport.reset();
    if (child_ > 0) kill_and_collect(SIGKILL);
    close(socket_);
  }
  void kill_and_collect(int signal) {
    kill(child_, signal);
    collect();
  }
  int collect() {
    int status = -1;
    waitpid(child_, &status, 0);
    child_ = -1;
    return status;
  }

  std::unique_ptr<Transport> transport;

 private:
  bool exchange(Transport& mine, Peer other) {
    const std::string address = mine.address();
    const size_t size = address.size();
    if (write(socket_, &size, sizeof(size)) != sizeof(size)) return false;
    if (write(socket_, address.data(), size) != static_cast<ssize_t>(size)) return false;
    size_t theirs = 0;
    if (read(socket_, &theirs, sizeof(theirs)) != sizeof(theirs)) return false;
    std::string peer(theirs, 0);
    if (recv(socket_, peer.data(), theirs, MSG_WAITALL) != static_cast<ssize_t>(theirs))
      return false;
    return mine.connect(other, peer).ok();
  }
  pid_t child_ = -1;
  int socket_ = -1;
};

// Sleeps until there is news, without ever polling. False if none came for `limit`.
template <class Until>
bool sleep_until(Transport& transport, Until until, Nanoseconds limit = 3s) {
  const auto end = real_clock.now() + limit;
  while (true) {
    while (transport.progress()) {
    }
    if (until()) return true;
    const auto left = end - real_clock.now();
    if (left <= 0s) return false;
    pollfd news{transport.arm(), POLLIN, 0};
    const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(left).count();
    if (news.fd >= 0 && poll(&news, 1, static_cast<int>(milliseconds)) == 0) return false;
  }
}

size_t entries(const char* folder) {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

volatile sig_atomic_t raised[NSIG];

}  // namespace

// The first test: afterwards UCX is loaded, and there would be nothing to see.
TEST_CASE("signal handlers and the environment are the user's after UCX was loaded") {
  REQUIRE(dlopen("libucp.so.0", RTLD_NOW | RTLD_NOLOAD) == nullptr);
  const int signals[] = {SIGSEGV, SIGBUS,  SIGILL,  SIGFPE,  SIGHUP, SIGUSR1,
                         SIGUSR2, SIGPIPE, SIGCHLD, SIGALRM, SIGTERM};
  const pid_t child = fork();
  if (child == 0) {
    for (int signal : signals) {
      struct sigaction action {};
      action.sa_handler = [](int number) { raised[number] = raised[number] + 1; };
      sigaction(signal, &action, nullptr);
    }
    std::vector<std::string> before;
    for (char** entry = environ; *entry; ++entry) before.emplace_back(*entry);
    stack_t stack_before, stack_after;
    sigaltstack(nullptr, &stack_before);
    const auto made = make_ucx(0, real_clock, {"lo"});
    if (!made.ok()) _exit(100);
    int wrong = 0;
    for (int signal : signals) {
      raise(signal);
      if (raised[signal] != 1) wrong = signal;
    }
    sigaltstack(nullptr, &stack_after);
    if (stack_before.ss_sp != stack_after.ss_sp) wrong = 98;
    std::vector<std::string> after;
    for (char** entry = environ; *entry; ++entry) after.emplace_back(*entry);
    if (before != after) wrong = 99;
    _exit(wrong);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 100) return test::skip("no UCX here");
  CHECK(WEXITSTATUS(status) == 0);  // else: the signal whose handler was lost
}

TEST_CASE("bytes arrive whole in either order, eagerly and by rendezvous") {
  const Variable transports("UCX_TLS", GENERATE("", "tcp"));
  Pair pair;
  if (!pair.ok) return;
  uint32_t index = 0;
  uint64_t total = 0;
  for (size_t bytes : {0, 1, 8, 8000, 8192, 60000, 65536, 262144, 262145, 1 << 20, 8 << 20})
    for (const bool early : {false, true})
      for (const bool lend : {false, true}) {
        CAPTURE(bytes, early, lend);
        Guarded sent(bytes), got(bytes);
        sent.fill(index);
        Request send, recv;
        const MessageId id{kComm, 0, index++, kPrint};
        if (!early) pair.ends[1]->recv(0, id, got.buffer(), lend, &recv);
        pair.ends[0]->send(1, id, sent.buffer(), &send);
        if (early) pair.settle(1ms);
        if (early) pair.ends[1]->recv(0, id, got.buffer(), lend, &recv);
        REQUIRE(pair.until([&] { return recv.calls && send.calls; }));
        REQUIRE(recv.ok());
        CHECK(send.ok());
        CHECK((bytes == 0 || std::memcmp(recv.view, sent.data(), bytes) == 0));
        CHECK(got.guards_intact());
        if (recv.lender) pair.ends[1]->give_back(&recv);
        total += bytes;
      }
  CHECK(pair.ends[0]->bytes_sent() == total);
}

TEST_CASE("another length or fingerprint is a mismatch and writes nothing") {
  Pair pair;
  if (!pair.ok) return;
  uint32_t index = 0;
  for (size_t bytes : {kEager, kRendezvous})
    for (const int difference : {-8, 8})
      for (const bool early : {false, true})
        for (const bool print : {false, true}) {
          CAPTURE(bytes, difference, early, print);
          Guarded sent(bytes), got(print ? bytes : bytes + difference);
          sent.fill(1);
          Request send, recv;
          const MessageId id{kComm, 0, index++, kPrint};
          MessageId theirs = id;
          if (print) theirs.fingerprint += difference;
          if (!early) pair.ends[1]->recv(0, id, got.buffer(), true, &recv);
          pair.ends[0]->send(1, theirs, sent.buffer(), &send);
          if (early) pair.settle();
          if (early) pair.ends[1]->recv(0, id, got.buffer(), true, &recv);
          REQUIRE(pair.until([&] { return recv.calls && send.calls; }));
          CHECK(recv.failed(Code::mismatch));
          CHECK(send.ok());
          CHECK(got.untouched());
        }
  CHECK(pair.mismatches[1] == 8);
  CHECK(pair.warm_up());  // the connection has not suffered
}

TEST_CASE("a sender that nobody asks is held back, and everything arrives in the end") {
  Pair pair;
  if (!pair.ok) return;
  constexpr uint32_t kMessages = 2000;
  Guarded data(4096);
  std::deque<Request> sends(kMessages), recvs(kMessages);
  std::deque<Guarded> got;
  for (uint32_t i = 0; i < kMessages; ++i)
    pair.ends[0]->send(1, {kComm, 0, i, kPrint}, data.buffer(), &sends[i]);
  pair.settle(50ms);
  const auto gone = std::count_if(sends.begin(), sends.end(), [](auto& s) { return s.calls; });
  CHECK(gone > 0);
  CHECK(gone <= 256);
  CHECK(pair.warm_up());  // another communicator is not held back
  for (uint32_t i = 0; i < kMessages; ++i)
    pair.ends[1]->recv(0, {kComm, 0, i, kPrint}, got.emplace_back(4096).buffer(), false, &recvs[i]);
  REQUIRE(pair.until([&] {
    return std::all_of(recvs.begin(), recvs.end(), [](auto& r) { return r.calls; }) &&
           std::all_of(sends.begin(), sends.end(), [](auto& s) { return s.calls; });
  }));
  CHECK(std::all_of(recvs.begin(), recvs.end(), [](auto& r) { return r.ok(); }));
  CHECK(pair.until([&] { return pair.ends[0]->flushed() && pair.ends[1]->flushed(); }));
}

TEST_CASE("cancelling a rendezvous: peers that go on stay, others are given up") {
  Pair pair;
  if (!pair.ok) return;
  REQUIRE(pair.warm_up());
  Guarded sent(kRendezvous), got(kRendezvous);
  Request send, recv, other;
  const MessageId id{kComm, 0, 0, kPrint};

  SECTION("both cancel while it waits for a receive: nobody is lost") {
    pair.ends[0]->send(1, id, sent.buffer(), &send);
    pair.settle();
    CHECK(send.calls == 0);
    pair.ends[0]->cancel(kComm, kWhy);
    CHECK(send.calls == 0);  // the peer may still read the buffer
    pair.ends[1]->cancel(kComm, kWhy);
    REQUIRE(pair.until([&] { return send.calls != 0; }));
    CHECK(send.failed(Code::aborted));
    pair.settle(300ms);
    CHECK(pair.lost[0] + pair.lost[1] == 0);
    CHECK(pair.warm_up(kOther, 1));
  }
  SECTION("the receiver never looks: the sender gives it up") {
    pair.ends[0]->send(1, id, sent.buffer(), &send);
    Guarded unread(8);
    pair.ends[0]->recv(1, {kOther, 1, 0, kPrint}, unread.buffer(), false, &other);
    pair.ends[0]->cancel(kComm, kWhy);
    CHECK(send.calls == 0);
    // There is a clock to look at: it must not sleep on.
    REQUIRE(sleep_until(
        *pair.ends[0], [&] { return send.calls && other.calls; }, 2s));
    CHECK(send.failed(Code::aborted));
    CHECK(other.failed(Code::peer_lost));
    CHECK(pair.lost[0] == 1);
    REQUIRE(pair.until([&] { return pair.lost[1] != 0; }));
    CHECK(pair.lost[1] == 1);
  }
  SECTION("the sender stops in the middle: the receiver's buffer is its own again") {
    pair.ends[1]->recv(0, id, got.buffer(), false, &recv);
    pair.ends[0]->send(1, id, sent.buffer(), &send);
    const auto begun = real_clock.now();
    drive({pair.ends[1].get()}, [&] { return real_clock.now() > begun + 20ms; });
    CHECK(recv.calls == 0);
    pair.ends[1]->cancel(kComm, kWhy);
    CHECK(recv.calls == 0);
    REQUIRE(drive(
        {pair.ends[1].get()}, [&] { return recv.calls != 0; }, 2s));
    CHECK(recv.failed(Code::aborted));
    CHECK(pair.lost[1] == 1);
    std::fill(got.all.begin(), got.all.end(), 0xee);
    REQUIRE(pair.until([&] { return send.calls != 0; }));
    // The receiver's word may come before or after the last byte was handed to the socket.
    CHECK((send.ok() || send.failed(Code::peer_lost)));
    REQUIRE(pair.until([&] { return pair.lost[0] != 0; }));
    pair.settle();
    CHECK(got.untouched());
  }
  SECTION("a receive that nothing has come for ends at once") {
    pair.ends[1]->recv(0, id, got.buffer(), false, &recv);
    pair.ends[1]->cancel(kComm, kWhy);
    CHECK(recv.failed(Code::aborted));
    pair.ends[0]->send(1, id, sent.buffer(), &send);  // comes too late: dropped
    REQUIRE(pair.until([&] { return send.calls != 0; }));
    CHECK(send.ok());
    CHECK(got.untouched());
  }
}

TEST_CASE("a killed process is lost, with traffic and without") {
  const bool traffic = GENERATE(false, true);
  const Variable transports("UCX_TLS", GENERATE("", "tcp"));
  CAPTURE(traffic);
  TwoProcesses two([&](std::unique_ptr<Transport> mine) {
    Guarded hello(8), got(kRendezvous);
    Request sent, asked;
    mine->send(0, {kComm, 0, 0, kPrint}, hello.buffer(), &sent);
    if (traffic) mine->recv(0, {kComm, 0, 1, kPrint}, got.buffer(), false, &asked);
    drive(
        {mine.get()}, [&] { return asked.calls != 0; }, 10s);  // then it goes on to nothing
    pause();
  });
  if (!two.transport) return test::skip("no UCX here");
  Transport& mine = *two.transport;
  int lost = 0;
  mine.on_lost = [&](Peer peer, const Status&) { lost += peer == 1 ? 1 : 100; };
  Guarded hello(8), never(8), large(kRendezvous);
  Request heard, waiting, first, second;
  mine.recv(1, {kComm, 0, 0, kPrint}, hello.buffer(), false, &heard);
  mine.recv(1, {kComm, 0, 2, kPrint}, never.buffer(), false, &waiting);
  REQUIRE(sleep_until(mine, [&] { return heard.ok(); }));
  if (traffic) {
    mine.send(1, {kComm, 0, 1, kPrint}, large.buffer(), &first);
    REQUIRE(sleep_until(mine, [&] { return first.ok(); }));
    mine.send(1, {kComm, 0, 3, kPrint}, large.buffer(), &second);  // nobody asks for it
    mine.progress();
  }
  two.kill_and_collect(SIGKILL);
  const auto killed = real_clock.now();
  REQUIRE(sleep_until(mine, [&] { return waiting.calls && lost && (!traffic || second.calls); }));
  CHECK(real_clock.now() - killed < 3s);
  CHECK(waiting.failed(Code::peer_lost));
  if (traffic) CHECK(second.failed(Code::peer_lost));
  CHECK(waiting.status.message().find("rank 1") != std::string::npos);
  CHECK(lost == 1);
  Request late_send, late_recv;
  mine.send(1, {kComm, 0, 4, kPrint}, hello.buffer(), &late_send);
  mine.recv(1, {kComm, 0, 5, kPrint}, hello.buffer(), false, &late_recv);
  CHECK(late_send.calls + late_recv.calls == 0);
  mine.progress();
  CHECK(late_send.failed(Code::peer_lost));
  CHECK(late_recv.failed(Code::peer_lost));
  CHECK(lost == 1);
}

TEST_CASE("what was sent arrives although the sender leaves at once") {
  constexpr uint32_t kMessages = 60;
  const size_t bytes = GENERATE(size_t{100}, size_t{16000});
  TwoProcesses two([&](std::unique_ptr<Transport> mine) {
    Guarded data(bytes);
    data.fill(7);
    std::deque<Request> sends(kMessages);
    for (uint32_t i = 0; i < kMessages; ++i)
      mine->send(0, {kComm, 0, i, kPrint}, data.buffer(), &sends[i]);
    sleep_until(*mine, [&] { return sends.back().calls != 0; });
    mine.reset();
  });
  if (!two.transport) return test::skip("no UCX here");
  bool left = false;
  two.transport->on_lost = [&](Peer, const Status&) { left = true; };
  // This rank is busy elsewhere, and then sends something that the other will never read.
  std::this_thread::sleep_for(100ms);
  Guarded unread(8), expected(bytes);
  expected.fill(7);
  Request into_the_void;
  two.transport->send(1, {kComm, 1, 0, kPrint}, unread.buffer(), &into_the_void);
  std::deque<Request> recvs(kMessages);
  std::deque<Guarded> got;
  for (uint32_t i = 0; i < kMessages; ++i)
    two.transport->recv(1, {kComm, 0, i, kPrint}, got.emplace_back(bytes).buffer(), false,
                        &recvs[i]);
  REQUIRE(sleep_until(*two.transport, [&] {
    return std::all_of(recvs.begin(), recvs.end(), [](auto& r) { return r.calls; });
  }));
  CHECK(std::all_of(recvs.begin(), recvs.end(), [](auto& r) { return r.ok(); }));
  CHECK(std::all_of(got.begin(), got.end(), [&](auto& g) { return g.all == expected.all; }));
  CHECK(sleep_until(*two.transport, [&] { return left; }));
  CHECK(two.collect() == 0);
}

TEST_CASE("sleeping on arm() loses no wake-up") {
  Pair pair;
  if (!pair.ok) return;
  constexpr uint32_t kRounds = 2000;
  const auto rounds = [&](Peer me) {
    Transport& mine = *pair.ends[me];
    Guarded data(8), got(8), large(300000), large_got(300000);
    for (uint32_t i = 0; i < kRounds; ++i) {
      const bool big = i % 100 == 99;
      Request send, recv;
      mine.recv(1 - me, {kComm, 0, i, kPrint}, (big ? large_got : got).buffer(), false, &recv);
      const auto answer = [&] {
        mine.send(1 - me, {kComm, 0, i, kPrint}, (big ? large : data).buffer(), &send);
      };
      if (me == 0) answer();
      if (!sleep_until(mine, [&] { return recv.ok(); })) return false;
      if (me == 1) answer();
      if (!sleep_until(mine, [&] { return send.ok(); })) return false;
    }
    return true;
  };
  bool other = false;
  std::thread thread([&] { other = rounds(1); });
  const bool mine = rounds(0);
  thread.join();
  CHECK(mine);
  CHECK(other);
  std::thread peer([&] { other = sleep_until(*pair.ends[1], [&] { return pair.lost[1] != 0; }); });
  CHECK(sleep_until(*pair.ends[0], [&] { return pair.ends[0]->flushed(); }));
  pair.ends[0].reset();
  peer.join();
  CHECK(other);
}

TEST_CASE("arm() does not sleep on a completion that waits to be told") {
  Pair pair;
  if (!pair.ok) return;
  Guarded data(8);
  Request send, recv;
  pair.ends[0]->send(1, {kComm, 0, 0, kPrint}, data.buffer(), &send);
  REQUIRE(pair.warm_up());  // what was sent before has arrived too
  REQUIRE(pair.until([&] { return !pair.ends[1]->progress() && pair.ends[1]->arm() >= 0; }));
  pair.ends[1]->recv(0, {kComm, 0, 0, kPrint}, data.buffer(), false, &recv);
  CHECK(recv.calls == 0);
  CHECK(pair.ends[1]->arm() == -1);
  pair.ends[1]->progress();
  CHECK(recv.ok());
}

TEST_CASE("transports that come and go leave no descriptor and no thread") {
  const Variable transports("UCX_TLS", "tcp");
  {
    Pair pair;
    if (!pair.ok) return;
    REQUIRE(pair.warm_up());
  }
  const size_t descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  for (int i = 0; i < 100; ++i) {  // two transports each
    Pair pair;
    REQUIRE(pair.ok);
    if (i % 4 == 0) REQUIRE(pair.warm_up());
  }
  CHECK(entries("/proc/self/fd") == descriptors);
  CHECK(entries("/proc/self/task") == threads);
}

TEST_CASE("two worlds in one process do not meet") {
  Pair one, two;
  if (!one.ok || !two.ok) return;
  const MessageId id{kComm, 0, 0, kPrint};
  Guarded first(8), second(8), got_first(8), got_second(8);
  first.fill(1);
  second.fill(2);
  Request s1, s2, r1, r2;
  one.ends[1]->recv(0, id, got_first.buffer(), false, &r1);
  two.ends[1]->recv(0, id, got_second.buffer(), false, &r2);
  two.ends[0]->send(1, id, second.buffer(), &s2);
  one.ends[0]->send(1, id, first.buffer(), &s1);
  REQUIRE(drive({one.ends[0].get(), one.ends[1].get(), two.ends[0].get(), two.ends[1].get()},
                [&] { return r1.calls && r2.calls; }));
  CHECK(got_first.all == first.all);
  CHECK(got_second.all == second.all);
}

TEST_CASE("a forked child is refused and the parent goes on") {
  Pair pair;
  if (!pair.ok) return;
  REQUIRE(pair.warm_up());
  Guarded data(8);
  Request posted;
  pair.ends[0]->recv(1, {kOther, 7, 0, kPrint}, data.buffer(), false, &posted);
  const pid_t child = fork();
  if (child == 0) {
    alarm(5);
    Request send, recv;
    Transport& mine = *pair.ends[0];
    bool right = mine.connect(1, "x").code() == Code::invalid_argument;
    mine.send(1, {kComm, 0, 0, kPrint}, data.buffer(), &send);
    mine.recv(1, {kComm, 0, 1, kPrint}, data.buffer(), false, &recv);
    mine.progress();
    right &= send.failed(Code::invalid_argument) && recv.failed(Code::invalid_argument);
    mine.arm();
    mine.cancel(kOther, kWhy);
    pair.ends[0].reset();
    pair.ends[1].reset();
    _exit(right ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  for (uint32_t i = 1; i < 200; ++i) REQUIRE(pair.warm_up(kOther, i + 100));
  CHECK(posted.calls == 0);
  pair.ends[0]->cancel(kOther, kWhy);
  CHECK(posted.failed(Code::aborted));
}

TEST_CASE("what is wrong is said") {
  auto end = make(0);
  if (!end) return;
  CHECK(end->connect(1, "nonsense").code() == Code::invalid_argument);
  CHECK(end->connect(1, "").code() == Code::invalid_argument);
  Guarded data(8);
  Request send;
  end->send(3, {kComm, 0, 0, kPrint}, data.buffer(), &send);
  CHECK(send.calls == 0);
  end->progress();
  CHECK(send.failed(Code::invalid_argument));
  CHECK(send.status.message() == "rank 3 was never connected");
  CHECK(end->reaches(MemoryKind::host));

  const Variable nonsense("UCX_TLS", "nosuch");
  const auto none = make_ucx(0, real_clock);
  REQUIRE(!none.ok());
  CHECK(none.status().code() == Code::system);
  CHECK(none.status().message().find("UCX_TLS") != std::string::npos);
}
