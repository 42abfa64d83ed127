#include "lib/sim/simulation.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "lib/engine/execution.h"

namespace ringfold {
namespace {

// A Compute of time alone.
class SimCompute final : public Compute {
 public:
  SimCompute(SimNetwork& network, Peer rank, size_t element_bytes, double gamma)
      : network_(network), rank_(rank), element_bytes_(element_bytes), gamma_(gamma) {}

  Buffer landing(const Piece& piece, int) override { return bytes_of(piece.range); }
  void consume(const Piece& piece, int, int, const void*, Completion* completion) override {
    if (piece.then == Then::reduce) return add_up(piece.range, completion);
    completion->done(completion, {});
  }
  void stage(const Piece& piece, int, Buffer* out, Completion* completion) override {
    *out = bytes_of(piece.range);
    completion->done(completion, {});
  }
  [[nodiscard]] bool stages(From) const override { return false; }
  void copy_local(Range range, Completion* completion) override { add_up(range, completion); }
  [[nodiscard]] bool in_place() const override { return false; }
  bool progress() override { return false; }  // the endpoint's progress() brings the completions

 private:
  [[nodiscard]] Buffer bytes_of(const Range& range) const {
    return {nullptr, range.count * element_bytes_};
  }
  void add_up(const Range& range, Completion* completion) {
    const size_t bytes = range.count * element_bytes_;
    const double seconds = static_cast<double>(bytes) * gamma_;
    if (seconds == 0) return completion->done(completion, {});
    network_.add_up(rank_, seconds, bytes, completion);
  }

  SimNetwork& network_;
  const Peer rank_;
  const size_t element_bytes_;
  const double gamma_;
};

class Simulation {
 public:
  Simulation(const SimulatedCall& call, const SimOptions& options, std::vector<SimSpan>* trace);
  Simulated run();

 private:
  static constexpr MessageId kOperation{1, 0, 0, 0x73696d};

  struct Rank {
    std::vector<Transport*> route;
    std::unique_ptr<Transport> transport;
    std::unique_ptr<Compute> compute;
    std::unique_ptr<Execution> execution;
    bool cancelled = false, ended = false;
  };

  void turn(Peer rank);
  void fail(Peer rank, const Status& why);
  void time_out();
  void end_stalled();

  const SimulatedCall& call_;
  SimNetwork network_;
  std::vector<Peer> peers_;
  std::vector<Rank> ranks_;
  Simulated result_;
  int running_;
};

Simulation::Simulation(const SimulatedCall& call, const SimOptions& options,
                       std::vector<SimSpan>* trace)
    : call_(call),
      network_(call.schedule.size, options),
      peers_(static_cast<size_t>(call.schedule.size)),
      ranks_(peers_.size()),
      running_(call.schedule.size) {
  if (trace != nullptr) network_.trace_into(trace);
  std::iota(peers_.begin(), peers_.end(), 0);
  result_.ranks.resize(ranks_.size());
  for (const Peer peer : peers_) {
    Rank& rank = ranks_[static_cast<size_t>(peer)];
    rank.transport = network_.endpoint(peer);
    rank.route.assign(peers_.size(), rank.transport.get());
    if (call.compute)
      rank.compute = call.compute(peer);
    else
      rank.compute =
          std::make_unique<SimCompute>(network_, peer, call.element_bytes, options.machine.gamma);
    rank.execution = std::make_unique<Execution>(call.schedule, peer, kOperation,
                                                 Execution::Route{rank.route, peers_},
                                                 *rank.compute, call.piece, call.element_bytes);
    rank.transport->open(kOperation.comm, kOperation.seq, kOperation.fingerprint);
    rank.transport->on_lost = [this, peer](Peer, const Status& why) { fail(peer, why); };
    network_.wake(peer);
  }
}

// What the engine does in its turn, for the one operation there is.
void Simulation::turn(Peer peer) {
  Rank& rank = ranks_[static_cast<size_t>(peer)];
  if (!network_.alive(peer)) fail(peer, Status(Code::peer_lost, "it died"));
  rank.transport->progress();
  if (rank.ended) return;
  Execution& execution = *rank.execution;
  execution.advance();
  if (!execution.status().ok() && !rank.cancelled) {
    rank.cancelled = true;
    rank.transport->cancel(kOperation.comm, execution.status());
  }
  if (!execution.finished()) return;
  rank.ended = true;
  --running_;
  SimulatedEnd& end = result_.ranks[static_cast<size_t>(peer)];
  end = {execution.status(), static_cast<double>(network_.now()) * 1e-12, execution.bytes_sent()};
  if (!end.status.ok())
    end.status =
        Status(end.status.code(), "rank " + std::to_string(peer) + ": " + end.status.message());
  result_.seconds = std::max(result_.seconds, end.seconds);
  result_.bytes_per_rank = std::max(result_.bytes_per_rank, end.bytes_sent);
}

// Ends the call on this rank, in its next turn.
void Simulation::fail(Peer peer, const Status& why) {
  Rank& rank = ranks_[static_cast<size_t>(peer)];
  if (rank.ended) return;
  rank.execution->fail(why);
  network_.wake(peer);
}

void Simulation::time_out() {
  for (const Peer peer : peers_) {
    if (network_.stalled(peer)) continue;  // it does not look at the clock
    const Execution& execution = *ranks_[static_cast<size_t>(peer)].execution;
    fail(peer,
         Status(Code::timeout, "not done at its deadline; waiting at " + execution.waiting_for()));
  }
}

// Nothing will ever happen any more: whoever is left stands still for ever.
void Simulation::end_stalled() {
  for (const Peer peer : peers_) {
    fail(peer, Status(Code::timeout, "it stands still for ever"));
    network_.resume(peer);
  }
}

Simulated Simulation::run() {
  const Picoseconds deadline = call_.timeout.count() * 1000;
  bool timed_out = false;
  while (running_ != 0) {
    for (Peer rank; (rank = network_.take_ready()) >= 0;) turn(rank);
    if (running_ == 0 || network_.next(timed_out ? SimNetwork::kForever : deadline)) continue;
    if (std::exchange(timed_out, true)) {
      end_stalled();
    } else {
      network_.pass_until(deadline);
      time_out();
    }
  }
  result_.events = network_.events();
  return std::move(result_);
}

}  // namespace

Simulated simulate(const SimulatedCall& call, const SimOptions& options,
                   std::vector<SimSpan>* trace) {
  return Simulation(call, options, trace).run();
}

}  // namespace ringfold
