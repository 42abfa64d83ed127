// Host memory as a Compute: in-place views of the user's buffers, scratch slots, and the host
// kernels.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "lib/engine/compute.h"

namespace ringfold {

// Scratch memory for slots, kept between operations so that none allocates on the data path.
// Threads: any.
class SlotPool {
 public:
  // One block for all slots of an operation.
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    size_t bytes = 0;
    [[nodiscard]] std::byte* aligned() const;  // to a cache line
  };
  Block take(size_t bytes);
  void give(Block block);

 private:
  static constexpr size_t kKept = 8;  // blocks
  std::mutex lock_;
  std::vector<Block> free_;
};

class HostCompute final : public Compute {
 public:
  // `input` and `work` point at the first element that the rank's buffers hold (see frame()); equal
  // memory means in place. Null where the rank has no such buffer.
  HostCompute(const Schedule& schedule, int position, const void* input, void* work, DType type,
              Reduction reduction, size_t piece, SlotPool& pool);
  ~HostCompute() override;

  Buffer landing(const Piece& piece, int slot) override;
  void consume(const Piece& piece, int slot, int operand_slot, const void* view,
               Completion* completion) override;
  void stage(const Piece& piece, int slot, Buffer* out, Completion* completion) override;
  [[nodiscard]] bool stages(From side) const override { return scales_ && side == From::input; }
  void copy_local(Range range, Completion* completion) override;
  [[nodiscard]] bool in_place() const override { return in_place_; }
  bool progress() override { return false; }

 private:
  [[nodiscard]] const std::byte* input(const Range& range) const;
  [[nodiscard]] std::byte* work(const Range& range) const;
  std::byte* slot(int slot);

  const DType type_;
  const Reduction reduction_;
  const int size_;
  const size_t element_bytes_, slot_bytes_;
  const std::byte* const input_;
  std::byte* const work_;
  const size_t input_begin_, work_begin_;  // of the frame
  const bool in_place_, scales_;
  SlotPool& pool_;
  SlotPool::Block slots_;
};

}  // namespace ringfold
