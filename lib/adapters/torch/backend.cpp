// torch.distributed's backend "ringfold": every method of c10d as operations of the C interface.
// Compiled against the installed torch when it is first used (ringfold/torch/_build.py). Overrides
// the names that all torch 2.x know; what only newer ones have is declared without `override`.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "meet.h"
#include "work.h"

namespace ringfold::torch {
namespace {

using c10d::OpType;
using Kind = Op::Kind;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using Result = c10::intrusive_ptr<c10d::Work>;

const at::Tensor& single(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "ringfold: one tensor a rank is expected, given are ",
              tensors.size());
  return tensors[0];
}

const Tensors& single(const std::vector<Tensors>& lists) {
  TORCH_CHECK(lists.size() == 1, "ringfold: one list of tensors a rank is expected, given are ",
              lists.size());
  return lists[0];
}

size_t numbers(const at::Tensor& memory) {
  return static_cast<size_t>(memory.numel()) * element_of(memory.scalar_type()).numbers;
}

// Moving `memory`, one part of it or all.
Op moves(Kind kind, const at::Tensor& part, int peer = 0) {
  Op op{kind};
  op.type = element_of(part.scalar_type()).type;
  op.count = numbers(part);
  op.peer = peer;
  return op;
}

Op reduces(Kind kind, const at::Tensor& part, const Arithmetic& what, int root = 0) {
  Op op = moves(kind, part, root);
  op.op = what.op;
  op.factor = what.factor;
  return op;
}

bool equal_sizes(const Tensors& tensors, const at::Tensor& like) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& each) { return each.numel() == like.numel(); });
}

void check_parts(const at::Tensor& part, const at::Tensor& whole, int parts) {
  TORCH_CHECK(part.scalar_type() == whole.scalar_type(), "ringfold: the types ", part.scalar_type(),
              " and ", whole.scalar_type(), " differ");
  TORCH_CHECK(part.numel() * parts == whole.numel(), "ringfold: ", whole.numel(),
              " elements are not ", parts, " times ", part.numel());
}

// Where the rows of each rank begin; `splits` empty: equal parts.
std::vector<int64_t> starts_of(const std::vector<int64_t>& splits, const at::Tensor& tensor,
                               int ranks) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  std::vector<int64_t> lengths = splits;
  if (lengths.empty()) {
    TORCH_CHECK(rows % ranks == 0, "ringfold: ", rows, " rows do not make ", ranks, " equal parts");
    lengths.assign(static_cast<size_t>(ranks), rows / ranks);
  }
  TORCH_CHECK(lengths.size() == static_cast<size_t>(ranks) &&
                  std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) == rows,
              "ringfold: the split sizes do not make the ", rows, " rows of the tensor");
  std::vector<int64_t> starts(1, 0);
  for (const int64_t length : lengths) starts.push_back(starts.back() + length);
  return starts;
}

class Backend final : public c10d::Backend {
 public:
  Backend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout)
      : Backend(store, meet(*store, rank, size, timeout), rank, size, timeout) {}
  Backend(c10::intrusive_ptr<c10d::Store> store, ringfold_comm_t comm, int rank, int size,
          Milliseconds timeout)
      : c10d::Backend(rank, size), store_(std::move(store)), comm_(comm), timeout_(timeout) {
    init();
  }
  ~Backend() override { shutdown(); }

  const std::string getBackendName() const override { return "ringfold"; }
  c10::intrusive_ptr<Options> getBackendOptions() {
    return c10::make_intrusive<Options>("ringfold", timeout_);
  }

  // ---- Reductions ----

  Result allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return submit(all_reduce(single(tensors), opts.reduceOp), opts);
  }
  Result allreduce_coalesced(Tensors& tensors,
                             const c10d::AllreduceCoalescedOptions& opts) override {
    Call all(OpType::ALLREDUCE_COALESCED);
    for (const at::Tensor& tensor : tensors) all.add_all(all_reduce(tensor, opts.reduceOp));
    return submit(std::move(all), opts);
  }
  Result reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    Call call(OpType::REDUCE);
    add_reduce(call, single(tensors), single(tensors), opts.reduceOp,
               static_cast<int>(opts.rootRank));
    return submit(std::move(call), opts);
  }
  Result _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                              const c10d::ReduceScatterOptions& opts) override {
    return submit(reduce_scatter(output, input, opts.reduceOp), opts);
  }
  Result reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::ReduceScatterOptions& opts) override {
    TORCH_CHECK(outputs.size() == inputs.size(),
                "ringfold: as many outputs as inputs are expected");
    Call all(OpType::COALESCED);
    for (size_t i = 0; i < inputs.size(); ++i)
      all.add_all(reduce_scatter(outputs[i], inputs[i], opts.reduceOp));
    return submit(std::move(all), opts);
  }
  Result reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                        const c10d::ReduceScatterOptions& opts) override {
    const at::Tensor& output = single(outputs);
    const Tensors& parts = single(inputs);
    check_list(parts);
    Call call(OpType::REDUCE_SCATTER);
    if (!equal_sizes(parts, output)) {
      for (int r = 0; r < size_; ++r)
        add_reduce(call, parts[static_cast<size_t>(r)], output, opts.reduceOp, r);
      return submit(std::move(call), opts);
    }
    const Arithmetic what = arithmetic(opts.reduceOp, output.scalar_type());
    const at::Tensor send = call.parts_in(parts, what.through);
    const at::Tensor recv = call.output(output, what.through);
    add(call, reduces(Kind::reduce_scatter, recv, what), send, recv);
    return submit(std::move(call), opts);
  }

  // ---- Moving ----

  Result broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    Call call(OpType::BROADCAST);
    add_broadcast(call, single(tensors), static_cast<int>(opts.rootRank));
    return submit(std::move(call), opts);
  }
  Result _allgather_base(at::Tensor& output, at::Tensor& input,
                         const c10d::AllgatherOptions& opts) override {
    return submit(all_gather(output, input), opts);
  }
  Result allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) override {
    TORCH_CHECK(outputs.size() == inputs.size(),
                "ringfold: as many outputs as inputs are expected");
    Call all(OpType::COALESCED);
    for (size_t i = 0; i < inputs.size(); ++i) all.add_all(all_gather(outputs[i], inputs[i]));
    return submit(std::move(all), opts);
  }
  Result allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                   const c10d::AllgatherOptions& opts) override {
    return submit(all_gather(single(outputs), single(inputs)), opts);
  }
  // [r][i] of the outputs is input i of rank r.
  Result allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::AllgatherOptions& opts) override {
    TORCH_CHECK(outputs.size() == static_cast<size_t>(size_),
                "ringfold: a list of outputs for every rank is expected");
    Call all(OpType::ALLGATHER_COALESCED);
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors of_input;
      for (const Tensors& of_rank : outputs) {
        TORCH_CHECK(of_rank.size() == inputs.size(),
                    "ringfold: an output for every input is expected");
        of_input.push_back(of_rank[i]);
      }
      all.add_all(all_gather(of_input, inputs[i]));
    }
    return submit(std::move(all), opts);
  }
  Result gather(std::vector<Tensors>& outputs, Tensors& inputs,
                const c10d::GatherOptions& opts) override {
    Call call(OpType::GATHER);
    const at::Tensor send = call.input(single(inputs));
    at::Tensor recv;
    if (rank_ == opts.rootRank) {
      const Tensors& parts = single(outputs);
      check_list(parts);
      TORCH_CHECK(equal_sizes(parts, send) && parts[0].scalar_type() == send.scalar_type(),
                  "ringfold: gather needs outputs of the input's size and type");
      recv = call.parts_out(parts);
    }
    add(call, moves(Kind::gather, send, static_cast<int>(opts.rootRank)), send, recv);
    return submit(std::move(call), opts);
  }
  Result scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                 const c10d::ScatterOptions& opts) override {
    Call call(OpType::SCATTER);
    const at::Tensor recv = call.output(single(outputs));
    at::Tensor send;
    if (rank_ == opts.rootRank) {
      const Tensors& parts = single(inputs);
      check_list(parts);
      TORCH_CHECK(equal_sizes(parts, recv) && parts[0].scalar_type() == recv.scalar_type(),
                  "ringfold: scatter needs inputs of the output's size and type");
      send = call.parts_in(parts, recv.scalar_type());
    }
    add(call, moves(Kind::scatter, recv, static_cast<int>(opts.rootRank)), send, recv);
    return submit(std::move(call), opts);
  }
  Result alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                       std::vector<int64_t>& input_splits,
                       const c10d::AllToAllOptions& opts) override {
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "ringfold: the types differ");
    const auto from = starts_of(output_splits, output, size_);
    const auto to = starts_of(input_splits, input, size_);
    Call call(OpType::ALLTOALL_BASE);
    const at::Tensor send = call.input(input), recv = call.output(output);
    if (output_splits.empty() && input_splits.empty() && output.numel() == input.numel()) {
      Op op = moves(Kind::all_to_all, send);
      op.count /= static_cast<size_t>(size_);
      add(call, op, send, recv);
      return submit(std::move(call), opts);
    }
    for (int r = 0; r < size_; ++r) {
      const auto i = static_cast<size_t>(r);
      add_message(call, Kind::send, send.narrow(0, to[i], to[i + 1] - to[i]), r);
      add_message(call, Kind::recv, recv.narrow(0, from[i], from[i + 1] - from[i]), r);
    }
    return submit(std::move(call), opts);
  }
  Result alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    check_list(outputs);
    check_list(inputs);
    Call call(OpType::ALLTOALL);
    for (int r = 0; r < size_; ++r) {
      add_message(call, Kind::send, call.input(inputs[static_cast<size_t>(r)]), r);
      add_message(call, Kind::recv, call.output(outputs[static_cast<size_t>(r)]), r);
    }
    return submit(std::move(call), opts);
  }
  Result send(Tensors& tensors, int to, int tag) override {
    check_tag(tag);
    Call call(OpType::SEND);
    add_message(call, Kind::send, call.input(single(tensors)), to);
    return submit(std::move(call), true, c10d::kUnsetTimeout);
  }
  Result recv(Tensors& tensors, int from, int tag) override {
    check_tag(tag);
    Call call(OpType::RECV);
    add_message(call, Kind::recv, call.output(single(tensors)), from);
    return submit(std::move(call), true, c10d::kUnsetTimeout);
  }
  Result barrier(const c10d::BarrierOptions& opts) override {
    Call call(OpType::BARRIER);
    call.add(Op{Kind::barrier});
    return submit(std::move(call), true, opts.timeout);
  }

  // Over the store, so that a rank that is missing does no harm to the communicator.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    const Milliseconds timeout = opts.timeout > kNoTimeout ? opts.timeout : timeout_;
    const std::string key = "ringfold/monitored/" + std::to_string(barriers_++) + "/";
    if (rank_ != 0) {
      store_->set(key + std::to_string(rank_), std::vector<uint8_t>{1});
      // Rank 0 needs up to `timeout` from when it comes, and tells.
      store_->wait({key + "missing"}, 2 * timeout);
      const std::vector<uint8_t> missing = store_->get(key + "missing");
      if (!missing.empty() && missing[0] != ' ')
        fail("monitored_barrier: rank 0 misses rank " +
             std::string(missing.begin(), missing.end()));
      return;
    }
    const auto until = std::chrono::steady_clock::now() + timeout;
    std::string missing;
    for (int r = 1; r < size_ && (missing.empty() || wait_all_ranks); ++r) {
      const auto left =
          std::chrono::duration_cast<Milliseconds>(until - std::chrono::steady_clock::now());
      try {
        store_->wait({key + std::to_string(r)}, std::max(left, Milliseconds(1)));
      } catch (const std::exception&) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      }
    }
    const std::string tell = missing.empty() ? " " : missing;
    store_->set(key + "missing", std::vector<uint8_t>(tell.begin(), tell.end()));
    if (!missing.empty())
      fail("monitored_barrier: rank " + missing + " did not come within " +
           std::to_string(timeout.count()) + " ms");
  }

  // ---- Several calls as one ----

  bool supportsCoalescing() const { return true; }
  void startCoalescing() override { coalesced_.emplace(OpType::COALESCED); }
  Result endCoalescing() override {
    TORCH_CHECK(coalesced_, "ringfold: endCoalescing without startCoalescing");
    Call all = std::move(*coalesced_);
    coalesced_.reset();
    return submit(std::move(all), true, c10d::kUnsetTimeout);
  }

  // ---- Groups, and the end ----

  bool supportsSplitting() const { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) {
    const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
    if (mine == ranks.end()) return nullptr;
    return c10::make_intrusive<Backend>(store, static_cast<int>(mine - ranks.begin()),
                                        static_cast<int>(ranks.size()),
                                        opts ? opts->timeout : timeout_);
  }
  bool supportsShrinking() const { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& exclude, int /*flags*/,
                                           const c10::intrusive_ptr<Options>& opts) {
    const std::vector<int> gone(exclude.begin(), exclude.end());
    ringfold_comm_t smaller = nullptr;
    check(ringfold_shrink(comm_, gone.data(), gone.size(), &smaller));
    int rank = 0, size = 0;
    check(ringfold_rank(smaller, &rank));
    check(ringfold_size(smaller, &size));
    return c10::make_intrusive<Backend>(store_, smaller, rank, size,
                                        opts ? opts->timeout : timeout_);
  }
  void setSequenceNumberForGroup() override {}  // begins at 0 everywhere
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  void abort() { ringfold_abort(comm_, "torch.distributed aborted the group"); }
  void shutdown() {
    const std::lock_guard guard(end_);
    if (comm_ == nullptr) return;
    ringfold_destroy(comm_);
    comm_ = nullptr;
  }

 private:
  void check_list(const Tensors& tensors) const {
    TORCH_CHECK(tensors.size() == static_cast<size_t>(size_), "ringfold: one tensor for each of ",
                size_, " ranks is expected, given are ", tensors.size());
  }
  static void check_tag(int tag) {
    TORCH_CHECK(tag == 0, "ringfold: messages of a pair arrive in order; tags (", tag,
                ") are not offered");
  }
  static void add(Call& call, Op op, const at::Tensor& send, const at::Tensor& recv) {
    op.send = send.defined() ? send.data_ptr() : nullptr;
    op.recv = recv.defined() ? recv.data_ptr() : nullptr;
    call.add(op);
  }
  static void add_message(Call& call, Kind kind, const at::Tensor& memory, int peer) {
    add(call, moves(kind, memory, peer), memory, memory);
  }
  void add_broadcast(Call& call, const at::Tensor& tensor, int root) const {
    const bool reads = rank_ == root;
    const at::Tensor memory = reads ? call.input(tensor) : call.output(tensor);
    if (reads) call.results.push_back(tensor);
    add(call, moves(Kind::broadcast, memory, root), memory, memory);
  }
  // Of `input` into `output` on the root.
  void add_reduce(Call& call, const at::Tensor& input, const at::Tensor& output,
                  const c10d::ReduceOp& op, int root) const {
    const Arithmetic what = arithmetic(op, input.scalar_type());
    at::Tensor send, recv;
    if (rank_ == root && input.is_same(output)) {
      send = recv = call.in_place(input, what.through);
    } else {
      send = call.input(input, what.through);
      if (rank_ == root) {
        check_parts(output, input, 1);
        recv = call.output(output, what.through);
      }
    }
    add(call, reduces(Kind::reduce, send, what, root), send, recv);
  }
  static Call all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    Call call(OpType::ALLREDUCE);
    const Arithmetic what = arithmetic(op, tensor.scalar_type());
    const at::Tensor memory = call.in_place(tensor, what.through);
    add(call, reduces(Kind::all_reduce, memory, what), memory, memory);
    return call;
  }
  Call reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      const c10d::ReduceOp& op) const {
    check_parts(output, input, size_);
    const Arithmetic what = arithmetic(op, input.scalar_type());
    Call call(OpType::_REDUCE_SCATTER_BASE);
    const at::Tensor send = call.input(input, what.through);
    const at::Tensor recv = call.output(output, what.through);
    add(call, reduces(Kind::reduce_scatter, recv, what), send, recv);
    return call;
  }
  Call all_gather(const at::Tensor& output, const at::Tensor& input) const {
    check_parts(input, output, size_);
    Call call(OpType::_ALLGATHER_BASE);
    const at::Tensor send = call.input(input), recv = call.output(output);
    add(call, moves(Kind::all_gather, send), send, recv);
    return call;
  }
  Call all_gather(const Tensors& outputs, const at::Tensor& input) const {
    check_list(outputs);
    Call call(OpType::ALLGATHER);
    if (equal_sizes(outputs, input)) {
      check_parts(input, outputs[0], 1);
      const at::Tensor send = call.input(input), recv = call.parts_out(outputs);
      add(call, moves(Kind::all_gather, send), send, recv);
      return call;
    }
    const at::Tensor& mine = outputs[static_cast<size_t>(rank_)];
    check_parts(input, mine, 1);
    {
      const at::AutoDispatchBelowADInplaceOrView autograd;
      mine.copy_(input.reshape(mine.sizes()));
    }
    for (int r = 0; r < size_; ++r) add_broadcast(call, outputs[static_cast<size_t>(r)], r);
    return call;
  }

  template <class Options>
  Result submit(Call call, const Options& opts) {
    return submit(std::move(call), opts.asyncOp, opts.timeout);
  }
  // Starts it, or adds it to the calls that are being collected; waits if the caller will do
  // nothing else.
  Result submit(Call call, bool async, Milliseconds timeout) {
    if (coalesced_) {
      coalesced_->add_all(std::move(call));
      return nullptr;
    }
    ++calls_;
    const OpType kind = call.kind();
    std::optional<c10::Stream> stream;
    if (call.device().is_cuda())
      stream = c10::impl::VirtualGuardImpl(at::kCUDA).getStream(call.device());
    const ringfold_work_t handle = start(call, stream ? stream->native_handle() : nullptr);
    auto work = c10::make_intrusive<Work>(
        rank_, kind, std::make_shared<Running>(std::move(call), handle, stream));
    if (!async && !stream) work->wait(std::max(timeout, kNoTimeout));
    return work;
  }
  ringfold_work_t start(const Call& call, void* stream) const {
    ringfold_work_t whole = nullptr;
    if (call.ops().size() == 1) {
      check(call.ops()[0].start(comm_, stream, &whole));
      return whole;
    }
    check(ringfold_group_begin());
    for (const Op& op : call.ops()) {
      ringfold_work_t one = nullptr;
      const ringfold_status status = op.start(comm_, stream, &one);
      if (status != RINGFOLD_OK) {
        const std::string why = ringfold_last_error();
        ringfold_group_discard();
        fail(why);
      }
      ringfold_work_free(one);
    }
    check(ringfold_group_end_async(&whole));
    return whole;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::mutex end_;
  ringfold_comm_t comm_;
  const Milliseconds timeout_;
  std::optional<Call> coalesced_;
  uint64_t calls_ = 0;
  int barriers_ = 0;
};

}  // namespace
}  // namespace ringfold::torch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  using ringfold::torch::Backend;
  module.def(
      "create",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Backend>(store, rank, size, timeout);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
      py::call_guard<py::gil_scoped_release>());
}
