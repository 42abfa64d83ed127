// The engine's one path of failure, and who sets out on it: deadlines, departures, contradictions.
#include <algorithm>

#include "lib/engine/engine.h"
#include "lib/engine/matcher.h"

namespace ringfold {

// ---- failure: the one path --------------------------------------------------------------------

bool Engine::pending(const Channel& channel) const {
  if (channel.companion && channel.companion->pending()) return true;
  return !channel.waiting.empty() || std::ranges::any_of(running_, [&](const auto& operation) {
    return operation->channel.get() == &channel;
  });
}

void Engine::fail_channel(Channel& channel, const Status& why, bool tell) {
  if (!channel.failed.ok()) return;
  failed_any_ = true;
  channel.failed = why;
  channel.mark_failed(why);
  if (channel.record && !channel.closing) channel.record->fail(why);
  for (auto& operation : running_)
    if (operation->channel.get() == &channel) operation->execution->fail(why);
  for (auto& operation : channel.waiting) finished_.push_back({std::move(operation), why});
  channel.waiting.clear();
  if (channel.companion) channel.companion->fail(why);
  for (Transport* transport : transports_) {
    transport->cancel(channel.id, why);
    transport->cancel(channel.id | kPointToPoint, why);
  }
  if (on_failed && tell) on_failed(channel, why);
  if (channel.family == Channel::kAlone) return;
  for (size_t i = 0; i < channels_.size(); ++i)
    if (channels_[i]->family == channel.family) fail_channel(*channels_[i], why, tell);
}

// An operation met an error: who is to blame, and in which words, may take a moment to find out.
void Engine::failed_by_itself(Operation& operation) {
  const Execution& execution = *operation.execution;
  const Peer peer = execution.failed_peer();
  const auto& peers = operation.channel->peers;
  const auto from = std::ranges::find(peers, peer);
  const std::string whose =
      from == peers.end() ? "" : "from rank " + std::to_string(from - peers.begin()) + ": ";
  const bool damaged = execution.status().code() == Code::system;
  const Status why(execution.status().code(),
                   operation.text() + ": " + (damaged ? whose : "") + execution.status().message());
  if (why.code() == Code::peer_lost && peer >= 0)
    // It may have left because another rank died: whoever heard of that first says so soon.
    departures_.try_emplace(peer, Departure{clock_.now(), why, false});
  else if (why.code() == Code::mismatch && !operation.what.point_to_point && peer >= 0)
    suspect(*operation.channel, peer, operation.id.seq);
  else
    fail_channel(*operation.channel, why, true);
}

void Engine::suspect(Channel& channel, Peer peer, uint32_t seq) {
  if (!channel.failed.ok() || channel.suspected >= 0) return;
  channel.suspected = peer;
  channel.suspected_seq = seq;
  if (on_mismatch)
    on_mismatch(channel, peer, seq);
  else
    fail_channel(channel,
                 Status(Code::mismatch, recall(channel, seq) + ", but another rank differs"), true);
}

void Engine::stall(Channel& channel, const Stalled& what) {
  if (!channel.failed.ok() || channel.stalled) return;
  channel.stalled = true;
  if (on_stalled)
    on_stalled(channel, what);
  else
    fail_channel(channel, what.why, true);
}

void Engine::check_deadlines() {
  const Nanoseconds now = clock_.now();
  if (now < next_deadline_) return;
  next_deadline_ = Nanoseconds::max();
  for (auto& operation : running_) {
    if (!operation->channel->failed.ok() || operation->channel->stalled) continue;
    if (operation->deadline > now) {
      next_deadline_ = std::min(next_deadline_, operation->deadline);
      continue;
    }
    Stalled what;
    what.why = Status(Code::timeout, operation->text() + ": not done at its deadline; waiting at " +
                                         operation->execution->waiting_for());
    what.question = question_of(*operation);
    what.partner = operation->what.point_to_point ? operation->partner : -1;
    stall(*operation->channel, what);
  }
}

Engine::Question Engine::question_of(const Operation& operation) {
  return {operation.id.seq, operation.id.fingerprint, false, operation.beside};
}

Nanoseconds Engine::first_question(Nanoseconds called, size_t ranks) {
  constexpr Nanoseconds kSoon = std::chrono::milliseconds(10);
  constexpr Nanoseconds kARank = std::chrono::microseconds(100);
  return called + kSoon + static_cast<int64_t>(ranks) * kARank;
}

Nanoseconds Engine::next_question(Nanoseconds called, Nanoseconds now) {
  constexpr Nanoseconds kSeldom = std::chrono::seconds(1);
  return now + std::min(now - called, kSeldom);
}

void Engine::quiet(uint32_t channel, const Question& question, Peer peer) const {
  const auto known = find(channel);
  if (known && known->failed.ok() && on_quiet) on_quiet(*known, question, peer);
}

// Those who wait for each other may never meet in a message that contradicts one of them: a root
// that gathers and one that reduces both only listen. So whoever waits for long asks.
void Engine::check_quiet(Nanoseconds now) {
  if (now < next_quiet_) return;
  next_quiet_ = Nanoseconds::max();
  for (auto& operation : running_) {
    Operation& o = *operation;
    if (o.quiet_at == Nanoseconds(0) || !o.channel->failed.ok()) continue;
    if (o.quiet_at <= now) {
      o.quiet_at = next_question(o.called, now);
      const int rank = o.rank_at(o.execution->awaited().position);
      if (o.ready && rank >= 0)
        on_quiet(*o.channel, question_of(o), o.channel->peers[static_cast<size_t>(rank)]);
    }
    next_quiet_ = std::min(next_quiet_, o.quiet_at);
  }
}

namespace {

// Hundreds of ranks on a few cores: rank 0 may be long in telling all of them who left in order.
Nanoseconds grace_lost(const Channel& channel) {
  constexpr size_t kSoonTold = 16;
  return Engine::kGraceLost * std::max<size_t>(1, channel.peers.size() / kSoonTold);
}

}  // namespace

// A peer that died fails every communicator it belongs to. One that left in order fails only what
// waits for it, and only after a moment: what it sent before may still be on its way.
void Engine::check_departures() {
  if (departures_.empty()) return;
  const Nanoseconds now = clock_.now();
  // Rank 0 passes on who leaves in order. Once it has itself, nobody does, and whoever is gone may
  // have had no more to do here.
  const auto hub = departures_.find(0);
  const bool untold = hub != departures_.end() && hub->second.orderly;
  const auto orderly = [untold](const Departure& departure) { return departure.orderly || untold; };
  for (const auto& [peer, departure] : departures_) {
    if (orderly(departure)) continue;
    for (size_t i = 0; i < channels_.size(); ++i)
      if (now >= departure.when + grace_lost(*channels_[i]) &&
          std::ranges::find(channels_[i]->peers, peer) != channels_[i]->peers.end())
        fail_channel(*channels_[i], departure.why, true);
  }
  // Whoever was asked what it called can no longer say so.
  for (const auto& channel : channels_) {
    if (channel->suspected < 0 || !departures_.contains(channel->suspected)) continue;
    const auto who = std::ranges::find(channel->peers, channel->suspected);
    const auto rank = static_cast<int>(who - channel->peers.begin());
    fail_channel(*channel,
                 Status(Code::mismatch, recall(*channel, channel->suspected_seq) + "; rank " +
                                            std::to_string(channel->named(rank)) +
                                            " called something else, and has left since"),
                 true);
  }
  // What a companion waits for would be there already: memory has no delay.
  for (const auto& channel : channels_) {
    if (!channel->companion || !channel->companion->pending()) continue;
    for (size_t r = 0; r < channel->peers.size(); ++r) {
      const auto gone = departures_.find(channel->peers[r]);
      if (gone == departures_.end() || !orderly(gone->second)) continue;
      if (channel->companion->waits_for(static_cast<int>(r)))
        fail_channel(*channel, gone->second.why, true);
    }
  }
  for (auto& operation : running_) {
    const auto gone = std::ranges::find_if(departures_, [&](const auto& entry) {
      const Execution& execution = *operation->execution;
      return orderly(entry.second) &&
             (execution.waits_for(entry.first) || execution.failed_peer() == entry.first);
    });
    if (gone == departures_.end())
      operation->starved = Nanoseconds(0);
    else if (operation->starved == Nanoseconds(0))
      operation->starved = now;
    else if (now >= operation->starved + kGraceLeft)
      fail_channel(*operation->channel, gone->second.why, true);
  }
}

}  // namespace ringfold
