// Ranks as processes: fork N of them, hurt some, collect how each ended.
//
//   CHECK(run_ranks(4, 20s, [](const Rendezvous& me) {
//     auto comm = Communicator::create(me);
//     if (!rank_ok(comm.status())) return 1;
//     RANK_CHECK(comm->size() == 4);
//     return 0;
//   }) == "");
//
// A Catch2 assertion inside a rank would be lost with the process: ranks use RANK_CHECK and
// rank_ok, whose failures travel to the parent through a pipe. A rank has failed if its body
// returned something else than 0, threw, died, did not end in time, or failed a check.
//
// No rank outlives its Processes object, nor the program, however either ends. Create Processes
// only while the program has a single thread: the ranks are forked and not executed anew.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <catch2/catch.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "ringfold/bootstrap.h"
#include "ringfold/status.h"

namespace ringfold::test {

// ---- Inside a rank ----

namespace detail {

inline int report_pipe = -1;      // where this process reports; -1 in the parent
inline int failures = 0;          // failed checks of this process
inline constexpr int kTold = 20;  // failures that are written out; the others are only counted

inline void write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(descriptor, text.data(), text.size());
    if (written < 0 && errno != EINTR) return;  // the parent is gone, and so shall we be soon
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace detail

// Reports a failure of this rank.
inline void rank_fail(std::string_view what,
                      std::source_location at = std::source_location::current()) {
  if (++detail::failures > detail::kTold) return;
  detail::write_all(detail::report_pipe,
                    fmt::format("{}:{}: {}\n", at.file_name(), at.line(), what));
}

// Reports a status that is not ok; true if it is.
inline bool rank_ok(const Status& status,
                    std::source_location at = std::source_location::current()) {
  if (!status.ok()) rank_fail(status.to_string(), at);
  return status.ok();
}

namespace detail {

// `expression` as Catch2 takes it apart, so that the report shows the values of both sides.
inline bool check(const Catch::ITransientExpression& expression, const char* text,
                  std::source_location at = std::source_location::current()) {
  if (expression.getResult()) return true;
  std::ostringstream values;
  expression.streamReconstructedExpression(values);
  rank_fail(fmt::format("{} is false: {}", text, values.str()), at);
  return false;
}

template <class T>  // an expression without an operator
bool check(Catch::ExprLhs<T> expression, const char* text,
           std::source_location at = std::source_location::current()) {
  return check(expression.makeUnaryExpr(), text, at);
}

}  // namespace detail

// CHECK for ranks; true if the expression holds. It does not leave the function.
#define RANK_CHECK(...) \
  ::ringfold::test::detail::check(::Catch::Decomposer() <= __VA_ARGS__, #__VA_ARGS__)

// A T that the parent and all ranks see, zero at first: progress, and results for the parent. Made
// before the ranks; several writers need atomics.
template <class T>
class Shared {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  Shared() {
    void* memory =
        mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no shared memory for a test");
    value_ = new (memory) T();
  }
  ~Shared() { munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  T* value_;
};

// ---- Inside the parent ----

// A port of 127.0.0.1 that nobody listens on. Taken from below the range that the system hands out
// to outgoing connections, so that none of them occupies it before the ranks do.
inline uint16_t free_port() {
  std::random_device random;
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const auto port = static_cast<uint16_t>(20000 + random() % 12000);
    const int socket_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool free =
        bind(socket_fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    close(socket_fd);
    if (free) return port;
  }
  throw std::runtime_error("no free port on 127.0.0.1");
}

// How a rank ended.
struct Outcome {
  bool hung = false;   // it had to be killed at the deadline
  int exit_code = -1;  // what the body returned; -1 if a signal ended it
  int signal = 0;      // that signal, or 0
  std::string text;    // its failed checks, and what it threw

  [[nodiscard]] bool ok() const { return !hung && exit_code == 0; }
  [[nodiscard]] std::string to_string() const {
    if (ok()) return "ok";
    std::string how = fmt::format("ended with {}", exit_code);
    if (signal != 0) how = fmt::format("ended by signal {} ({})", signal, strsignal(signal));
    if (hung) how = "did not end in time";
    return text.empty() ? how : fmt::format("{}\n{}", how, text);
  }
};

class Processes {
 public:
  using Body = std::function<int(const Rendezvous& me)>;
  static constexpr int kChecksFailed =
      99;  // exit code of a rank whose body returned 0 nevertheless

  // Starts `size` ranks, which meet at a free port of 127.0.0.1 with a random secret. Throws
  // std::runtime_error if the system refuses.
  Processes(int size, const Body& body) {
    std::random_device random;
    Rendezvous where;
    where.size = size;
    where.coordinator = fmt::format("127.0.0.1:{}", free_port());
    where.secret = fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
    where.source = "test";
    ranks_.reserve(static_cast<size_t>(size));
    for (where.rank = 0; where.rank < size; ++where.rank) ranks_.emplace_back(where, body);
  }

  void kill(int rank) { signal(rank, SIGKILL); }
  void stop(int rank) { signal(rank, SIGSTOP); }  // a rank that lives but does not answer
  void resume(int rank) { signal(rank, SIGCONT); }
  [[nodiscard]] pid_t pid(int rank) const { return at(rank).pid; }

  // Waits for all ranks; those that have not ended after `deadline` are killed.
  std::vector<Outcome> wait(Nanoseconds deadline) {
    const auto end = std::chrono::steady_clock::now() + deadline;
    while (collect() > 0) {
      if (std::chrono::steady_clock::now() >= end) {
        for (Rank& rank : ranks_) rank.give_up();
        break;
      }
      std::vector<pollfd> pipes;
      for (const Rank& rank : ranks_) {
        if (rank.pid > 0) pipes.push_back({rank.pipe, POLLIN, 0});
      }
      poll(pipes.data(), pipes.size(), 5);  // milliseconds; an exit is noticed after them
    }
    std::vector<Outcome> outcomes;
    for (const Rank& rank : ranks_) outcomes.push_back(rank.outcome);
    return outcomes;
  }

 private:
  struct Rank {
    pid_t pid = -1;  // -1: it has ended
    int pipe = -1;   // its reports
    Outcome outcome;

    Rank(const Rendezvous& me, const Body& body) {
      std::array<int, 2> ends{};
      if (pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("no pipe for a rank");
      fcntl(ends[0], F_SETFL, O_NONBLOCK);
      fflush(nullptr);  // or the rank would print it again
      const pid_t parent = getpid();
      pid = fork();
      if (pid == 0) {
        close(ends[0]);
        live(me, body, parent, ends[1]);
      }
      close(ends[1]);
      pipe = ends[0];
      if (pid < 0) {
        close(pipe);
        throw std::runtime_error("cannot fork a rank");
      }
    }
    Rank(Rank&& other) noexcept
        : pid(std::exchange(other.pid, -1)),
          pipe(std::exchange(other.pipe, -1)),
          outcome(std::move(other.outcome)) {}
    ~Rank() {
      give_up();
      if (pipe >= 0) close(pipe);
    }

    void read_reports() {
      std::array<char, 4096> bytes{};
      for (ssize_t n; (n = read(pipe, bytes.data(), bytes.size())) > 0;) {
        outcome.text.append(bytes.data(), static_cast<size_t>(n));
      }
    }

    // Notes how the rank ended; with WNOHANG only if it has. True if it has ended by now.
    bool reap(int options) {
      if (pid < 0) return true;
      int status = 0;
      read_reports();
      if (waitpid(pid, &status, options) != pid) return false;
      read_reports();
      pid = -1;
      if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
      return true;
    }

    void give_up() {
      if (reap(WNOHANG)) return;
      outcome.hung = true;
      ::kill(pid, SIGKILL);
      reap(0);
    }

    // The whole life of the forked process.
    [[noreturn]] static void live(const Rendezvous& me, const Body& body, pid_t parent, int pipe) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(kChecksFailed);  // the parent died before that took effect
      // Catch2's handlers would report a crash as if this were the test program.
      for (const int number : {SIGINT, SIGILL, SIGABRT, SIGFPE, SIGSEGV, SIGTERM}) {
        ::signal(number, SIG_DFL);
      }
      ::signal(SIGPIPE, SIG_IGN);
      detail::report_pipe = pipe;
      detail::failures = 0;  // those of a rank that starts ranks itself are not theirs
      int code = kChecksFailed;
      try {
        code = body(me);
      } catch (const std::exception& error) {
        rank_fail(fmt::format("threw: {}", error.what()));
      }
      if (detail::failures > detail::kTold) {
        detail::write_all(pipe, fmt::format("and {} more\n", detail::failures - detail::kTold));
      }
      fflush(nullptr);
      _exit(code == 0 && detail::failures > 0 ? kChecksFailed : code);
    }
  };

  [[nodiscard]] const Rank& at(int rank) const { return ranks_.at(static_cast<size_t>(rank)); }

  void signal(int rank, int number) {
    if (pid(rank) > 0) ::kill(pid(rank), number);
  }

  // Ranks that are still running.
  size_t collect() {
    size_t running = 0;
    for (Rank& rank : ranks_) running += rank.reap(WNOHANG) ? 0 : 1;
    return running;
  }

  std::vector<Rank> ranks_;
};

// Runs `size` ranks to their end: "" if all is well, otherwise a line or more for each that failed.
inline std::string run_ranks(int size, Nanoseconds deadline, const Processes::Body& body) {
  const std::vector<Outcome> outcomes = Processes(size, body).wait(deadline);
  std::string failed;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].ok()) continue;
    failed += fmt::format("rank {} {}\n", rank, outcomes[rank].to_string());
  }
  return failed;
}

}  // namespace ringfold::test
