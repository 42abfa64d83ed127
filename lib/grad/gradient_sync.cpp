#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "lib/base/cores.h"
#include "lib/grad/agreement.h"
#include "lib/grad/gradient_sync_impl.h"
#include "lib/grad/plan.h"

namespace ringfold {
namespace {

Status invalid(std::string message) {
  return {Code::invalid_argument, std::move(message)};
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool is_weight(double weight) {
  return std::isfinite(weight) && weight >= 0;
}

}  // namespace

Status average_bucket(Communicator& comm, const Bucket& bucket) {
  const Reduction how = bucket.equal ? Reduction(Op::avg) : Reduction(Op::premul_sum, bucket.share);
  return comm.all_reduce(bucket.data, bucket.data, bucket.count, bucket.type, how).wait();
}

// ---- making and ending ------------------------------------------------------------------------

using Impl = GradientSync::Impl;

Result<GradientSync> GradientSync::create(Communicator& comm, std::vector<Parameter> parameters,
                                          SyncOptions options) {
  Result<Communicator> own = comm.split(0, comm.valid() ? comm.rank() : 0);
  if (!own.ok()) return own.status();
  if (Status status = grad::agree(*own, parameters, options); !status.ok()) return status;
  if (!options.hook.average) options.hook.average = average_bucket;
  BucketPlan plan = plan_buckets(parameters, options.first_bytes, options.bucket_bytes);
  std::vector<grad::LaidOutBucket> buckets = grad::lay_out(parameters, plan);
  if (buckets.size() != plan.size()) {
    const Status status(Code::system, "there is no memory for the buckets");
    own->abort(status.message());
    return status;
  }
  return GradientSync(std::make_unique<Impl>(*own, std::move(parameters), std::move(options),
                                             std::move(plan), std::move(buckets)));
}

Impl::Impl(Communicator comm, std::vector<Parameter> parameters, SyncOptions options,
           BucketPlan plan, std::vector<grad::LaidOutBucket> buckets)
    : comm_(std::move(comm)),
      parameters_(std::move(parameters)),
      options_(std::move(options)),
      bucket_of_(parameters_.size()),
      gradients_(parameters_.size()),
      seen_(parameters_.size()),
      contributes_(parameters_.size()) {
  set_layout(std::move(plan), std::move(buckets));
  thread_ = std::thread([this] { serve(); });
}

Impl::~Impl() {
  {
    const std::lock_guard guard(mutex_);
    if (phase_ != Phase::idle && synchronises_)
      comm_.abort("a gradient synchroniser was destroyed in the middle of a step");
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Impl::set_layout(BucketPlan plan, std::vector<grad::LaidOutBucket> buckets) {
  plan_ = std::move(plan);
  buckets_ = std::move(buckets);
  missing_.assign(buckets_.size(), 0);
  ++layout_;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const grad::Slice& slice : buckets_[b].slices) {
      bucket_of_[slice.parameter] = b;
      gradients_[slice.parameter] = slice.gradient;
    }
  }
}

// ---- a step, from the caller's side -----------------------------------------------------------

std::string Impl::called(size_t parameter) const {
  return fmt::format("parameter {} '{}'", parameter, parameters_[parameter].name);
}

std::string Impl::called(const grad::LaidOutBucket& bucket, size_t index) const {
  return fmt::format("bucket {} of {} ({} to {}; {} elements of {}; hook {})", index,
                     buckets_.size(), called(bucket.slices.front().parameter),
                     called(bucket.slices.back().parameter), bucket.count, name(bucket.type),
                     options_.hook.name.empty() ? "none" : options_.hook.name);
}

void Impl::accumulate(bool on) {
  const std::lock_guard guard(mutex_);
  accumulating_ = on;
}

Status Impl::begin(std::optional<double> weight) {
  const std::lock_guard guard(mutex_);
  if (!failed_.ok()) return failed_;
  if (phase_ != Phase::idle)
    return invalid("begin() in the middle of a step: finish() ends the one before");
  phase_ = Phase::open;
  synchronises_ = !accumulating_;
  step_failed_ = {};
  weight_ = weight;
  weights_settled_ = !weight.has_value();
  share_ = 1.0 / comm_.size();
  std::ranges::fill(seen_, 0);
  order_.clear();
  next_ = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) missing_[b] = buckets_[b].slices.size();
  if (synchronises_) {
    report_ = {};
    report_.divisor = comm_.size();
    report_.bytes_sent = comm_.bytes_sent();  // until finish() subtracts it
    for (const grad::LaidOutBucket& bucket : buckets_)
      report_.gradient_bytes += bucket.count * size_of(bucket.type);
  }
  if (due()) changed_.notify_all();
  return {};
}

Status Impl::ready(size_t parameter) {
  const std::lock_guard guard(mutex_);
  if (!failed_.ok()) return failed_;
  if (parameter >= parameters_.size())
    return invalid(
        fmt::format("ready({}): there are {} parameters", parameter, parameters_.size()));
  if (phase_ == Phase::idle)
    return invalid(
        fmt::format("{} is ready outside a step: begin() comes first", called(parameter)));
  if (phase_ == Phase::finishing)
    return invalid(fmt::format("{} is ready after finish() was called", called(parameter)));
  if (seen_[parameter] != 0)
    return invalid(fmt::format("{} is ready for the second time in one step", called(parameter)));
  seen_[parameter] = contributes_[parameter] = 1;
  order_.push_back(parameter);
  if (--missing_[bucket_of_[parameter]] == 0 && due()) changed_.notify_all();
  return {};
}

Status Impl::finish() {
  Lock lock(mutex_);
  if (!failed_.ok()) {
    changed_.wait(lock, [this] { return !carrying_; });
    phase_ = Phase::idle;
    return failed_;
  }
  if (phase_ != Phase::open) return invalid("finish() outside a step: begin() comes first");
  phase_ = Phase::finishing;
  Status status = synchronises_ ? complete(lock) : Status();
  phase_ = Phase::idle;
  return status;
}

Status Impl::complete(Lock& lock) {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (contributes_[i] == 0) report_.unused.push_back(i);
  if (Status status = refuse_unused(); !status.ok()) {
    fail(status);
  } else {
    std::ranges::fill(missing_, 0);
  }
  const double start = seconds_now();
  while (carrying_ || !over()) {
    if (!carrying_)
      carry_what_is_due(lock);
    else
      changed_.wait(lock, [this] { return !carrying_; });
  }
  report_.exposed_seconds = seconds_now() - start;
  report_.bytes_sent = comm_.bytes_sent() - report_.bytes_sent;
  if (!failed_.ok()) return failed_;
  if (!step_failed_.ok()) return step_failed_;
  std::ranges::fill(contributes_, 0);
  synchronises_ = false;  // nothing is left to carry, also while the buckets change
  if (std::exchange(reconsidered_, true) || buckets_.size() < 2) return {};
  lock.unlock();
  const Status status = reconsider_plan();
  lock.lock();
  if (!status.ok()) fail(status);
  return failed_;
}

Status Impl::refuse_unused() {
  if (!options_.require_all || report_.unused.empty() || weight_ == 0.0) return {};
  std::string names;
  for (const size_t i : report_.unused)
    names += fmt::format("{}{}", names.empty() ? "" : ", ", called(i));
  return invalid(fmt::format("rank {}: not ready at finish(): {}", comm_.rank(), names));
}

void Impl::fail(Status why) {
  if (!failed_.ok()) return;
  failed_ = std::move(why);
  comm_.abort(failed_.message());  // nobody shall wait for what will not come
}

// ---- carrying ---------------------------------------------------------------------------------

bool Impl::over() const {
  if (!failed_.ok() || !step_failed_.ok()) return true;
  return weights_settled_ && next_ == buckets_.size();
}

bool Impl::due() const {
  if (phase_ == Phase::idle || !synchronises_ || over()) return false;
  return !weights_settled_ || missing_[next_] == 0;
}

void Impl::carry_what_is_due(Lock& lock) {
  carrying_ = true;
  while (due()) {
    const bool weights = !weights_settled_;
    const size_t index = next_;
    lock.unlock();
    const double start = seconds_now();
    Result<double> sum = weights ? exchange_weights() : Status();
    const Status status = weights ? Status() : carry(index);
    const double seconds = seconds_now() - start;
    lock.lock();
    report_.busy_seconds += seconds;
    if (weights)
      settle_weights(std::move(sum));
    else if (status.ok())
      ++next_;
    else
      fail(status);
  }
  carrying_ = false;
  changed_.notify_all();
}

// A weight that cannot be goes into the sum as NaN, so that all ranks refuse and none waits.
Result<double> Impl::exchange_weights() {
  double sum = is_weight(*weight_) ? *weight_ : std::numeric_limits<double>::quiet_NaN();
  const Status status = comm_.all_reduce(&sum, &sum, 1, DType::f64, Op::sum).wait();
  if (!status.ok()) return Status(status.code(), "the weights of a step: " + status.message());
  return sum;
}

void Impl::settle_weights(Result<double> sum) {
  if (!sum.ok()) return fail(sum.status());
  report_.divisor = *sum;
  weights_settled_ = true;
  if (!is_weight(*weight_))
    step_failed_ =
        invalid(fmt::format("weight {}: expected a finite number that is not negative", *weight_));
  else if (!std::isfinite(*sum))
    step_failed_ = invalid("a rank gave a weight that is not finite or negative");
  else if (*sum == 0)
    step_failed_ = invalid("the weights of all ranks are 0");
  else
    share_ = *weight_ / *sum;
}

Status Impl::carry(size_t index) {
  const grad::LaidOutBucket& laid_out = buckets_[index];
  // Without data nothing counts that lies in the gradients, NaN included.
  laid_out.gather(weight_ == 0.0 ? std::span<const char>() : contributes_);
  Bucket bucket;
  bucket.index = index;
  bucket.type = laid_out.type;
  bucket.data = laid_out.data;
  bucket.count = laid_out.count;
  bucket.share = share_;
  bucket.equal = !weight_.has_value();
  bucket.layout = layout_;
  const Status status = options_.hook.average(comm_, bucket);
  if (!status.ok())
    return {status.code(), fmt::format("{}: {}", called(laid_out, index), status.message())};
  laid_out.scatter();
  return {};
}

void Impl::serve() {
  run_soon_when_woken();
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !carrying_ && (stopping_ || due()); });
    if (stopping_) return;
    carry_what_is_due(lock);
  }
}

// Rank 0's order makes the new plan, so that all have the same one; each rank judges it by its own.
Status Impl::reconsider_plan() {
  const size_t number = parameters_.size();
  const bool complete = order_.size() == number;
  std::vector<uint64_t> shared(number);
  for (size_t i = 0; i < number; ++i) shared[i] = complete ? order_[i] : i;
  if (Status status = comm_.broadcast(shared.data(), number, DType::u64, 0).wait(); !status.ok())
    return status;
  const std::vector<size_t> order(shared.begin(), shared.end());
  BucketPlan plan = plan_buckets(parameters_, options_.first_bytes, options_.bucket_bytes, order);
  std::vector<grad::LaidOutBucket> buckets = grad::lay_out(parameters_, plan);
  const bool all_callers = std::ranges::all_of(
      parameters_, [](const Parameter& p) { return p.gradient != nullptr || p.count == 0; });
  auto better = static_cast<uint8_t>(complete && all_callers && buckets.size() == plan.size() &&
                                     grad::waiting(parameters_, plan, order_) <
                                         grad::waiting(parameters_, plan_, order_) &&
                                     grad::copied_bytes(buckets) <= copied_bytes());
  if (Status status = comm_.all_reduce(&better, &better, 1, DType::u8, Op::min).wait();
      !status.ok())
    return status;
  if (better != 0) set_layout(std::move(plan), std::move(buckets));
  return {};
}

// ---- the handle -------------------------------------------------------------------------------

GradientSync::GradientSync(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GradientSync::GradientSync(GradientSync&&) noexcept = default;
GradientSync& GradientSync::operator=(GradientSync&&) noexcept = default;
GradientSync::~GradientSync() = default;

Status GradientSync::begin() {
  return impl_->begin(std::nullopt);
}
Status GradientSync::begin(double weight) {
  return impl_->begin(weight);
}
Status GradientSync::ready(size_t parameter) {
  return impl_->ready(parameter);
}
Status GradientSync::finish() {
  return impl_->finish();
}
void GradientSync::accumulate(bool on) {
  impl_->accumulate(on);
}
void* GradientSync::gradient(size_t parameter) const {
  return impl_->gradient(parameter);
}
size_t GradientSync::parameters() const {
  return impl_->parameters();
}
const BucketPlan& GradientSync::plan() const {
  return impl_->plan();
}
size_t GradientSync::copied_bytes() const {
  return impl_->copied_bytes();
}
const SyncReport& GradientSync::report() const {
  return impl_->report();
}
void GradientSync::abort(const std::string& why) {
  impl_->abort(why);
}

}  // namespace ringfold
