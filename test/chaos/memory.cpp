#include "test/chaos/memory.h"

#include <fmt/core.h>

#include <algorithm>

namespace ringfold::test::chaos {

bool Memory::Block::fenced() const {
  const auto whole = [](std::byte b) { return b == std::byte{0xa5}; };
  return bytes.empty() || (std::all_of(bytes.begin(), bytes.begin() + kFence, whole) &&
                           std::all_of(bytes.end() - kFence, bytes.end(), whole));
}

Memory::Memory(const Call& call, int position, uint64_t seed)
    : call_(call),
      position_(position),
      seed_(seed),
      element_(size_of(call.type)),
      frame_(frame(call.schedule, position)) {
  const bool broadcast = call.schedule.collective == Collective::broadcast && !call.message;
  if (call.message)
    frame_ = {position == 0 ? frame_.work : Range{}, position == 1 ? frame_.work : Range{}};
  const size_t in = frame_.input.count * element_, out = frame_.work.count * element_;
  const bool one = (call.in_place || broadcast) && in != 0 && out != 0;
  if (one) {
    first_.make(std::max(in, out));
    const size_t begin = std::min(frame_.input.begin, frame_.work.begin);
    in_ = first_.data() + (frame_.input.begin - begin) * element_;
    out_ = first_.data() + (frame_.work.begin - begin) * element_;
  } else {
    first_.make(in);
    second_.make(out);
    if (!frame_.input.empty()) in_ = first_.data();
    if (!frame_.work.empty()) out_ = second_.data();
  }
  if (in_ != nullptr) fill(in_);
}

// A rank's own contribution is numbered from 0, but that to a sum by the elements of the frame.
void Memory::fill(std::byte* to) const {
  if (call_.reduces())
    Exact(seed_, call_.schedule.size, call_.type, call_.op)
        .fill(to, position_, 0, frame_.input.count);
  else
    fill_bits(to, call_.type, seed_, position_, 0, frame_.input.count);
}

size_t Memory::wrong_elements() const {
  const Schedule& s = call_.schedule;
  const size_t count = frame_.work.count;
  if (count == 0) return 0;
  const Exact exact(seed_, s.size, call_.type, call_.op);
  const size_t each = s.count / static_cast<size_t>(s.size);
  const auto mine = static_cast<size_t>(position_) * each;
  switch (s.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
      return exact.wrong(out_, 0, count);
    case Collective::reduce_scatter:
      return exact.wrong(out_, mine, count);
    case Collective::broadcast:
      return wrong_bits(out_, call_.type, seed_, s.root, 0, count);
    case Collective::scatter:
      return wrong_bits(out_, call_.type, seed_, s.root, mine, count);
    case Collective::all_gather:
    case Collective::gather:
    case Collective::all_to_all:
      break;
  }
  size_t wrong = 0;
  for (int r = 0; r < s.size; ++r)
    wrong += wrong_bits(out_ + static_cast<size_t>(r) * each * element_, call_.type, seed_, r,
                        s.collective == Collective::all_to_all ? mine : 0, each);
  return wrong;
}

std::string Memory::judge() const {
  if (const size_t wrong = wrong_elements(); wrong != 0)
    return fmt::format("{} wrong elements", wrong);
  if (!first_.fenced() || !second_.fenced()) return "something beside the buffers was written";
  if (in_ != nullptr && !second_.bytes.empty()) {
    std::vector<std::byte> given(frame_.input.count * element_);
    fill(given.data());
    if (std::memcmp(given.data(), in_, given.size()) != 0) return "the input was written";
  }
  return {};
}

void Memory::take_back() {
  std::ranges::fill(first_.bytes, kPoison);
  std::ranges::fill(second_.bytes, kPoison);
}

bool Memory::left_alone() const {
  const auto poison = [](std::byte b) { return b == kPoison; };
  return std::ranges::all_of(first_.bytes, poison) && std::ranges::all_of(second_.bytes, poison);
}

}  // namespace ringfold::test::chaos
