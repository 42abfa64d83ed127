// libnccl.so.2: collectives, messages and the operations made at run time.
#include <cstring>
#include <limits>

#include "kernels/scalar.h"
#include "lib/adapters/nccl_state.h"
#include "lib/cuda/path.h"

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

// The scalar as a factor, if it is one that ringfold can apply.
Result<double> to_factor(DType type, const void* scalar) {
  if (type != DType::i64 && type != DType::u64) return scalar_as_factor(type, scalar);
  const auto whole = read_scalar<int64_t>(scalar);
  if (whole <= kLargestFactor && whole >= -kLargestFactor) return scalar_as_factor(type, scalar);
  return usage(
      fmt::format("a factor of {}: ringfold offers up to 2^53 for 64-bit integers", whole));
}

// Operations are numbered per communicator; one belongs to one type.
Result<Reduction> to_reduction(Comm& comm, ncclRedOp_t op, DType type, bool for_device) {
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
  if (for_device && is_for_kernels(made->scalar))
    return Reduction(Op::premul_sum, 1.0, made->scalar);
  if (!is_for_host(made->scalar))
    return invalid(
        fmt::format("the scalar of op {} at {} is on a device, but the data is in host memory",
                    static_cast<int>(op), made->scalar));
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
  cudaStream_t stream;
};

// What begins a call once its arguments are known to be right.
struct Known {
  Communicator& on;
  DType type;
  Stream stream;
};

// Checks what is alike everywhere and starts `begin(known)`.
template <class Begin>
ncclResult_t call(ncclComm_t comm, const Data& data, Begin begin) {
  const auto found = comms().find(comm);
  if (!found.ok()) return refuse(found.status());
  const auto type = to_dtype(data.type);
  if (!type.ok()) return refuse(type.status(), found->get());
  const auto for_device = is_for_device(data.send, data.recv, data.stream);
  if (!for_device.ok()) return refuse(for_device.status(), found->get());
  const Stream stream{data.stream, *for_device};
  return start({*found, *for_device, [&](Communicator& on) {
                  return begin(Known{on, *type, stream});
                }});
}

// The same for what reduces: `begin(known, reduction)`.
template <class Begin>
ncclResult_t call(ncclComm_t comm, const Data& data, ncclRedOp_t op, Begin begin) {
  const auto found = comms().find(comm);
  if (!found.ok()) return refuse(found.status());
  return call(comm, data, [&](const Known& known) {
    const auto reduction = to_reduction(**found, op, known.type, known.stream.orders_all);
    return reduction.ok() ? begin(known, *reduction) : Work(reduction.status());
  });
}

// Whether this rank is the root, as far as is known: the others need no buffer for what only the
// root has or gets, and whatever they give is not looked at.
bool is_root(ncclComm_t comm, int root) {
  const auto found = comms().find(comm);
  const auto communicator =
      found.ok() ? (*found)->whatever_failed() : Result<Communicator>(found.status());
  return !communicator.ok() || communicator->rank() == root;
}

// ---- the collectives, for their plain and their configured form -------------------------------

ncclResult_t all_reduce(const Data& data, ncclRedOp_t op, ncclComm_t comm) {
  return call(comm, data, op, [&](const Known& known, Reduction reduction) {
    return known.on.all_reduce(data.send, data.recv, data.count, known.type, reduction,
                               known.stream);
  });
}

ncclResult_t reduce(Data data, ncclRedOp_t op, int root, ncclComm_t comm) {
  if (!is_root(comm, root)) data.recv = nullptr;
  return call(comm, data, op, [&](const Known& known, Reduction reduction) {
    return known.on.reduce(data.send, data.recv, data.count, known.type, reduction, root,
                           known.stream);
  });
}

ncclResult_t reduce_scatter(const Data& data, ncclRedOp_t op, ncclComm_t comm) {
  return call(comm, data, op, [&](const Known& known, Reduction reduction) {
    return known.on.reduce_scatter(data.send, data.recv, data.count, known.type, reduction,
                                   known.stream);
  });
}

// Ok if a broadcast may first copy one buffer to the other.
Status can_copy(const Data& data, DType type) {
  if (data.send == nullptr || data.recv == nullptr)
    return null_argument(data.send == nullptr ? "sendbuff" : "recvbuff");
  const size_t bytes = data.count * size_of(type);
  const auto* const from = static_cast<const char*>(data.send);
  const auto* const to = static_cast<const char*>(data.recv);
  if (data.count <= std::numeric_limits<ptrdiff_t>::max() / size_of(type) &&
      (from + bytes <= to || to + bytes <= from))
    return {};
  return invalid(fmt::format("broadcast: sendbuff {} and recvbuff {} overlap, but are not equal",
                             data.send, data.recv));
}

// The root may have its data elsewhere than where everybody gets it: it is copied there first.
ncclResult_t broadcast(const Data& data, int root, ncclComm_t comm) {
  const auto found = comms().find(comm);
  if (!found.ok()) return refuse(found.status());
  const auto type = to_dtype(data.type);
  if (!type.ok()) return refuse(type.status(), found->get());
  const bool copies = is_root(comm, root) && data.count > 0 && data.send != data.recv;
  if (copies)
    if (const Status status = can_copy(data, *type); !status.ok())
      return refuse(status, found->get());
  // Others need only the memory that they receive into.
  const auto for_device = is_for_device(copies ? data.send : nullptr, data.recv, data.stream);
  if (!for_device.ok()) return refuse(for_device.status(), found->get());
  const Stream stream{data.stream, *for_device};
  Start what{*found, *for_device, [&](Communicator& on) {
               return on.broadcast(data.recv, data.count, *type, root, stream);
             }};
  if (copies && *for_device)
    what.before = [data, type = *type, stream] {
      return cuda::enqueue_copy(data.send, data.recv, data.count, type, 1.0, stream);
    };
  else if (copies)
    what.before = [data, bytes = data.count * size_of(*type)] {
      std::memcpy(data.recv, data.send, bytes);
      return Status();
    };
  return start(what);
}

ncclResult_t all_gather(const Data& data, ncclComm_t comm) {
  return call(comm, data, [&](const Known& known) {
    return known.on.all_gather(data.send, data.recv, data.count, known.type, known.stream);
  });
}

ncclResult_t all_to_all(const Data& data, ncclComm_t comm) {
  return call(comm, data, [&](const Known& known) {
    return known.on.all_to_all(data.send, data.recv, data.count, known.type, known.stream);
  });
}

ncclResult_t gather(Data data, int root, ncclComm_t comm) {
  if (!is_root(comm, root)) data.recv = nullptr;
  return call(comm, data, [&](const Known& known) {
    return known.on.gather(data.send, data.recv, data.count, known.type, root, known.stream);
  });
}

ncclResult_t scatter(Data data, int root, ncclComm_t comm) {
  if (!is_root(comm, root)) data.send = nullptr;
  return call(comm, data, [&](const Known& known) {
    return known.on.scatter(data.send, data.recv, data.count, known.type, root, known.stream);
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
                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)) {
  return all_reduce({sendbuff, recvbuff, count, datatype, stream}, op, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, AllReduceConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return all_reduce({sendbuff, recvbuff, count, datatype, stream}, op, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Reduce,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)) {
  return reduce({sendbuff, recvbuff, count, datatype, stream}, op, root, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, ReduceConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return reduce({sendbuff, recvbuff, count, datatype, stream}, op, root, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, ReduceScatter,
                     (const void* sendbuff, void* recvbuff, size_t recvcount,
                      ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                      cudaStream_t stream)) {
  return reduce_scatter({sendbuff, recvbuff, recvcount, datatype, stream}, op, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, ReduceScatterConfig,
                     (const void* sendbuff, void* recvbuff, size_t recvcount,
                      ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return reduce_scatter({sendbuff, recvbuff, recvcount, datatype, stream}, op, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Broadcast,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t stream)) {
  return broadcast({sendbuff, recvbuff, count, datatype, stream}, root, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, BroadcastConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t stream,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return broadcast({sendbuff, recvbuff, count, datatype, stream}, root, comm);
  });
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, Bcast,
                     (void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                      cudaStream_t stream)) {
  return broadcast({buff, buff, count, datatype, stream}, root, comm);
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, AllGather,
                     (const void* sendbuff, void* recvbuff, size_t sendcount,
                      ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)) {
  return all_gather({sendbuff, recvbuff, sendcount, datatype, stream}, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, AllGatherConfig,
                     (const void* sendbuff, void* recvbuff, size_t sendcount,
                      ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return all_gather({sendbuff, recvbuff, sendcount, datatype, stream}, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, AlltoAll,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclComm_t comm, cudaStream_t stream)) {
  return all_to_all({sendbuff, recvbuff, count, datatype, stream}, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, AlltoAllConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return all_to_all({sendbuff, recvbuff, count, datatype, stream}, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Gather,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t stream)) {
  return gather({sendbuff, recvbuff, count, datatype, stream}, root, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, GatherConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t stream,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return gather({sendbuff, recvbuff, count, datatype, stream}, root, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Scatter,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t stream)) {
  return scatter({sendbuff, recvbuff, count, datatype, stream}, root, comm);
}
RINGFOLD_NCCL_EXPORT(ncclResult_t, ScatterConfig,
                     (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                      int root, ncclComm_t comm, cudaStream_t stream,
                      const ncclCollConfig_t* config)) {
  return configured(config, [&] {
    return scatter({sendbuff, recvbuff, count, datatype, stream}, root, comm);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Send,
                     (const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream)) {
  return call(comm, {sendbuff, nullptr, count, datatype, stream}, [&](const Known& known) {
    return known.on.send(sendbuff, count, known.type, peer, known.stream);
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, Recv,
                     (void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream)) {
  return call(comm, {nullptr, recvbuff, count, datatype, stream}, [&](const Known& known) {
    return known.on.recv(recvbuff, count, known.type, peer, known.stream);
  });
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
