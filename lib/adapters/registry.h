// The live handles of one kind. A handle is a running number, not an address, so that one that has
// been given up never becomes valid again.
//
// Thread-safety: any thread.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "ringfold/status.h"

namespace ringfold {

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
    if (handle == nullptr)
      return {Code::invalid_argument, fmt::format("the {} handle is null", kind_)};
    return {Code::invalid_argument,
            fmt::format("{0} handle {1} is not live: it was given up already or never made", kind_,
                        reinterpret_cast<uintptr_t>(handle))};
  }

  const char* kind_;
  mutable std::mutex mutex_;
  uintptr_t latest_ = 0;
  std::unordered_map<Handle, T> live_;
};

}  // namespace ringfold
