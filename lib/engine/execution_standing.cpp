// Where an execution stands, for people and for the flight recorder.
#include <algorithm>

#include "lib/engine/execution.h"

namespace ringfold {

bool Execution::waits_for(Peer peer) const {
  for (uint32_t n = retired_; n != received_; ++n) {
    const Receive& receive = receives_[n % kWindow];
    if (receive.state == State::posted && route_.peer[static_cast<size_t>(receive.from)] == peer)
      return true;
  }
  for (uint32_t n = sends_retired_; n != sends_posted_; ++n) {
    const Send& send = sends_[n % kWindow];
    if (send.state != State::done && route_.peer[static_cast<size_t>(send.to)] == peer) return true;
  }
  return false;
}

Execution::Awaited Execution::awaited() const {
  Awaited next{std::min(next_receive_.index, next_send_.index), -1, 0, false};
  for (uint32_t n = retired_; n != received_; ++n) {
    const Receive& receive = receives_[n % kWindow];
    if (n == retired_) next.step = std::min(next.step, receive.step);
    if (receive.state != State::posted) continue;
    next.position = receive.from;
    next.piece = receive.number;
    return next;
  }
  for (uint32_t n = sends_retired_; n != sends_posted_; ++n) {
    const Send& send = sends_[n % kWindow];
    if (send.state == State::done) continue;
    next.step = std::min(next.step, send.step);
    next.position = send.to;
    next.piece = send.number;
    next.sends = true;
    return next;
  }
  return next;
}

std::string Execution::waiting_for() const {
  const Awaited next = awaited();
  if (next.position < 0) return "nothing";
  return "step " + std::to_string(next.step + 1) + " of " + std::to_string(steps_) + ", piece " +
         std::to_string(next.piece) + (next.sends ? " to" : " from") + " position " +
         std::to_string(next.position);
}

}  // namespace ringfold
