#include "lib/comm/two_level.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "kernels/reduce.h"

namespace ringfold {
namespace {

// Below, the steps inside the hosts cost more than they spare on the links.
constexpr size_t kLeastBytes = size_t{64} << 10;
constexpr size_t kSegmentBytes = size_t{1} << 20;
constexpr size_t kLeastSegment = size_t{128} << 10;
constexpr int kMostSegments = 64;
constexpr int kAhead = 4;  // segments that are on the links at once

int segments_of(const Call& call) {
  const size_t bytes = call.count * size_of(call.type);
  const size_t few = std::clamp<size_t>(bytes / kLeastSegment, 1, kAhead);
  return static_cast<int>(std::clamp<size_t>(bytes / kSegmentBytes, few, kMostSegments));
}

// data[i] / ranks, as the average of so many ranks whose sum it is.
void divide(std::byte* data, size_t count, DType type, int ranks) {
  alignas(64) static constexpr std::array<std::byte, 4096> kZeros{};
  const size_t block = kZeros.size() / size_of(type);
  for (size_t done = 0; done < count; done += block) {
    ReduceCall call;
    call.dtype = type;
    call.op = Op::avg;
    call.a = call.out = data + done * size_of(type);
    call.b = kZeros.data();
    call.count = std::min(block, count - done);
    call.count_a = ranks - 1;
    call.total = ranks;
    reduce_host(call);
  }
}

// One operation of those that carry out `whole`; `number` tells them apart.
Call part_of(const Call& whole, int number, Call part) {
  part.stands_for = whole.count;
  part.part = static_cast<size_t>(number);
  return part;
}

}  // namespace

// A call of the user on its way.
struct TwoLevel::Running {
  Running(const Call& c, std::shared_ptr<Work::State> s, int many, int shards)
      : call(c), state(std::move(s)), segments(many), left(many * shards + 1) {
    reduced.resize(static_cast<size_t>(segments), false);
    crossed.resize(static_cast<size_t>(segments), false);
  }

  [[nodiscard]] Range range(int segment, int shard, int shards) const {
    const size_t grain = std::max<size_t>(1, 64 / size_of(call.type));
    const Range all =
        part(call.count, static_cast<size_t>(segments), static_cast<size_t>(segment), grain);
    const Range own =
        part(all.count, static_cast<size_t>(shards), static_cast<size_t>(shard), grain);
    return {all.begin + own.begin, own.count};
  }
  // So many of what is left are over; a failure ends it all.
  void finished(const Status& status, int operations) {
    if (!status.ok()) {
      if (!failed.exchange(true)) complete(status);
    } else if (left.fetch_sub(operations) == operations && !failed.load()) {
      complete(Status());
    }
  }
  void complete(const Status& status) {
    {
      const std::lock_guard guard(state->lock);
      state->report.bytes_sent = bytes_sent.load();
      state->report.measured_seconds =
          std::chrono::duration<double>(steady_clock().now() - state->started).count();
    }
    state->complete(status);
  }

  const Call call;
  const std::shared_ptr<Work::State> state;
  const int segments;
  std::atomic<int> left;            // broadcasts that are not over, and the comparison
  std::atomic<bool> failed{false};  // the Work has been told
  std::atomic<uint64_t> bytes_sent{0};
  // By segment, under lock_: my host's sum of my shard is there; its ring is through.
  std::vector<bool> reduced, crossed;
};

bool TwoLevel::suits(const Call& call) {
  if (call.collective != Collective::all_reduce || call.count * size_of(call.type) < kLeastBytes)
    return false;
  // The sum of small floats may be out of their range where the average is not.
  return call.reduction.op != Op::avg || size_of(call.type) >= 4 || !is_float(call.type);
}

double TwoLevel::predict(const Call& call, int hosts, const Machine& machine) {
  const auto bytes = static_cast<double>(call.count * size_of(call.type));
  return predict_by_hosts(hosts, bytes, bytes / segments_of(call), machine);
}

void TwoLevel::start(const Call& call, std::shared_ptr<Work::State> state, Work::State& compared) {
  const int segments = segments_of(call);
  auto running = std::make_shared<Running>(call, std::move(state), segments, shards_);
  {
    const std::lock_guard guard(lock_);
    const auto add = [&](bool hands_out, int segment) {
      if (segment < 0 || segment >= segments) return;
      for (int shard = 0; shard < shards_; ++shard)
        queue_.push_back({running, hands_out, segment, shard});
    };
    for (int segment = 0; segment < segments + kAhead; ++segment) {
      add(false, segment);
      add(true, segment - kAhead);
    }
    for (int segment = 0; across_ && segment < segments; ++segment)
      crossings_.push_back({running, segment});
  }
  pump();
  compared.then([running](const Status& status) { running->finished(status, 1); });
}

bool TwoLevel::may_start(const Entry& entry) const {
  const int mine = local_ ? local_->rank() : 0;
  return !entry.hands_out || entry.shard != mine || entry.call->failed.load() ||
         entry.call->crossed[static_cast<size_t>(entry.segment)];
}

bool TwoLevel::may_start(const Crossing& crossing) {
  return crossing.call->failed.load() ||
         crossing.call->reduced[static_cast<size_t>(crossing.segment)];
}

template <class Waiting>
void TwoLevel::begin_those_that_may(std::deque<Waiting>& waiting,
                                    std::unique_lock<std::mutex>& guard) {
  while (!waiting.empty() && may_start(waiting.front())) {
    const Waiting next = std::move(waiting.front());
    waiting.pop_front();
    guard.unlock();
    begin(next);
    guard.lock();
  }
}

// Starts what is next, as long as it may. Callbacks of what is over at once come back here.
void TwoLevel::pump() {
  std::unique_lock guard(lock_);
  more_ = true;
  if (pumping_) return;
  pumping_ = true;
  while (std::exchange(more_, false)) {
    begin_those_that_may(queue_, guard);
    begin_those_that_may(crossings_, guard);
  }
  pumping_ = false;
}

void TwoLevel::begin(const Entry& entry) {
  const auto running = entry.call;
  if (running->failed.load()) return;  // the communicators inside have failed with it
  const Call& call = running->call;
  const size_t element = size_of(call.type);
  const Range range = running->range(entry.segment, entry.shard, shards_);
  auto* const recv = static_cast<std::byte*>(call.recv) + range.begin * element;
  const auto* const send = static_cast<const std::byte*>(call.send) + range.begin * element;
  const bool mine = entry.shard == (local_ ? local_->rank() : 0);
  const int number = entry.segment * shards_ + entry.shard;
  const auto keep = shared_from_this();
  if (entry.hands_out) {
    const auto done = [keep, running](const Status& status) { running->finished(status, 1); };
    if (!local_) return done(Status());
    local_
        ->collective(part_of(
            call, number,
            {Collective::broadcast, recv, recv, range.count, call.type, Reduction(), entry.shard}))
        .then(done);
    return;
  }
  Reduction inside = call.reduction;
  if (inside.op == Op::avg) inside = Reduction(Op::sum);
  const int segment = entry.segment;
  const auto done = [keep, running, segment, mine](const Status& status) {
    if (!status.ok())
      running->finished(status, 0);
    else if (mine)
      keep->reduced(running, segment);
  };
  if (local_) {
    local_
        ->collective(part_of(call, number,
                             {Collective::reduce, send, mine ? recv : nullptr, range.count,
                              call.type, inside, entry.shard}))
        .then(done);
    return;
  }
  scale_host(call.type, send, recv, range.count, inside.op == Op::premul_sum ? inside.factor : 1.0);
  done(Status());
}

// My host's sum of my shard is there. Of several segments the news may come in any order.
void TwoLevel::reduced(const std::shared_ptr<Running>& running, int segment) {
  {
    const std::lock_guard guard(lock_);
    running->reduced[static_cast<size_t>(segment)] = true;
  }
  pump();
}

void TwoLevel::begin(const Crossing& crossing) {
  const auto& [running, segment] = crossing;
  if (running->failed.load()) return;
  const Call& call = running->call;
  const Range range = running->range(segment, local_ ? local_->rank() : 0, shards_);
  auto* const data = static_cast<std::byte*>(call.recv) + range.begin * size_of(call.type);
  Op op = call.reduction.op;
  if (op == Op::avg || op == Op::premul_sum) op = Op::sum;
  Work ring = across_->collective(part_of(
      call, segment, {Collective::all_reduce, data, data, range.count, call.type, Reduction(op)}));
  ring.then([keep = shared_from_this(), running = running, segment = segment, data, ring,
             count = range.count](const Status& status) {
    if (!status.ok()) return running->finished(status, 0);
    running->bytes_sent += ring.report().bytes_sent;
    if (running->call.reduction.op == Op::avg)
      divide(data, count, running->call.type, keep->ranks_);
    keep->crossed(running, segment);
  });
}

void TwoLevel::crossed(const std::shared_ptr<Running>& running, int segment) {
  {
    const std::lock_guard guard(lock_);
    running->crossed[static_cast<size_t>(segment)] = true;
  }
  pump();
}

std::string TwoLevel::transport() const {
  std::string inside = local_ ? local_->transport() : "";
  if (!across_) return inside;
  return inside + (inside.empty() ? "" : "+") + across_->transport();
}

uint64_t TwoLevel::bytes_across(const Call& call, int hosts) const {
  if (!across_) return 0;
  const auto shard = static_cast<double>(call.count * size_of(call.type)) / shards_;
  return static_cast<uint64_t>(bus_factor(Collective::all_reduce, hosts) * shard);
}

}  // namespace ringfold
