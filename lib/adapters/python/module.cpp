// ringfold._core: the C interface for Python. What users see is in ringfold/__init__.py.
#include <fmt/core.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "lib/adapters/python/buffer.h"
#include "lib/adapters/python/gradients.h"
#include "lib/adapters/python/work.h"
#include "ringfold/c.h"

namespace ringfold::python {
namespace {

constexpr std::array<const char*, 6> kOps = {"sum", "prod", "max", "min", "avg", "premul_sum"};
constexpr std::array<const char*, 9> kAlgorithms = {
    "auto",   "ring",  "halving_doubling", "recursive_doubling", "two_level", "chain", "tree",
    "direct", "region"};

// The number of an operation, if the elements have it.
int to_op(const std::string& name, const Buffer& elements) {
  const int op = find("op", name, kOps);
  bool offered = false;
  switch (elements.reduces()) {
    case Reduces::all:
      offered = true;
      break;
    case Reduces::sums:
      offered = op == RINGFOLD_SUM || op == RINGFOLD_AVG || op == RINGFOLD_PREMUL_SUM;
      break;
    case Reduces::order:
      offered = op == RINGFOLD_MIN || op == RINGFOLD_MAX;
      break;
    case Reduces::none:
      break;
  }
  if (!offered)
    raise("unsupported", fmt::format("{} is not offered for {}", name, elements.type_name()));
  return op;
}

// Both sides of a call where `more` elements of one stand for each of the other.
void match(const Buffer& few, const char* few_name, const Buffer& many, const char* many_name,
           size_t times) {
  if (few.type_name() != many.type_name())
    raise("invalid_argument", fmt::format("{} has {} and {} has {}: the types must be the same",
                                          few_name, few.type_name(), many_name, many.type_name()));
  if (few.count() * times != many.count())
    raise("invalid_argument",
          fmt::format("{} has {} elements and {} has {}: it must have {}", few_name, few.count(),
                      many_name, many.count(), few.count() * times));
}

class Comm {
 public:
  explicit Comm(ringfold_comm_t handle) : handle_(handle) {
    check(ringfold_rank(handle_, &rank_));
    check(ringfold_size(handle_, &size_));
  }
  ~Comm() { close(); }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }

  void close() {
    const ringfold_comm_t ended = std::exchange(handle_, nullptr);
    if (ended == nullptr) return;
    const nb::gil_scoped_release others;
    ringfold_destroy(ended);
  }
  void abort(const std::string& why) const { check(ringfold_abort(handle_, why.c_str())); }
  void health() const { check(ringfold_health(handle_)); }
  [[nodiscard]] uint64_t bytes_sent() const {
    uint64_t bytes = 0;
    check(ringfold_bytes_sent(handle_, &bytes));
    return bytes;
  }
  [[nodiscard]] std::string transport() const {
    std::array<char, 32> name{};
    check(ringfold_transport(handle_, name.data(), name.size()));
    return name.data();
  }

  // None for a negative colour.
  [[nodiscard]] std::unique_ptr<Comm> split(int color, int key) const {
    const ringfold_comm_t made = make_interruptibly([=, comm = handle_](ringfold_comm_t* out) {
      return ringfold_split(comm, color, key, out);
    });
    return made != nullptr ? std::make_unique<Comm>(made) : nullptr;
  }
  [[nodiscard]] std::unique_ptr<Comm> shrink(const std::vector<int>& exclude) const {
    return std::make_unique<Comm>(
        make_interruptibly([exclude, comm = handle_](ringfold_comm_t* out) {
          return ringfold_shrink(comm, exclude.data(), exclude.size(), out);
        }));
  }

  [[nodiscard]] std::unique_ptr<Gradients> gradients(const std::vector<std::string>& names,
                                                     const std::vector<nb::object>& gradients,
                                                     size_t first_bytes, size_t bucket_bytes,
                                                     bool require_all,
                                                     const std::string& compression,
                                                     double sparse_share) const {
    const Gradients::Options options{first_bytes, bucket_bytes, require_all, compression,
                                     sparse_share};
    return std::make_unique<Gradients>(handle_, names, gradients, options);
  }

  Work all_reduce(nb::handle x, nb::handle out, const std::string& op, double factor,
                  nb::handle stream) {
    return reduction(x, out, op, factor, stream, Shape::equal, -1);
  }
  Work reduce(nb::handle x, nb::handle out, const std::string& op, double factor, int root,
              nb::handle stream) {
    return reduction(x, out, op, factor, stream, Shape::rooted, root);
  }
  Work reduce_scatter(nb::handle x, nb::handle out, const std::string& op, double factor,
                      nb::handle stream) {
    return reduction(x, out, op, factor, stream, Shape::scattered, -1);
  }

  Work all_gather(nb::handle x, nb::handle out, nb::handle stream) {
    Buffer send = Buffer::of(x, "x", Buffer::Use::read, stream);
    Buffer recv = Buffer::of(out, "out", Buffer::Use::write, stream);
    match(send, "x", recv, "out", parts());
    return start(std::move(send), std::move(recv), out, [&](auto& s, auto& r, auto* work) {
      return ringfold_all_gather_async(handle_, s.data(), r.data(), s.count(), s.type(), r.stream(),
                                       work);
    });
  }
  Work gather(nb::handle x, nb::handle out, int root, nb::handle stream) {
    Buffer send = Buffer::of(x, "x", Buffer::Use::read, stream);
    Buffer recv = Buffer::of(out, "out", Buffer::Use::write, stream);
    if (rank_ == root) match(send, "x", recv, "out", parts());
    return start(std::move(send), std::move(recv), out, [&](auto& s, auto& r, auto* work) {
      return ringfold_gather_async(handle_, s.data(), r.data(), s.count(), s.type(), root,
                                   s.stream(), work);
    });
  }
  Work scatter(nb::handle x, nb::handle out, int root, nb::handle stream) {
    Buffer send = Buffer::of(x, "x", Buffer::Use::read, stream);
    Buffer recv = Buffer::of(out, "out", Buffer::Use::write, stream);
    if (rank_ == root) match(recv, "out", send, "x", parts());
    return start(std::move(send), std::move(recv), out, [&](auto& s, auto& r, auto* work) {
      return ringfold_scatter_async(handle_, s.data(), r.data(), r.count(), r.type(), root,
                                    r.stream(), work);
    });
  }
  Work all_to_all(nb::handle x, nb::handle out, nb::handle stream) {
    Buffer send = Buffer::of(x, "x", Buffer::Use::read, stream);
    Buffer recv = Buffer::of(out, "out", Buffer::Use::write, stream);
    match(send, "x", recv, "out", 1);
    if (send.count() % parts() != 0)
      raise("invalid_argument", fmt::format("x has {} elements, which do not make {} equal parts",
                                            send.count(), parts()));
    return start(std::move(send), std::move(recv), out, [&](auto& s, auto& r, auto* work) {
      return ringfold_all_to_all_async(handle_, s.data(), r.data(), s.count() / parts(), s.type(),
                                       r.stream(), work);
    });
  }
  Work broadcast(nb::handle x, int root, nb::handle stream) {
    const auto use = rank_ == root ? Buffer::Use::read : Buffer::Use::write;
    return start(Buffer(), Buffer::of(x, "x", use, stream), x, [&](auto&, auto& r, auto* work) {
      return ringfold_broadcast_async(handle_, r.data(), r.count(), r.type(), root, r.stream(),
                                      work);
    });
  }
  Work send(nb::handle x, int to, nb::handle stream) {
    return start(Buffer::of(x, "x", Buffer::Use::read, stream), Buffer(), nb::none(),
                 [&](auto& s, auto&, auto* work) {
                   return ringfold_send_async(handle_, s.data(), s.count(), s.type(), to,
                                              s.stream(), work);
                 });
  }
  Work recv(nb::handle out, int source, nb::handle stream) {
    return start(Buffer(), Buffer::of(out, "out", Buffer::Use::write, stream), out,
                 [&](auto&, auto& r, auto* work) {
                   return ringfold_recv_async(handle_, r.data(), r.count(), r.type(), source,
                                              r.stream(), work);
                 });
  }
  Work barrier() {
    return start(Buffer(), Buffer(), nb::none(),
                 [&](auto&, auto&, auto* work) { return ringfold_barrier_async(handle_, work); });
  }

 private:
  enum class Shape : uint8_t { equal, rooted, scattered };

  [[nodiscard]] size_t parts() const { return static_cast<size_t>(size_); }

  // Calls `begin(send, recv, work)` without the GIL. `result` is what the wait returns.
  template <class Begin>
  Work start(Buffer send, Buffer recv, nb::handle result, Begin begin) {
    release_ended();
    ringfold_work_t handle = nullptr;
    ringfold_status status = RINGFOLD_OK;
    {
      const nb::gil_scoped_release others;
      status = begin(send, recv, &handle);
    }
    check(status);
    std::vector<Buffer> buffers;
    buffers.push_back(std::move(send));
    buffers.push_back(std::move(recv));
    return {handle, std::move(buffers), nb::borrow(result)};
  }

  Work reduction(nb::handle x, nb::handle out, const std::string& name, double factor,
                 nb::handle stream, Shape shape, int root) {
    Buffer send = Buffer::of(x, "x", Buffer::Use::read, stream);
    Buffer recv = Buffer::of(out, "out", Buffer::Use::write, stream);
    const int op = to_op(name, send);
    if (shape == Shape::scattered) {
      match(recv, "out", send, "x", parts());
    } else if (shape == Shape::equal || rank_ == root) {
      match(send, "x", recv, "out", 1);
    }
    return start(std::move(send), std::move(recv), out, [&](auto& s, auto& r, auto* work) {
      switch (shape) {
        case Shape::equal:
          return ringfold_all_reduce_async(handle_, s.data(), r.data(), s.count(), s.type(), op,
                                           factor, s.stream(), work);
        case Shape::rooted:
          return ringfold_reduce_async(handle_, s.data(), r.data(), s.count(), s.type(), op, factor,
                                       root, s.stream(), work);
        case Shape::scattered:
          return ringfold_reduce_scatter_async(handle_, s.data(), r.data(), r.count(), s.type(), op,
                                               factor, s.stream(), work);
      }
      return RINGFOLD_INTERNAL;
    });
  }

  ringfold_comm_t handle_;
  int rank_ = 0, size_ = 1;
};

ringfold_options options_of(double timeout, double start_timeout, size_t piece_bytes,
                            const std::string& algorithm) {
  ringfold_options options{};
  options.timeout = timeout;
  options.start_timeout = start_timeout;
  options.piece_bytes = piece_bytes;
  const std::span settable(kAlgorithms.begin(), kAlgorithms.size() - 1);  // no "region"
  options.algorithm = find("algorithm", algorithm, settable);
  return options;
}

std::unique_ptr<Comm> init(const std::optional<nb::bytes>& id, int rank, int size, double timeout,
                           double start_timeout, size_t piece_bytes, const std::string& algorithm,
                           const std::optional<std::string>& transports) {
  ringfold_options options = options_of(timeout, start_timeout, piece_bytes, algorithm);
  ringfold_unique_id unique;
  if (id) {
    if (id->size() != sizeof unique.bytes)
      raise("invalid_argument", fmt::format("id has {} bytes, accepted are the {} of unique_id()",
                                            id->size(), sizeof unique.bytes));
    std::copy_n(static_cast<const unsigned char*>(id->data()), sizeof unique.bytes, unique.bytes);
  }
  return std::make_unique<Comm>(make_interruptibly(
      [=, known = id.has_value()](ringfold_comm_t* comm) mutable {  // in a thread: by value
        if (transports) options.transports = transports->c_str();
        return known ? ringfold_init_id(comm, unique, rank, size, &options)
                     : ringfold_init(comm, &options);
      }));
}

nb::bytes unique_id() {
  ringfold_unique_id id;
  check(ringfold_get_unique_id(&id));
  return nb::bytes(id.bytes, sizeof id.bytes);
}

nb::dict report_of(const Work& work) {
  const ringfold_report from = work.report();
  nb::dict to;
  to["algorithm"] = kAlgorithms[static_cast<size_t>(from.algorithm)];
  to["transport"] = static_cast<const char*>(from.transport);
  to["steps"] = from.steps;
  to["bytes_sent"] = from.bytes_sent;
  to["bytes_model"] = from.bytes_model;
  to["factor"] = from.bus_factor;
  to["chunk_bytes"] = from.chunk_bytes;
  to["piece_bytes"] = from.piece_bytes;
  to["predicted_seconds"] = from.predicted_seconds;
  to["measured_seconds"] = from.measured_seconds;
  return to;
}

}  // namespace

NB_MODULE(_core, module) {
  using namespace nb::literals;  // NOLINT(google-build-using-namespace): "name"_a
  nb::set_leak_warnings(false);  // what still lives when the interpreter ends may be in use
  nb::class_<Work>(module, "Work")
      .def("wait", &Work::wait, "timeout"_a = nb::none())
      .def("done", &Work::done)
      .def("report", &report_of);
  nb::class_<Gradients>(module, "Gradients")
      .def("begin", &Gradients::begin, "weight"_a.none())
      .def("ready", &Gradients::ready, "parameter"_a)
      .def("finish", &Gradients::finish)
      .def("accumulate", &Gradients::accumulate, "on"_a)
      .def(
          "memory",
          [](nb::handle self, size_t parameter) {
            return nb::cast<Gradients&>(self).memory(self, parameter);
          },
          "parameter"_a)
      .def("report", &Gradients::report)
      .def("abort", &Gradients::abort, "why"_a);
  const auto op = "op"_a;
  nb::class_<Comm>(module, "Comm")
      .def_prop_ro("rank", &Comm::rank)
      .def_prop_ro("size", &Comm::size)
      .def("close", &Comm::close)
      .def("abort", &Comm::abort, "why"_a)
      .def("health", &Comm::health)
      .def("bytes_sent", &Comm::bytes_sent)
      .def("transport", &Comm::transport)
      .def("split", &Comm::split, "color"_a, "key"_a)
      .def("shrink", &Comm::shrink, "exclude"_a)
      .def("gradients", &Comm::gradients, "names"_a, "gradients"_a, "first_bytes"_a,
           "bucket_bytes"_a, "require_all"_a, "compression"_a, "sparse_share"_a)
      .def("all_reduce", &Comm::all_reduce, "x"_a.none(), "out"_a.none(), op, "factor"_a,
           "stream"_a.none())
      .def("reduce", &Comm::reduce, "x"_a.none(), "out"_a.none(), op, "factor"_a, "root"_a,
           "stream"_a.none())
      .def("reduce_scatter", &Comm::reduce_scatter, "x"_a.none(), "out"_a.none(), op, "factor"_a,
           "stream"_a.none())
      .def("all_gather", &Comm::all_gather, "x"_a.none(), "out"_a.none(), "stream"_a.none())
      .def("gather", &Comm::gather, "x"_a.none(), "out"_a.none(), "root"_a, "stream"_a.none())
      .def("scatter", &Comm::scatter, "x"_a.none(), "out"_a.none(), "root"_a, "stream"_a.none())
      .def("all_to_all", &Comm::all_to_all, "x"_a.none(), "out"_a.none(), "stream"_a.none())
      .def("broadcast", &Comm::broadcast, "x"_a.none(), "root"_a, "stream"_a.none())
      .def("send", &Comm::send, "x"_a.none(), "to"_a, "stream"_a.none())
      .def("recv", &Comm::recv, "out"_a.none(), "source"_a, "stream"_a.none())
      .def("barrier", &Comm::barrier);
  module.def("init", &init, "id"_a.none(), "rank"_a, "size"_a, "timeout"_a, "start_timeout"_a,
             "piece_bytes"_a, "algorithm"_a, "transports"_a.none());
  module.def("unique_id", &unique_id);
  module.def("version", &ringfold_version);
}

}  // namespace ringfold::python
