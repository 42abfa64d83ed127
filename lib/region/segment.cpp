#include "lib/region/segment.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace ringfold::region {
namespace {

constexpr size_t kPage = 4096;
// Pools begin at huge pages, where the system has them for such memory.
constexpr size_t kHuge = 2 << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kDesks = kPage;  // where they begin, after the geometry
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

size_t flags_begin(int ranks) {
  return round_up(kDesks + static_cast<size_t>(ranks) * sizeof(Desk), kPage);
}

Status system_error(const std::string& what) {
  return {Code::system, fmt::format("{}: {}", what, std::strerror(errno))};
}

}  // namespace

size_t Segment::pools_begin(int ranks) {
  return round_up(flags_begin(ranks) + static_cast<size_t>(ranks) * kFlagsBytes, kHuge);
}

size_t Segment::pool_bytes_for(int ranks) {
  return std::min(kPoolBytes, kPoolBytesOfAll / static_cast<size_t>(ranks)) / kPage * kPage;
}

size_t Segment::bytes_for(int ranks) {
  return pools_begin(ranks) + static_cast<size_t>(ranks) * pool_bytes_for(ranks);
}

Segment::Segment(Segment&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      flags_(other.flags_),
      ranks_(other.ranks_),
      pool_bytes_(other.pool_bytes_) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(flags_, other.flags_);
  std::swap(ranks_, other.ranks_);
  std::swap(pool_bytes_, other.pool_bytes_);
  return *this;
}

Segment::~Segment() {
  if (memory_ != nullptr) munmap(memory_, bytes_for(ranks_));
}

Result<Segment> Segment::map(int fd, int ranks) {
  const size_t bytes = bytes_for(ranks);
  // Aligned by hand: the kernel aligns to huge pages only what it knows to be backed by them.
  void* const place =
      mmap(nullptr, bytes + kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return system_error("finding room for a shared region");
  const auto address = reinterpret_cast<uintptr_t>(place);
  const size_t before = round_up(address, kHuge) - address;
  auto* const begin = static_cast<std::byte*>(place) + before;
  if (before > 0) munmap(place, before);
  if (before < kHuge) munmap(begin + bytes, kHuge - before);
  if (mmap(begin, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0) ==
      MAP_FAILED) {
    munmap(begin, bytes);
    return system_error(fmt::format("mapping a shared region of {} bytes", bytes));
  }
  madvise(begin, bytes, MADV_DONTFORK);
  Segment segment;
  segment.memory_ = begin;
  segment.flags_ = begin + flags_begin(ranks);
  segment.ranks_ = ranks;
  segment.pool_bytes_ = pool_bytes_for(ranks);
  return segment;
}

Result<Segment> Segment::create(int ranks, Descriptor* fd) {
  *fd = Descriptor(memfd_create("ringfold-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!*fd) return system_error("creating a shared region");
  const size_t bytes = bytes_for(ranks);
  errno = posix_fallocate(fd->get(), 0, static_cast<off_t>(bytes));
  if (errno != 0)
    return system_error(
        fmt::format("reserving {} bytes for the shared region of {} ranks", bytes, ranks));
  Geometry geometry;
  geometry.ranks = static_cast<uint32_t>(ranks);
  geometry.pool_bytes = pool_bytes_for(ranks);
  if (pwrite(fd->get(), &geometry, sizeof(geometry), 0) != sizeof(geometry) ||
      fcntl(fd->get(), F_ADD_SEALS, kSeals) != 0)
    return system_error("preparing a shared region");
  auto made = map(fd->get(), ranks);
  // A tenth faster at 1 MiB where it works; nothing is lost where it does not.
  if (made.ok()) madvise(made->memory_, bytes, MADV_COLLAPSE);
  return made;
}

Result<Segment> Segment::adopt(const Descriptor& fd, int ranks) {
  const auto refuse = [](const std::string& why) {
    return Status(Code::invalid_argument, "shared region refused: " + why);
  };
  struct stat info {};
  const size_t bytes = bytes_for(ranks);
  if (!fd || fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) return refuse("not a file");
  if (info.st_size != static_cast<off_t>(bytes))
    return refuse(fmt::format("{} bytes, expected {}", info.st_size, bytes));
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return refuse("not sealed against shrinking");
  Geometry expected;
  expected.ranks = static_cast<uint32_t>(ranks);
  expected.pool_bytes = pool_bytes_for(ranks);
  Geometry found;
  if (pread(fd.get(), &found, sizeof(found), 0) != sizeof(found) || found != expected)
    return refuse(fmt::format("version {}, {} ranks, pools of {}; expected {}, {}, {}",
                              found.version, found.ranks, found.pool_bytes, expected.version,
                              expected.ranks, expected.pool_bytes));
  return map(fd.get(), ranks);
}

Desk& Segment::desk(int rank) const {
  return reinterpret_cast<Desk*>(memory_ + kDesks)[rank];
}

std::byte* Segment::pool(int rank) const {
  return memory_ + pools_begin(ranks_) + static_cast<size_t>(rank) * pool_bytes_;
}

}  // namespace ringfold::region
