#include "lib/region/direct.h"

#include <fmt/core.h>

#include <algorithm>

#include "kernels/reduce.h"

namespace ringfold::region {
namespace {

// What is read, folded and written at once: it stays in the nearest caches.
constexpr size_t kBlock = 16 << 10;
// What is done before somebody looks whether the operation has failed meanwhile.
constexpr size_t kBytesATurn = 1 << 20;
// Where ranks take turns on a core, a second phase is dearer than copies up to here.
constexpr size_t kCrowdedLeast = 64 << 10;

bool reads_root(Collective collective) {
  return collective == Collective::broadcast;
}

// Elements that this rank gives to the others.
size_t input_count(const Schedule& what) {
  return what.collective == Collective::all_gather ? what.count / static_cast<size_t>(what.size)
                                                   : what.count;
}

uint64_t offset_in(const Memory& memory, const void* buffer) {
  return static_cast<uint64_t>(static_cast<const std::byte*>(buffer) - memory.begin());
}

}  // namespace

bool Direct::suits(const Schedule& what, const Shape& shape, const Room& room) {
  if (shape.small) return false;
  switch (what.collective) {
    case Collective::all_reduce:
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::broadcast:
      return !room.crowded || shape.area_a * shape.blocks >= kCrowdedLeast;
    case Collective::reduce:
    case Collective::all_to_all:
    case Collective::gather:
    case Collective::scatter:
      return false;
  }
  return false;
}

Offered Direct::offer(const Description& what, const Operation::Memory& memory, int rank,
                      Neighbours& neighbours) {
  const Schedule& call = what.schedule;
  if (reads_root(call.collective) && rank != call.root) return {};
  // Others read the input as it is.
  if (memory.reduction.op == Op::premul_sum && memory.reduction.factor != 1.0) return {};
  Offered mine;
  const size_t element = size_of(what.type);
  mine.send = find_memory(memory.send, input_count(call) * element);
  if (!mine.send || !neighbours.have(*mine.send)) return {};
  mine.offer.send_id = mine.send->id();
  mine.offer.send_offset = offset_in(*mine.send, memory.send);
  if (call.collective == Collective::all_reduce) {
    mine.recv =
        memory.recv == memory.send ? mine.send : find_memory(memory.recv, call.count * element);
    if (!mine.recv || !neighbours.have(*mine.recv)) return {};
    mine.offer.recv_id = mine.recv->id();
    mine.offer.recv_offset = offset_in(*mine.recv, memory.recv);
  }
  mine.offer.made = 1;
  return mine;
}

Moves::Whom Direct::needs(const Schedule& what, int rank, int step) {
  if (!reads_root(what.collective)) return Moves::Whom::everybody;
  const bool root = rank == what.root;
  if (step == 1) return root ? Moves::Whom::nobody : Moves::Whom::root;
  return root ? Moves::Whom::everybody : Moves::Whom::nobody;
}

uint64_t Direct::bytes_written(const Schedule& what, int rank, size_t element_bytes) {
  if (what.collective != Collective::all_reduce) return 0;
  const Moves::Range own = Moves::part_of(what.count, what.size, rank, element_bytes);
  return own.count * element_bytes * static_cast<uint64_t>(what.size - 1);
}

Report Direct::report_of(const Schedule& what, size_t element_bytes, int rank, const Room& room) {
  Report report = region::report_of(what, element_bytes, rank, room);
  report.transport = "direct";
  report.steps = kPhases;
  report.bytes_model = bytes_written(what, rank, element_bytes);
  report.chunk_bytes = report.piece_bytes = kBlock;
  report.predicted_seconds /= 2;  // half the copies
  return report;
}

Result<std::byte*> Direct::resolve(int rank, Offer::Place place, size_t bytes,
                                   Neighbours& neighbours) {
  auto mapping = neighbours.mapping(rank, place.id);
  if (!mapping || place.offset > mapping->bytes() || bytes > mapping->bytes() - place.offset)
    return Status(Code::internal,
                  fmt::format("rank {} offers {} bytes at {} of its memory {}, not mapped here",
                              rank, bytes, place.offset, place.id));
  std::byte* const at = mapping->begin() + place.offset;
  held_.push_back(std::move(mapping));
  return at;
}

Status Direct::begin(const Description& what, const Operation::Memory& memory, int rank,
                     const std::vector<Offer>& offers, Neighbours& neighbours) {
  const Schedule& call = what.schedule;
  const auto ranks = static_cast<size_t>(call.size);
  collective_ = call.collective;
  type_ = what.type;
  op_ = what.op;
  rank_ = rank;
  size_ = call.size;
  root_ = call.root;
  element_ = size_of(what.type);
  each_ = call.count / ranks;
  recv_ = static_cast<std::byte*>(memory.recv);
  stream_ = memory.send != memory.recv && call.count * element_ >= kStreamBytes;
  const bool whole = collective_ == Collective::all_reduce;
  const Moves::Range own = Moves::part_of(call.count, call.size, rank, element_);
  next_ = whole ? own.begin : 0;
  last_ = whole ? own.begin + own.count : reads_root(collective_) ? call.count : each_;
  inputs_.assign(ranks, nullptr);
  outputs_.assign(ranks, nullptr);
  inputs_[static_cast<size_t>(rank)] = static_cast<const std::byte*>(memory.send);
  outputs_[static_cast<size_t>(rank)] = recv_;
  if (reads_root(collective_) && rank == root_) next_ = last_;  // the others come and take it
  for (int r = 0; r < size_; ++r) {
    const auto i = static_cast<size_t>(r);
    if (r == rank || (reads_root(collective_) && (r != root_ || rank == root_))) continue;
    const auto input = resolve(r, offers[i].send(), input_count(call) * element_, neighbours);
    if (!input.ok()) return input.status();
    inputs_[i] = *input;
    if (!whole) continue;
    const auto output = resolve(r, offers[i].recv(), call.count * element_, neighbours);
    if (!output.ok()) return output.status();
    outputs_[i] = *output;
  }
  return {};
}

void Direct::end() {
  held_.clear();
}

bool Direct::work() {
  const size_t most = std::max<size_t>(1, kBlock / element_);
  for (size_t bytes = 0; next_ < last_ && bytes < kBytesATurn; bytes += kBlock) {
    const size_t count = std::min(most, last_ - next_);
    fold(next_, count);
    next_ += count;
  }
  return next_ == last_;
}

void Direct::copy(std::byte* to, const std::byte* from, size_t bytes) const {
  stream_ ? copy_streaming(to, from, bytes) : copy_host(to, from, bytes);
}

// Elements [first, first + count) from everybody's input to where they belong.
void Direct::fold(size_t first, size_t count) const {
  const size_t at = first * element_, bytes = count * element_;
  switch (collective_) {
    case Collective::broadcast:
      return copy_host(recv_ + at, inputs_[static_cast<size_t>(root_)] + at, bytes);
    case Collective::all_gather:
      for (int d = 0; d < size_; ++d) {
        const auto from = static_cast<size_t>((rank_ + d) % size_);
        std::byte* const to = recv_ + from * each_ * element_ + at;
        if (to != inputs_[from] + at) copy(to, inputs_[from] + at, bytes);
      }
      return;
    case Collective::reduce_scatter:
      return fold_into(recv_ + at, nullptr, static_cast<size_t>(rank_) * each_ + first, count);
    default:
      break;
  }
  if (stream_) {  // by way of the nearest cache, past all others
    alignas(64) std::array<std::byte, kBlock> sum;
    fold_into(sum.data(), nullptr, first, count);
    for (std::byte* const output : outputs_) copy_streaming(output + at, sum.data(), bytes);
    return;
  }
  const auto me = static_cast<size_t>(rank_);
  std::byte* const mine = outputs_[me] + at;
  // A second destination must not be a source as well.
  const bool both = size_ == 2 && outputs_[1 - me] != inputs_[1 - me];
  fold_into(mine, both ? outputs_[1 - me] + at : nullptr, first, count);
  for (size_t r = 0; r < outputs_.size(); ++r)
    if (r != me && !both) copy_host(outputs_[r] + at, mine, bytes);
}

void Direct::fold_into(std::byte* out, std::byte* mirror, size_t first, size_t count) const {
  std::array<const void*, kMaxRanks> sources;
  for (size_t r = 0; r < inputs_.size(); ++r) sources[r] = inputs_[r] + first * element_;
  FoldCall call;
  call.dtype = type_;
  call.op = op_;
  call.sources = sources.data();
  call.ranks = size_;
  call.out = out;
  call.mirror = mirror;
  call.count = count;
  call.stream = stream_ && collective_ == Collective::reduce_scatter;
  fold_host(call);
}

}  // namespace ringfold::region
