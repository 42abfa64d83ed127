// Every collective, called alike on device and on host memory: the results are the same bytes.
#pragma once

#include "test/cuda_ranks.h"
#include "test/elements.h"

namespace ringfold::test {

struct Shape {
  DType type = DType::f32;
  Reduction reduction;
  size_t count = 0;
  int root = 0;
};

// A collective, and how many elements of each buffer a rank has.
struct Kind {
  const char* name;
  Work (*call)(Communicator& comm, const void* send, void* recv, const Shape& shape, Stream stream);
  size_t (*sends)(size_t ranks, size_t count, bool root);
  size_t (*receives)(size_t ranks, size_t count, bool root);
};

inline size_t one(size_t, size_t count, bool) {
  return count;
}
inline size_t all(size_t ranks, size_t count, bool) {
  return ranks * count;
}
inline size_t one_at_root(size_t, size_t count, bool root) {
  return root ? count : 0;
}
inline size_t all_at_root(size_t ranks, size_t count, bool root) {
  return root ? ranks * count : 0;
}

inline const std::vector<Kind> kKinds = {
    {"all_reduce",
     [](Communicator& c, const void* send, void* recv, const Shape& s, Stream stream) {
       return c.all_reduce(send, recv, s.count, s.type, s.reduction, stream);
     },
     one, one},
    {"reduce_scatter",
     [](Communicator& c, const void* send, void* recv, const Shape& s, Stream stream) {
       return c.reduce_scatter(send, recv, s.count, s.type, s.reduction, stream);
     },
     all, one},
    {"all_gather",
     [](Communicator& c, const void* send, void* recv, const Shape& s, Stream stream) {
       return c.all_gather(send, recv, s.count, s.type, stream);
     },
     one, all},
    {"broadcast",  // in place: `recv` holds the input
     [](Communicator& c, const void*, void* recv, const Shape& s, Stream stream) {
       return c.broadcast(recv, s.count, s.type, s.root, stream);
     },
     [](size_t, size_t, bool) { return size_t{0}; }, one},
    {"reduce",
     [](Communicator& c, const void* send, void* recv, const Shape& s, Stream stream) {
       return c.reduce(send, recv, s.count, s.type, s.reduction, s.root, stream);
     },
     one, one_at_root},
    {"all_to_all",
     [](Communicator& c, const void* send, void* recv, const Shape& s, Stream stream) {
       return c.all_to_all(send, recv, s.count, s.type, stream);
     },
     all, all},
    {"gather",
     [](Communicator& c, const void* send, void* recv, const Shape& s, Stream stream) {
       return c.gather(send, recv, s.count, s.type, s.root, stream);
     },
     one, all_at_root},
    {"scatter",
     [](Communicator& c, const void* send, void* recv, const Shape& s, Stream stream) {
       return c.scatter(send, recv, s.count, s.type, s.root, stream);
     },
     all_at_root, one},
};

// `count` hashed elements as bytes.
inline std::vector<uint8_t> elements(DType type, size_t count, uint64_t seed) {
  std::vector<uint8_t> bytes(count * size_of(type));
  fill_hashed(type, bytes.data(), count, seed);
  return bytes;
}

inline void* or_null(std::vector<uint8_t>& bytes) {
  return bytes.empty() ? nullptr : bytes.data();
}
inline void* or_null(const Memory& memory, size_t bytes) {
  return bytes == 0 ? nullptr : memory.get();
}

// The same call on host memory and on the device: the results are the same bytes.
inline void check_like_host(const CudaRank& me, const Kind& kind, const Shape& shape,
                            size_t phase = 0, bool managed = false) {
  const bool root = me.comm.rank() == shape.root;
  auto send = elements(shape.type, kind.sends(me.size(), shape.count, root), me.rank() + 1);
  auto recv = elements(shape.type, kind.receives(me.size(), shape.count, root), me.rank() + 100);
  const Memory device_send(me.world, send.size() + 1, phase, managed);
  const Memory device_recv(me.world, recv.size() + 1, phase, managed);
  device_send.set(me.stream, send);
  device_recv.set(me.stream, recv);
  const std::string what = fmt::format("{} {} {} of {}", kind.name, name(shape.type),
                                       name(shape.reduction.op), shape.count);
  Work work = kind.call(me.comm, or_null(device_send, send.size()),
                        or_null(device_recv, recv.size()), shape, me.handle());
  const auto got =
      device_recv.get<uint8_t>(me.stream, recv.size());  // before the work is waited for
  me.problems.ok(work.wait(), what);
  me.problems.ok(kind.call(me.comm, or_null(send), or_null(recv), shape, {}).wait(), what);
  me.problems.check(got == recv, what + ": other bytes than on the host");
}

}  // namespace ringfold::test
