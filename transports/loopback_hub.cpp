#include <cassert>

#include "transports/loopback_inbox.h"
#include "transports/transports.h"

namespace ringfold {

std::shared_ptr<LoopbackInbox> LoopbackHub::join(Peer me) {
  const std::lock_guard lock(mutex_);
  assert(inboxes_.count(me) == 0);
  return inboxes_[me] = std::make_shared<LoopbackInbox>();
}

std::shared_ptr<LoopbackInbox> LoopbackHub::find(Peer peer) {
  const std::lock_guard lock(mutex_);
  const auto found = inboxes_.find(peer);
  return found == inboxes_.end() ? nullptr : found->second;
}

void LoopbackHub::tell_others(Peer gone) {
  for (auto& [peer, inbox] : inboxes_)
    if (peer != gone) inbox->push(loopback::Lost{gone});
}

void LoopbackHub::leave(Peer me) {
  const std::lock_guard lock(mutex_);
  inboxes_.erase(me);
  tell_others(me);
}

void LoopbackHub::kill(Peer peer) {
  const std::lock_guard lock(mutex_);
  const auto found = inboxes_.find(peer);
  if (found == inboxes_.end() || found->second->dead.exchange(true)) return;
  tell_others(peer);
}

void LoopbackHub::mute(Peer peer) {
  if (const auto inbox = find(peer)) inbox->mute = true;
}

void LoopbackHub::corrupt_next_fingerprint(Peer peer) {
  if (const auto inbox = find(peer)) inbox->corrupt = true;
}

}  // namespace ringfold
