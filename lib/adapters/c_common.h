// What the two halves of the C interface share: handles, errors, and the two forms of a call.
// Thread-safety: any thread.
#pragma once

#include <fmt/core.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "lib/comm/work.h"
#include "ringfold/c.h"
#include "ringfold/communicator.h"

namespace ringfold::c {

inline thread_local std::string last_error;

// The code of `status` for C; its text is kept for ringfold_last_error().
inline ringfold_status answer(const Status& status) {
  if (!status.ok()) last_error = status.message();
  return static_cast<ringfold_status>(status.code());
}

inline Status invalid(std::string message) {
  return Status(Code::invalid_argument, std::move(message));
}

inline Status null_pointer(const char* argument) {
  return invalid(fmt::format("{} is null", argument));
}

// The live handles of one kind. A handle is a running number, not an address, so that one that has
// been given up never becomes valid again.
template <class Handle, class T>
class Registry {
 public:
  explicit Registry(const char* kind) : kind_(kind) {}

  Handle add(T object) {
    const std::lock_guard lock(mutex_);
    const Handle handle = reinterpret_cast<Handle>(++latest_);  // NOLINT(performance-no-int-to-ptr)
    live_.emplace(handle, std::move(object));
    return handle;
  }
  // A copy: it stays usable when another thread gives the handle up meanwhile.
  Result<T> find(Handle handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(handle);
    if (found == live_.end()) return unknown(handle);
    return found->second;
  }
  Status remove(Handle handle) {
    std::unique_lock lock(mutex_);
    auto node = live_.extract(handle);
    lock.unlock();  // the object may take a while to end
    return node.empty() ? unknown(handle) : Status();
  }

 private:
  Status unknown(Handle handle) const {
    if (handle == nullptr) return invalid(fmt::format("the {} handle is null", kind_));
    return invalid(fmt::format("{0} handle {1} is not live: it was given up already or never made",
                               kind_, reinterpret_cast<uintptr_t>(handle)));
  }

  const char* kind_;
  mutable std::mutex mutex_;
  uintptr_t latest_ = 0;
  std::unordered_map<Handle, T> live_;
};

// Never destroyed: other threads may still be calling while the process exits.
inline Registry<ringfold_comm_t, Communicator>& communicators() {
  static auto& registry = *new Registry<ringfold_comm_t, Communicator>("communicator");
  return registry;
}
inline Registry<ringfold_work_t, Work>& works() {
  static auto& registry = *new Registry<ringfold_work_t, Work>("work");
  return registry;
}

// Groups that are open on this thread.
inline thread_local int open_groups = 0;

inline Status may_block() {
  if (open_groups == 0) return {};
  return invalid(
      "a blocking call inside a group would wait for itself: use the _async form, or end the "
      "group first");
}

// A type number of the caller.
inline Result<DType> to_dtype(ringfold_dtype type) {
  if (type >= 0 && type < kDTypes) return static_cast<DType>(type);
  return invalid(fmt::format("type is {}, accepted are 0 ({}) to {} ({})", type,
                             kDTypeNames.front(), kDTypes - 1, kDTypeNames.back()));
}

// Calls `call` with the communicator.
template <class Call>
Status with(ringfold_comm_t comm, Call call) {
  Result<Communicator> found = communicators().find(comm);
  return found.ok() ? call(*found) : found.status();
}

// The two forms of every operation; `begin` starts it.
template <class Begin>
ringfold_status blocking(Begin begin) {
  const Status may = may_block();
  will_wait_at_once();
  return answer(may.ok() ? begin().wait() : may);
}
template <class Begin>
ringfold_status async(ringfold_work_t* work, Begin begin) {
  if (work == nullptr) return answer(null_pointer("work"));
  *work = nullptr;
  Work started = begin();
  if (started.done()) {
    const Status ended = started.wait();
    if (!ended.ok()) return answer(ended);
  }
  *work = works().add(std::move(started));
  return RINGFOLD_OK;
}

}  // namespace ringfold::c
