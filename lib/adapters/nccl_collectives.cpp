// libnccl.so.2: collectives, messages and the operations made at run time.
#include <cstring>
#include <limits>

#include "kernels/floats.h"
#include "lib/adapters/nccl_state.h"

namespace ringfold::nccl {
namespace {

static_assert(static_cast<int>(DType::f8e5m2) == ncclFloat8e5m2 && kDTypes == 12);
static_assert(static_cast<int>(Op::avg) == ncclAvg && static_cast<int>(Op::max) == ncclMax &&
              static_cast<int>(Op::min) == ncclMin && static_cast<int>(Op::prod) == ncclProd);

// What whole numbers a factor may be: those that f64 holds.
constexpr int64_t kLargestFactor = int64_t{1} << 53;

Result<DType> to_dtype(ncclDataType_t type) {
  if (type >= 0 && type < kDTypes) return static_cast<DType>(type);
  return invalid(fmt::format("datatype {}: expected 0 ({}) to {} ({})", static_cast<int>(type),
                             kDTypeNames.front(), kDTypes - 1, kDTypeNames.back()));
}

template <class T>
T read(const void* scalar) {
  T value;
  std::memcpy(&value, scalar, sizeof value);
  return value;
}

// The scalar as a factor. Integers are multiplied modulo the type, so unsigned ones may count down.
Result<double> to_factor(DType type, const void* scalar) {
  switch (type) {
    case DType::i8:
    case DType::u8:
      return read<int8_t>(scalar);
    case DType::i32:
    case DType::u32:
      return read<int32_t>(scalar);
    case DType::i64:
    case DType::u64: {
      const auto whole = read<int64_t>(scalar);
      if (whole <= kLargestFactor && whole >= -kLargestFactor) return static_cast<double>(whole);
      return usage(
          fmt::format("a factor of {}: ringfold offers up to 2^53 for 64-bit integers", whole));
    }
    case DType::f16:
      return to_f32(read<F16>(scalar));
    case DType::bf16:
      return to_f32(read<BF16>(scalar));
    case DType::f8e4m3:
      return to_f32(read<F8E4M3>(scalar));
    case DType::f8e5m2:
      return to_f32(read<F8E5M2>(scalar));
    case DType::f32:
      return read<float>(scalar);
    case DType::f64:
      return read<double>(scalar);
  }
  return invalid("datatype");
}

// Operations are numbered per communicator; one belongs to one type.
Result<Reduction> to_reduction(Comm& comm, ncclRedOp_t op, DType type) {
  if (op >= 0 && op < ncclNumOps) return Reduction(static_cast<Op>(op));
  std::optional<PreMulSum> made;
  {
    const std::lock_guard guard(comm.lock);
    const auto index = static_cast<size_t>(static_cast<int>(op) - ncclNumOps);
    if (op >= ncclNumOps && index < comm.operations.size()) made = comm.operations[index];
  }
  if (!made)
    return invalid(
        fmt::format("op {}: neither 0 (ncclSum) to {} (ncclAvg) nor made on this "
                    "communicator and still there",
                    static_cast<int>(op), ncclNumOps - 1));
  if (made->type != type)
    return invalid(fmt::format("op {} was made for {}, but the data is {}", static_cast<int>(op),
                               name(made->type), name(type)));
  if (made->scalar == nullptr) return Reduction(Op::premul_sum, made->factor);
  const auto factor = to_factor(type, made->scalar);
  if (!factor.ok()) return factor.status();
  return Reduction(Op::premul_sum, *factor);
}

// The arguments that all calls share.
struct Data {
  const void* send;
  void* recv;
  size_t count;
  ncclDataType_t type;
};

// Checks what is alike everywhere and starts `begin(communicator, type)`.
template <class Begin>
ncclResult_t call(ncclComm_t comm, const Data& data, Begin begin,
                  std::function<void()> before = nullptr) {
  const auto found = comms().find(comm);
  if (!found.ok()) return refuse(found.status());
  const auto type = to_dtype(data.type);
  if (!type.ok()) return refuse(type.status(), found->get());
  if (data.count > 0)
    for (const void* pointer : {data.send, static_cast<const void*>(data.recv)})
      if (const Status memory = usable_memory(pointer); !memory.ok())
        return refuse(memory, found->get());
  return start(
      *found, [&](Communicator& on) { return begin(on, *type); }, std::move(before));
}

// The same for what reduces: `begin(communicator, type, reduction)`.
template <class Begin>
ncclResult_t call(ncclComm_t comm, const Data& data, ncclRedOp_t op, Begin begin) {
  const auto found = comms().find(comm);
  if (!found.ok()) return refuse(found.status());
  return call(comm, data, [&](Communicator& on, DType type) {
    const auto reduction = to_reduction(**found, op, type);
    return reduction.ok() ? begin(on, type, *reduction) : Work(reduction.status());
  });
}

// ---- the collectives, for their plain and their configured form -------------------------------

ncclResult_t all_reduce(const Data& data, ncclRedOp_t op, ncclComm_t comm) {
  return call(comm, data, op, [&](Communicator& on, DType type, Reduction reduction) {
    return on.all_reduce(data.send, data.recv, data.count, type, reduction);
  });
}

ncclResult_t reduce(const Data& data, ncclRedOp_t op, int root, ncclComm_t comm) {
  return call(comm, data, op, [&](Communicator& on, DType type, Reduction reduction) {
    return on.reduce(data.send, data.recv, data.count, type, reduction, root);
  });
}

ncclResult_t reduce_scatter(const Data& data, ncclRedOp_t op, ncclComm_t comm) {
  return call(comm, data, op, [&](Communicator& on, DType type, Reduction reduction) {
    return on.reduce_scatter(data.send, data.recv, data.count, type, reduction);
  });
}

// The root may have its data elsewhere than where everybody gets it: it is copied there first.
ncclResult_t broadcast(const Data& data, int root, ncclComm_t comm) {
  const auto found = comms().find(comm);
  if (!found.ok()) return refuse(found.status());
  const auto communicator = (*found)->whatever_failed();
  const bool copies =
      communicator.ok() && communicator->rank() == root && data.count > 0 && data.send != data.recv;
  if (!copies)
    return call(comm, data, [&](Communicator& on, DType type) {
      return on.broadcast(data.recv, data.count, type, root);
    });
  if (data.send == nullptr || data.recv == nullptr)
    return refuse(null_argument(data.send == nullptr ? "sendbuff" : "recvbuff"), found->get());
  const auto type = to_dtype(data.type);
  if (!type.ok()) return refuse(type.status(), found->get());
  const size_t bytes = data.count * size_of(*type);
  const auto* const from = static_cast<const char*>(data.send);
  auto* const to = static_cast<char*>(data.recv);
  if (data.count > std::numeric_limits<ptrdiff_t>::max() / size_of(*type) ||
      (from < to + bytes && to < from + bytes))
    return refuse(invalid(fmt::format("broadcast: sendbuff {} and recvbuff {} overlap, but are not "
                                      "equal",
                                      data.send, data.recv)),
                  found->get());
  return call(
      comm, data,
      [&](Communicator& on, DType known) {
        return on.broadcast(data.recv, data.count, known, root);
      },
      [from, to, bytes] { std::memcpy(to, from, bytes); });
}

ncclResult_t all_gather(const Data& data, ncclComm_t comm) {
  return call(comm, data, [&](Communicator& on, DType type) {
    return on.all_gather(data.send, data.recv, data.count, type);
  });
}

ncclResult_t all_to_all(const Data& data, ncclComm_t comm) {
  return call(comm, data, [&](Communicator& on, DType type) {
    return on.all_to_all(data.send, data.recv, data.count, type);
  });
}

ncclResult_t gather(const Data& data, int root, ncclComm_t comm) {
  return call(comm, data, [&](Communicator& on, DType type) {
    return on.gather(data.send, data.recv, data.count, type, root);
  });
}

ncclResult_t scatter(const Data& data, int root, ncclComm_t comm) {
  return call(comm, data, [&](Communicator& on, DType type) {
    return on.scatter(data.send, data.recv, data.count, type, root);
  });
}

// The configuration of one collective: only what would change the result or a promise matters.
Status check(const ncclCollConfig_t* config) {
  if (config == nullptr) return {};
  if (config->size < sizeof(ncclCollConfig_t) || config->magic != kMagic)
    return invalid("the configuration was not initialised with NCCL_COLLCONFIG_INITIALIZER");
  if (config->launchCompletionEvent != nullptr)
    return usage("config.launchCompletionEvent is not offered by ringfold");
  if (config->algSelection != nullptr && *config->algSelection != '\0' &&
      config->forceAlgSelection != 0)
    return usage(
        fmt::format("config.algSelection \"{}\" is not offered by ringfold: set "
                    "RINGFOLD_ALGORITHM, or forceAlgSelection = 0",
                    config->algSelection));
  return {};
}

template <class Collective>
ncclResult_t configured(const ncclCollConfig_t* config, Collective collective) {
  const Status status = check(config);
  return status.ok() ? collective() : refuse(status);
}

Status make_operation(Comm& comm, ncclRedOp_t* op, const void* scalar, ncclDataType_t datatype,
                      ncclScalarResidence_t residence) {
  if (op == nullptr) return null_argument("op");
  if (scalar == nullptr) return null_argument("scalar");
  const auto type = to_dtype(datatype);
  if (!type.ok()) return type.status();
  if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate)
    return invalid(
        fmt::format("residence {}: expected 0 (ncclScalarDevice) or 1 "
                    "(ncclScalarHostImmediate)",
                    static_cast<int>(residence)));
  PreMulSum made{*type, 1, nullptr};
  if (residence == ncclScalarDevice) {
    if (Status memory = usable_memory(scalar); !memory.ok()) return memory;
    made.scalar = scalar;
  } else {
    const auto factor = to_factor(*type, scalar);
    if (!factor.ok()) return factor.status();
    made.factor = *factor;
  }
  const std::lock_guard guard(comm.lock);
  size_t index = 0;
  while (index < comm.operations.size() && comm.operations[index]) ++index;
  if (index == comm.operations.size()) comm.operations.emplace_back();
  comm.operations[index] = made;
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(index));
  return {};
}

Status destroy_operation(Comm& comm, ncclRedOp_t op) {
  const std::lock_guard guard(comm.lock);
  const auto index = static_cast<size_t>(static_cast<int>(op) - ncclNumOps);
  if (op < ncclNumOps || index >= comm.operations.size() || !comm.operations[index])
    return invalid(fmt::format("op {} was not made on this communicator, or is destroyed already",
                               static_cast<int>(op)));
  comm.operations[index].reset();
  return {};
}

}  // namespace

RINGFOLD_NCCL_EXPORT(ncclResult_t, AllReduce,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t)) {
  return all_reduce({sendbuff, recvbuff, count, datatype}, op, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, AllReduceConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return all_reduce({sendbuff, recvbuff, count, datatype}, op, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Reduce,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t)) {
  return reduce({sendbuff, recvbuff, count, datatype}, op, root, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, ReduceConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return reduce({sendbuff, recvbuff, count, datatype}, op, root, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, ReduceScatter,
                     (const void* sendbuff, void* recvbuff, size_t recvcount,
                      ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t)) {
  return reduce_scatter({sendbuff, recvbuff, recvcount, datatype}, op, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, ReduceScatterConfig,
                     (const void* sendbuff, void* recvbuff, size_t recvcount,
                      ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return reduce_scatter({sendbuff, recvbuff, recvcount, datatype}, op, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Broadcast,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t)) {
  return broadcast({sendbuff, recvbuff, count, datatype}, root, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, BroadcastConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t, const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return broadcast({sendbuff, recvbuff, count, datatype}, root, comm);
  });
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, Bcast,
                     (void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                      cudaStream_t)) {
  return broadcast({buff, buff, count, datatype}, root, comm);
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, AllGather,
                     (const void* sendbuff, void* recvbuff, size_t sendcount,
                      ncclDataType_t datatype, ncclComm_t comm, cudaStream_t)) {
  return all_gather({sendbuff, recvbuff, sendcount, datatype}, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, AllGatherConfig,
                     (const void* sendbuff, void* recvbuff, size_t sendcount,
                      ncclDataType_t datatype, ncclComm_t comm, cudaStream_t,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return all_gather({sendbuff, recvbuff, sendcount, datatype}, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, AlltoAll,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclComm_t comm, cudaStream_t)) {
  return all_to_all({sendbuff, recvbuff, count, datatype}, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, AlltoAllConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclComm_t comm, cudaStream_t, const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return all_to_all({sendbuff, recvbuff, count, datatype}, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Gather,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t)) {
  return gather({sendbuff, recvbuff, count, datatype}, root, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, GatherConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t, const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return gather({sendbuff, recvbuff, count, datatype}, root, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Scatter,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t)) {
  return scatter({sendbuff, recvbuff, count, datatype}, root, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, ScatterConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t, const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return scatter({sendbuff, recvbuff, count, datatype}, root, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Send,
                     (const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t)) {
  return call(comm, {sendbuff, nullptr, count, datatype},
              [&](Communicator& on, DType type) { return on.send(sendbuff, count, type, peer); });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Recv,
                     (void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t)) {
  return call(comm, {nullptr, recvbuff, count, datatype},
              [&](Communicator& on, DType type) { return on.recv(recvbuff, count, type, peer); });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, RedOpCreatePreMulSum,
                     (ncclRedOp_t * op, void* scalar, ncclDataType_t datatype,
                      ncclScalarResidence_t residence, ncclComm_t comm)) {
  const auto found = comms().find(comm);
  if (!found.ok()) return answer(found.status());
  return answer(make_operation(**found, op, scalar, datatype, residence), found->get());
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, RedOpDestroy, (ncclRedOp_t op, ncclComm_t comm)) {
  const auto found = comms().find(comm);
  if (!found.ok()) return answer(found.status());
  return answer(destroy_operation(**found, op), found->get());
}

}  // namespace ringfold::nccl
