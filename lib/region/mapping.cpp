#include "lib/region/mapping.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>

namespace ringfold::region {
namespace {

constexpr size_t kHuge = 2 << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

Status system_error(const std::string& what) {
  return {Code::system, fmt::format("{}: {}", what, std::strerror(errno))};
}

// A number from a file of the system, if it is there.
std::optional<uint64_t> number_in(const std::string& path) {
  uint64_t value = 0;
  if (std::ifstream(path) >> value) return value;
  return std::nullopt;
}

// What the control group of this process still grants, by cgroup 2 or 1.
uint64_t granted_memory() {
  uint64_t left = UINT64_MAX;
  std::ifstream list("/proc/self/cgroup");
  for (std::string line; std::getline(list, line);) {
    const bool second = line.starts_with("0::");
    const size_t first = line.find(":memory:");
    if (!second && first == std::string::npos) continue;
    const std::string root = second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    const std::string group = second ? line.substr(3) : line.substr(first + 8);
    for (const std::string& at : {root, root + group}) {
      const auto most = number_in(at + (second ? "/memory.max" : "/memory.limit_in_bytes"));
      const auto used = number_in(at + (second ? "/memory.current" : "/memory.usage_in_bytes"));
      if (most && used) left = std::min(left, *most - std::min(*most, *used));
    }
  }
  return left;
}

uint64_t available_memory() {
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("MemAvailable:"))
      return std::min<uint64_t>(granted_memory(), std::strtoull(line.c_str() + 13, nullptr, 10)
                                                      << 10);
  return granted_memory();
}

}  // namespace

Result<Descriptor> make_shared(const char* what, size_t bytes) {
  // To reserve what is not there would end processes, this one or others.
  if (const uint64_t available = available_memory(); bytes > available)
    return Status(Code::system, fmt::format("reserving {} bytes for {}: {} are available", bytes,
                                            what, available));
  Descriptor fd(memfd_create(what, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return system_error(fmt::format("creating shared memory for {}", what));
  errno = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  if (errno != 0) return system_error(fmt::format("reserving {} bytes for {}", bytes, what));
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0)
    return system_error(fmt::format("sealing the memory of {}", what));
  return fd;
}

Status check_shared(const Descriptor& fd, size_t bytes) {
  const auto refuse = [](const std::string& why) {
    return Status(Code::invalid_argument, "shared memory refused: " + why);
  };
  struct stat info {};
  if (!fd || fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) return refuse("not a file");
  if (info.st_size != static_cast<off_t>(bytes))
    return refuse(fmt::format("{} bytes, expected {}", info.st_size, bytes));
  if (static_cast<size_t>(info.st_blocks) * 512 < bytes) return refuse("not reserved");
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return refuse("not sealed against shrinking");
  return {};
}

Mapping::~Mapping() {
  if (begin_ != nullptr) munmap(begin_, bytes_);
}

Result<Mapping> Mapping::map(const Descriptor& fd, size_t bytes, InChildren children) {
  // Aligned by hand: the kernel aligns to huge pages only what it knows to be backed by them.
  void* const place =
      mmap(nullptr, bytes + kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return system_error("finding room for shared memory");
  const auto address = reinterpret_cast<uintptr_t>(place);
  const size_t before = (kHuge - address % kHuge) % kHuge;
  auto* const begin = static_cast<std::byte*>(place) + before;
  if (before > 0) munmap(place, before);
  munmap(begin + bytes, kHuge - before);
  if (mmap(begin, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd.get(),
           0) == MAP_FAILED) {
    const Status why = system_error(fmt::format("mapping {} bytes of shared memory", bytes));
    munmap(begin, bytes);
    return why;
  }
  if (children == InChildren::absent) madvise(begin, bytes, MADV_DONTFORK);
  Mapping mapping;
  mapping.begin_ = begin;
  mapping.bytes_ = bytes;
  return mapping;
}

void Mapping::enlarge_pages() {
  madvise(begin_, bytes_, MADV_COLLAPSE);
}

Status Mapping::part_from_others(std::byte* begin, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t first = static_cast<size_t>(begin - begin_) / page * page;
  const size_t last = (static_cast<size_t>(begin - begin_) + bytes + page - 1) / page * page;
  const size_t length = std::min(last, bytes_) - first;
  void* const copy =
      mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return system_error("parting from shared memory");
  std::memcpy(copy, begin_ + first, length);
  if (mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, begin_ + first) == MAP_FAILED) {
    Status why = system_error("parting from shared memory");
    munmap(copy, length);
    return why;
  }
  return {};
}

}  // namespace ringfold::region
