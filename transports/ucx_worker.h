// A UCX context with its one worker: made, described and destroyed.
#pragma once

#include <memory>
#include <string>

#include "ringfold/status.h"
#include "transports/ucx_library.h"

namespace ringfold {

// Threads: one at a time.
class UcxWorker {
 public:
  // `net_devices`: see make_ucx().
  static Result<std::unique_ptr<UcxWorker>> create(const std::string& net_devices);
  // Destroys the endpoints that are still there; does nothing in a forked child.
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  [[nodiscard]] const UcxLibrary& ucx() const { return ucx_; }
  [[nodiscard]] ucp_worker_h handle() const { return worker_; }
  [[nodiscard]] const std::string& address() const { return address_; }
  // Whether UCX itself moves device memory.
  [[nodiscard]] bool reaches_cuda() const { return reaches_cuda_; }
  // Whether TCP is all that UCX has got to reach other hosts by, and the user has not told it from
  // which length on it is to fetch messages.
  [[nodiscard]] bool prefers_eager() const { return prefers_eager_; }
  // Threads and sockets of UCX do not survive fork(): in the child nothing may call it.
  [[nodiscard]] bool forked() const;
  // A descriptor that becomes readable on news; -1: there are news already.
  [[nodiscard]] int arm();
  // The same descriptor, whether armed or not.
  [[nodiscard]] int descriptor() const { return descriptor_; }

 private:
  explicit UcxWorker(const UcxLibrary& ucx);
  Status open_context(const std::string& net_devices);
  Status open_worker();
  [[nodiscard]] bool only_tcp() const;
  Status failed(const char* what, ucs_status_t why) const;

  const UcxLibrary& ucx_;
  const unsigned forks_;  // how often the process had been forked when this was made
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int descriptor_ = -1;
  bool reaches_cuda_ = false;
  bool prefers_eager_ = false;
  std::string address_;
};

}  // namespace ringfold
