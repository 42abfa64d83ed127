#include "lib/region/segment.h"

#include <fmt/core.h>
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
constexpr size_t kDesks = kPage;  // where they begin, after the geometry

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

size_t flags_begin(int ranks) {
  return round_up(kDesks + static_cast<size_t>(ranks) * sizeof(Desk), kPage);
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

Result<Segment> Segment::map(const Descriptor& fd, int ranks) {
  auto memory = Mapping::map(fd, bytes_for(ranks), Mapping::InChildren::absent);
  if (!memory.ok()) return memory.status();
  Segment segment;
  segment.memory_ = std::move(*memory);
  segment.flags_ = segment.memory_.begin() + flags_begin(ranks);
  segment.ranks_ = ranks;
  segment.pool_bytes_ = pool_bytes_for(ranks);
  return segment;
}

Result<Segment> Segment::create(int ranks, Descriptor* fd) {
  auto made = make_shared("ringfold-region", bytes_for(ranks));
  if (!made.ok()) return made.status();
  *fd = std::move(*made);
  Geometry geometry;
  geometry.ranks = static_cast<uint32_t>(ranks);
  geometry.pool_bytes = pool_bytes_for(ranks);
  if (pwrite(fd->get(), &geometry, sizeof(geometry), 0) != sizeof(geometry))
    return Status(Code::system, fmt::format("preparing a shared region: {}", std::strerror(errno)));
  auto segment = map(*fd, ranks);
  // A tenth faster at 1 MiB where it works; nothing is lost where it does not.
  if (segment.ok()) segment->memory_.enlarge_pages();
  return segment;
}

Result<Segment> Segment::adopt(const Descriptor& fd, int ranks) {
  if (Status status = check_shared(fd, bytes_for(ranks)); !status.ok()) return status;
  Geometry expected;
  expected.ranks = static_cast<uint32_t>(ranks);
  expected.pool_bytes = pool_bytes_for(ranks);
  Geometry found;
  if (pread(fd.get(), &found, sizeof(found), 0) != sizeof(found) || found != expected)
    return Status(Code::invalid_argument,
                  fmt::format("shared region refused: version {}, {} ranks, pools of {}; expected "
                              "{}, {}, {}",
                              found.version, found.ranks, found.pool_bytes, expected.version,
                              expected.ranks, expected.pool_bytes));
  return map(fd, ranks);
}

Desk& Segment::desk(int rank) const {
  return reinterpret_cast<Desk*>(memory_.begin() + kDesks)[rank];
}

std::byte* Segment::pool(int rank) const {
  return memory_.begin() + pools_begin(ranks_) + static_cast<size_t>(rank) * pool_bytes_;
}

}  // namespace ringfold::region
