// Cases C17 to C30, C47 and C48 of the list of reported bugs, as far as no other file has them
// (C22, C28: stall_test; C23: gradient_errors_test; C24, C27: cases_lifecycle_test): ranks that
// call different things, ranks and connections that go, and signals of the user's program.
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "test/cases.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// What ends before it has not waited for it.
constexpr Nanoseconds kLong = 10min;

Options with(Nanoseconds timeout) {
  Options options;
  options.timeout = timeout;
  return options;
}

void contains(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos)
    rank_fail(fmt::format("\"{}\" is not in: {}", part, text));
}

bool exact_sum(Communicator& comm, size_t count) {
  std::vector<int64_t> x(count, comm.rank() + 1);
  const int64_t n = comm.size();
  return rank_ok(comm.all_reduce(x.data(), x.data(), count, DType::i64, Op::sum).wait()) &&
         RANK_CHECK(x == std::vector<int64_t>(count, n * (n + 1) / 2));
}

}  // namespace

// ---- mismatch ---------------------------------------------------------------------------------

TEST_CASE("C17: other counts on one rank are an error on all, which has both") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(4, transport, with(kLong), [](Communicator& comm) {
          using Counts = std::pair<size_t, size_t>;
          for (const auto& [usual, other] :
               {Counts{409'600, 409'598}, Counts{409'600, 32'768'000}, Counts{1, 2}}) {
            const size_t count = comm.rank() == 0 ? other : usual;
            std::vector<uint8_t> x(count, 1);
            const Status status =
                comm.all_reduce(x.data(), x.data(), count, DType::u8, Op::sum).wait();
            RANK_CHECK(status.code() == Code::mismatch);
            contains(status.message(),
                     fmt::format("rank 0 called all_reduce u8 sum of {} ", other));
            contains(status.message(), fmt::format("called all_reduce u8 sum of {} ", usual));
            // It is broken from then on, and says so; the ranks can go on without it.
            RANK_CHECK(comm.health().code() == Code::mismatch);
            RANK_CHECK(comm.barrier().wait().code() == Code::mismatch);
            auto next = comm.shrink({});
            if (!rank_ok(next.status()) || !exact_sum(*next, 1000)) return;
            comm = *next;
          }
        }) == "");
}

TEST_CASE("C18: all_gather on one rank and all_reduce on three, of as many bytes") {
  const std::string transport = GENERATE(from_range(transports()));
  const int odd = GENERATE(0, 3);
  CHECK(on_transport(4, transport, with(kLong), [odd](Communicator& comm) {
          constexpr size_t kEach = 1000;
          std::vector<float> in(4 * kEach), out(4 * kEach);
          Work work = comm.rank() == odd
                          ? comm.all_gather(in.data(), out.data(), kEach, DType::f32)
                          : comm.all_reduce(in.data(), out.data(), 4 * kEach, DType::f32, Op::sum);
          const Status status = work.wait();
          RANK_CHECK(status.code() == Code::mismatch);
          contains(status.message(), fmt::format("rank {} called all_gather f32", odd));
          contains(status.message(), "called all_reduce f32 sum of 4000 elements");
        }) == "");
}

TEST_CASE("C19: after a mismatch both make a new communicator in the same processes") {
  const std::string transport = GENERATE(from_range(transports()));
  const uint16_t second_port = free_port();
  CHECK(run_ranks(2, 60s, [&](Rendezvous where) {
          Options options = with(kLong);
          options.transports = transport;
          {
            auto comm = Communicator::create(where, options);
            if (!rank_ok(comm.status())) return 1;
            const size_t bytes = where.rank == 0 ? 1'046'204 : 1'040'256;
            std::vector<float> x(bytes / 4);
            RANK_CHECK(
                comm->all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::sum).wait().code() ==
                Code::mismatch);
          }
          where.coordinator = fmt::format("127.0.0.1:{}", second_port);
          auto again = Communicator::create(where, options);
          if (rank_ok(again.status())) exact_sum(*again, 260'064);
          return 0;
        }) == "");
}

TEST_CASE("C20: the report shows both sides, on every rank") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(3, transport, with(kLong), [](Communicator& comm) {
          std::vector<float> x(5000);
          const Op op = comm.rank() == 2 ? Op::max : Op::sum;
          const Status status =
              comm.all_reduce(x.data(), x.data(), x.size(), DType::f32, op).wait();
          RANK_CHECK(status.code() == Code::mismatch);
          contains(status.message(), "called all_reduce f32 sum of 5000 elements");
          contains(status.message(), "rank 2 called all_reduce f32 max of 5000 elements");
        }) == "");
}

TEST_CASE("C21: a rank with other settings: the same choice for all, or an error with the values") {
  using Setting = std::pair<const char*, const char*>;
  const auto [name, value] =
      GENERATE(Setting{"RINGFOLD_ALGORITHM", "recursive_doubling"},
               Setting{"RINGFOLD_PIECE", "4096"}, Setting{"RINGFOLD_TRANSPORTS", "loopback,shm"},
               Setting{"RINGFOLD_NUMERICS", "nccl"}, Setting{"RINGFOLD_TIMEOUT", "30s"});
  INFO(name << "=" << value << " on rank 1 of 3");
  Shared<std::array<std::atomic<int>, 2>> ends;  // agreed, refused
  CHECK(run_ranks(3, 100s, [&, name = name, value = value](const Rendezvous& where) {
          if (where.rank == 1) setenv(name, value, 1);
          auto comm = Communicator::create(where);
          if (!comm.ok()) {
            ++ends->at(1);
            contains(comm.status().message(), value);
            contains(comm.status().message(), "rank 1");
            return 0;
          }
          ++ends->at(0);
          for (size_t bytes = 8; bytes <= size_t{16} << 20; bytes *= 4)
            if (!exact_sum(*comm, bytes / 8)) return 1;
          return 0;
        }) == "");
  CHECK((ends->at(0) == 3 || ends->at(1) == 3));
}

// ---- failure ----------------------------------------------------------------------------------

TEST_CASE("C25: a rank that exits without a word; waiting for it costs hardly any processor time") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(3, transport, with(kLong), [](Communicator& comm) {
          if (!exact_sum(comm, 1)) return;
          if (comm.rank() == 0) {
            std::this_thread::sleep_for(700ms);
            _exit(0);
          }
          const std::clock_t busy = std::clock();
          const auto begun = std::chrono::steady_clock::now();
          double x = 1;
          const Status status = comm.all_reduce(&x, &x, 1, DType::f64, Op::sum).wait();
          const double took =
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
          const double used = static_cast<double>(std::clock() - busy) / CLOCKS_PER_SEC;
          RANK_CHECK(status.code() == Code::peer_lost);
          contains(status.message(), "rank 0");
          RANK_CHECK(used < 0.2 * took);
        }) == "");
}

#ifdef RINGFOLD_TEST_UCX

namespace {

// The TCP connections of this process.
std::set<int> connections() {
  std::set<int> found;
  DIR* const files = opendir("/proc/self/fd");
  while (const dirent* const entry = readdir(files)) {
    const int fd = std::atoi(entry->d_name);
    sockaddr_in peer{};
    socklen_t length = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 &&
        peer.sin_family == AF_INET)
      found.insert(fd);
  }
  closedir(files);
  return found;
}

// What a relay on the way could do: the other side sees a reset.
void reset(const std::set<int>& sockets) {
  for (const int fd : sockets) {
    sockaddr nobody{};
    nobody.sa_family = AF_UNSPEC;
    RANK_CHECK(connect(fd, &nobody, sizeof nobody) == 0);
  }
}

}  // namespace

TEST_CASE("C26: a connection that is reset, in the middle of a transfer or idle") {
  const bool idle = GENERATE(false, true);
  INFO((idle ? "idle" : "in the middle"));
  setenv("UCX_TLS", "tcp,self", 1);
  const std::string wrong = on_transport(3, "ucx", with(kLong), [idle](Communicator& comm) {
    const std::set<int> control = connections();
    std::vector<int64_t> x(idle ? 10'000 : 2'000'000, 1);
    const auto sum = [&] {
      return comm.all_reduce(x.data(), x.data(), x.size(), DType::i64, Op::max).wait();
    };
    for (int i = 0; i < 3; ++i) rank_ok(sum());
    std::set<int> data = connections();
    for (const int fd : control) data.erase(fd);
    RANK_CHECK(!data.empty());
    rank_ok(comm.barrier().wait());
    std::thread relay;
    if (comm.rank() == 1)
      relay = std::thread([&] {
        if (!idle) std::this_thread::sleep_for(5ms);
        reset(data);
      });
    if (idle && relay.joinable()) relay.join();
    Status status;
    const auto end = std::chrono::steady_clock::now() + 30s;
    while (status.ok() && std::chrono::steady_clock::now() < end) status = sum();
    RANK_CHECK(status.code() == Code::peer_lost);
    contains(status.message(), "rank");
    if (relay.joinable()) relay.join();
  });
  unsetenv("UCX_TLS");
  CHECK(wrong == "");
}

#endif

TEST_CASE("C29: a rank just leaves; the others shrink without it, and are exact") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(5, transport, with(kLong), [](Communicator& comm) {
          if (!exact_sum(comm, 1000) || comm.rank() == 3) return;
          const std::array<int, 1> gone = {3};
          auto rest = comm.shrink(gone);
          if (!rank_ok(rest.status())) return;
          RANK_CHECK(rest->size() == 4);
          for (size_t i = 0; i < 100; ++i)
            if (!exact_sum(*rest, 1 + i * i)) return;
        }) == "");
}

TEST_CASE("C30: what cannot be is an error on every rank, at the call or in its wait") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(2, transport, with(kLong), [](Communicator& comm) {
          std::array<double, 4> x{};
          const auto no_type = static_cast<DType>(kDTypes), wild = static_cast<DType>(200);
          const auto no_op = static_cast<Op>(kOps);
          for (const auto& [type, op] :
               {std::pair{no_type, Op::sum}, {wild, Op::max}, {DType::f32, no_op}}) {
            Work work = comm.all_reduce(x.data(), x.data(), 4, type, op);
            std::atomic<int> told{0};
            work.then([&](const Status& why) { told += why.ok() ? 100 : 1; });
            RANK_CHECK(work.wait().code() == Code::invalid_argument);
            RANK_CHECK(told == 1);
          }
          exact_sum(comm, 100);  // nothing of it was started
        }) == "");
}

// ---- signals ----------------------------------------------------------------------------------

namespace {

std::array<std::atomic<int>, 65> heard{};

void hear(int number) {
  ++heard[static_cast<size_t>(number)];
}

void listen_for(int number) {
  struct sigaction mine {};
  mine.sa_handler = hear;  // without SA_RESTART
  RANK_CHECK(sigaction(number, &mine, nullptr) == 0);
}

bool still_ours(int number) {
  struct sigaction now {};
  return sigaction(number, nullptr, &now) == 0 && now.sa_handler == hear;
}

// Interrupts every other thread of this process a thousand times a second.
class Profiler {
 public:
  Profiler() : thread_([this] { run(); }) {}
  ~Profiler() {
    over_ = true;
    thread_.join();
  }
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

 private:
  void run() {
    const auto me = static_cast<pid_t>(syscall(SYS_gettid));
    while (!over_) {
      DIR* const threads = opendir("/proc/self/task");
      while (const dirent* const entry = readdir(threads))
        if (const pid_t other = std::atoi(entry->d_name); other > 0 && other != me)
          syscall(SYS_tgkill, getpid(), other, SIGPROF);
      closedir(threads);
      std::this_thread::sleep_for(1ms);
    }
  }

  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace

TEST_CASE("C47: a profiler's signals, in all threads, from start-up to the end") {
  const std::string transport = GENERATE(from_range(transports()));
  const int calls = std::getenv("RINGFOLD_TEST_SLOW") != nullptr ? 10'000 : 2'000;
  CHECK(run_ranks(2, 100s, [&](const Rendezvous& where) {
          listen_for(SIGPROF);
          const Profiler profiler;
          Options options = with(kLong);
          options.transports = transport;
          auto comm = Communicator::create(where, options);
          if (!rank_ok(comm.status())) return 1;
          std::mt19937_64 random(47);
          for (int i = 0; i < calls; ++i) {
            const size_t most = i % 100 == 0 ? 100'000 : 300;
            if (!exact_sum(*comm, 1 + random() % most)) return 1;
          }
          auto part = comm->split(0, -where.rank);
          if (rank_ok(part.status())) exact_sum(*part, 100'000);
          RANK_CHECK(heard[SIGPROF] > 10);
          return 0;
        }) == "");
}

TEST_CASE("C48: the user's signals stay the user's, and a peer that dies sends none") {
  const std::string transport = GENERATE(from_range(transports()));
  const std::array signals = {SIGUSR1, SIGUSR2, SIGPIPE, SIGCHLD};
  const bool handlers = GENERATE(true, false);  // or the default for SIGPIPE, which kills
  INFO(transport << (handlers ? ", with handlers" : ", without"));
  Processes ranks(3, [&](const Rendezvous& where) {
    if (handlers)
      for (const int number : signals) listen_for(number);
    else
      signal(SIGPIPE, SIG_DFL);
    Options options = with(kLong);
    options.transports = transport;
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    for (int i = 0; i < 50 && exact_sum(*comm, 20'000); ++i)
      if (handlers)
        for (const int number : signals) {
          raise(number);
          RANK_CHECK(heard[static_cast<size_t>(number)] == i + 1);
        }
    rank_ok(comm->barrier().wait());
    if (where.rank == 1) raise(SIGKILL);
    Status status;
    std::vector<float> x(300'000);
    while (status.ok())
      status = comm->all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::max).wait();
    RANK_CHECK(status.code() == Code::peer_lost);
    for (const int number : signals)
      if (handlers) RANK_CHECK(still_ours(number));
    if (handlers) RANK_CHECK(heard[SIGPIPE] == 50);
    return 0;
  });
  const auto ended = ranks.wait(60s);
  CHECK(ended[0].to_string() == "ok");
  CHECK(ended[1].signal == SIGKILL);
  CHECK(ended[2].to_string() == "ok");
}
