// A new communicator of those that are left, without a word from the others.
#include <fmt/format.h>

#include <algorithm>

#include "lib/comm/communicator_impl.h"

namespace ringfold {
namespace {

// FNV-1a over words.
uint64_t hash(uint64_t h, uint64_t word) {
  for (int byte = 0; byte < 8; ++byte, word >>= 8) h = (h ^ (word & 0xff)) * 0x100000001b3;
  return h;
}

// The members that stay, or what is wrong with the list.
Result<std::vector<int>> survivors(int size, int rank, std::span<const int> exclude) {
  std::vector<bool> stays(static_cast<size_t>(size), true);
  for (const int gone : exclude) {
    if (gone < 0 || gone >= size)
      return Status(Code::invalid_argument,
                    fmt::format("shrink: rank {} to exclude: expected 0 to {}", gone, size - 1));
    if (gone == rank)
      return Status(
          Code::invalid_argument,
          fmt::format("shrink: rank {} excludes itself: excluded ranks do not call", rank));
    stays[static_cast<size_t>(gone)] = false;
  }
  std::vector<int> members;
  for (int r = 0; r < size; ++r)
    if (stays[static_cast<size_t>(r)]) members.push_back(r);
  return members;
}

}  // namespace

// The survivors cannot be told a number by rank 0, which may be the one that died. All of them have
// shrunk this communicator equally often, so its number and that count give the same new number.
Result<Communicator> Communicator::Impl::shrink(std::span<const int> exclude) {
  if (world_ && !world_->usable()) return usable();
  if (in_callback())
    return Status(Code::invalid_argument, "shrink() waits, so it cannot be called from a callback");
  const auto members = survivors(size_, rank_, exclude);
  if (!members.ok()) return members.status();
  if (members->size() == 1) return Communicator(sub(0, *members));
  const uint64_t number = hash(hash(0xcbf29ce484222325, channel_->id), shrinks_.fetch_add(1));
  const auto id = kAgreedIds | (static_cast<uint32_t>(number) & (kAgreedIds - 1));
  Communicator smaller(sub(id, *members));
  uint64_t mine = number;
  for (const int member : *members) mine = hash(mine, static_cast<uint64_t>(member));
  std::vector<uint64_t> all(members->size());
  if (Status met = smaller.all_gather(&mine, all.data(), 1, DType::u64).wait(); !met.ok())
    return Status(met.code(),
                  fmt::format("shrink to {} ranks: {}", members->size(), met.message()));
  const auto other = std::ranges::find_if(all, [&](uint64_t theirs) { return theirs != mine; });
  if (other == all.end()) {
    smaller.impl()->open_region();
    smaller.impl()->open_two_level();
    smaller.impl()->open_device_routes();
    return smaller;
  }
  return Status(Code::mismatch,
                fmt::format("shrink: rank {} names other ranks to exclude than rank {}",
                            (*members)[static_cast<size_t>(other - all.begin())], rank_));
}

Result<Communicator> Communicator::shrink(std::span<const int> exclude) {
  if (!impl_)
    return Status(Code::invalid_argument,
                  "this Communicator is empty: create() or split() makes one");
  return impl_->shrink(exclude);
}

}  // namespace ringfold
