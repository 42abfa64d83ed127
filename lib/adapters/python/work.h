// An operation that was started from Python, and what it uses.
//
// Thread-safety: only with the GIL; waiting gives it up.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lib/adapters/python/buffer.h"
#include "ringfold/c.h"

namespace ringfold::python {

// Raises ringfold.Error with the library's text if `status` is an error of this thread's last call.
void check(ringfold_status status);
[[noreturn]] void raise_status(ringfold_status status, const std::string& text);

// Runs a call that may block for long without the GIL and so that KeyboardInterrupt ends the wait
// for it. Then, or when it comes too late, what it made is given to `discard`.
ringfold_comm_t make_interruptibly(std::function<ringfold_status(ringfold_comm_t*)> make);

class Work {
 public:
  // `result` is what wait() returns.
  Work(ringfold_work_t handle, std::vector<Buffer> buffers, nb::object result)
      : handle_(handle), buffers_(std::move(buffers)), result_(std::move(result)) {}
  ~Work();  // the operation goes on; its buffers stay until it is done
  Work(Work&& other) noexcept;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  nb::object wait(std::optional<double> timeout);
  bool done();
  [[nodiscard]] ringfold_report report() const;

 private:
  ringfold_work_t handle_;
  std::vector<Buffer> buffers_;
  nb::object result_;
};

// Lets go of the buffers of operations that ended after their Work was dropped.
void release_ended();

}  // namespace ringfold::python
