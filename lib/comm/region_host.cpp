#include "lib/comm/region_host.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

namespace ringfold {
namespace {

// How long memory that was handed over may take to arrive, and how often to look.
constexpr Nanoseconds kUnderWay = std::chrono::seconds(5);
constexpr auto kLookAgain = std::chrono::microseconds(100);

}  // namespace

Result<std::unique_ptr<RegionHost>> RegionHost::make(Engine& engine) {
  auto post = shm::Post::make();
  if (!post.ok()) return post.status();
  return std::unique_ptr<RegionHost>(new RegionHost(engine, std::move(*post)));
}

void RegionHost::meet(const std::vector<Member>& members) {
  const std::lock_guard guard(lock_);
  addresses_.resize(members.size());
  for (const Member& member : members)
    for (const auto& [name, text] : member.addresses) {
      if (name != "region") continue;
      auto address = shm::Address::decode(text);
      // Elsewhere the same names mean other things.
      if (address && address->host == post_.address().host)
        addresses_[static_cast<size_t>(member.rank)] = std::move(address);
    }
}

bool RegionHost::reaches(Peer peer) const {
  const std::lock_guard guard(lock_);
  return addresses_[static_cast<size_t>(peer)].has_value();
}

// ---- handing memory over ----------------------------------------------------------------------

Result<region::Segment> RegionHost::make_segment(uint32_t id, const std::vector<Peer>& others) {
  Descriptor fd;
  auto segment = region::Segment::create(static_cast<int>(others.size()) + 1, &fd);
  if (!segment.ok()) return segment.status();
  Clock& clock = steady_clock();
  const Nanoseconds until = clock.now() + kUnderWay;
  for (const Peer peer : others) {
    for (;;) {
      auto sent = shm::Post::Sent::gone;
      {
        const std::lock_guard guard(lock_);
        const auto& to = addresses_[static_cast<size_t>(peer)];
        if (to) sent = post_.hand_over(*to, fd.get(), id);
      }
      if (sent == shm::Post::Sent::yes) break;
      if (sent == shm::Post::Sent::gone || clock.now() >= until)
        return Status(Code::system,
                      fmt::format("a shared region could not be handed to rank {}", peer));
      std::this_thread::sleep_for(kLookAgain);
    }
  }
  return segment;
}

Result<region::Segment> RegionHost::receive_segment(uint32_t id, Peer from, int ranks) {
  Clock& clock = steady_clock();
  const Nanoseconds until = clock.now() + kUnderWay;
  for (;;) {
    {
      const std::lock_guard guard(lock_);
      const bool news = read_post();
      const auto& sender = addresses_[static_cast<size_t>(from)];
      if (!sender) return Status(Code::system, fmt::format("rank {} has no address", from));
      if (const auto found = arrived_.find({id, sender->token}); found != arrived_.end()) {
        const Descriptor fd = std::move(found->second);
        arrived_.erase(found);
        engine_.nudge();
        return region::Segment::adopt(fd, ranks);
      }
      if (news) engine_.nudge();  // it may have been a bell for its thread
    }
    if (clock.now() >= until)
      return Status(Code::timeout, fmt::format("no shared region came from rank {}", from));
    std::this_thread::sleep_for(kLookAgain);
  }
}

// Swallows bells and keeps memory for whoever is to receive it. True if there was anything.
bool RegionHost::read_post() {
  if (!post_.stirred()) return false;
  while (auto news = post_.next())
    if (news->what == shm::Post::News::What::segment)
      arrived_[{news->id, news->from}] = Descriptor(news->segment.release());
  return true;
}

// ---- the regions ------------------------------------------------------------------------------

void RegionHost::add(std::shared_ptr<region::Region> region) {
  const std::lock_guard guard(lock_);
  regions_.push_back(std::move(region));
}

void RegionHost::remove(const region::Region* region) {
  const std::lock_guard guard(lock_);
  bytes_of_removed_ += region->bytes_written();
  std::erase_if(regions_, [&](const auto& r) { return r.get() == region; });
}

void RegionHost::ring(Peer peer) {
  const std::lock_guard guard(lock_);
  if (const auto& to = addresses_[static_cast<size_t>(peer)]) post_.ring(*to);
}

uint64_t RegionHost::bytes_written() const {
  const std::lock_guard guard(lock_);
  uint64_t sum = bytes_of_removed_;
  for (const auto& region : regions_) sum += region->bytes_written();
  return sum;
}

bool RegionHost::progress() {
  {
    const std::lock_guard guard(lock_);
    if (std::exchange(armed_, false)) read_post();
    deadline_ = Nanoseconds::max();
    for (const auto& region : regions_)
      if (region->pending()) polled_.push_back(region);
  }
  bool moved = false;
  for (const auto& region : polled_) {
    moved |= region->progress();
    deadline_ = std::min(deadline_, region->check_deadline(engine_.clock().now()));
  }
  polled_.clear();
  return moved;
}

int RegionHost::arm() {
  const std::lock_guard guard(lock_);
  armed_ = true;
  bool quiet = true;
  for (const auto& region : regions_) quiet &= region->arm();
  return quiet ? post_.descriptor() : -1;
}

}  // namespace ringfold
