#include "lib/comm/link.h"

#include <sys/socket.h>

#include <array>

#include "lib/base/wire.h"

namespace ringfold {
namespace {

constexpr size_t kLengthBytes = 4;
constexpr int kReadsAtOnce = 8;  // so that one busy peer does not starve the others
constexpr size_t kKept = 4 * 1024;

// Start-up sends much, and then there is silence: rank 0 would hold that memory for every rank.
void keep_little(std::string& buffer) {
  if (buffer.size() < kKept && buffer.capacity() > 2 * kKept) buffer.shrink_to_fit();
}

}  // namespace

Link::Link(Descriptor socket, const Key& sending, const Key& receiving)
    : socket_(std::move(socket)), receiving_(receiving) {
  out_ = outgoing_.begin_sending(sending);
}

void Link::queue(std::string_view frame) {
  if (!ended_.ok()) return;
  if (frame.size() > kMaxFrame) {
    return fail({Code::internal, "a control frame is longer than its limit"});
  }
  if (queued() > kMaxQueued) return fail({Code::peer_lost, "it reads no messages any more"});
  Writer length;
  length.u32(static_cast<uint32_t>(frame.size() + Seal::kOverhead));
  out_ += std::move(length).take();
  out_ += outgoing_.seal(frame);
}

bool Link::write() {
  bool moved = false;
  while (ended_.ok() && queued() > 0) {
    const auto sent = send_some(socket_, std::string_view(out_).substr(sent_));
    if (!sent.ok()) {
      fail(sent.status());
      break;
    }
    if (sent->moved == 0) break;
    sent_ += sent->moved;
    moved = true;
  }
  if (queued() == 0 || sent_ > kMaxFrame) {
    out_.erase(0, sent_);
    sent_ = 0;
    keep_little(out_);
  }
  return moved;
}

bool Link::read() {
  std::array<char, 16 * 1024> chunk;
  bool moved = false;
  for (int i = 0; i < kReadsAtOnce && ended_.ok(); ++i) {
    const auto received = recv_some(socket_, chunk);
    if (!received.ok()) {
      fail(received.status());
    } else if (received->ended) {
      fail({Code::peer_lost, "the connection was closed"});
    } else if (received->moved == 0) {
      break;
    } else {
      in_.append(chunk.data(), received->moved);
      take_frames();
    }
    moved = true;
  }
  return moved;
}

std::optional<std::string> Link::next() {
  if (frames_.empty()) return std::nullopt;
  std::string frame = std::move(frames_.front());
  frames_.pop_front();
  return frame;
}

void Link::finish() {
  shutdown(socket_.get(), SHUT_WR);
}

void Link::fail(Status why) {
  ended_ = std::move(why);
  shutdown(socket_.get(), SHUT_RDWR);  // wakes whoever sleeps on the descriptor
}

void Link::take_frames() {
  size_t begin = 0;
  const auto left = [&] { return std::string_view(in_).substr(begin); };
  if (!header_read_ && in_.size() >= Seal::kHeaderBytes) {
    incoming_.begin_receiving(receiving_, left().substr(0, Seal::kHeaderBytes));
    begin = Seal::kHeaderBytes;
    header_read_ = true;
  }
  while (header_read_ && left().size() >= kLengthBytes) {
    const size_t length = Reader(left()).u32();
    if (length > kMaxFrame + Seal::kOverhead) {
      return fail({Code::peer_lost, "it sent a frame beyond the limit"});
    }
    if (left().size() < kLengthBytes + length) break;
    auto frame = incoming_.open(left().substr(kLengthBytes, length));
    if (!frame) return fail({Code::peer_lost, "it sent a frame that does not open"});
    frames_.push_back(std::move(*frame));
    begin += kLengthBytes + length;
  }
  in_.erase(0, begin);
  keep_little(in_);
}

}  // namespace ringfold
