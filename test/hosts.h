// Two hosts on this one: network, mount and host-name namespaces of their own, joined by a virtual
// cable. Needs root, `ip` and `nsenter`; nothing is left when the object is gone.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "test/processes.h"

namespace ringfold::test {

class Hosts {
 public:
  static constexpr std::array<const char*, 2> kNames = {"alpha", "beta"};

  Hosts() {
    for (size_t host = 0; host < 2; ++host) {
      std::array<int, 2> ready{};
      if (pipe2(ready.data(), O_CLOEXEC) != 0) return;
      pids_[host] = fork();
      if (pids_[host] == 0) hold(host, ready[1]);
      close(ready[1]);
      char done = 0;
      const bool made = read(ready[0], &done, 1) == 1;
      close(ready[0]);
      if (!made) return;
    }
    here_ = ip(0, fmt::format("link add v0 type veth peer name v0 netns {}", pids_[1])) &&
            ip(0, "link set lo up") && ip(1, "link set lo up") && ip(0, "link set v0 up") &&
            ip(1, "link set v0 up");
  }
  ~Hosts() {
    for (const pid_t pid : pids_) {
      if (pid <= 0) continue;
      ::kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  // False: they cannot be made here.
  [[nodiscard]] bool here() const { return here_; }
  [[nodiscard]] bool run(size_t host, const std::string& command) const {
    return std::system(fmt::format("nsenter -t {} -n -m -u sh -c '{}' >/dev/null 2>&1", pids_[host],
                                   command)
                           .c_str()) == 0;
  }
  [[nodiscard]] bool ip(size_t host, const std::string& arguments) const {
    return run(host, "ip " + arguments);
  }
  // The usual addresses, 10.77.0.1 and 10.77.0.2, and names: a host's own is 127.0.0.1.
  [[nodiscard]] bool with_ipv4() const {
    return ip(0, "addr add 10.77.0.1/24 dev v0") && ip(1, "addr add 10.77.0.2/24 dev v0") &&
           names(0, "127.0.0.1 localhost\n127.0.0.1 alpha\n10.77.0.2 beta\n") &&
           names(1, "127.0.0.1 localhost\n127.0.0.1 beta\n10.77.0.1 alpha\n");
  }
  // What this host's names mean, in place of /etc/hosts.
  [[nodiscard]] bool names(size_t host, const std::string& lines) const {
    const std::string path = fmt::format("/tmp/ringfold-hosts-{}", pids_[host]);
    std::ofstream(path) << lines;
    const bool bound = run(host, fmt::format("mount --bind {} /etc/hosts", path));
    unlink(path.c_str());
    return bound;
  }
  // The calling process lives there from now on.
  [[nodiscard]] bool enter(size_t host) const {
    for (const char* kind : {"net", "uts", "mnt"}) {
      const int space = open(fmt::format("/proc/{}/ns/{}", pids_[host], kind).c_str(), O_RDONLY);
      const bool entered = space >= 0 && setns(space, 0) == 0;
      close(space);
      if (!entered) return false;
    }
    return true;
  }

 private:
  [[noreturn]] static void hold(size_t host, int ready) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS) != 0) _exit(1);
    if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) _exit(1);
    if (mount("sysfs", "/sys", "sysfs", 0, nullptr) != 0) _exit(1);  // shows its own devices
    if (sethostname(kNames[host], std::strlen(kNames[host])) != 0) _exit(1);
    if (write(ready, "", 1) != 1) _exit(1);
    for (;;) pause();
  }

  std::array<pid_t, 2> pids_{-1, -1};
  bool here_ = false;
};

}  // namespace ringfold::test
