// What the two halves of the C interface share: handles, errors, and the two forms of a call.
// Thread-safety: any thread.
#pragma once

#include <fmt/core.h>

#include <string>
#include <utility>

#include "lib/adapters/registry.h"
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

// Never destroyed: other threads may still be calling while the process exits.
using Communicators = Registry<ringfold_comm_t, Communicator>;
inline Communicators& communicators() {
  static auto& registry = *new Communicators("communicator");
  return registry;
}
using Works = Registry<ringfold_work_t, Work>;
inline Works& works() {
  static auto& registry = *new Works("work");
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
  const Communicators::Use found(communicators(), comm);
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
    const Status ended = started.wait(Nanoseconds(0));
    if (!ended.ok()) return answer(ended);
  }
  *work = works().add(std::move(started));
  return RINGFOLD_OK;
}

}  // namespace ringfold::c
