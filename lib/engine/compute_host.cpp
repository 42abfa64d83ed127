#include "lib/engine/compute_host.h"

#include <cassert>
#include <cstring>

#include "kernels/reduce.h"
#include "lib/engine/execution.h"

namespace ringfold {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kAllSlots = Execution::kSlots + Execution::kStagingSlots;  // it needs no mirrors

void finish(Completion* completion) {
  completion->done(completion, Status());
}

}  // namespace

std::byte* SlotPool::Block::aligned() const {
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  return memory.get() + ((kAlignment - address % kAlignment) % kAlignment);
}

SlotPool::Block SlotPool::take(size_t bytes) {
  {
    const std::lock_guard lock(lock_);
    for (Block& block : free_) {
      if (block.bytes < bytes || block.bytes > 4 * bytes) continue;
      Block found = std::move(block);
      block = std::move(free_.back());
      free_.pop_back();
      return found;
    }
  }
  return {std::unique_ptr<std::byte[]>(new std::byte[bytes + kAlignment]), bytes};
}

void SlotPool::give(Block block) {
  if (!block.memory) return;
  const std::lock_guard lock(lock_);
  if (free_.size() == kKept) free_.erase(free_.begin());
  free_.push_back(std::move(block));
}

HostCompute::HostCompute(const Schedule& schedule, int position, const void* input, void* work,
                         DType type, Reduction reduction, size_t piece, SlotPool& pool)
    : type_(type),
      reduction_(reduction),
      size_(schedule.size),
      element_bytes_(size_of(type)),
      slot_bytes_((piece * size_of(type) + kAlignment - 1) / kAlignment * kAlignment),
      input_(static_cast<const std::byte*>(input)),
      work_(static_cast<std::byte*>(work)),
      input_begin_(frame(schedule, position).input.begin),
      work_begin_(frame(schedule, position).work.begin),
      // The same element of the frame lies at the same address.
      in_place_(input != nullptr && work != nullptr &&
                reinterpret_cast<uintptr_t>(input) - input_begin_ * size_of(type) ==
                    reinterpret_cast<uintptr_t>(work) - work_begin_ * size_of(type)),
      scales_(reduction.op == Op::premul_sum && reduction.factor != 1.0),
      pool_(pool) {}

HostCompute::~HostCompute() {
  pool_.give(std::move(slots_));
}

const std::byte* HostCompute::input(const Range& range) const {
  return range.empty() ? input_ : input_ + (range.begin - input_begin_) * element_bytes_;
}

std::byte* HostCompute::work(const Range& range) const {
  return range.empty() ? work_ : work_ + (range.begin - work_begin_) * element_bytes_;
}

std::byte* HostCompute::slot(int slot) {
  assert(slot >= 0 && slot < kAllSlots);
  if (!slots_.memory) slots_ = pool_.take(slot_bytes_ * kAllSlots);
  return slots_.aligned() + static_cast<size_t>(slot) * slot_bytes_;
}

Buffer HostCompute::landing(const Piece& piece, int slot) {
  const size_t bytes = piece.range.count * element_bytes_;
  if (bytes == 0) return {};
  return {slot < 0 ? work(piece.range) : this->slot(slot), bytes};
}

void HostCompute::consume(const Piece& piece, int slot, int operand_slot, const void* view,
                          Completion* completion) {
  const size_t bytes = piece.range.count * element_bytes_;
  if (bytes == 0 || piece.then == Then::none) return finish(completion);
  std::byte* const out = piece.into == From::transit ? this->slot(slot) : work(piece.range);
  if (piece.then == Then::copy) {
    if (out != view) std::memcpy(out, view, bytes);
    return finish(completion);
  }
  ReduceCall call;
  call.dtype = type_;
  call.op = reduction_.op;
  call.a = piece.side == From::input     ? input(piece.range)
           : piece.side == From::transit ? this->slot(operand_slot)
                                         : work(piece.range);
  call.b = view;
  call.out = out;
  call.count = piece.range.count;
  if (scales_ && piece.side == From::input) call.scale_a = reduction_.factor;
  call.count_a = piece.mine;
  call.count_b = piece.theirs;
  call.total = size_;
  reduce_host(call);
  finish(completion);
}

void HostCompute::stage(const Piece& piece, int slot, Buffer* out, Completion* completion) {
  const size_t bytes = piece.range.count * element_bytes_;
  const void* data = nullptr;
  if (bytes == 0) {
  } else if (piece.side == From::transit) {
    data = this->slot(slot);
  } else if (piece.side == From::work) {
    data = work(piece.range);
  } else if (scales_) {
    scale_host(type_, input(piece.range), this->slot(slot), piece.range.count, reduction_.factor);
    data = this->slot(slot);
  } else {
    data = input(piece.range);
  }
  *out = {const_cast<void*>(data), bytes};  // the transport only reads it
  finish(completion);
}

void HostCompute::copy_local(Range range, Completion* completion) {
  if (!range.empty() && scales_)
    scale_host(type_, input(range), work(range), range.count, reduction_.factor);
  else if (!range.empty() && !in_place_)
    std::memcpy(work(range), input(range), range.count * element_bytes_);
  finish(completion);
}

}  // namespace ringfold
