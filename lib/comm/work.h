// The state behind a Work, and the operations that end in one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/comm/world.h"
#include "ringfold/communicator.h"

namespace ringfold {

// Threads: any.
struct Work::State {
  explicit State(std::shared_ptr<World> w = nullptr) : world(std::move(w)) {}

  void complete(const Status& why);
  [[nodiscard]] bool is_done();
  void poll_region();
  Status wait(Nanoseconds timeout);
  Status outcome();
  void then(std::function<void(const Status&)> f);

  std::atomic<bool> done{false};
  std::mutex lock;  // guards what follows
  std::condition_variable finished;
  // A message to oneself has no engine that watches its deadline: whoever asks for it ends it then.
  Nanoseconds deadline = Nanoseconds::max();
  std::function<void()> expire;
  std::shared_ptr<World> world;            // to help it along while waiting; null once done
  std::shared_ptr<region::Region> region;  // the same, for an operation of a region
  std::shared_ptr<record::Record> record;  // counts the waiting; null: nobody does
  Status status;
  std::vector<std::function<void(const Status&)>> callbacks;
  Report report;
  Nanoseconds started{}, returned{};  // `returned`: from the call, if that took a while
  // What report() works out when it is asked.
  Schedule schedule;
  int position = 0;
  size_t element_bytes = 0;  // 0: there is nothing to work out
};

// Operations of a communicator that are not over yet. The communicator waits for none to be left.
struct Pending {
  std::atomic<int> count{0};
};

// An operation of a user, from the call to the end of its Work.
class UserOperation final : public Operation {
 public:
  UserOperation(std::shared_ptr<Work::State> state, std::shared_ptr<Pending> pending)
      : state_(std::move(state)), pending_(std::move(pending)) {
    pending_->count.fetch_add(1);
  }
  ~UserOperation() override;
  void completed(const Status& status) noexcept override;
  [[nodiscard]] const std::shared_ptr<Work::State>& state() const { return state_; }

  std::shared_ptr<region::Region> region;  // runs it; null: the engine
  // Its buffers in a region, where the library allocated them: not to be freed meanwhile.
  std::shared_ptr<region::Memory> send, recv;

 private:
  std::shared_ptr<Work::State> state_;
  std::shared_ptr<Pending> pending_;
};

// Hands an operation to its engine, or to the group that this thread has open; a group keeps the
// communicator until it is over.
void start_or_group(std::shared_ptr<Communicator::Impl> communicator,
                    std::unique_ptr<UserOperation> operation);
// The same for what needs no engine (one rank): runs now, or when the group is submitted.
void run_or_group(std::shared_ptr<Communicator::Impl> communicator,
                  std::shared_ptr<Work::State> state, std::function<void()> run);
// True while a group of this thread holds calls back.
[[nodiscard]] bool group_open();
// Whether this thread waited for its latest operation at once, and so may for the next; asking
// forgets it.
[[nodiscard]] bool take_waits_at_once();
void will_wait_at_once();
// True while this thread runs a callback of Work::then: it must not wait for anything.
[[nodiscard]] bool in_callback();

}  // namespace ringfold
