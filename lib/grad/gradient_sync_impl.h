// One rank's synchroniser: the step that is under way, and the thread that carries its buckets.
//
// Whoever finds a full bucket whose turn it is carries it: the thread while backward computes, the
// caller of finish() afterwards, never both at once (`carrying_`). While a bucket is carried, the
// lock is free, so that ready() never waits for a collective.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "lib/grad/layout.h"
#include "ringfold/gradient_sync.h"

namespace ringfold {

struct GradientSync::Impl {
  // `buckets`: as `plan` lays them out.
  Impl(Communicator comm, std::vector<Parameter> parameters, SyncOptions options, BucketPlan plan,
       std::vector<grad::LaidOutBucket> buckets);
  ~Impl();

  Status begin(std::optional<double> weight);
  Status ready(size_t parameter);
  Status finish();
  void accumulate(bool on);
  void abort(const std::string& why) { comm_.abort(why); }

  [[nodiscard]] void* gradient(size_t parameter) const { return gradients_[parameter]; }
  [[nodiscard]] size_t parameters() const { return parameters_.size(); }
  [[nodiscard]] const BucketPlan& plan() const { return plan_; }
  [[nodiscard]] size_t copied_bytes() const { return grad::copied_bytes(buckets_); }
  [[nodiscard]] const SyncReport& report() const { return report_; }

 private:
  enum class Phase : uint8_t { idle, open, finishing };
  using Lock = std::unique_lock<std::mutex>;

  void set_layout(BucketPlan plan, std::vector<grad::LaidOutBucket> buckets);
  [[nodiscard]] std::string called(size_t parameter) const;  // "parameter 3 'name'"
  [[nodiscard]] std::string called(const grad::LaidOutBucket& bucket, size_t index) const;

  // With the lock.
  [[nodiscard]] bool due() const;   // is there something to carry?
  [[nodiscard]] bool over() const;  // has all been carried, or has it failed?
  void carry_what_is_due(Lock& lock);
  void settle_weights(Result<double> sum);
  Status complete(Lock& lock);  // the second half of a synchronised step
  Status refuse_unused();
  void fail(Status why);

  // Without the lock, by whoever carries.
  Result<double> exchange_weights();
  Status carry(size_t index);
  void serve();  // the thread

  // Without the lock, by finish() when nobody carries.
  Status reconsider_plan();

  Communicator comm_;
  const std::vector<Parameter> parameters_;
  const SyncOptions options_;

  // Where things lie; changes between steps only.
  BucketPlan plan_;
  std::vector<grad::LaidOutBucket> buckets_;
  std::vector<size_t> bucket_of_;
  std::vector<void*> gradients_;
  int layout_ = 0;
  bool reconsidered_ = false;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Phase phase_ = Phase::idle;
  bool accumulating_ = false, synchronises_ = false;
  bool carrying_ = false, stopping_ = false;
  Status failed_;       // for ever
  Status step_failed_;  // of this step, on all ranks alike

  std::optional<double> weight_;  // of this rank
  bool weights_settled_ = false;
  double share_ = 1;
  std::vector<char> seen_;         // ready in this step
  std::vector<char> contributes_;  // ready in this step, or in one before that sent nothing
  std::vector<size_t> order_;      // in which they became ready
  std::vector<size_t> missing_;    // of each bucket
  size_t next_ = 0;                // the bucket whose turn it is
  SyncReport report_;

  std::thread thread_;
};

}  // namespace ringfold
