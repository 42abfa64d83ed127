// One line of the benchmark on one rank: its buffers, the call, and what must come out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ringfold/communicator.h"
#include "tools/bench_options.h"

namespace ringfold::tools {

// A failed operation ends the benchmark on this rank; caught in bench.cpp.
struct OperationFailed {
  Status status;
};
inline void must(const Status& status) {
  if (!status.ok()) throw OperationFailed{status};
}

// A buffer with a guard before and behind, whose start can be shifted by a few elements.
class Guarded {
 public:
  void resize(size_t bytes, size_t shift);  // keeps memory that is large enough
  [[nodiscard]] std::byte* data() const { return memory_.get() + kGuard + shift_; }
  void protect();                            // writes the guards
  [[nodiscard]] size_t overwritten() const;  // guard bytes that changed since

 private:
  static constexpr size_t kGuard = 4096;
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte[], Free> memory_;
  size_t capacity_ = 0, bytes_ = 0, shift_ = 0;
};

class Subject {
 public:
  Subject(Communicator& comm, const BenchOptions& options) : comm_(comm), options_(options) {}

  // Sets the line up. `bytes` is the size of the largest buffer of a rank; what does not divide is
  // left off.
  void set(uint64_t bytes, DType type, Op op, int root);

  [[nodiscard]] size_t size() const;  // bytes of the largest buffer
  [[nodiscard]] size_t count() const { return count_; }
  [[nodiscard]] bool offers(bool in_place) const;

  // Fills the buffers: input where the call reads, rubbish where it writes.
  void prepare(bool in_place, uint64_t seed);
  // One call, to its end. Its report is report().
  void call(bool in_place);
  [[nodiscard]] const Report& report() const { return report_; }
  // One all_reduce of the library with the same data, for comparison with a baseline.
  Report library_call();
  // Elements of this rank's output that differ from what `seed` demands, input that was changed,
  // and bytes written beside the buffers.
  [[nodiscard]] uint64_t wrong(bool in_place, uint64_t seed) const;

 private:
  struct Pointers {
    std::byte *send, *recv;
  };
  [[nodiscard]] Pointers pointers(bool in_place) const;
  [[nodiscard]] size_t input_count() const;   // elements that this rank contributes
  [[nodiscard]] size_t output_count() const;  // elements that it gets
  void fill_input(std::byte* at, uint64_t seed) const;
  [[nodiscard]] uint64_t wrong_output(const std::byte* at, uint64_t seed) const;
  [[nodiscard]] Work start(Pointers at);
  void send_recv(Pointers at);
  void baseline(Pointers at);
  void receive_and_fold(Pointers at);
  void hand_back(Pointers at);
  void fold(Pointers at, int rank, const std::byte* received) const;
  void finish(Work work);  // waits, and adds its report to this call's

  Communicator& comm_;
  const BenchOptions& options_;
  DType type_ = DType::f32;
  Op op_ = Op::sum;
  int root_ = 0;
  size_t count_ = 0;  // as the call is given it
  Guarded send_, recv_;
  std::vector<std::byte> incoming_;  // baselines: what the hub receives
  Report report_;
};

}  // namespace ringfold::tools
