// One call of torch.distributed as operations of the C interface: which memory they work on, and
// what is copied where when they are done.
//
// The library takes contiguous memory of twelve types. Any other tensor (strided, conjugated,
// int16) is taken through a contiguous copy, whose content goes back at the end: any layout is
// right or refused.
//
// Thread-safety: a Call is a plain value; one thread at a time.
#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "ringfold/c.h"

namespace ringfold::torch {

// What an element is for the library: so many numbers of a type. Types that it cannot add are
// bytes.
struct Element {
  int type = RINGFOLD_U8;
  size_t numbers = 1;
};

inline Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kChar:
      return {RINGFOLD_I8, 1};
    case at::kByte:
      return {RINGFOLD_U8, 1};
    case at::kInt:
      return {RINGFOLD_I32, 1};
    case at::kLong:
      return {RINGFOLD_I64, 1};
    case at::kHalf:
      return {RINGFOLD_F16, 1};
    case at::kFloat:
      return {RINGFOLD_F32, 1};
    case at::kDouble:
      return {RINGFOLD_F64, 1};
    case at::kBFloat16:
      return {RINGFOLD_BF16, 1};
    case at::kUInt32:
      return {RINGFOLD_U32, 1};
    case at::kUInt64:
      return {RINGFOLD_U64, 1};
    case at::kFloat8_e4m3fn:
      return {RINGFOLD_F8E4M3, 1};
    case at::kFloat8_e5m2:
      return {RINGFOLD_F8E5M2, 1};
    case at::kComplexFloat:
      return {RINGFOLD_F32, 2};
    case at::kComplexDouble:
      return {RINGFOLD_F64, 2};
    default:
      return {RINGFOLD_U8, c10::elementSize(type)};
  }
}

// A reduction as the library has it; `through`: the type that the numbers have meanwhile.
struct Arithmetic {
  int op = RINGFOLD_SUM;
  double factor = 1;
  at::ScalarType through = at::kFloat;
};

// Truth values: a sum is "any", a product "all".
inline int op_of_bool(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::MAX:
    case c10d::ReduceOp::BOR:
      return RINGFOLD_MAX;
    case c10d::ReduceOp::PRODUCT:
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::BAND:
      return RINGFOLD_MIN;
    default:
      TORCH_CHECK(false,
                  "ringfold: this ReduceOp is not offered for bool: SUM, PRODUCT, MIN, "
                  "MAX, BAND and BOR are");
  }
}

inline Arithmetic arithmetic(const c10d::ReduceOp& given, at::ScalarType type) {
  Arithmetic what;
  what.through = type;
  if (type == at::kBool) {
    what.op = op_of_bool(given.op_);
    return what;
  }
  switch (given.op_) {
    case c10d::ReduceOp::SUM:
      what.op = RINGFOLD_SUM;
      break;
    case c10d::ReduceOp::AVG:
      what.op = RINGFOLD_AVG;
      break;
    case c10d::ReduceOp::PRODUCT:
      what.op = RINGFOLD_PROD;
      break;
    case c10d::ReduceOp::MIN:
      what.op = RINGFOLD_MIN;
      break;
    case c10d::ReduceOp::MAX:
      what.op = RINGFOLD_MAX;
      break;
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* more = static_cast<const c10d::NCCLPreMulSumSupplement*>(given.supplement_.get());
      TORCH_CHECK(more != nullptr, "ringfold: PREMUL_SUM has no factor");
      what.op = RINGFOLD_PREMUL_SUM;
      what.factor =
          more->tensor_factor.defined() ? more->tensor_factor.item<double>() : more->double_factor;
      break;
    }
    default:
      TORCH_CHECK(false, "ringfold: bitwise reductions are offered for bool only");
  }
  const bool sums =
      what.op == RINGFOLD_SUM || what.op == RINGFOLD_AVG || what.op == RINGFOLD_PREMUL_SUM;
  TORCH_CHECK(sums || !at::isComplexType(type), "ringfold: complex numbers have SUM, AVG and ",
              "PREMUL_SUM, no order and no product");
  // Sums and products of 16 bits are the low half of those of 32.
  if (type == at::kShort || type == at::kUInt16) what.through = at::kInt;
  TORCH_CHECK(element_of(what.through).type != RINGFOLD_U8 || type == at::kByte,
              "ringfold: reductions are not offered for ", type);
  return what;
}

// One operation of the C interface.
struct Op {
  enum class Kind : uint8_t {
    all_reduce,
    reduce,
    reduce_scatter,
    all_gather,
    gather,
    scatter,
    all_to_all,
    broadcast,
    send,
    recv,
    barrier,
  };
  Kind kind;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;  // elements of `type`, of one part where there are parts
  int type = RINGFOLD_U8;
  int op = RINGFOLD_SUM;
  double factor = 1;
  int peer = 0;  // or the root

  ringfold_status start(ringfold_comm_t comm, void* stream, ringfold_work_t* work) const {
    switch (kind) {
      case Kind::all_reduce:
        return ringfold_all_reduce_async(comm, send, recv, count, type, op, factor, stream, work);
      case Kind::reduce:
        return ringfold_reduce_async(comm, send, recv, count, type, op, factor, peer, stream, work);
      case Kind::reduce_scatter:
        return ringfold_reduce_scatter_async(comm, send, recv, count, type, op, factor, stream,
                                             work);
      case Kind::all_gather:
        return ringfold_all_gather_async(comm, send, recv, count, type, stream, work);
      case Kind::gather:
        return ringfold_gather_async(comm, send, recv, count, type, peer, stream, work);
      case Kind::scatter:
        return ringfold_scatter_async(comm, send, recv, count, type, peer, stream, work);
      case Kind::all_to_all:
        return ringfold_all_to_all_async(comm, send, recv, count, type, stream, work);
      case Kind::broadcast:
        return ringfold_broadcast_async(comm, recv, count, type, peer, stream, work);
      case Kind::send:
        return ringfold_send_async(comm, send, count, type, peer, stream, work);
      case Kind::recv:
        return ringfold_recv_async(comm, recv, count, type, peer, stream, work);
      case Kind::barrier:
        return ringfold_barrier_async(comm, work);
    }
    return RINGFOLD_INTERNAL;
  }
};

class Call {
 public:
  explicit Call(c10d::OpType kind) : kind_(kind) {}

  // The tensor itself where the library can use it, else a contiguous copy. `type`: as what.
  at::Tensor input(const at::Tensor& tensor, at::ScalarType type) {
    check(tensor);
    at::Tensor memory = tensor;
    if (!usable(tensor, type)) {
      const Below autograd;
      memory = tensor.resolve_conj().resolve_neg().to(type).contiguous();
    }
    held_.push_back(memory);
    return memory;
  }
  at::Tensor input(const at::Tensor& tensor) { return input(tensor, tensor.scalar_type()); }

  // The same for what is written; the content is copied into the tensor when all is done.
  at::Tensor output(const at::Tensor& tensor, at::ScalarType type) {
    check(tensor);
    results.push_back(tensor);
    if (usable(tensor, type)) {
      held_.push_back(tensor);
      return tensor;
    }
    check_written(tensor);
    const Below autograd;
    at::Tensor memory = at::empty(tensor.sizes(), tensor.options().dtype(type));
    held_.push_back(memory);
    copies_.emplace_back(tensor, memory);
    return memory;
  }
  at::Tensor output(const at::Tensor& tensor) { return output(tensor, tensor.scalar_type()); }

  // For what is read and written.
  at::Tensor in_place(const at::Tensor& tensor, at::ScalarType type) {
    const at::Tensor memory = output(tensor, type);
    if (!memory.is_same(tensor)) {
      const Below autograd;
      memory.copy_(tensor);
    }
    return memory;
  }

  // Memory for equal parts that are tensors of their own; null where there are none.
  at::Tensor parts_in(const std::vector<at::Tensor>& parts, at::ScalarType type) {
    const at::Tensor memory = parts_memory(parts, type);
    const Below autograd;
    for (size_t i = 0; i < parts.size(); ++i) {
      check(parts[i]);
      memory[static_cast<int64_t>(i)].copy_(parts[i].reshape({-1}));
    }
    return memory;
  }
  at::Tensor parts_out(const std::vector<at::Tensor>& parts) {
    const at::Tensor memory = parts_memory(parts, parts.at(0).scalar_type());
    for (size_t i = 0; i < parts.size(); ++i) {
      check(parts[i]);
      check_written(parts[i]);
      results.push_back(parts[i]);
      copies_.emplace_back(parts[i], memory[static_cast<int64_t>(i)].view(parts[i].sizes()));
    }
    return memory;
  }

  void add(const Op& op) { ops_.push_back(op); }
  void add_all(Call&& other) {
    for (auto& op : other.ops_) ops_.push_back(op);
    for (auto& tensor : other.held_) held_.push_back(std::move(tensor));
    for (auto& copy : other.copies_) copies_.push_back(std::move(copy));
    for (auto& tensor : other.results) results.push_back(std::move(tensor));
  }

  // After the operations: into the tensors that were not used themselves.
  void copy_back() {
    const Below autograd;
    for (auto& [to, from] : copies_) to.copy_(from);
    copies_.clear();
  }
  void let_go() { held_.clear(); }

  [[nodiscard]] c10d::OpType kind() const { return kind_; }
  [[nodiscard]] const std::vector<Op>& ops() const { return ops_; }
  // Of all tensors: they are on one.
  [[nodiscard]] at::Device device() const {
    return held_.empty() ? at::Device(at::kCPU) : held_.front().device();
  }

  std::vector<at::Tensor> results;  // what the Work and its future give

 private:
  // Copies are no part of the graph, and written tensors may be leaves that want a gradient.
  using Below = at::AutoDispatchBelowADInplaceOrView;

  static bool usable(const at::Tensor& tensor, at::ScalarType type) {
    return tensor.scalar_type() == type && tensor.is_contiguous() && !tensor.is_conj() &&
           !tensor.is_neg();
  }
  void check(const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.layout() == at::kStrided, "ringfold: sparse tensors are not offered");
    TORCH_CHECK(tensor.is_cpu() || tensor.is_cuda(),
                "ringfold: tensors are on the CPU or CUDA, not ", tensor.device());
    TORCH_CHECK(held_.empty() || tensor.device() == device(),
                "ringfold: tensors of one call are on ", device(), " and ", tensor.device());
  }
  static void check_written(const at::Tensor& tensor) {
    TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                "ringfold: several elements of an output share memory, as expand() makes them");
  }
  at::Tensor parts_memory(const std::vector<at::Tensor>& parts, at::ScalarType type) {
    TORCH_CHECK(!parts.empty(), "ringfold: an empty list of tensors");
    for (const at::Tensor& part : parts) {
      TORCH_CHECK(part.numel() == parts[0].numel() && part.scalar_type() == parts[0].scalar_type(),
                  "ringfold: the tensors of a list differ in size or type");
    }
    const Below autograd;
    at::Tensor memory = at::empty({static_cast<int64_t>(parts.size()), parts[0].numel()},
                                  parts[0].options().dtype(type));
    held_.push_back(memory);
    return memory;
  }

  c10d::OpType kind_;
  std::vector<Op> ops_;
  std::vector<at::Tensor> held_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from
};

}  // namespace ringfold::torch
