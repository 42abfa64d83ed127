// The C interface of the collectives, point to point, and the barrier. Every operation is started
// in one place; its blocking and its asynchronous form call that.
#include <fmt/core.h>

#include <optional>

#include "lib/adapters/c_common.h"
#include "lib/comm/communicator_impl.h"
#include "ringfold/c.h"
#include "ringfold/communicator.h"

namespace ringfold::c {
namespace {

static_assert(RINGFOLD_PREMUL_SUM == static_cast<int>(Op::premul_sum) && kOps == 6);

Result<Reduction> to_reduction(ringfold_op op, double factor) {
  if (op >= 0 && op < kOps) return Reduction(static_cast<Op>(op), factor);
  return invalid(fmt::format("op is {}, accepted are 0 ({}) to {} ({})", op, kOpNames.front(),
                             kOps - 1, kOpNames.back()));
}

// Starts `call(communicator, type)`.
template <class Call>
Work start(ringfold_comm_t comm, ringfold_dtype type, Call call) {
  const Communicators::Use found(communicators(), comm);
  if (!found.ok()) return Work(found.status());
  const Result<DType> known = to_dtype(type);
  return known.ok() ? call(*found, *known) : Work(known.status());
}

// Starts `call(communicator, type, reduction)`.
template <class Call>
Work start(ringfold_comm_t comm, ringfold_dtype type, ringfold_op op, double factor, Call call) {
  return start(comm, type, [&](Communicator& found, DType known) {
    const Result<Reduction> reduction = to_reduction(op, factor);
    return reduction.ok() ? call(found, known, *reduction) : Work(reduction.status());
  });
}

// ---- Starting each operation, for both of its forms ----

Work all_reduce(ringfold_comm_t comm, const void* send, void* recv, size_t count,
                ringfold_dtype type, ringfold_op op, double factor, void* stream) {
  return start(comm, type, op, factor, [&](Communicator& on, DType known, Reduction reduction) {
    return on.all_reduce(send, recv, count, known, reduction, Stream{stream});
  });
}

Work reduce_scatter(ringfold_comm_t comm, const void* send, void* recv, size_t count_each,
                    ringfold_dtype type, ringfold_op op, double factor, void* stream) {
  return start(comm, type, op, factor, [&](Communicator& on, DType known, Reduction reduction) {
    return on.reduce_scatter(send, recv, count_each, known, reduction, Stream{stream});
  });
}

Work all_gather(ringfold_comm_t comm, const void* send, void* recv, size_t count_each,
                ringfold_dtype type, void* stream) {
  return start(comm, type, [&](Communicator& on, DType known) {
    return on.all_gather(send, recv, count_each, known, Stream{stream});
  });
}

Work broadcast(ringfold_comm_t comm, void* buffer, size_t count, ringfold_dtype type, int root,
               void* stream) {
  return start(comm, type, [&](Communicator& on, DType known) {
    return on.broadcast(buffer, count, known, root, Stream{stream});
  });
}

Work reduce(ringfold_comm_t comm, const void* send, void* recv, size_t count, ringfold_dtype type,
            ringfold_op op, double factor, int root, void* stream) {
  return start(comm, type, op, factor, [&](Communicator& on, DType known, Reduction reduction) {
    return on.reduce(send, recv, count, known, reduction, root, Stream{stream});
  });
}

Work all_to_all(ringfold_comm_t comm, const void* send, void* recv, size_t count_each,
                ringfold_dtype type, void* stream) {
  return start(comm, type, [&](Communicator& on, DType known) {
    return on.all_to_all(send, recv, count_each, known, Stream{stream});
  });
}

Work gather(ringfold_comm_t comm, const void* send, void* recv, size_t count_each,
            ringfold_dtype type, int root, void* stream) {
  return start(comm, type, [&](Communicator& on, DType known) {
    return on.gather(send, recv, count_each, known, root, Stream{stream});
  });
}

Work scatter(ringfold_comm_t comm, const void* send, void* recv, size_t count_each,
             ringfold_dtype type, int root, void* stream) {
  return start(comm, type, [&](Communicator& on, DType known) {
    return on.scatter(send, recv, count_each, known, root, Stream{stream});
  });
}

Work send(ringfold_comm_t comm, const void* buffer, size_t count, ringfold_dtype type, int to,
          void* stream) {
  return start(comm, type, [&](Communicator& on, DType known) {
    return on.send(buffer, count, known, to, Stream{stream});
  });
}

Work recv(ringfold_comm_t comm, void* buffer, size_t count, ringfold_dtype type, int from,
          void* stream) {
  return start(comm, type, [&](Communicator& on, DType known) {
    return on.recv(buffer, count, known, from, Stream{stream});
  });
}

// Small ones, of which the way to them is a good part. None: nothing has happened, and the ordinary
// way also finds what is wrong.
std::optional<ringfold_status> all_reduce_at_once(ringfold_comm_t comm, const void* send,
                                                  void* recv, size_t count, ringfold_dtype type,
                                                  ringfold_op op, double factor, void* stream) {
  if (type < 0 || type >= kDTypes || op < 0 || op >= kOps) return {};
  const Operation::Memory memory{send, recv, Reduction(static_cast<Op>(op), factor)};
  std::shared_ptr<Work::State> takes_longer;
  {
    const Communicators::Use found(communicators(), comm);
    if (!found.ok() || !found->impl() ||
        found->impl()->quick(memory, count, static_cast<DType>(type), Stream{stream}, true,
                             &takes_longer) == region::Region::Quick::none)
      return {};
  }
  return takes_longer ? answer(Work(std::move(takes_longer)).wait()) : RINGFOLD_OK;
}

Work barrier(ringfold_comm_t comm) {
  const Communicators::Use found(communicators(), comm);
  return found.ok() ? found->barrier() : Work(found.status());
}

}  // namespace
}  // namespace ringfold::c

using namespace ringfold::c;

extern "C" {

ringfold_status ringfold_all_reduce(ringfold_comm_t comm, const void* send, void* recv,
                                    size_t count, ringfold_dtype type, ringfold_op op,
                                    double factor, void* stream) {
  const auto over = all_reduce_at_once(comm, send, recv, count, type, op, factor, stream);
  if (over) return *over;
  return blocking([&] { return all_reduce(comm, send, recv, count, type, op, factor, stream); });
}
ringfold_status ringfold_all_reduce_async(ringfold_comm_t comm, const void* send, void* recv,
                                          size_t count, ringfold_dtype type, ringfold_op op,
                                          double factor, void* stream, ringfold_work_t* work) {
  return async(work, [&] { return all_reduce(comm, send, recv, count, type, op, factor, stream); });
}

ringfold_status ringfold_reduce_scatter(ringfold_comm_t comm, const void* send, void* recv,
                                        size_t count_each, ringfold_dtype type, ringfold_op op,
                                        double factor, void* stream) {
  return blocking(
      [&] { return reduce_scatter(comm, send, recv, count_each, type, op, factor, stream); });
}
ringfold_status ringfold_reduce_scatter_async(ringfold_comm_t comm, const void* send, void* recv,
                                              size_t count_each, ringfold_dtype type,
                                              ringfold_op op, double factor, void* stream,
                                              ringfold_work_t* work) {
  return async(
      work, [&] { return reduce_scatter(comm, send, recv, count_each, type, op, factor, stream); });
}

ringfold_status ringfold_all_gather(ringfold_comm_t comm, const void* send, void* recv,
                                    size_t count_each, ringfold_dtype type, void* stream) {
  return blocking([&] { return all_gather(comm, send, recv, count_each, type, stream); });
}
ringfold_status ringfold_all_gather_async(ringfold_comm_t comm, const void* send, void* recv,
                                          size_t count_each, ringfold_dtype type, void* stream,
                                          ringfold_work_t* work) {
  return async(work, [&] { return all_gather(comm, send, recv, count_each, type, stream); });
}

ringfold_status ringfold_broadcast(ringfold_comm_t comm, void* buffer, size_t count,
                                   ringfold_dtype type, int root, void* stream) {
  return blocking([&] { return broadcast(comm, buffer, count, type, root, stream); });
}
ringfold_status ringfold_broadcast_async(ringfold_comm_t comm, void* buffer, size_t count,
                                         ringfold_dtype type, int root, void* stream,
                                         ringfold_work_t* work) {
  return async(work, [&] { return broadcast(comm, buffer, count, type, root, stream); });
}

ringfold_status ringfold_reduce(ringfold_comm_t comm, const void* send, void* recv, size_t count,
                                ringfold_dtype type, ringfold_op op, double factor, int root,
                                void* stream) {
  return blocking([&] { return reduce(comm, send, recv, count, type, op, factor, root, stream); });
}
ringfold_status ringfold_reduce_async(ringfold_comm_t comm, const void* send, void* recv,
                                      size_t count, ringfold_dtype type, ringfold_op op,
                                      double factor, int root, void* stream,
                                      ringfold_work_t* work) {
  return async(work,
               [&] { return reduce(comm, send, recv, count, type, op, factor, root, stream); });
}

ringfold_status ringfold_all_to_all(ringfold_comm_t comm, const void* send, void* recv,
                                    size_t count_each, ringfold_dtype type, void* stream) {
  return blocking([&] { return all_to_all(comm, send, recv, count_each, type, stream); });
}
ringfold_status ringfold_all_to_all_async(ringfold_comm_t comm, const void* send, void* recv,
                                          size_t count_each, ringfold_dtype type, void* stream,
                                          ringfold_work_t* work) {
  return async(work, [&] { return all_to_all(comm, send, recv, count_each, type, stream); });
}

ringfold_status ringfold_gather(ringfold_comm_t comm, const void* send, void* recv,
                                size_t count_each, ringfold_dtype type, int root, void* stream) {
  return blocking([&] { return gather(comm, send, recv, count_each, type, root, stream); });
}
ringfold_status ringfold_gather_async(ringfold_comm_t comm, const void* send, void* recv,
                                      size_t count_each, ringfold_dtype type, int root,
                                      void* stream, ringfold_work_t* work) {
  return async(work, [&] { return gather(comm, send, recv, count_each, type, root, stream); });
}

ringfold_status ringfold_scatter(ringfold_comm_t comm, const void* send, void* recv,
                                 size_t count_each, ringfold_dtype type, int root, void* stream) {
  return blocking([&] { return scatter(comm, send, recv, count_each, type, root, stream); });
}
ringfold_status ringfold_scatter_async(ringfold_comm_t comm, const void* send, void* recv,
                                       size_t count_each, ringfold_dtype type, int root,
                                       void* stream, ringfold_work_t* work) {
  return async(work, [&] { return scatter(comm, send, recv, count_each, type, root, stream); });
}

ringfold_status ringfold_send(ringfold_comm_t comm, const void* buffer, size_t count,
                              ringfold_dtype type, int to, void* stream) {
  return blocking([&] { return send(comm, buffer, count, type, to, stream); });
}
ringfold_status ringfold_send_async(ringfold_comm_t comm, const void* buffer, size_t count,
                                    ringfold_dtype type, int to, void* stream,
                                    ringfold_work_t* work) {
  return async(work, [&] { return send(comm, buffer, count, type, to, stream); });
}

ringfold_status ringfold_recv(ringfold_comm_t comm, void* buffer, size_t count, ringfold_dtype type,
                              int from, void* stream) {
  return blocking([&] { return recv(comm, buffer, count, type, from, stream); });
}
ringfold_status ringfold_recv_async(ringfold_comm_t comm, void* buffer, size_t count,
                                    ringfold_dtype type, int from, void* stream,
                                    ringfold_work_t* work) {
  return async(work, [&] { return recv(comm, buffer, count, type, from, stream); });
}

ringfold_status ringfold_barrier(ringfold_comm_t comm) {
  return blocking([&] { return barrier(comm); });
}
ringfold_status ringfold_barrier_async(ringfold_comm_t comm, ringfold_work_t* work) {
  return async(work, [&] { return barrier(comm); });
}

}  // extern "C"
