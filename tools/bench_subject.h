// One line of the benchmark on one rank: its buffers, the call, and what must come out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ringfold/communicator.h"
#include "tools/bench_device.h"
#include "tools/bench_options.h"

namespace ringfold::tools {

// A failed operation ends the benchmark on this rank; caught in bench.cpp.
struct OperationFailed {
  Status status;
};
inline void must(const Status& status) {
  if (!status.ok()) throw OperationFailed{status};
}

// A buffer with a guard before and behind, whose start can be shifted by a few elements. With a
// device it has a second one there, guards and all, which is the one that calls get.
class Guarded {
 public:
  explicit Guarded(const Gpu* gpu) : gpu_(gpu) {}
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  void resize(size_t bytes, size_t shift);  // keeps memory that is large enough
  [[nodiscard]] std::byte* data() const { return memory_.get() + kGuard + shift_; }
  // What lies on the device for an address of this buffer; without a device the address itself.
  [[nodiscard]] std::byte* for_call(std::byte* at) const;
  void upload() const;
  void download() const;
  void protect();                            // writes the guards
  [[nodiscard]] size_t overwritten() const;  // guard bytes that changed since

 private:
  static constexpr size_t kGuard = 4096;
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  const Gpu* const gpu_;  // null: none
  std::unique_ptr<std::byte[], Free> memory_;
  std::byte* on_device_ = nullptr;
  size_t capacity_ = 0, bytes_ = 0, shift_ = 0;
};

class Subject {
 public:
  // `gpu`: where the buffers lie; null: on the host.
  Subject(Communicator& comm, const BenchOptions& options, const Gpu* gpu)
      : comm_(comm), options_(options), gpu_(gpu), send_(gpu), recv_(gpu) {}

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
  // `calls` of them, back to back, on a device without waiting in between; `after`: after each.
  // Seconds of one.
  double time(bool in_place, int calls, const std::function<double()>& after = nullptr);
  [[nodiscard]] Report report() const;
  // One all_reduce of the library with the same data, for comparison with a baseline.
  Report library_call();
  // Elements of this rank's output that differ from what `seed` demands, input that was changed,
  // and bytes written beside the buffers.
  [[nodiscard]] uint64_t wrong(bool in_place, uint64_t seed) const;  // waits for the device

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

  [[nodiscard]] Stream stream() const { return gpu_ != nullptr ? gpu_->stream() : Stream{}; }
  void launch(bool in_place);
  void settle();

  Communicator& comm_;
  const BenchOptions& options_;
  const Gpu* const gpu_;
  DType type_ = DType::f32;
  Op op_ = Op::sum;
  int root_ = 0;
  size_t count_ = 0;  // as the call is given it
  Guarded send_, recv_;
  std::vector<std::byte> incoming_;  // baselines: what the hub receives
  std::vector<Work> launched_;
  std::vector<Work> done_;  // by the latest call
};

}  // namespace ringfold::tools
