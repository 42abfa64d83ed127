// What the functions of libnccl.so.2 share: communicators behind handles, errors with their texts,
// memory, and the group that a thread has open.
//
// Thread-safety: any thread; a group belongs to the thread that opened it.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/adapters/nccl_abi.h"
#include "lib/adapters/registry.h"
#include "ringfold/communicator.h"

namespace ringfold::nccl {

// An operation made by ncclRedOpCreatePreMulSum.
struct PreMulSum {
  DType type;
  double factor = 1;
  const void* scalar = nullptr;  // read when a collective runs; null: `factor` was read before
};

// A device and its context, as the driver has it; null: CUDA was not in use there.
struct Place {
  int device = 0;
  void* context = nullptr;
};

// What an ncclComm_t stands for.
class Comm {
 public:
  Comm(bool blocking, const Place& place) : blocking(blocking), place(place) {}

  // Ends a creation: `made`, or the failure that every later call repeats.
  void finish(Result<Communicator> made);
  // The communicator for a call that needs one that is ready for it, or why there is none.
  [[nodiscard]] Result<Communicator> ready();
  // The same whatever has failed on it, for what mends a failure.
  [[nodiscard]] Result<Communicator> whatever_failed();
  // What ncclCommGetAsyncError says: ok, the first failure, or none yet.
  [[nodiscard]] std::optional<Status> progress();
  // Ends everything, now and later.
  void abort(const std::string& why);
  void revoke();
  [[nodiscard]] Status finalize();
  // Waits for what is running and gives the communicator up.
  void release();

  // Non-blocking: jobs and operations that were begun and may not be over.
  void begin_job();
  void end_job(const Status& status);
  void add(Work work);
  // An operation that its stream carries on: nobody waits for it but finalize() and release().
  void launched(Work work);
  // Whether the communicator itself has failed.
  [[nodiscard]] Status health();

  [[nodiscard]] std::string last_error();
  void note(const std::string& text);

  const bool blocking;
  const Place place;

  std::mutex lock;                                   // guards what follows
  std::vector<std::optional<PreMulSum>> operations;  // by number - ncclNumOps
  std::map<void*, std::pair<void*, size_t>> registered;

 private:
  [[nodiscard]] bool running_locked();

  Communicator communicator_;
  int jobs_ = 0;
  std::vector<Work> works_;
  std::deque<Work> launched_;
  Status failure_;
  bool aborted_ = false, revoked_ = false, finalized_ = false;
  std::string last_error_;
};
using CommPointer = std::shared_ptr<Comm>;

Registry<ncclComm_t, CommPointer>& comms();

// ---- errors -----------------------------------------------------------------------------------

[[nodiscard]] Status invalid(std::string message);  // ncclInvalidArgument
[[nodiscard]] Status usage(std::string message);    // ncclInvalidUsage
[[nodiscard]] Status null_argument(const char* name);
// NCCL's number for a status; keeps the text for ncclGetLastError, of `comm` too.
ncclResult_t answer(const Status& status, Comm* comm = nullptr);
[[nodiscard]] ncclResult_t number_of(const Status& status);
// The text for ncclGetLastError: of this thread, else the latest of all.
[[nodiscard]] std::string latest_error();
[[nodiscard]] Result<int> reported_version();

// ---- memory -----------------------------------------------------------------------------------

// Ok, unless it is device memory and nothing here can use that.
[[nodiscard]] Status usable_memory(const void* pointer);
// Whether kernels can use it: device, managed or pinned memory.
[[nodiscard]] bool is_for_kernels(const void* pointer);
// Whether the host can use it: all but the memory of a device.
[[nodiscard]] bool is_for_host(const void* pointer);
// Whether a call is for the device, in the order of its stream: if its buffers are for kernels, or
// if it has none and this thread uses CUDA. Otherwise it is for the host. Buffers that cannot be
// used together, or not on a stream, are refused.
[[nodiscard]] Result<bool> is_for_device(const void* send, const void* recv, cudaStream_t stream);

// Where this thread is.
[[nodiscard]] Place current_place();
[[nodiscard]] Result<Place> place_of(int device);
// Makes a place the current one of this thread for a while.
class InPlace {
 public:
  explicit InPlace(const Place& place);
  ~InPlace();
  InPlace(const InPlace&) = delete;
  InPlace& operator=(const InPlace&) = delete;

 private:
  bool pushed_ = false;
};

// ncclMemAlloc and ncclMemFree: device memory for a thread that uses CUDA, else host memory.
[[nodiscard]] Status allocate(void** out, size_t bytes);
[[nodiscard]] Status release(void* memory);

// ---- groups -----------------------------------------------------------------------------------

// The making, splitting or finalizing of a communicator: may block, runs on a thread of its own in
// a group or on a non-blocking communicator. Jobs with the same `order` run one after another.
struct Job {
  CommPointer order, target;
  std::function<Status()> run;
  ncclComm_t* out = nullptr;  // set to null if it fails
};

ncclResult_t group_start();
ncclResult_t group_end();
ncclResult_t group_discard(const Status& why);
// Runs `job`, or leaves it to the group that is open.
ncclResult_t submit(Job job);
// Starts an operation. For the host it is over on return, unless a group is open or the
// communicator does not block; for a device it is then on its stream.
struct Start {
  CommPointer comm;
  bool for_device = false;
  std::function<Work(Communicator&)> begin;
  std::function<Status()> before = nullptr;  // runs when it really starts
};
ncclResult_t start(const Start& start);
// A wrong argument: the group that is open will not start anything.
ncclResult_t refuse(const Status& why, Comm* comm = nullptr);

}  // namespace ringfold::nccl
