#include "lib/comm/region_host.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

namespace ringfold {
namespace {

// How long memory that was handed over may take to arrive, and how often to look.
constexpr Nanoseconds kUnderWay = std::chrono::seconds(5);
constexpr auto kLookAgain = std::chrono::microseconds(100);
// A letter that found the other's queue full is sent again.
constexpr Nanoseconds kTryAgain = std::chrono::milliseconds(5);

using What = shm::Post::News::What;

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
  if (!post_.stirred().any) return false;
  while (auto news = post_.next())
    if (news->what == What::segment)
      arrived_[{news->id, news->from}] = Descriptor(news->segment.release());
    else
      of_memory_.push_back(std::move(*news));
  return true;
}

// ---- memory of users --------------------------------------------------------------------------

// The memory of a world as the region of some of its ranks sees it. One thread at a time.
class RegionHost::Neighbours final : public region::Neighbours {
 public:
  Neighbours(RegionHost& host, std::vector<Peer> peers) : host_(host), peers_(std::move(peers)) {}

  void ring(int rank) override { host_.ring(peer(rank)); }
  bool have(const region::Memory& memory) override {
    if (std::ranges::find(known_, memory.id()) != known_.end()) return true;
    if (!host_.share(memory, peers_)) return false;
    known_[next_known_++ % known_.size()] = memory.id();
    return true;
  }
  std::shared_ptr<const region::Mapping> mapping(int rank, uint32_t id) override {
    return host_.mapping(peer(rank), id);
  }

 private:
  [[nodiscard]] Peer peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }

  RegionHost& host_;
  const std::vector<Peer> peers_;
  std::array<uint32_t, 8> known_{};  // allocations that all have
  size_t next_known_ = 0;
};

std::unique_ptr<region::Neighbours> RegionHost::neighbours(std::vector<Peer> peers) {
  return std::make_unique<Neighbours>(*this, std::move(peers));
}

bool RegionHost::share(const region::Memory& memory, const std::vector<Peer>& peers) {
  const std::lock_guard guard(lock_);
  auto& standings = exported_[memory.id()];
  standings.resize(addresses_.size(), Standing::unasked);
  bool all = true;
  for (const Peer peer : peers) {
    const auto& address = addresses_[static_cast<size_t>(peer)];
    Standing& standing = standings[static_cast<size_t>(peer)];
    if (address && address->token == post_.address().token) continue;  // this rank itself
    if (standing == Standing::unasked && address &&
        post_.hand_over(*address, memory.fd().get(), memory.id(), What::memory) ==
            shm::Post::Sent::yes)
      standing = Standing::asked;
    all &= standing == Standing::mapped;
  }
  return all;
}

std::shared_ptr<const region::Mapping> RegionHost::mapping(Peer peer, uint32_t id) {
  const std::lock_guard guard(lock_);
  const auto found = imported_.find({peer, id});
  return found != imported_.end() ? found->second : nullptr;
}

void RegionHost::freed(uint32_t id) {
  const std::lock_guard guard(lock_);
  const auto known = exported_.extract(id);
  if (known.empty()) return;
  for (size_t peer = 0; peer < known.mapped().size(); ++peer)
    if (known.mapped()[peer] != Standing::unasked) tell(static_cast<Peer>(peer), What::gone, id);
}

void RegionHost::tell(Peer to, What what, uint32_t id) {
  const auto& address = addresses_[static_cast<size_t>(to)];
  if (address && post_.tell(*address, what, id) == shm::Post::Sent::later)
    unsent_.push_back({to, what, id});
}

// Does what the letters say. To map much memory takes a while: others are not held up by it.
void RegionHost::take_memory() {
  std::vector<shm::Post::News> letters;
  {
    const std::lock_guard guard(lock_);
    letters.swap(of_memory_);
    for (const Unsent& again : std::exchange(unsent_, {})) tell(again.to, again.what, again.id);
  }
  for (shm::Post::News& letter : letters) take(std::move(letter));
}

void RegionHost::take(shm::Post::News news) {
  std::shared_ptr<region::Mapping> mapping;
  Status why(Code::invalid_argument, "no memory in the letter");
  if (news.what == What::memory && news.segment) {
    const Descriptor fd(news.segment.release());
    const auto bytes = static_cast<size_t>(lseek(fd.get(), 0, SEEK_END));
    why = region::check_shared(fd, bytes);
    if (why.ok()) {
      auto mapped = region::Mapping::map(fd, bytes, region::Mapping::InChildren::absent);
      why = mapped.status();
      if (mapped.ok()) mapping = std::make_shared<region::Mapping>(std::move(*mapped));
    }
  }
  const std::lock_guard guard(lock_);
  const auto from = std::ranges::find_if(
      addresses_, [&](const auto& address) { return address && address->token == news.from; });
  if (from == addresses_.end()) return;
  const auto peer = static_cast<Peer>(from - addresses_.begin());
  const auto exported = exported_.find(news.id);
  switch (news.what) {
    case What::memory:
      if (mapping)
        imported_[{peer, news.id}] = mapping;
      else
        log_line(LogLevel::info,
                 "memory of another rank is not used where it lies: " + why.message());
      return tell(peer, mapping ? What::mapped : What::refused, news.id);
    case What::mapped:
    case What::refused:
      if (exported != exported_.end())
        exported->second[static_cast<size_t>(peer)] =
            news.what == What::mapped ? Standing::mapped : Standing::refused;
      return;
    case What::gone:
      imported_.erase({peer, news.id});
      return;
    case What::segment:
    case What::goodbye:
      return;
  }
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
  bool letters = false;
  {
    const std::lock_guard guard(lock_);
    if (std::exchange(armed_, false)) read_post();
    letters = !of_memory_.empty() || !unsent_.empty();
    deadline_ = unsent_.empty() ? Nanoseconds::max() : engine_.clock().now() + kTryAgain;
    for (const auto& region : regions_)
      if (region->pending()) polled_.push_back(region);
  }
  bool moved = false;
  if (letters) take_memory();
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
