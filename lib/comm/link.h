// One sealed connection between two ranks that have authenticated each other: frames in, frames
// out, nothing ever blocks.
//
// Thread-safety: one thread at a time.
// Errors: a Link that has failed or ended stays so; ended() says why.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "lib/base/auth.h"
#include "lib/base/net.h"
#include "ringfold/status.h"

namespace ringfold {

inline constexpr size_t kMaxFrame = 256 * 1024;
// Bytes that may wait for a peer that does not read; beyond that it counts as lost.
inline constexpr size_t kMaxQueued = 4 * 1024 * 1024;

class Link {
 public:
  Link(Descriptor socket, const Key& sending, const Key& receiving);

  // Hands over a frame of at most kMaxFrame bytes; write() sends it.
  void queue(std::string_view frame);
  // Sends what is possible now; true if anything moved.
  bool write();
  // Receives what is there now; true if anything moved.
  bool read();
  // The next complete frame, also after the connection has ended.
  [[nodiscard]] std::optional<std::string> next();

  [[nodiscard]] size_t queued() const { return out_.size() - sent_; }
  // ok while the connection lives.
  [[nodiscard]] const Status& ended() const { return ended_; }
  // Tells the peer that nothing more will come; REQUIRES queued() == 0.
  void finish();
  [[nodiscard]] const Descriptor& socket() const { return socket_; }

 private:
  void fail(Status why);
  void take_frames();

  Descriptor socket_;
  Seal outgoing_, incoming_;
  Key receiving_;
  bool header_read_ = false;
  std::string in_, out_;
  size_t sent_ = 0;  // of out_
  std::deque<std::string> frames_;
  Status ended_;
};

}  // namespace ringfold
