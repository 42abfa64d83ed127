#include "tools/probes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <hwloc.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>

#include "lib/base/cores.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

Json limit_json(rlim_t value) {
  return value == RLIM_INFINITY ? Json("unlimited") : Json(static_cast<uint64_t>(value));
}

// The parent reads a word of its child's memory, as a transport would.
std::string cross_memory_attach() {
  const uint64_t secret = 0x72696e67666f6c64;
  std::array<int, 2> hold{};
  if (pipe(hold.data()) != 0) return std::strerror(errno);
  const pid_t child = fork();
  if (child == 0) {
    char byte = 0;
    close(hold[1]);
    [[maybe_unused]] const ssize_t n = read(hold[0], &byte, 1);  // until the parent is done
    _exit(0);
  }
  close(hold[0]);
  uint64_t copy = 0;
  const iovec here{&copy, sizeof(copy)}, there{const_cast<uint64_t*>(&secret), sizeof(secret)};
  const ssize_t n = child < 0 ? -1 : process_vm_readv(child, &here, 1, &there, 1, 0);
  const int why = errno;
  close(hold[1]);
  if (child > 0) waitpid(child, nullptr, 0);
  if (n == sizeof(copy) && copy == secret) return "works";
  return n < 0 ? std::strerror(why) : "reads something else";
}

std::string works(long result) {
  if (result < 0) return std::strerror(errno);
  close(static_cast<int>(result));
  return "works";
}

std::string memfd_works() {
  const int fd = memfd_create("ringfold-doctor", MFD_CLOEXEC);
  if (fd < 0) return std::strerror(errno);
  const int error = posix_fallocate(fd, 0, 1 << 20);
  close(fd);
  return error == 0 ? "works" : std::strerror(error);
}

}  // namespace

Json probe_cores(Problems& problems) {
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  cpu_set_t set;
  CPU_ZERO(&set);
  const int allowed = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : -1;
  const auto quota = granted_cores();
  double usable = allowed > 0 ? allowed : static_cast<double>(online);
  if (quota) usable = std::min(usable, *quota);
  if (usable < 2) {
    problems.push_back(fmt::format(
        "only {:g} core usable: ranks take turns, and waiting sleeps instead of spinning", usable));
  }
  return {{"online", online},
          {"affinity", allowed},
          {"cgroup_limit", quota ? Json(*quota) : Json("none")},
          {"usable", usable}};
}

Json probe_topology() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0 || hwloc_topology_load(topology) != 0) {
    return {{"error", "hwloc cannot read the topology"}};
  }
  Json j = {{"packages", hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PACKAGE)},
            {"numa_nodes", hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE)},
            {"cores", hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE)}};
  const std::array<std::pair<const char*, hwloc_obj_type_t>, 3> caches = {
      {{"l1", HWLOC_OBJ_L1CACHE}, {"l2", HWLOC_OBJ_L2CACHE}, {"l3", HWLOC_OBJ_L3CACHE}}};
  for (const auto& [label, type] : caches) {
    const hwloc_obj_t cache = hwloc_get_obj_by_type(topology, type, 0);
    if (cache == nullptr) continue;
    j[label] = fmt::format("{} x {}", hwloc_get_nbobjs_by_type(topology, type),
                           show_size(cache->attr->cache.size));
  }
  hwloc_topology_destroy(topology);
  return j;
}

Json probe_memory(Problems& problems) {
  constexpr uint64_t kSmallShm = uint64_t{256} << 20;
  constexpr long kTmpfs = 0x01021994;
  Json j;
  struct statvfs space {};
  struct statfs type {};
  if (statvfs("/dev/shm", &space) != 0 || statfs("/dev/shm", &type) != 0) {
    j["/dev/shm"] = std::strerror(errno);
    problems.emplace_back("/dev/shm is not there; memfd is used for shared memory instead");
  } else {
    const uint64_t size = uint64_t{space.f_blocks} * space.f_frsize;
    const uint64_t free = uint64_t{space.f_bavail} * space.f_frsize;
    j["/dev/shm"] = {{"type", type.f_type == kTmpfs ? "tmpfs" : fmt::format("{:#x}", type.f_type)},
                     {"size", size},
                     {"free", free}};
    if (free < kSmallShm) {
      problems.push_back(
          fmt::format("/dev/shm has {} free; if memfd does not work either, give "
                      "the container more (docker run --shm-size=1g)",
                      show_size(free)));
    }
  }
  j["memfd"] = memfd_works();
  rlimit locked{};
  getrlimit(RLIMIT_MEMLOCK, &locked);
  j["memlock"] = limit_json(locked.rlim_cur);
  if (locked.rlim_cur != RLIM_INFINITY && locked.rlim_cur < kSmallShm) {
    problems.push_back(
        fmt::format("memory that may be locked: {}; RDMA and pinned buffers need "
                    "more (ulimit -l unlimited)",
                    show_size(locked.rlim_cur)));
  }
  return j;
}

Json probe_kernel(Problems& problems) {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_max < 4096) {
    problems.push_back(
        fmt::format("at most {} descriptors: rank 0 needs one for every rank "
                    "(ulimit -Hn)",
                    files.rlim_max));
  }
  const std::string attach = cross_memory_attach();
  const std::string pidfd = works(syscall(SYS_pidfd_open, getpid(), 0));
  if (pidfd != "works") {
    problems.push_back(fmt::format("pidfd_open: {}; a local rank's death is noticed later", pidfd));
  }
  return {
      {"descriptors", {{"soft", limit_json(files.rlim_cur)}, {"hard", limit_json(files.rlim_max)}}},
      {"cross_memory_attach", attach},
      {"ptrace_scope", first_line("/proc/sys/kernel/yama/ptrace_scope").value_or("no Yama")},
      {"pidfd", pidfd}};
}

Json probe_interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {{"error", std::strerror(errno)}};
  Json j = Json::object();
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    std::array<char, NI_MAXHOST> text{};
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(i->ifa_addr, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0)
      continue;
    Json& one = j[i->ifa_name];
    one["addresses"].push_back(text.data());
    one["up"] = (i->ifa_flags & IFF_UP) != 0;
    one["loopback"] = (i->ifa_flags & IFF_LOOPBACK) != 0;
    const auto speed = first_line(fmt::format("/sys/class/net/{}/speed", i->ifa_name));
    if (speed && *speed != "-1") one["Mbit_s"] = *speed;
  }
  freeifaddrs(list);
  return j;
}

}  // namespace ringfold::tools
