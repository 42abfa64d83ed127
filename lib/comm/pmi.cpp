#include "lib/comm/pmi.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "lib/base/net.h"

namespace ringfold::pmi {
namespace {

constexpr const char* kKey = "ringfold";
constexpr size_t kLongestLine = 4096;

std::optional<int> descriptor() {
  const char* const text = std::getenv("PMI_FD");
  const auto fd = text != nullptr ? parse_integer(text) : std::nullopt;
  if (!fd || *fd < 0 || fcntl(static_cast<int>(*fd), F_GETFD) < 0) return std::nullopt;
  return static_cast<int>(*fd);
}

// A question and its answer are a line each: "cmd=get kvsname=K key=ringfold".
class Launcher {
 public:
  Launcher(int fd, Nanoseconds deadline) : fd_(fd), deadline_(deadline) {}

  // The answer, which must be of that kind and no refusal.
  Result<std::string> ask(const std::string& question, std::string_view kind) {
    std::string_view rest = question;
    while (!rest.empty()) {
      const ssize_t n = send(fd_, rest.data(), rest.size(), MSG_NOSIGNAL);
      if (n < 0 && errno != EINTR) return trouble(question, std::strerror(errno));
      rest.remove_prefix(n > 0 ? static_cast<size_t>(n) : 0);
    }
    const auto answer = line();
    if (!answer.ok()) return Status(answer.status().code(), answer.status().message());
    const bool refused = value(*answer, "rc").value_or("0") != "0";
    if (value(*answer, "cmd") != kind || refused) return trouble(question, *answer);
    return *answer;
  }

  // The value of a name in a line, up to the next blank.
  static std::optional<std::string> value(const std::string& line, const std::string& name) {
    const size_t at = (" " + line).find(" " + name + "=");
    if (at == std::string::npos) return std::nullopt;
    const size_t begin = at + name.size() + 1;
    return line.substr(begin, line.find(' ', begin) - begin);
  }

 private:
  static Status trouble(std::string_view question, std::string_view answer) {
    return {Code::system, fmt::format("mpirun (PMI): to \"{}\" the launcher said \"{}\"",
                                      question.substr(0, question.find('\n')), answer)};
  }

  Result<std::string> line() {
    std::string text;
    for (char c = 0; text.size() < kLongestLine;) {
      pollfd waiting{fd_, POLLIN, 0};
      const int ready = poll(&waiting, 1, milliseconds_until(deadline_));
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0)
        return Status(Code::timeout,
                      "mpirun (PMI): the launcher did not answer in time: not all "
                      "ranks have come");
      if (read(fd_, &c, 1) != 1) return trouble("", "nothing more");
      if (c == '\n') return text;
      text += c;
    }
    return trouble("", text);
  }

  const int fd_;
  const Nanoseconds deadline_;
};

Result<std::string> exchange(int fd, int rank,
                             const std::function<std::string(std::string_view)>& said,
                             Nanoseconds deadline) {
  Launcher launcher(fd, deadline);
  auto answer = launcher.ask("cmd=init pmi_version=1 pmi_subversion=1\n", "response_to_init");
  if (answer.ok()) answer = launcher.ask("cmd=get_my_kvsname\n", "my_kvsname");
  if (!answer.ok()) return answer;
  const std::string space = Launcher::value(*answer, "kvsname").value_or("");
  std::string told;
  if (rank == 0) {
    told = said(space);
    answer = launcher.ask(fmt::format("cmd=put kvsname={} key={} value={}\n", space, kKey, told),
                          "put_result");
    if (!answer.ok()) return answer;
  }
  answer = launcher.ask("cmd=barrier_in\n", "barrier_out");
  if (answer.ok() && rank != 0) {
    answer = launcher.ask(fmt::format("cmd=get kvsname={} key={}\n", space, kKey), "get_result");
    if (answer.ok()) told = Launcher::value(*answer, "value").value_or("");
  }
  // Who leaves without it is taken for crashed.
  if (answer.ok()) answer = launcher.ask("cmd=finalize\n", "finalize_ack");
  if (!answer.ok()) return answer;
  return told;
}

}  // namespace

bool usable() {
  const bool speaks_mpi = dlsym(RTLD_DEFAULT, "MPI_Init") != nullptr;
  return descriptor().has_value() && !speaks_mpi;
}

Result<std::string> tell_all(int rank, const std::function<std::string(std::string_view)>& said,
                             Nanoseconds deadline) {
  static std::mutex lock;
  static std::optional<std::string> known;
  const std::lock_guard guard(lock);
  if (known) return *known;
  const auto fd = descriptor();
  if (!fd) return Status(Code::invalid_argument, "mpirun (PMI): PMI_FD is no open descriptor");
  auto told = exchange(*fd, rank, said, deadline);
  if (told.ok()) known = *told;
  return told;
}

}  // namespace ringfold::pmi
