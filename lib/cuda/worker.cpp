#include "lib/cuda/worker.h"

#include <algorithm>

#include "kernels/words.h"
#include "lib/cuda/path.h"

namespace ringfold::cuda {
namespace {

constexpr size_t kBytesPerLane = size_t{64} << 10;   // of an operation: below, one lane less
constexpr size_t kSmallestShare = size_t{16} << 10;  // of a command that is divided

// The elements [first, first + count) of a command.
Command part_of(const Command& command, size_t first, size_t count) {
  const size_t offset = first * size_of(command.dtype);
  Command part = command;
  part.a = static_cast<const std::byte*>(command.a) + offset;
  if (command.b != nullptr) part.b = static_cast<const std::byte*>(command.b) + offset;
  part.out = static_cast<std::byte*>(command.out) + offset;
  if (command.mirror != nullptr) part.mirror = static_cast<std::byte*>(command.mirror) + offset;
  part.count = count;
  return part;
}

bool reached(uint32_t count, uint32_t target) {
  return static_cast<int32_t>(count - target) >= 0;
}

}  // namespace

// What was brought stays until the launch has left the stream: the copies may be still to come.
Worker::~Worker() {
  for (const Brought& one : brought_)
    if (gate_ != nullptr)
      gate_->kept.push_back(one.to);
    else
      device_.give_pinned(one.to);
  if (gate_ != nullptr) device_.give_gate(gate_);
  if (own_stream_ != nullptr) device_.give_stream(own_stream_);
}

bool Worker::serve(bool reduces, DType type, size_t bytes) {
  if (reduces && reduces_ && type != type_) return false;
  if (reduces) type_ = type;
  reduces_ |= reduces;
  bytes_ = std::max(bytes_, bytes);
  const std::lock_guard guard(lock_);
  ++operations_;
  return true;
}

Result<const std::byte*> Worker::bring(const void* element, DType type) {
  const auto pinned = device_.take_pinned(size_of(type));
  if (!pinned.ok()) return pinned.status();
  brought_.push_back({element, *pinned, type});
  return *pinned;
}

Status Worker::copy_brought(CUstream stream) {
  for (const Brought& one : brought_)
    if (Status status = enqueue_copy(one.from, one.to, 1, one.type, 1.0, {stream}); !status.ok())
      return status;
  return {};
}

void Worker::release() {
  const std::lock_guard guard(lock_);
  if (--operations_ == 0 && launched_) end();
}

bool Worker::idle() const {
  const std::lock_guard guard(lock_);
  return operations_ == 0;
}

Status Worker::take_gate() {
  const auto gate = device_.take_gate();
  if (!gate.ok()) return gate.status();
  const std::lock_guard guard(lock_);
  gate_ = *gate;
  lanes_ = std::clamp(static_cast<int>(bytes_ / kBytesPerLane), 1, kMaxLanes);
  return {};
}

CUresult Worker::put(CUstream stream) {
  void* parameters[] = {&gate_->lanes};
  return call().cuLaunchKernel(device_.worker(type_), static_cast<unsigned>(lanes_), 1, 1,
                               kWorkerThreads, 1, 1, 0, stream, parameters, nullptr);
}

// The lock is not held meanwhile: with CUDA_LAUNCH_BLOCKING the call returns when the kernel has
// ended, for which the engine needs it.
Status Worker::launch(CUstream stream) {
  if (Status status = take_gate(); !status.ok()) return status;
  if (Status status = copy_brought(stream); !status.ok()) return status;
  {
    const std::lock_guard guard(lock_);
    for (size_t i = 0; i < static_cast<size_t>(lanes_); ++i) ++gate_->launches[i];
    launched_ = true;
    if (operations_ == 0) end();  // they failed before
  }
  const CUresult result = put(stream);
  if (result == CUDA_SUCCESS) return {};
  const std::lock_guard guard(lock_);
  launched_ = false;
  for (size_t i = 0; i < static_cast<size_t>(lanes_); ++i) {
    --gate_->launches[i];
    store_release(gate_->lanes[i].orders, orders_of(gate_->posted[i], gate_->launches[i]));
  }
  return check(result, "launching the worker kernel");
}

Status Worker::capture(CUstream stream) {
  if (Status status = take_gate(); !status.ok()) return status;
  if (Status status = copy_brought(stream); !status.ok()) return status;
  operations_ = 0;  // those of a replay come with it
  return check(put(stream), "capturing the worker kernel");
}

bool Worker::begin_replay(int operations) {
  const std::lock_guard guard(lock_);
  bool free = operations_ == 0;
  for (size_t i = 0; i < static_cast<size_t>(lanes_); ++i)
    free &= load_acquire(gate_->lanes[i].left) == gate_->launches[i]++;
  launched_ = true;
  if (free)
    operations_ = operations;
  else if (operations_ == 0)
    end();
  return free;
}

// REQUIRES the lock.
void Worker::end() {
  for (size_t i = 0; i < static_cast<size_t>(lanes_); ++i)
    store_release(gate_->lanes[i].orders, orders_of(gate_->posted[i], gate_->launches[i]));
}

bool Worker::begun(int lane) const {
  const auto i = static_cast<size_t>(lane);
  return load_acquire(gate_->lanes[i].begun) == gate_->launches[i];
}

bool Worker::begun() const {
  const std::lock_guard guard(lock_);
  if (!launched_) return false;
  for (int lane = 0; lane < lanes_; ++lane)
    if (begun(lane)) return true;
  return false;
}

// Divides a large command among the lanes that are there; all or nothing.
bool Worker::post(const Command& command, Ticket* ticket) {
  const std::lock_guard guard(lock_);
  std::array<size_t, kMaxLanes> use{};
  size_t there = 0;
  for (int k = 0; k < lanes_; ++k) {
    const int lane = (next_lane_ + k) % lanes_;
    const auto i = static_cast<size_t>(lane);
    if (!begun(lane)) continue;
    if (gate_->posted[i] - load_acquire(gate_->lanes[i].done) == kLaneCommands) continue;
    use[there++] = i;
  }
  if (there == 0) return false;
  next_lane_ = (next_lane_ + 1) % lanes_;
  const size_t element = size_of(command.dtype);
  const size_t shares = std::clamp(command.count * element / kSmallestShare, size_t{1}, there);
  const size_t unit = 64 / element;  // so that each share is aligned as the whole is
  const size_t each = ((command.count + shares - 1) / shares + unit - 1) / unit * unit;
  ticket->lanes = 0;
  for (size_t n = 0, first = 0; n < shares && (first < command.count || n == 0); ++n) {
    const size_t i = use[n], count = std::min(each, command.count - first);
    Lane& lane = gate_->lanes[i];
    lane.commands[gate_->posted[i] % kLaneCommands] = part_of(command, first, count);
    ticket->counts[i] = ++gate_->posted[i];
    ticket->lanes |= 1u << i;
    store_release(lane.orders, orders_of(gate_->posted[i], gate_->launches[i] - 1));
    first += count;
  }
  return true;
}

bool Worker::done(const Ticket& ticket) const {
  for (size_t i = 0; i < ticket.counts.size(); ++i)
    if ((ticket.lanes >> i & 1) != 0 &&
        !reached(load_acquire(gate_->lanes[i].done), ticket.counts[i]))
      return false;
  return true;
}

}  // namespace ringfold::cuda
