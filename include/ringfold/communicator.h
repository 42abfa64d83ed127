// Collectives between the ranks of a communicator.
//
//   auto comm = ringfold::Communicator::create(*ringfold::Rendezvous::from_environment());
//   comm->all_reduce(grad, grad, n, ringfold::DType::f32, ringfold::Op::avg).wait();
//
// Thread-safety: a Communicator is a cheap shared handle. Any thread may call it; calls on one
// communicator from several threads are serialised, and it is the caller's business that all ranks
// make them in the same order. abort(), health() and the Work functions may be called at any time.
// Operations on different communicators never block each other.
// Buffers: belong to the library from the call until the Work is done, and must stay valid until
// then. Equal send and receive pointers (see each function) mean in place; any other overlap is
// refused with invalid_argument. Pointers are aligned to their element size. A count of 0 is legal,
// also with null pointers, and still meets the other ranks.
// Device memory (a build with CUDA): buffers that are device or managed memory are used in the
// order of `stream`. The call returns at once; the operation begins, and its deadline counts, when
// the stream has come to it; what comes later on the stream sees the result, and never waits for
// longer than the operation, also if that fails. The other buffer of such a call must be memory
// that kernels can use, too. Where devices can reach each other's memory, all ranks of a collective
// must give device memory, on the device that was current when the communicator was made; a path
// that was asked for and cannot be had fails the calls that need it. Its Work is done when the
// result is there (of one rank alone: when it is on the stream). Ranks that share a device all need
// room on it at once, and those of one thread must make their calls in one Group. A collective on a
// stream that is being captured becomes part of the CUDA graph: its Work is done at once, and each
// replay runs it anew, on all ranks. The graph keeps what it needs of the communicator, whose
// failure its replays share. Messages cannot be captured.
// Errors: a wrong argument is reported by the returned Work at once and starts nothing. A failure
// of an operation (timeout, peer_lost, mismatch, aborted) completes every operation of that
// communicator on every rank, and the communicator stays failed: health() tells. Others go on. All
// ranks receive bit-identical results.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ringfold/bootstrap.h"
#include "ringfold/memory.h"
#include "ringfold/record.h"
#include "ringfold/schedule.h"
#include "ringfold/status.h"
#include "ringfold/types.h"

namespace ringfold {

// What an operation did, and what the bandwidth model says of it.
struct Report {
  Collective collective = Collective::all_reduce;
  Algorithm algorithm = Algorithm::ring;
  // "region", "direct" (without copies: a region, see memory.h, or devices), "shm", "ucx",
  // "loopback", "shm+ucx", "direct+ucx", or "self"
  std::string transport;
  int steps = 0;             // of the schedule
  uint64_t bytes_sent = 0;   // payload bytes this rank sent, counted where they left
  uint64_t bytes_model = 0;  // what the model says it must send
  double bus_factor = 0;     // 2(N-1)/N for all_reduce; see model.h
  size_t chunk_bytes = 0, piece_bytes = 0;
  double predicted_seconds = 0;
  double measured_seconds = 0;  // from the call to completion; 0: too short to be timed
};

// Cheap shared handle of one operation. Dropping it does not stop the operation.
class Work {
 public:
  Work() = default;                       // done, ok
  explicit Work(const Status& finished);  // done with that status
  // What report() needs to know of an operation that was over before the call returned.
  struct Brief {
    Nanoseconds returned{};  // from the call; 0: not measured, as `seconds`
    float seconds = 0;
    uint32_t count = 0;
    uint16_t ranks = 0, rank = 0, root = 0;  // ranks == 0: there was no such operation
    Collective collective = Collective::all_reduce;
    uint8_t element_bytes = 0;
    bool crowded = false;  // ranks outnumbered the cores
    bool direct = false;   // it used the buffers where they lie
  };
  explicit Work(const Brief& brief) : brief_(brief) {}  // done, ok

  [[nodiscard]] bool done() const;
  // Waits until done, helping the engine from this thread. Code::timeout if `timeout` passes first:
  // then the operation is still running (its own deadline is Options::timeout).
  Status wait(Nanoseconds timeout = Nanoseconds::max());
  // Runs `f` when done: on the library's thread (it may start operations but must not wait), or
  // here and now if already done.
  void then(std::function<void(const Status&)> f);
  [[nodiscard]] Report report() const;  // complete once done

  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  [[nodiscard]] const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
  Brief brief_;  // where there is no state
};

struct Options {
  // Deadline of every operation, from the call. Empty: RINGFOLD_TIMEOUT, else ten minutes.
  std::optional<Nanoseconds> timeout;
  size_t piece_bytes = 0;  // bytes that travel in one message; 0: RINGFOLD_PIECE or the model
  std::optional<Algorithm> algorithm;  // empty: RINGFOLD_ALGORITHM or the model
  std::string transports;              // "shm,ucx": allowed ones; empty: RINGFOLD_TRANSPORTS or all
  std::optional<Numerics> numerics;    // empty: RINGFOLD_NUMERICS or exact
  // How device memory travels: "auto", "direct", "ucx", "staged"; empty: RINGFOLD_CUDA_PATH or auto
  std::string cuda_path;
};

class Communicator {
 public:
  Communicator() = default;  // empty: every call answers invalid_argument

  // Meets the other ranks; blocks until all are there or the rendezvous' timeout has passed (the
  // message then names the missing ranks). One rank costs no thread, socket or buffer.
  [[nodiscard]] static Result<Communicator> create(const Rendezvous& where,
                                                   const Options& options = {});
  // The same without blocking; *out is set when the Work is done and ok. For many ranks in one
  // thread.
  [[nodiscard]] static Work create(const Rendezvous& where, const Options& options,
                                   Communicator* out);

  [[nodiscard]] bool valid() const { return impl_ != nullptr; }
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;

  // recv[i] = reduction over ranks of send[i]; `count` elements each. In place: send == recv.
  Work all_reduce(const void* send, void* recv, size_t count, DType type, Reduction reduction,
                  Stream stream = {});
  // send: size()*count_each elements; recv: the count_each elements of part rank().
  // In place: recv == send + rank()*count_each elements.
  Work reduce_scatter(const void* send, void* recv, size_t count_each, DType type,
                      Reduction reduction, Stream stream = {});
  // recv: size()*count_each elements, part r from rank r. In place: send == recv +
  // rank()*count_each.
  Work all_gather(const void* send, void* recv, size_t count_each, DType type, Stream stream = {});
  // buffer on every rank = buffer on root.
  Work broadcast(void* buffer, size_t count, DType type, int root, Stream stream = {});
  // recv is written on root only and may be null elsewhere. In place on root: send == recv.
  Work reduce(const void* send, void* recv, size_t count, DType type, Reduction reduction, int root,
              Stream stream = {});
  // Part r of send goes to rank r, part r of recv comes from rank r. Not in place.
  Work all_to_all(const void* send, void* recv, size_t count_each, DType type, Stream stream = {});
  // recv (on root only, else may be null): part r from rank r. In place on root:
  // send == recv + root*count_each.
  Work gather(const void* send, void* recv, size_t count_each, DType type, int root,
              Stream stream = {});
  // send (on root only, else may be null): part r goes to rank r. In place on root:
  // recv == send + root*count_each.
  Work scatter(const void* send, void* recv, size_t count_each, DType type, int root,
               Stream stream = {});
  // Point to point; matched in order per pair. Any number may be open. To oneself: both must be
  // open at once (start one without waiting, or use a Group).
  Work send(const void* buffer, size_t count, DType type, int to, Stream stream = {});
  Work recv(void* buffer, size_t count, DType type, int from, Stream stream = {});
  // Done when every rank has called it.
  Work barrier();

  // Ranks of equal colour form a new communicator, ordered by (key, rank). Every rank calls it, in
  // the same order as other operations. A negative colour yields an invalid() Communicator. Blocks.
  [[nodiscard]] Result<Communicator> split(int color, int key);

  // Those not in `exclude` form a new communicator, in the same order. Only they call it, with the
  // same list; the others may be dead, and this communicator may have failed. Blocks until all have
  // called, at most until the deadline of an operation. mismatch: the lists differ. When rank 0 of
  // the first communicator is gone, ranks no longer hear of each other's failures but by their
  // messages: connections that break, and deadlines.
  [[nodiscard]] Result<Communicator> shrink(std::span<const int> exclude);

  // All ranks of this communicator, in the same order, and `newcomers` more behind them form a new
  // communicator. The newcomers are processes that call create(Rendezvous::from_id(id, rank, size))
  // with the new size and ranks from size() on. `id` counts on rank 0 only, which has got it from
  // Rendezvous::unique_id() and handed it to the newcomers. Blocks until all are there, at most
  // until the deadline of an operation. This communicator stays as it is.
  [[nodiscard]] Result<Communicator> grow(const UniqueId& id, int newcomers);

  // Ends every pending and future operation of this communicator, on every rank, with
  // Code::aborted and `why`. Returns at once.
  void abort(const std::string& why = "abort() was called");
  // ok until the first failure, then that failure for ever.
  [[nodiscard]] Status health() const;
  // Lets the others know memory from allocate_memory() now, so that the first operations on it may
  // go without copies already. A hint about any memory, which this rank gives for itself: it waits
  // for nobody, and memory of another kind is used in the ordinary way. Until it is freed.
  Status register_memory(const void* memory, size_t bytes);

  // Payload bytes this rank has sent on all transports of its world, counted by them.
  [[nodiscard]] uint64_t bytes_sent() const;
  // What this communicator has done, and its latest operations as JSON; see record.h.
  [[nodiscard]] Counters counters() const;
  [[nodiscard]] std::string record() const;
  // What collectives use: "region", "shm", "ucx", "shm+ucx", "loopback", "self".
  [[nodiscard]] std::string transport() const;

  struct Impl;
  explicit Communicator(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  [[nodiscard]] const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

// Calls made by this thread between construction and submit() start together, whatever their
// communicators: the only safe way to drive several ranks, or both ends of a pair, from one thread.
// Groups nest; the outermost submit() starts everything. Their Works are done only afterwards.
class Group {
 public:
  Group();
  // Without submit(): nothing of it was started, inner groups included, and its Works are
  // `aborted`.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  Work submit();  // done when all are done; the first error of them

 private:
  bool open_ = true;
  size_t first_;  // of the calls that the open groups of this thread hold: where this one's begin
};

}  // namespace ringfold
