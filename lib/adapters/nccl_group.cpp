// The group of a thread: what is called inside is checked at once and starts with the outermost
// ncclGroupEnd.
#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include "lib/adapters/nccl_state.h"

namespace ringfold::nccl {
namespace {

struct Started {
  CommPointer comm;
  Work work;
  bool for_device = false;
};

struct OpenGroup {
  // What the library keeps for groups on this thread must outlive `operations`.
  OpenGroup() { const Group first; }

  int depth = 0;
  Status error;  // the first
  std::vector<Job> jobs;
  std::unique_ptr<Group> operations;
  std::vector<Started> started;
  std::vector<std::function<Status()>> before;

  [[nodiscard]] bool blocks() const {
    return std::ranges::all_of(jobs, [](const Job& job) { return job.target->blocking; }) &&
           std::ranges::all_of(started, [](const Started& s) { return s.comm->blocking; });
  }
  [[nodiscard]] bool mixed() const {
    return !blocks() &&
           (std::ranges::any_of(jobs, [](const Job& job) { return job.target->blocking; }) ||
            std::ranges::any_of(started, [](const Started& s) { return s.comm->blocking; }));
  }
};

OpenGroup& group() {
  thread_local OpenGroup open;
  return open;
}

// Takes everything out of the group and closes it.
OpenGroup close_group() {
  OpenGroup closed = std::move(group());
  group() = OpenGroup();
  closed.depth = 0;
  return closed;
}

Status run(const Job& job) {
  Status status = job.run();
  if (status.ok()) return status;
  if (!job.target->blocking || job.out == nullptr) return status;
  if (*job.out != nullptr) (void)comms().remove(*job.out);
  *job.out = nullptr;
  return status;
}

// The jobs that must follow one another, in their order.
std::vector<std::vector<Job>> in_order(std::vector<Job> jobs) {
  std::vector<std::vector<Job>> rows;
  for (Job& job : jobs) {
    const auto row = std::ranges::find_if(
        rows, [&](const std::vector<Job>& known) { return known.front().order == job.order; });
    if (row == rows.end())
      rows.emplace_back().push_back(std::move(job));
    else
      row->push_back(std::move(job));
  }
  return rows;
}

Status run_jobs(std::vector<Job> jobs) {
  std::mutex lock;
  Status first;
  std::vector<std::thread> threads;
  for (std::vector<Job>& row : in_order(std::move(jobs)))
    threads.emplace_back([&lock, &first, row = std::move(row)] {
      for (const Job& job : row) {
        const Status status = run(job);
        const std::lock_guard guard(lock);
        if (!status.ok() && first.ok()) first = status;
        if (!status.ok()) job.target->note(status.to_string());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return first;
}

// Leaves the jobs to threads; their communicators are in progress until then.
void run_detached(std::vector<Job> jobs) {
  for (std::vector<Job>& row : in_order(std::move(jobs))) {
    for (const Job& job : row) {
      job.target->begin_job();
      if (job.order != job.target) job.order->begin_job();
    }
    std::thread([row = std::move(row)] {
      for (const Job& job : row) {
        const Status status = run(job);
        if (!status.ok()) job.target->note(status.to_string());
        job.target->end_job(status);
        if (job.order != job.target) job.order->end_job(Status());
      }
    }).detach();
  }
}

// Leaves what is on streams to them. What is known already to have gone wrong is the first error.
Status hand_to_streams(std::vector<Started>& started) {
  Status first;
  for (Started& one : started) {
    if (!one.for_device) continue;
    Status status = one.work.done() ? one.work.wait() : one.comm->health();
    one.comm->launched(std::move(one.work));
    if (!status.ok()) one.comm->note(status.to_string());
    if (first.ok()) first = std::move(status);
  }
  std::erase_if(started, [](const Started& one) { return one.for_device; });
  return first;
}

// Waits for all; the first error, which is also told to its communicator.
Status wait_for(std::vector<Started>& started) {
  Status first;
  for (Started& one : started) {
    const Status status = one.work.wait();
    if (status.ok()) continue;
    one.comm->note(status.to_string());
    if (first.ok()) first = status;
  }
  return first;
}

// Non-blocking: what is over needs no second look.
ncclResult_t leave_running(std::vector<Started>& started, bool jobs) {
  bool running = jobs;
  for (Started& one : started) {
    running |= !one.work.done();
    one.comm->add(std::move(one.work));
  }
  if (running) return ncclInProgress;
  for (Started& one : started) {
    const auto status = one.comm->progress();
    if (status && !status->ok()) return answer(*status, one.comm.get());
  }
  return ncclSuccess;
}

}  // namespace

ncclResult_t group_start() {
  OpenGroup& open = group();
  if (open.depth++ == 0) open.operations = std::make_unique<Group>();
  return ncclSuccess;
}

ncclResult_t group_end() {
  OpenGroup& open = group();
  if (open.depth == 0)
    return answer(
        usage("ncclGroupEnd: no group is open on this thread: ncclGroupStart comes first"));
  if (open.depth > 1) {
    --open.depth;
    return ncclSuccess;
  }
  if (open.error.ok() && open.mixed())
    open.error = invalid("a group holds blocking and non-blocking communicators: one or the other");
  if (const Status wrong = std::exchange(open.error, Status()); !wrong.ok())
    return group_discard(wrong);
  OpenGroup all = close_group();
  const bool blocks = all.blocks();
  const bool jobs = !all.jobs.empty();
  if (!blocks) {
    run_detached(std::move(all.jobs));
  } else if (const Status made = run_jobs(std::move(all.jobs)); !made.ok()) {
    return answer(made);
  }
  for (const auto& f : all.before)
    if (const Status status = f(); !status.ok()) return answer(status);
  (void)all.operations->submit();
  const Status launched = hand_to_streams(all.started);
  if (!blocks) {
    const ncclResult_t running = leave_running(all.started, jobs);
    return launched.ok() ? running : answer(launched);
  }
  const Status waited = wait_for(all.started);
  return answer(launched.ok() ? waited : launched);
}

// Nothing of the group is started; communicators that it would have made are not.
ncclResult_t group_discard(const Status& why) {
  OpenGroup all = close_group();
  for (const Job& job : all.jobs) {
    if (job.out == nullptr) continue;
    if (*job.out != nullptr) (void)comms().remove(*job.out);
    *job.out = nullptr;
  }
  return answer(why);
}

ncclResult_t submit(Job job) {
  OpenGroup& open = group();
  if (open.depth > 0) {
    open.jobs.push_back(std::move(job));
    return ncclSuccess;
  }
  if (!job.target->blocking) {
    run_detached({std::move(job)});
    return ncclInProgress;
  }
  const CommPointer target = job.target;
  return answer(run(job), target.get());
}

ncclResult_t start(const Start& start) {
  Comm* const comm = start.comm.get();
  auto communicator = comm->ready();
  if (!communicator.ok()) return refuse(communicator.status(), comm);
  OpenGroup& open = group();
  if (open.depth == 0 && start.before)
    if (const Status status = start.before(); !status.ok()) return answer(status, comm);
  std::optional<InPlace> in;
  if (start.for_device) in.emplace(comm->place);
  std::vector<Started> one = {{start.comm, start.begin(*communicator), start.for_device}};
  if (open.depth == 0) {
    if (const Status launched = hand_to_streams(one); !launched.ok()) return answer(launched, comm);
    return comm->blocking ? answer(wait_for(one), comm) : leave_running(one, false);
  }
  if (Work& work = one.front().work; work.done())
    if (const Status wrong = work.wait(); !wrong.ok()) return refuse(wrong, comm);
  if (start.before) open.before.push_back(start.before);
  open.started.push_back(std::move(one.front()));
  return ncclSuccess;
}

ncclResult_t refuse(const Status& why, Comm* comm) {
  OpenGroup& open = group();
  if (open.depth > 0 && open.error.ok()) open.error = why;
  return answer(why, comm);
}

}  // namespace ringfold::nccl
