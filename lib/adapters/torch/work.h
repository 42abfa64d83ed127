// A call that runs: what torch.distributed waits for, asks, and takes a future from.
//
// Thread-safety: any thread.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "call.h"

namespace ringfold::torch {

[[noreturn]] inline void fail(const std::string& why) {
  TORCH_CHECK_WITH(DistBackendError, false, "ringfold: ", why);
}
inline void check(ringfold_status status) {
  if (status != RINGFOLD_OK) fail(ringfold_last_error());
}

// Threads on which futures are completed. Callbacks of futures may wait for other operations, which
// the library's own thread must not: whenever all are busy there is one more.
class Completers {
 public:
  static Completers& all() {
    static auto& one = *new Completers;  // its threads outlive main()
    return one;
  }
  void run(std::function<void()> task) {
    const std::lock_guard guard(lock_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() > idle_) {
      std::thread([this] { work(); }).detach();
      ++idle_;
    }
    changed_.notify_one();
  }

 private:
  void work() {
    std::unique_lock guard(lock_);
    for (;;) {
      changed_.wait(guard, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      --idle_;
      guard.unlock();
      task();
      task = nullptr;  // may let go of tensors
      guard.lock();
      ++idle_;
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;  // including those that are about to take a task
};

// The operations of a call; whoever sees first that they have ended does what is left to do.
class Running {
 public:
  Running(Call call, ringfold_work_t handle, std::optional<c10::Stream> stream)
      : call_(std::move(call)), handle_(handle), stream_(stream) {
    if (!stream_) return;
    call_.copy_back();  // in the order of the stream
    event_.emplace(stream_->device_type());
    event_->record(*stream_);
  }
  ~Running() { ringfold_work_free(handle_); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  bool ended() {
    int done = 0;
    check(ringfold_work_done(handle_, &done));
    if (done == 0) return false;
    const ringfold_status status = ringfold_work_wait(handle_, 0);
    finish(status, status != RINGFOLD_OK ? ringfold_last_error() : "");
    return true;
  }
  // False: the time was over first.
  bool wait(double seconds) {
    const ringfold_status status = ringfold_work_wait(handle_, seconds);
    const std::string why = status != RINGFOLD_OK ? ringfold_last_error() : "";
    if (status == RINGFOLD_TIMEOUT) return ended();
    finish(status, why);
    return true;
  }
  // Calls `then` on a completer when the operations have ended; keeps this until then.
  static void when_ended(std::shared_ptr<Running> running, std::function<void(Running&)> then) {
    struct Kept {
      std::shared_ptr<Running> running;
      std::function<void(Running&)> then;
    };
    const ringfold_work_t handle = running->handle_;
    auto* const kept = new Kept{std::move(running), std::move(then)};
    check(ringfold_work_then(
        handle,
        [](void* context, ringfold_status status, const char* why) {
          Completers::all().run([given = std::shared_ptr<Kept>(static_cast<Kept*>(context)), status,
                                 text = std::string(why)] {
            given->running->finish(status, text);
            given->then(*given->running);
          });
        },
        kept));
  }

  [[nodiscard]] const std::string& error() const { return error_; }  // once it has ended
  [[nodiscard]] std::vector<at::Tensor>& results() { return call_.results; }
  [[nodiscard]] const std::optional<c10::Stream>& stream() const { return stream_; }
  void block_current_stream() {
    if (!stream_) return;
    const c10::impl::VirtualGuardImpl device(stream_->device_type());
    event_->block(device.getStream(stream_->device()));
  }

 private:
  void finish(ringfold_status status, const std::string& why) {
    const std::lock_guard guard(lock_);
    if (finished_) return;
    finished_ = true;
    if (status == RINGFOLD_OK) {
      call_.copy_back();
    } else {
      error_ = why;
    }
    call_.let_go();
  }

  Call call_;
  const ringfold_work_t handle_;
  const std::optional<c10::Stream> stream_;  // of device memory
  std::optional<c10::Event> event_;
  std::mutex lock_;
  bool finished_ = false;
  std::string error_;
};

class Work final : public c10d::Work {
 public:
  Work(int rank, c10d::OpType kind, std::shared_ptr<Running> running)
      : c10d::Work(rank, kind), running_(std::move(running)) {}
  // The operation goes on when nobody waits for it: its memory stays, and is copied back.
  ~Work() override {
    try {
      if (!running_->ended()) Running::when_ended(running_, [](Running&) {});
    } catch (const std::exception&) {  // the library has ended before us
    }
  }

  bool isCompleted() override { return running_->ended(); }
  bool isSuccess() const override { return running_->ended() && running_->error().empty(); }
  std::exception_ptr exception() const override {
    if (!running_->ended() || running_->error().empty()) return nullptr;
    return error_of(*running_);
  }
  std::vector<at::Tensor> result() override { return running_->results(); }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (running_->stream()) {
      synchronize();
      return true;
    }
    const double seconds = timeout <= kNoTimeout ? -1 : static_cast<double>(timeout.count()) / 1000;
    if (!running_->wait(seconds))
      fail("the wait ended after " + std::to_string(timeout.count()) +
           " ms, before the operation did; it is still running");
    if (!running_->error().empty()) fail(running_->error());
    return true;
  }
  void synchronize() override { running_->block_current_stream(); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard guard(lock_);
    if (future_) return future_;
    std::vector<at::Device> devices;
    if (running_->stream()) devices.push_back(running_->stream()->device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), devices);
    if (running_->stream()) {  // as far as the host sees: the rest is the stream's
      const c10::impl::VirtualGuardImpl device(running_->stream()->device_type());
      const c10::Stream before = device.exchangeStream(*running_->stream());
      complete(*future_, *running_);
      device.exchangeStream(before);
    } else if (running_->ended()) {
      complete(*future_, *running_);
    } else {
      Running::when_ended(running_,
                          [future = future_](Running& ended) { complete(*future, ended); });
    }
    return future_;
  }

 private:
  static std::exception_ptr error_of(const Running& ended) {
    try {
      fail(ended.error());
    } catch (...) {
      return std::current_exception();
    }
  }
  static void complete(c10::ivalue::Future& future, Running& ended) {
    if (ended.error().empty()) {
      future.markCompleted(c10::IValue(ended.results()));
    } else {
      future.setError(error_of(ended));
    }
  }

  const std::shared_ptr<Running> running_;
  std::mutex lock_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ringfold::torch
