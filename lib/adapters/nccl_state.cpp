#include "lib/adapters/nccl_state.h"

#include <algorithm>
#include <utility>

#include "lib/base/base.h"

namespace ringfold::nccl {
namespace {

constexpr int kTimeoutSince = 23000;  // older headers do not know ncclTimeout

thread_local std::string thread_error;
std::mutex process_lock;

// Never destroyed: other threads may still be calling while the process exits.
std::string& process_error() {
  static auto& text = *new std::string;
  return text;
}

}  // namespace

Registry<ncclComm_t, CommPointer>& comms() {
  static auto& registry = *new Registry<ncclComm_t, CommPointer>("communicator");
  return registry;
}

// ---- errors -----------------------------------------------------------------------------------

Status invalid(std::string message) {
  return {Code::invalid_argument, std::move(message)};
}

Status usage(std::string message) {
  return {Code::unsupported, std::move(message)};
}

Status null_argument(const char* name) {
  return invalid(fmt::format("{} is null", name));
}

Result<int> reported_version() {
  const auto wanted = setting_integer("RINGFOLD_NCCL_VERSION");
  if (!wanted.ok()) return wanted.status();
  const int64_t version = wanted->value_or(kVersion);
  if (version < 20000 || version > 99999)
    return invalid(
        fmt::format("RINGFOLD_NCCL_VERSION={}: expected a version of NCCL as its header "
                    "gives it, five digits: {} is 2.32.3",
                    version, kVersion));
  return static_cast<int>(version);
}

ncclResult_t number_of(const Status& status) {
  switch (status.code()) {
    case Code::ok:
      return ncclSuccess;
    case Code::invalid_argument:
      return ncclInvalidArgument;
    case Code::unsupported:
    case Code::mismatch:
      return ncclInvalidUsage;
    case Code::timeout: {
      const auto version = reported_version();
      return !version.ok() || *version >= kTimeoutSince ? ncclTimeout : ncclRemoteError;
    }
    case Code::peer_lost:
    case Code::aborted:
      return ncclRemoteError;
    case Code::system:  // there is no code of its own for CUDA's errors: the text tells
      return status.message().find("CUDA error") != std::string::npos ? ncclUnhandledCudaError
                                                                      : ncclSystemError;
    case Code::internal:
      return ncclInternalError;
  }
  return ncclInternalError;
}

ncclResult_t answer(const Status& status, Comm* comm) {
  if (status.ok()) return ncclSuccess;
  thread_error = status.to_string();
  if (comm != nullptr) comm->note(thread_error);
  {
    const std::lock_guard guard(process_lock);
    process_error() = thread_error;
  }
  log_line(LogLevel::warn, "libnccl: " + thread_error);
  return number_of(status);
}

std::string latest_error() {
  if (!thread_error.empty()) return thread_error;
  const std::lock_guard guard(process_lock);
  return process_error();
}

// ---- a communicator ---------------------------------------------------------------------------

void Comm::note(const std::string& text) {
  const std::lock_guard guard(lock);
  last_error_ = text;
}

std::string Comm::last_error() {
  const std::lock_guard guard(lock);
  if (!last_error_.empty()) return last_error_;
  const Status health = failure_.ok() && communicator_.valid() ? communicator_.health() : failure_;
  return health.ok() ? "" : health.to_string();
}

void Comm::finish(Result<Communicator> made) {
  Communicator to_abort;
  {
    const std::lock_guard guard(lock);
    if (made.ok())
      communicator_ = *made;
    else if (failure_.ok())
      failure_ = made.status();
    if (aborted_) to_abort = communicator_;
  }
  if (to_abort.valid()) to_abort.abort("aborted while it was made");
}

void Comm::begin_job() {
  const std::lock_guard guard(lock);
  ++jobs_;
}

void Comm::end_job(const Status& status) {
  const std::lock_guard guard(lock);
  --jobs_;
  if (!status.ok() && failure_.ok()) failure_ = status;
}

void Comm::add(Work work) {
  const std::lock_guard guard(lock);
  works_.push_back(std::move(work));
}

void Comm::launched(Work work) {
  const std::lock_guard guard(lock);
  while (!launched_.empty() && launched_.front().done()) launched_.pop_front();
  launched_.push_back(std::move(work));
}

Status Comm::health() {
  const std::lock_guard guard(lock);
  if (!failure_.ok() || !communicator_.valid()) return failure_;
  return communicator_.health();
}

// Also gathers how the operations ended that are over. REQUIRES the lock.
bool Comm::running_locked() {
  std::erase_if(works_, [this](Work& work) {
    if (!work.done()) return false;
    const Status ended = work.wait();
    if (!ended.ok() && failure_.ok()) failure_ = ended;
    return true;
  });
  return jobs_ > 0 || !works_.empty();
}

Result<Communicator> Comm::ready() {
  const std::lock_guard guard(lock);
  if (aborted_) return Status(Code::aborted, "this communicator was aborted");
  if (revoked_) return usage("this communicator was revoked: only destroy, abort or shrink it");
  if (finalized_) return usage("this communicator was finalized: only destroy or abort it");
  if (running_locked())
    return invalid(
        "the previous call on this communicator is still in progress: wait until "
        "ncclCommGetAsyncError no longer says ncclInProgress");
  if (!failure_.ok()) return failure_;
  return communicator_;
}

Result<Communicator> Comm::whatever_failed() {
  const std::lock_guard guard(lock);
  if (aborted_) return Status(Code::aborted, "this communicator was aborted");
  if (!communicator_.valid() && failure_.ok()) return invalid("this communicator is not made yet");
  if (!communicator_.valid()) return failure_;
  return communicator_;
}

std::optional<Status> Comm::progress() {
  const std::lock_guard guard(lock);
  if (running_locked()) return std::nullopt;
  if (revoked_) return Status();
  if (failure_.ok() && communicator_.valid()) return communicator_.health();
  return failure_;
}

void Comm::abort(const std::string& why) {
  Communicator communicator;
  {
    const std::lock_guard guard(lock);
    aborted_ = true;
    communicator = communicator_;
  }
  if (communicator.valid()) communicator.abort(why);
}

void Comm::revoke() {
  Communicator communicator;
  {
    const std::lock_guard guard(lock);
    revoked_ = true;
    communicator = communicator_;
  }
  if (communicator.valid()) communicator.abort("the communicator was revoked");
}

Status Comm::finalize() {
  std::vector<Work> works;
  {
    const std::lock_guard guard(lock);
    if (revoked_) return invalid("a revoked communicator cannot be finalized");
    if (finalized_) return invalid("this communicator was finalized already");
    finalized_ = true;
    works = works_;
    works.insert(works.end(), launched_.begin(), launched_.end());
  }
  Status first;
  for (Work& work : works)
    if (const Status ended = work.wait(); !ended.ok() && first.ok()) first = ended;
  return first;
}

void Comm::release() {
  std::vector<Work> works;
  Communicator communicator;
  {
    const std::lock_guard guard(lock);
    works.swap(works_);
    works.insert(works.end(), launched_.begin(), launched_.end());
    launched_.clear();
    std::swap(communicator, communicator_);
    aborted_ = true;  // what still comes, comes too late
  }
  for (Work& work : works) (void)work.wait();
}

}  // namespace ringfold::nccl
