// Averages the gradients of data-parallel training while the rest of backward still computes.
//
//   auto sync = ringfold::GradientSync::create(comm, parameters);    // once, on all ranks
//   sync->begin();                                                   // every step
//   for (i = last; ...; first) { compute the gradient of i; sync->ready(i); }
//   sync->finish();                                                  // the averages are there
//   optimizer.step();
//
// Parameters are gathered into buckets, in the reverse of the order in which they are given, since
// backward finishes the last layer first. A bucket travels as soon as all of its gradients are
// ready and those before it have left; a thread of the synchroniser carries it, so ready() never
// waits. On every rank the buckets leave in the same order, whatever the order of ready().
//
// Memory: host memory. A gradient stays the caller's and is averaged where it lies. One that is
// given as null lives in the storage of its bucket, and gradient() tells where: it is sent without
// a copy. So are the caller's own gradients where those of a bucket lie one behind the other (one
// flat buffer in the order of the parameters). All others are copied there and back.
// Ownership: from its ready() to the end of finish() a gradient belongs to the synchroniser; the
// gradients must outlive it.
// Threads: ready() and abort() may be called from any thread, at the same time; everything else
// from one thread at a time. The synchroniser has a communicator of its own (see split()), so that
// other collectives of the program may go on beside it. create() and finish() wait, so they cannot
// be called while a Group is open on the thread.
// Errors: a wrong call is answered with invalid_argument and changes nothing. A bucket that fails
// fails finish() with the library's text and the bucket's parameters, on all ranks, and the
// synchroniser stays failed: every later call returns that failure.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ringfold/communicator.h"

namespace ringfold {

// One parameter, for its gradient: `count` elements of a float type.
struct Parameter {
  std::string name;  // compared between ranks and used in errors; may be empty
  size_t count = 0;
  DType type = DType::f32;
  void* gradient = nullptr;  // null: it shall live in bucket storage
};

// What travels at once, as a hook sees it. Valid during the hook only.
struct Bucket {
  size_t index = 0;  // in the order of sending
  DType type = DType::f32;
  void* data = nullptr;  // this rank's gradients; the average when the hook returns
  size_t count = 0;      // elements
  // The average is the sum over the ranks of share * data; the shares add up to 1.
  double share = 1;
  bool equal = true;  // no weights were given: every share is 1 / size()
  // Counts up when the buckets were laid out anew: what a hook remembers of a bucket is void then.
  int layout = 0;
};

// How a bucket becomes its average: any collectives on `comm`, the same on every rank, waited for.
// Called in the order of the buckets, never twice at once, from the synchroniser's thread or from
// finish(). All ranks must end with the same bits. See compression.h for those that come along.
struct BucketHook {
  std::string name;  // compared between ranks, and used in errors
  std::function<Status(Communicator& comm, const Bucket& bucket)> average;  // empty: the plain one
};

// The plain hook: one all_reduce in place.
[[nodiscard]] Status average_bucket(Communicator& comm, const Bucket& bucket);

struct SyncOptions {
  size_t first_bytes = size_t{1} << 20;    // of the first bucket: small, so that it leaves early
  size_t bucket_bytes = size_t{25} << 20;  // of the others
  BucketHook hook;
  // finish() fails, naming them, if parameters were not ready. Otherwise they count as zeros.
  bool require_all = false;
};

// The parameters of each bucket, ascending, and the buckets in the order in which they will be
// full. Of one type each and no larger than their limit, but for a parameter that is larger alone.
// `order`: all parameters in the order in which they become ready; empty: from the last to the
// first. A pure function of its arguments: all ranks come to the same plan.
using BucketPlan = std::vector<std::vector<size_t>>;
[[nodiscard]] BucketPlan plan_buckets(std::span<const Parameter> parameters, size_t first_bytes,
                                      size_t bucket_bytes, std::span<const size_t> order = {});

// The latest step that was synchronised, on this rank.
struct SyncReport {
  double divisor = 0;          // the number of ranks, or the sum of the weights
  std::vector<size_t> unused;  // parameters that were not ready, and counted as zeros
  uint64_t gradient_bytes = 0;
  uint64_t bytes_sent = 0;     // by this rank's process meanwhile, counted by the transports
  double busy_seconds = 0;     // in which a bucket was travelling
  double exposed_seconds = 0;  // of them, those for which finish() waited
};

class GradientSync {
 public:
  // All ranks call it, with the same names, types, counts and options in the same order; where they
  // differ, every rank gets `mismatch` with both sides' words. Blocks until all have called.
  [[nodiscard]] static Result<GradientSync> create(Communicator& comm,
                                                   std::vector<Parameter> parameters,
                                                   SyncOptions options = {});
  GradientSync(GradientSync&&) noexcept;
  GradientSync& operator=(GradientSync&&) noexcept;
  // In the middle of a step: aborts it, on all ranks.
  ~GradientSync();

  // Begins a step. The first form averages by the number of ranks, the second by weight:
  // sum(weight * gradient) / sum(weight), so that with its number of samples as each rank's weight
  // unequal shards give the gradient of the union batch. A rank without data joins with weight 0;
  // it may call finish() at once, and what lies in its gradients does not count. All ranks use the
  // same form. A negative or non-finite weight, or only zeros, is an invalid_argument that all
  // ranks get from finish(); gradients are left alone then, and the next step may begin.
  [[nodiscard]] Status begin();
  [[nodiscard]] Status begin(double weight);

  // The gradient of that parameter is final; nobody writes to it before finish() has returned.
  [[nodiscard]] Status ready(size_t parameter);

  // Waits for all averages. Parameters that were not ready are sent as zeros and receive the
  // average, too; those that were ready in a step without synchronisation since the latest one with
  // it count as ready. After the first synchronised step the ranks compare notes: if the order in
  // which gradients became ready on rank 0 gives buckets that could leave earlier on every rank,
  // they are laid out anew, once (not if gradients live in bucket storage: those never move).
  [[nodiscard]] Status finish();

  // Accumulation: while on, steps send nothing; the first step after that sends what the caller
  // has piled up in the gradients. The weight of that step alone counts. Takes effect with begin();
  // all ranks switch alike.
  void accumulate(bool on);

  // Where the gradient of a parameter lies. Zeros at first if in bucket storage. REQUIRES
  // parameter < number of parameters.
  [[nodiscard]] void* gradient(size_t parameter) const;
  [[nodiscard]] size_t parameters() const;  // their number
  [[nodiscard]] const BucketPlan& plan() const;
  [[nodiscard]] size_t copied_bytes() const;  // of a step: gradients that are copied there and back
  [[nodiscard]] const SyncReport& report() const;

  // Ends the step that is under way, and all further ones, on every rank.
  void abort(const std::string& why = "abort() was called");

  struct Impl;
  explicit GradientSync(std::unique_ptr<Impl> impl);

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringfold
