// Processes that are kept from something, as containers keep them: system calls that are refused,
// and namespaces.
#pragma once

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <iterator>
#include <string>

#include "test/processes.h"

namespace ringfold::test {

namespace detail {

inline void install(const sock_filter* code, size_t length) {
  const sock_fprog filter{static_cast<unsigned short>(length), const_cast<sock_filter*>(code)};
  RANK_CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  RANK_CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
}

}  // namespace detail

// From now on the system call fails with EPERM in this process.
inline void refuse_call(long number) {
  const sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  detail::install(code, std::size(code));
}

// The same for mappings of shared memory from so many bytes on.
inline void refuse_shared_mappings(uint32_t from_bytes) {
  const auto low = [](int argument) {
    return static_cast<uint32_t>(offsetof(seccomp_data, args) +
                                 8U * static_cast<unsigned>(argument));
  };
  const sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                              BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 0, 5),
                              BPF_STMT(BPF_LD | BPF_W | BPF_ABS, low(3)),  // flags
                              BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_SHARED, 0, 3),
                              BPF_STMT(BPF_LD | BPF_W | BPF_ABS, low(1)),  // length
                              BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, from_bytes, 0, 1),
                              BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                              BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  detail::install(code, std::size(code));
}

// Gives this process a /dev/shm of its own, with these options of tmpfs; false: not allowed.
inline bool own_dev_shm(const std::string& options) {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", "/dev/shm", "tmpfs", 0, options.c_str()) == 0;
}

// Runs `body` in a process of its own, after `confine`. What body returned; empty also if confine
// returned false, and then *allowed is false.
inline std::string confined(const std::function<bool()>& confine,
                            const std::function<std::string()>& body, bool* allowed) {
  constexpr int kNotAllowed = 77;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return "no pipe";
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!confine()) _exit(kNotAllowed);
    detail::write_all(ends[1], body());
    fflush(nullptr);
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char bytes[4096];
  for (ssize_t n; (n = read(ends[0], bytes, sizeof bytes)) > 0;)
    said.append(bytes, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  *allowed = !WIFEXITED(status) || WEXITSTATUS(status) != kNotAllowed;
  if (*allowed && status != 0) said += fmt::format("ended with status {:#x}", status);
  return said;
}

}  // namespace ringfold::test
