// A communicator of one rank: no engine, no thread, no other memory.
#include "lib/comm/communicator_impl.h"

namespace ringfold {

// One rank: only the local steps are left of a schedule.
void Communicator::Impl::run_alone(Work::State& state, const Call& call) {
  if (cuda::is_ordered(call.send, call.recv, call.stream))
    return state.complete(run_alone_on_device(state.schedule, call));
  static SlotPool unused;
  HostCompute compute(state.schedule, 0, call.send, call.recv, call.type, arithmetic(call), 1,
                      unused);
  Completion ignored;
  ignored.done = [](Completion*, const Status&) noexcept {};
  for (int i = 0; i < step_count(state.schedule); ++i)
    compute.copy_local(step(state.schedule, 0, i).recv, &ignored);
  const Nanoseconds now = steady_clock().now();
  state.report.measured_seconds = std::chrono::duration<double>(now - state.started).count();
  record_alone(state, call, now);
  state.complete(Status());
}

void Communicator::Impl::record_alone(const Work::State& state, const Call& call, Nanoseconds now) {
  record::What what;
  what.collective = call.collective;
  what.algorithm = state.schedule.algorithm;
  what.type = call.type;
  what.op = call.reduction.op;
  what.whom = call.root;
  what.count = call.count;
  what.steps = step_count(state.schedule);
  record::Lane& lane = record_->messages();
  const std::lock_guard lock(self_lock_);  // any thread may call
  lane.called.store(alone_calls_ + 1, std::memory_order_relaxed);
  record::Entry& entry =
      record::begin(lane, what, alone_calls_++, record::State::running, state.started);
  record::end(lane, entry, true, now);
  if (!settled_.trace) return;
  const Description described{state.schedule, call.type, call.reduction.op, 1, false};
  settled_.trace->write(
      {0, alone_calls_ - 1, described.text(), "self", state.started, now, 0, "ok", {}});
}

// Done means here that it is on the stream.
Status Communicator::Impl::run_alone_on_device(const Schedule& schedule, const Call& call) {
  const size_t element = size_of(call.type);
  double factor = 1.0;
  if (call.reduction.op == Op::premul_sum) {
    factor = call.reduction.factor;
    if (const void* on_stream = call.reduction.factor_on_stream; on_stream != nullptr) {
      const auto read = cuda::wait_for_factor(on_stream, call.type, call.stream);
      if (!read.ok()) return read.status();
      factor = *read;
    }
  }
  for (int i = 0; i < step_count(schedule); ++i) {
    const Range range = step(schedule, 0, i).recv;  // of frames that begin at 0
    const size_t offset = range.begin * element;
    if (Status status = cuda::enqueue_copy(static_cast<const std::byte*>(call.send) + offset,
                                           static_cast<std::byte*>(call.recv) + offset, range.count,
                                           call.type, factor, call.stream);
        !status.ok())
      return status;
  }
  return {};
}

}  // namespace ringfold
