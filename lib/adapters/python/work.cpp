#include "lib/adapters/python/work.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace ringfold::python {
namespace {

// How often a waiting thread looks for signals.
constexpr double kSlice = 0.05;  // seconds

constexpr std::array<const char*, 9> kCodes = {"ok",       "invalid_argument", "unsupported",
                                               "mismatch", "timeout",          "peer_lost",
                                               "aborted",  "system",           "internal"};

// Python may only be touched with the GIL, which the library's thread, where operations end, must
// never wait for: what they used is put here until somebody comes by with it.
struct Ended {
  std::mutex lock;
  std::vector<std::vector<Buffer>*> buffers;
};
Ended& ended() {
  static auto& all = *new Ended;  // operations may end while the process exits
  return all;
}

void when_ended(void* context, ringfold_status /*status*/, const char* /*why*/) {
  {
    const std::lock_guard guard(ended().lock);
    ended().buffers.push_back(static_cast<std::vector<Buffer>*>(context));
  }
  Py_AddPendingCall(
      [](void*) {
        release_ended();
        return 0;
      },
      nullptr);
}

void look_for_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace

void release_ended() {
  std::vector<std::vector<Buffer>*> all;
  {
    const std::lock_guard guard(ended().lock);
    all.swap(ended().buffers);
  }
  for (const std::vector<Buffer>* const buffers : all) delete buffers;
}

void raise_status(ringfold_status status, const std::string& text) {
  raise(kCodes[static_cast<size_t>(status)], text);
}

void check(ringfold_status status) {
  if (status != RINGFOLD_OK) raise_status(status, ringfold_last_error());
}

namespace {

// The CUDA context of the thread that made this, for another thread to take up: a communicator
// chooses its device by it. Nothing where CUDA is not in use.
class CudaContext {
 public:
  CudaContext() {
    if (auto* const get = find<int(void**)>("cuCtxGetCurrent");
        get != nullptr && get(&context_) != 0)
      context_ = nullptr;
  }
  void enter() const {
    auto* const push = find<int(void*)>("cuCtxPushCurrent_v2");
    if (context_ != nullptr && push != nullptr) push(context_);
  }

 private:
  // Null as long as nobody has loaded the driver.
  template <class Function>
  static Function* find(const char* name) {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (driver == nullptr) return nullptr;
    auto* const found = reinterpret_cast<Function*>(dlsym(driver, name));
    dlclose(driver);  // whoever loaded it keeps it
    return found;
  }

  void* context_ = nullptr;
};

}  // namespace

ringfold_comm_t make_interruptibly(std::function<ringfold_status(ringfold_comm_t*)> make) {
  struct Made {
    std::mutex lock;
    std::condition_variable changed;
    bool over = false, unwanted = false;
    ringfold_comm_t comm = nullptr;
    ringfold_status status = RINGFOLD_OK;
    std::string why;
  };
  const auto made = std::make_shared<Made>();
  std::thread([made, make = std::move(make), context = CudaContext()] {
    context.enter();
    ringfold_comm_t comm = nullptr;
    const ringfold_status status = make(&comm);
    const std::lock_guard guard(made->lock);
    if (made->unwanted && comm != nullptr) ringfold_destroy(comm);
    made->comm = comm;
    made->status = status;
    if (status != RINGFOLD_OK) made->why = ringfold_last_error();
    made->over = true;
    made->changed.notify_all();
  }).detach();
  for (;;) {
    bool over = false;
    {
      const nb::gil_scoped_release others;
      std::unique_lock guard(made->lock);
      over = made->changed.wait_for(guard, std::chrono::duration<double>(kSlice),
                                    [&] { return made->over; });
    }
    if (over) break;
    if (PyErr_CheckSignals() == 0) continue;
    const std::lock_guard guard(made->lock);
    made->unwanted = true;
    if (made->comm != nullptr) ringfold_destroy(made->comm);
    throw nb::python_error();
  }
  if (made->status != RINGFOLD_OK) raise_status(made->status, made->why);
  return made->comm;
}

Work::Work(Work&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)),
      buffers_(std::move(other.buffers_)),
      result_(std::move(other.result_)) {}

Work::~Work() {
  if (handle_ == nullptr) return;
  if (!done()) {
    auto* const kept = new std::vector<Buffer>(std::move(buffers_));
    const nb::gil_scoped_release others;
    if (ringfold_work_then(handle_, when_ended, kept) != RINGFOLD_OK) std::terminate();
  }
  ringfold_work_free(handle_);
}

bool Work::done() {
  int is_done = 0;
  check(ringfold_work_done(handle_, &is_done));
  if (is_done != 0) buffers_.clear();
  return is_done != 0;
}

nb::object Work::wait(std::optional<double> timeout) {
  using Clock = std::chrono::steady_clock;
  const auto begun = Clock::now();
  for (;;) {
    const double left =
        timeout ? *timeout - std::chrono::duration<double>(Clock::now() - begun).count() : kSlice;
    ringfold_status status = RINGFOLD_OK;
    {
      const nb::gil_scoped_release others;
      status = ringfold_work_wait(handle_, std::clamp(left, 0.0, kSlice));
    }
    const std::string why = status == RINGFOLD_OK ? "" : ringfold_last_error();
    if (status == RINGFOLD_TIMEOUT && !done()) {
      look_for_signals();
      if (left <= kSlice && timeout) raise_status(status, why);
      continue;
    }
    buffers_.clear();
    if (status != RINGFOLD_OK) raise_status(status, why);
    return result_;
  }
}

ringfold_report Work::report() const {
  ringfold_report report;
  check(ringfold_work_report(handle_, &report));
  return report;
}

}  // namespace ringfold::python
