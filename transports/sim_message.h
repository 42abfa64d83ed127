// One message of the simulated network, from send() until its receiver has taken it. Shared by the
// two halves of the implementation: the network (sim.cpp) and its endpoints (sim_endpoint.cpp).
#pragma once

#include <memory>

#include "lib/engine/transport.h"

namespace ringfold {

struct SimMessage {
  MessageId id;
  Peer from = -1, to = -1;
  uint64_t bytes = 0;
  const void* data = nullptr;         // the sender's buffer, or `copy`; null: only time passes
  Completion* completion = nullptr;   // the sender's, until it was told
  std::unique_ptr<std::byte[]> copy;  // eager: made when it leaves
  SimMessage* next = nullptr;         // in the queue of a port
  uint32_t index = 0;                 // in the pool
  bool used = false;
  bool left = false;      // its last byte has
  bool revoked = false;   // nobody shall see it any more; freed by whoever meets it next
  bool stranded = false;  // came to a dead rank; its sender frees it
};

}  // namespace ringfold
