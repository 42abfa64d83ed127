// Device memory as a Compute whose messages travel through slots, in one of two kinds of memory:
//
//   pinned   for transports that do not reach device memory. Every receive lands in a slot, and one
//            command to the worker takes it from there over the bus: adds it to what is on the
//            device, or copies it to its place.
//   device   for those that do. A receive is a loan of the sender's own slot, which the worker
//   reads
//            where it is, or lands in a slot or in its place.
//
// What is to be sent is always formed in a slot by one command; a result in transit never touches
// the user's memory, and one that is sent next is written to both by the same command.
#pragma once

#include <array>
#include <memory>

#include "lib/cuda/path.h"
#include "lib/cuda/worker.h"
#include "lib/engine/compute.h"
#include "lib/engine/execution.h"

namespace ringfold::cuda {

class SlotCompute final : public Compute {
 public:
  // `worker` has been asked to serve it. Messages of one pair come in any order and must not wait
  // for each other, so each brings slots of its own; collectives get them from `path`, in turn.
  SlotCompute(const DeviceCall& call, std::shared_ptr<Worker> worker, std::shared_ptr<Path> path,
              std::byte* own_slots);
  ~SlotCompute() override;

  [[nodiscard]] bool ready() override;
  Buffer landing(const Piece& piece, int slot) override;
  void consume(const Piece& piece, int slot, int operand_slot, const void* view,
               Completion* completion) override;
  void stage(const Piece& piece, int slot, Buffer* out, Completion* completion) override;
  [[nodiscard]] bool stages(From side) const override { return side != From::transit; }
  [[nodiscard]] Loans loans() const override {
    return kind_ == MemoryKind::cuda ? Loans::all : Loans::none;
  }
  void copy_local(Range range, Completion* completion) override;
  [[nodiscard]] bool in_place() const override { return in_place_; }
  bool progress() override;
  [[nodiscard]] bool silent() const override { return true; }

  // Bytes of memory for the slots of a collective, and for those of a message.
  [[nodiscard]] static size_t slots_bytes(size_t piece_bytes, MemoryKind kind);
  [[nodiscard]] static size_t own_bytes(const DeviceCall& call);

 private:
  // Slots of the executor, and behind them, if they are pinned, one for each receive that it lands
  // in place.
  static constexpr int kLandings = Execution::kAllSlots;
  static constexpr int kAllSlots = kLandings + Execution::kWindow;

  struct Task {
    Command command;
    Completion* completion = nullptr;
    int landing = -1;  // slot to free afterwards
    bool posted = false;
    Ticket ticket;
  };

  [[nodiscard]] std::byte* at(const std::byte* base, size_t begin, const Range& range) const;
  [[nodiscard]] std::byte* input(const Range& range) const;
  [[nodiscard]] std::byte* work(const Range& range) const;
  [[nodiscard]] std::byte* slot(int slot, const Range& range) const;
  [[nodiscard]] int landing_at(const void* view) const;
  [[nodiscard]] Command copy_of(const void* from, void* to, size_t count, double factor) const;
  void give(const Command& command, Completion* completion, int landing = -1);

  [[nodiscard]] bool scales() const {
    return reduction_.op == Op::premul_sum && reduction_.factor != 1.0;
  }

  const DType type_;
  Reduction reduction_;
  const std::byte* factor_;  // to be read when the stream has come to it, or null
  const int size_;
  const size_t element_bytes_, slot_bytes_;
  std::byte* const input_;
  std::byte* const work_;
  const size_t input_begin_, work_begin_;  // of the frame
  const bool in_place_;
  const std::shared_ptr<Worker> worker_;
  const std::shared_ptr<Path> path_;
  const MemoryKind kind_;
  const bool owns_slots_;
  const uint32_t first_slot_;                // that slots_ has
  const uint64_t turn_;                      // of a collective
  std::byte* slots_;                         // null: not yet
  std::array<uint8_t, kAllSlots> places_{};  // in slots_, of each slot
  uint32_t free_landings_ = (uint64_t{1} << Execution::kWindow) - 1;

  // What is not done, oldest first: at most one for each receive and send of the executor.
  std::array<Task, size_t{2} * Execution::kWindow> tasks_;
  uint32_t first_ = 0, count_ = 0;
};

}  // namespace ringfold::cuda
