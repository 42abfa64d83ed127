#include "tools/launch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "lib/base/cores.h"
#include "tools/command.h"

namespace ringfold::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kGrace = std::chrono::seconds(2);         // between SIGTERM and SIGKILL
constexpr auto kDrain = std::chrono::milliseconds(500);  // for output after the last rank ended
constexpr size_t kLongestLine = size_t{1} << 20;         // longer ones are cut in two
constexpr int kProgramMissing = 127;                     // as shells say it

[[noreturn]] void refuse(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { close(); }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

struct Pipe {
  Fd out, in;
  Pipe() {
    std::array<int, 2> ends{};
    if (pipe2(ends.data(), O_CLOEXEC) != 0) refuse("pipe");
    out = Fd(ends[0]), in = Fd(ends[1]);
  }
};

std::string random_secret() {
  std::array<unsigned char, 32> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    refuse("getrandom");
  }
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

bool is_free(uint16_t port, uint16_t* chosen = nullptr) {
  const Fd probe(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const where = reinterpret_cast<sockaddr*>(&address);
  if (probe.get() < 0 || bind(probe.get(), where, length) != 0) return false;
  if (chosen != nullptr && getsockname(probe.get(), where, &length) == 0) {
    *chosen = ntohs(address.sin_port);
  }
  return true;
}

// A port that nobody holds now. It is drawn from below the range the kernel hands out by itself, so
// that no outgoing connection of another program takes it before rank 0 listens.
uint16_t free_port() {
  constexpr uint32_t kLowest = 10240;
  uint32_t first_automatic = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first_automatic;
  for (int attempt = 0; attempt < 100 && first_automatic > kLowest + 1000; ++attempt) {
    uint32_t random = 0;
    if (getrandom(&random, sizeof(random), 0) != sizeof(random)) refuse("getrandom");
    const auto port = static_cast<uint16_t>(kLowest + random % (first_automatic - kLowest));
    if (is_free(port)) return port;
  }
  uint16_t port = 0;
  if (!is_free(0, &port)) refuse("no free port on 127.0.0.1");
  return port;
}

// This process's environment, with the ranks' variables in place of any that are there already.
std::vector<std::string> environment_of(int rank, int ranks, uint16_t port,
                                        const std::string& secret) {
  const std::vector<std::string> ours = {fmt::format("RINGFOLD_RANK={}", rank),
                                         fmt::format("RINGFOLD_SIZE={}", ranks),
                                         fmt::format("RINGFOLD_LOCAL_RANK={}", rank),
                                         fmt::format("RINGFOLD_COORDINATOR=127.0.0.1:{}", port),
                                         fmt::format("RINGFOLD_SECRET={}", secret)};
  std::vector<std::string> all = ours;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view there = *entry;
    const std::string_view name = there.substr(0, there.find('='));
    const bool replaced = std::any_of(ours.begin(), ours.end(), [&](const std::string& own) {
      return own.substr(0, own.find('=')) == name;
    });
    if (!replaced && name != "RINGFOLD_SECRET_FILE") all.emplace_back(there);
  }
  return all;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (const std::string& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

class Launcher {
 public:
  explicit Launcher(const Launch& what) : what_(what) {}

  int run() {
    watch_signals();
    // Orphans of the ranks come to us, so that they can be found and ended, too.
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    allow_descriptors();
    const std::string secret = random_secret();
    const uint16_t port = free_port();
    for (int rank = 0; rank < what_.ranks && !stopping(); ++rank) start(rank, port, secret);
    while (running() > 0) step();
    end_leftovers();
    return first_failure_.value_or(0);
  }

 private:
  struct Rank {
    pid_t pid = -1;
    bool ended = false;
  };
  struct Stream {  // one rank's stdout or stderr
    Fd from;
    int to = -1;
    std::string prefix, line;
  };

  [[nodiscard]] bool stopping() const { return kill_at_.has_value(); }
  [[nodiscard]] long running() const {
    return std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !r.ended; });
  }

  static sigset_t set_of(std::initializer_list<int> signals) {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : signals) sigaddset(&set, signal);
    return set;
  }

  void watch_signals() {
    const sigset_t all = set_of({SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGPIPE});
    if (sigprocmask(SIG_BLOCK, &all, &old_mask_) != 0) refuse("sigprocmask");
    const sigset_t child = set_of({SIGCHLD});
    const sigset_t stop = set_of({SIGINT, SIGTERM, SIGHUP});
    child_ended_ = Fd(signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK));
    stop_asked_ = Fd(signalfd(-1, &stop, SFD_CLOEXEC | SFD_NONBLOCK));
    if (child_ended_.get() < 0 || stop_asked_.get() < 0) refuse("signalfd");
  }

  // Two pipes a rank. The ranks themselves get the limit that there was.
  void allow_descriptors() {
    const rlim_t needed = 2 * static_cast<rlim_t>(what_.ranks) + 64;
    if (getrlimit(RLIMIT_NOFILE, &old_limit_) != 0 || old_limit_.rlim_cur >= needed) return;
    const rlimit more{std::min(needed, old_limit_.rlim_max), old_limit_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &more);
  }

  void start(int rank, uint16_t port, const std::string& secret) {
    const auto environment = environment_of(rank, what_.ranks, port, secret);
    const auto variables = pointers(environment), arguments = pointers(what_.program);
    Pipe out, err, trouble;
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid < 0) refuse("fork");
    if (pid == 0) {
      become_rank(parent, out.in.get(), err.in.get());
      if (what_.bind) bind_to_core(rank);
      execvpe(arguments[0], arguments.data(), variables.data());
      const int why = errno;
      [[maybe_unused]] const ssize_t told = write(trouble.in.get(), &why, sizeof(why));
      _exit(kProgramMissing);
    }
    setpgid(pid, pid);  // in both: whoever comes first
    ranks_.push_back({pid, false});
    trouble.in.close();
    int why = 0;
    if (read(trouble.out.get(), &why, sizeof(why)) == sizeof(why) && !first_failure_) {
      fail(kFailed, fmt::format("cannot start {}: {}", what_.program[0], std::strerror(why)));
      stop_all(kProgramMissing);
    }
    const std::string prefix = what_.prefix ? fmt::format("[{}] ", rank) : "";
    streams_.push_back({std::move(out.out), STDOUT_FILENO, prefix, {}});
    streams_.push_back({std::move(err.out), STDERR_FILENO, prefix, {}});
  }

  // A rank that moves between the cores, or shares one with another while a second is idle, is
  // measured for what the system does, not for what it does itself.
  static void bind_to_core(int rank) {
    const std::vector<int> cores = allowed_cores();
    if (cores.empty()) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cores[static_cast<size_t>(rank) % cores.size()], &one);
    sched_setaffinity(0, sizeof one, &one);
  }

  // Runs in the child, between fork and exec.
  void become_rank(pid_t parent, int out, int err) const {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(kFailed);  // it died before we asked
    const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(nothing, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
    if (old_limit_.rlim_max != 0) setrlimit(RLIMIT_NOFILE, &old_limit_);
  }

  // Waits for whatever comes next, and handles it.
  void step() {
    std::vector<pollfd> waits = {{child_ended_.get(), POLLIN, 0}, {stop_asked_.get(), POLLIN, 0}};
    for (const Stream& s : streams_) waits.push_back({s.from.get(), POLLIN, 0});
    poll(waits.data(), waits.size(), milliseconds_left());
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (waits[i + 2].revents != 0) pass_on(streams_[i]);
    }
    signalfd_siginfo info{};
    if (read(stop_asked_.get(), &info, sizeof(info)) > 0) {
      // The second one means it.
      if (stopping()) kill_at_ = Clock::now();
      stop_all(128 + static_cast<int>(info.ssi_signo));
    }
    while (read(child_ended_.get(), &info, sizeof(info)) > 0) {
    }
    look_for_ended();
    if (stopping() && Clock::now() >= *kill_at_) signal_all(SIGKILL);
  }

  [[nodiscard]] int milliseconds_left() const {
    if (!stopping()) return -1;
    const auto left = *kill_at_ - Clock::now();
    // After SIGKILL only the notices of death are waited for.
    return std::max(10, static_cast<int>(left / std::chrono::milliseconds(1)) + 1);
  }

  // The ended stay zombies until the very end: their process group keeps its number.
  void look_for_ended() {
    for (size_t number = 0; number < ranks_.size(); ++number) {
      Rank& rank = ranks_[number];
      siginfo_t info{};
      if (rank.ended ||
          waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
        continue;
      }
      if (info.si_pid != rank.pid) continue;
      rank.ended = true;
      const int status = info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status;
      if (status == 0) continue;
      // The others end because of us, or of it.
      if (info.si_code != CLD_EXITED && !first_failure_)
        fail(kFailed, fmt::format("rank {} (process {}) was ended by signal {} ({})", number,
                                  rank.pid, info.si_status, strsignal(info.si_status)));
      stop_all(status);
    }
  }

  void stop_all(int status) {
    if (!first_failure_) first_failure_ = status;
    if (stopping()) return;
    kill_at_ = Clock::now() + kGrace;
    signal_all(SIGTERM);
  }
  void signal_all(int signal) const {
    for (const Rank& rank : ranks_) kill(-rank.pid, signal);
  }

  void pass_on(Stream& stream) {
    std::array<char, 65536> bytes;
    const ssize_t n = read(stream.from.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) return;
    if (n <= 0) {
      if (!stream.line.empty()) emit(stream, stream.line);
      stream.line.clear();
      stream.from.close();
      return;
    }
    std::string_view rest(bytes.data(), static_cast<size_t>(n));
    for (size_t end = rest.find('\n'); end != rest.npos; end = rest.find('\n')) {
      stream.line += rest.substr(0, end);
      emit(stream, stream.line);
      stream.line.clear();
      rest.remove_prefix(end + 1);
    }
    stream.line += rest;
    if (stream.line.size() >= kLongestLine) emit(stream, std::exchange(stream.line, {}));
  }

  // Never waits for a slow reader once somebody has asked us to stop.
  void emit(const Stream& stream, std::string_view line) {
    const std::string whole = fmt::format("{}{}\n", stream.prefix, line);
    std::string_view rest = whole;
    while (!rest.empty()) {
      std::array<pollfd, 2> waits = {{{stream.to, POLLOUT, 0}, {stop_asked_.get(), POLLIN, 0}}};
      if (poll(waits.data(), waits.size(), milliseconds_left()) < 0) continue;
      if (waits[0].revents == 0) return;
      // A pipe that is ready takes this much without blocking.
      const ssize_t n = write(stream.to, rest.data(), std::min<size_t>(rest.size(), PIPE_BUF));
      if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (n < 0) return stop_all(128 + SIGPIPE);
      rest.remove_prefix(static_cast<size_t>(n));
    }
  }

  // All ranks have ended. What they left running ends now; what they wrote last is passed on.
  void end_leftovers() {
    signal_all(SIGKILL);
    const auto until = Clock::now() + kDrain;
    do {
      reap();
      std::vector<pollfd> waits;
      for (const Stream& s : streams_) waits.push_back({s.from.get(), POLLIN, 0});
      poll(waits.data(), waits.size(), 10);
      bool open = false;
      for (size_t i = 0; i < streams_.size(); ++i) {
        if (waits[i].revents != 0) pass_on(streams_[i]);
        open |= streams_[i].from.get() >= 0;
      }
      // Orphans may hold the pipes open: first end them.
      if (!kill_children() && !open) break;
    } while (Clock::now() < until);
    reap();
  }
  static void reap() {
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
  }
  // Orphans that had left their rank's process group; true if there were any.
  static bool kill_children() {
    std::ifstream children(fmt::format("/proc/self/task/{}/children", getpid()));
    bool any = false;
    for (pid_t pid = 0; children >> pid; any = true) kill(pid, SIGKILL);
    return any;
  }

  const Launch& what_;
  std::vector<Rank> ranks_;
  std::vector<Stream> streams_;
  Fd child_ended_, stop_asked_;
  sigset_t old_mask_{};
  rlimit old_limit_{};
  std::optional<int> first_failure_;
  std::optional<Clock::time_point> kill_at_;  // set once everything is to end
};

}  // namespace

int launch(const Launch& what) {
  return Launcher(what).run();
}

}  // namespace ringfold::tools
