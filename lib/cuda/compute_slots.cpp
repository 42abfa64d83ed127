#include "lib/cuda/compute_slots.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <numeric>
#include <utility>

#include "kernels/scalar.h"

namespace ringfold::cuda {
namespace {

constexpr size_t kVector = 16;  // of the kernels' accesses

void finish(Completion* completion) {
  completion->done(completion, Status());
}

// Room for a piece at any phase to a vector.
size_t slot_bytes(size_t piece_bytes) {
  return (piece_bytes + kVector + 63) / 64 * 64;
}

}  // namespace

size_t SlotCompute::slots_bytes(size_t piece_bytes, MemoryKind kind) {
  return slot_bytes(piece_bytes) * (kind == MemoryKind::host ? kAllSlots : kLandings);
}

// A message is only staged, or only lands.
size_t SlotCompute::own_bytes(const DeviceCall& call) {
  const auto slots =
      static_cast<size_t>(call.position == 0 ? Execution::kStagingSlots : Execution::kWindow);
  return slot_bytes(call.piece * size_of(call.type)) * slots;
}

SlotCompute::SlotCompute(const DeviceCall& call, std::shared_ptr<Worker> worker,
                         std::shared_ptr<Path> path, std::byte* own_slots)
    : type_(call.type),
      reduction_(call.reduction),
      factor_(call.factor),
      size_(call.schedule->size),
      element_bytes_(size_of(call.type)),
      slot_bytes_(slot_bytes(call.piece * size_of(call.type))),
      input_(static_cast<std::byte*>(const_cast<void*>(call.input))),  // only read
      work_(static_cast<std::byte*>(call.work)),
      input_begin_(frame(*call.schedule, call.position).input.begin),
      work_begin_(frame(*call.schedule, call.position).work.begin),
      in_place_(input_ != nullptr && work_ != nullptr &&
                reinterpret_cast<uintptr_t>(input_) - input_begin_ * element_bytes_ ==
                    reinterpret_cast<uintptr_t>(work_) - work_begin_ * element_bytes_),
      worker_(std::move(worker)),
      path_(std::move(path)),
      kind_(path_->kind()),
      owns_slots_(own_slots != nullptr),
      first_slot_(!owns_slots_         ? 0U
                  : call.position == 0 ? Execution::kSlots
                                       : kLandings),
      turn_(owns_slots_ ? 0 : path_->enter()),
      slots_(own_slots) {
  std::iota(places_.begin(), places_.end(), uint8_t{0});
}

SlotCompute::~SlotCompute() {
  if (owns_slots_)
    path_->device().give_pinned(slots_);
  else
    path_->leave(turn_, slots_);
  worker_->release();
}

// The stream has come to it, and it has slots: in the order of the calls, so that the ranks do not
// each give theirs to another operation.
bool SlotCompute::ready() {
  if (!worker_->begun()) return false;
  if (factor_ != nullptr)
    reduction_.factor = scalar_as_factor(type_, std::exchange(factor_, nullptr));
  if (slots_ == nullptr) slots_ = path_->take_slots(turn_);
  return slots_ != nullptr;
}

// ---- addresses --------------------------------------------------------------------------------

std::byte* SlotCompute::input(const Range& range) const {
  return input_ + (range.begin - input_begin_) * element_bytes_;
}

std::byte* SlotCompute::work(const Range& range) const {
  return work_ + (range.begin - work_begin_) * element_bytes_;
}

// A slot with the phase of the range on the device, so that kernels can use whole vectors.
std::byte* SlotCompute::slot(int slot, const Range& range) const {
  assert(slot >= 0 && slot < kAllSlots);
  const std::byte* const device = work_ != nullptr ? work(range) : input(range);
  return slots_ + (places_[static_cast<size_t>(slot)] - size_t{first_slot_}) * slot_bytes_ +
         reinterpret_cast<uintptr_t>(device) % kVector;
}

Command SlotCompute::copy_of(const void* from, void* to, size_t count, double factor) const {
  const bool plain = factor == 1.0;
  Command command;
  command.dtype = plain ? DType::u8 : type_;
  command.a = from;
  command.out = to;
  command.count = plain ? count * element_bytes_ : count;
  command.scale_a = factor;
  return command;
}

// The slot behind those of the executor that is there; -1: none.
int SlotCompute::landing_at(const void* view) const {
  if (kind_ == MemoryKind::cuda) return -1;
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(view) - slots_);
  const size_t place = first_slot_ + offset / slot_bytes_;
  const auto slot = std::ranges::find(places_, place) - places_.begin();
  return slot >= kLandings ? static_cast<int>(slot) : -1;
}

// ---- what the executor asks for ---------------------------------------------------------------

Buffer SlotCompute::landing(const Piece& piece, int slot) {
  const size_t bytes = piece.range.count * element_bytes_;
  if (bytes == 0) return {};
  if (slot < 0 && kind_ == MemoryKind::cuda) return {work(piece.range), bytes, kind_};
  if (slot < 0) {  // for its place in the work buffer
    assert(free_landings_ != 0);
    slot = kLandings + std::countr_zero(free_landings_);
    free_landings_ &= free_landings_ - 1;
  }
  return {this->slot(slot, piece.range), bytes, kind_};
}

void SlotCompute::consume(const Piece& piece, int slot, int operand_slot, const void* view,
                          Completion* completion) {
  const size_t count = piece.range.count;
  if (count == 0 || piece.then == Then::none) return finish(completion);
  const bool to_slot = piece.into == From::transit;
  std::byte* const out = to_slot ? this->slot(slot, piece.range) : work(piece.range);
  std::byte* const mirror = piece.mirror >= 0 ? this->slot(piece.mirror, piece.range) : nullptr;
  if (piece.then == Then::copy) {
    if (out == view && mirror == nullptr) return finish(completion);
    if (out == view) return give(copy_of(view, mirror, count, 1.0), completion);
    Command command = copy_of(view, out, count, 1.0);
    const int landing = landing_at(view);
    if (mirror != nullptr && landing >= 0)  // it stays where it landed: the slots change places
      std::swap(places_[static_cast<size_t>(piece.mirror)], places_[static_cast<size_t>(landing)]);
    else
      command.mirror = mirror;
    return give(command, completion, landing);
  }
  Command command;
  command.dtype = type_;
  command.op = reduction_.op;
  command.a = piece.side == From::input     ? input(piece.range)
              : piece.side == From::transit ? this->slot(operand_slot, piece.range)
                                            : work(piece.range);
  command.b = view;
  command.out = out;
  command.mirror = mirror;
  command.count = count;
  if (scales() && piece.side == From::input) command.scale_a = reduction_.factor;
  command.count_a = piece.mine;
  command.count_b = piece.theirs;
  command.total = size_;
  give(command, completion);
}

void SlotCompute::stage(const Piece& piece, int slot, Buffer* out, Completion* completion) {
  const size_t count = piece.range.count;
  *out = {};
  if (count == 0) return finish(completion);
  std::byte* const to = this->slot(slot, piece.range);
  *out = {to, count * element_bytes_, kind_};
  if (piece.side == From::transit) return finish(completion);
  const bool from_input = piece.side == From::input;
  give(copy_of(from_input ? input(piece.range) : work(piece.range), to, count,
               from_input && scales() ? reduction_.factor : 1.0),
       completion);
}

void SlotCompute::copy_local(Range range, Completion* completion) {
  if (range.empty() || (in_place_ && !scales())) return finish(completion);
  give(copy_of(input(range), work(range), range.count, scales() ? reduction_.factor : 1.0),
       completion);
}

// ---- commands ---------------------------------------------------------------------------------

void SlotCompute::give(const Command& command, Completion* completion, int landing) {
  assert(count_ < tasks_.size());
  Task& task = tasks_[(first_ + count_++) % tasks_.size()];
  task.command = command;
  task.completion = completion;
  task.landing = landing;
  task.posted = worker_->post(command, &task.ticket);
}

bool SlotCompute::progress() {
  bool moved = false;
  for (uint32_t n = 0; n < count_; ++n) {
    Task& task = tasks_[(first_ + n) % tasks_.size()];
    if (!task.posted && !(task.posted = worker_->post(task.command, &task.ticket))) break;
  }
  while (count_ != 0) {
    Task& task = tasks_[first_ % tasks_.size()];
    if (!task.posted || !worker_->done(task.ticket)) break;
    if (task.landing >= 0) free_landings_ |= 1u << (task.landing - kLandings);
    Completion* const completion = task.completion;
    ++first_;
    --count_;
    finish(completion);
    moved = true;
  }
  return moved;
}

}  // namespace ringfold::cuda
