// The control star: every rank's sealed connection to rank 0, which passes news on.
#include "lib/comm/control.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "lib/base/net.h"
#include "lib/base/wire.h"
#include "lib/comm/link.h"
#include "lib/comm/rendezvous.h"

namespace ringfold {
namespace {

std::string encode(const Notice& notice) {
  Writer out;
  out.u8(static_cast<uint8_t>(Frame::notice));
  out.u8(static_cast<uint8_t>(notice.kind));
  out.u32(static_cast<uint32_t>(notice.origin));
  out.u32(notice.comm);
  out.u8(static_cast<uint8_t>(notice.code));
  out.text(notice.text);
  out.u32(static_cast<uint32_t>(notice.members.size()));
  for (const int member : notice.members) out.u32(static_cast<uint32_t>(member));
  return std::move(out).take();
}

Notice lost(std::string why) {
  Notice notice;
  notice.kind = Notice::Kind::lost;
  notice.text = std::move(why);
  return notice;
}

bool departs(Notice::Kind kind) {
  return kind == Notice::Kind::lost || kind == Notice::Kind::left;
}

}  // namespace

std::optional<Notice> decode_notice(std::string_view frame, int size) {
  Reader in(frame);
  const bool is_notice = in.u8() == static_cast<uint8_t>(Frame::notice);
  const uint8_t kind = in.u8();
  Notice notice;
  const uint32_t origin = in.u32();
  notice.comm = in.u32();
  const uint8_t code = in.u8();
  notice.text = in.text();
  const uint32_t count = in.u32();
  const auto ranks = static_cast<uint32_t>(size);
  if (!is_notice || kind > static_cast<uint8_t>(Notice::Kind::stands) || origin >= ranks ||
      code > static_cast<uint8_t>(Code::internal) || count > ranks) {
    return std::nullopt;
  }
  notice.kind = static_cast<Notice::Kind>(kind);
  notice.origin = static_cast<int>(origin);
  notice.code = static_cast<Code>(code);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t member = in.u32();
    if (member >= ranks) return std::nullopt;
    notice.members.push_back(static_cast<int>(member));
  }
  return in.complete() ? std::optional(notice) : std::nullopt;
}

namespace {

class Star final : public Control {
 public:
  Star(int rank, int size, Descriptor epoll, std::vector<std::unique_ptr<Link>> links)
      : rank_(rank),
        size_(size),
        epoll_(std::move(epoll)),
        links_(std::move(links)),
        gone_(static_cast<size_t>(size)) {
    // Asking for EPOLLOUT as well makes every link ready at once, so that the first progress() also
    // sees frames that arrived together with the end of start-up.
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      if (links_[peer]) watch(peer, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT);
    }
    writing_.assign(links_.size(), true);
    posted_.assign(links_.size(), false);
  }

  void tell(Notice notice) override;
  bool progress() override;
  int arm() override { return epoll_.get(); }
  void leave() override;

 private:
  [[nodiscard]] bool hub() const { return rank_ == 0; }
  void watch(size_t peer, int operation, uint32_t events) const;
  void post(size_t peer, const std::string& frame);
  void send_posted();
  void send(size_t peer);
  void forward(const Notice& notice);
  bool serve(size_t peer);
  void hear(size_t peer, Notice notice);
  void depart(int who, Notice notice);
  void drop_departed();
  void say_goodbye(std::string_view frame, Nanoseconds deadline);

  const int rank_, size_;
  Descriptor epoll_;
  std::vector<std::unique_ptr<Link>> links_;  // by peer; all ranks but 0 have links_[0] only
  std::vector<bool> writing_;                 // by peer: epoll also waits for room to write
  std::vector<bool> gone_;                    // by rank: lost or left, and reported
  std::vector<size_t> departed_;              // whose links are to be closed
  std::vector<bool> posted_;                  // by peer: it is among posted_peers_
  std::vector<size_t> posted_peers_;          // for whom something was queued and not yet sent
  bool in_progress_ = false;                  // which sends what is posted, together
};

void Star::watch(size_t peer, int operation, uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = peer;
  epoll_ctl(epoll_.get(), operation, links_[peer]->socket().get(), &event);
}

void Star::post(size_t peer, const std::string& frame) {
  if (!links_[peer] || gone_[peer]) return;
  links_[peer]->queue(frame);
  if (posted_[peer]) return;
  posted_[peer] = true;
  posted_peers_.push_back(peer);
}

// Sends what was posted, as far as the connections take it now. If one fails, the next progress()
// sees that: a failed link is always ready.
void Star::send_posted() {
  for (const size_t peer : std::exchange(posted_peers_, {})) {
    posted_[peer] = false;
    if (links_[peer] && !gone_[peer]) send(peer);
  }
}

void Star::send(size_t peer) {
  Link* const link = links_[peer].get();
  link->write();
  const bool waiting = link->queued() > 0;
  if (waiting && !writing_[peer]) {
    watch(peer, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
    writing_[peer] = true;
  }
}

// From rank 0 to everybody concerned except the origin.
void Star::forward(const Notice& notice) {
  const std::string frame = encode(notice);
  const auto send_to = [&](int member) {
    if (member != 0 && member != notice.origin) post(static_cast<size_t>(member), frame);
  };
  for (const int member : notice.members) send_to(member);
  if (!notice.members.empty()) return;
  for (int member = 0; member < size_; ++member) send_to(member);
}

void Star::tell(Notice notice) {
  if (departs(notice.kind)) notice.kind = Notice::Kind::failed;
  notice.origin = rank_;
  notice.text.resize(std::min(notice.text.size(), kMaxNoticeText));
  std::erase_if(notice.members, [&](int member) { return member < 0 || member >= size_; });
  if (hub())
    forward(notice);
  else if (!links_.empty())
    post(0, encode(notice));
  if (!in_progress_) send_posted();
}

bool Star::progress() {
  std::array<epoll_event, 64> events;
  const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  bool moved = false;
  in_progress_ = true;
  for (int i = 0; i < ready; ++i) {
    const size_t peer = events[static_cast<size_t>(i)].data.u64;
    if (links_[peer] && !gone_[peer]) moved = serve(peer) || moved;
  }
  in_progress_ = false;
  send_posted();
  drop_departed();
  return moved;
}

bool Star::serve(size_t peer) {
  Link& link = *links_[peer];
  bool moved = link.write();
  moved = link.read() || moved;
  while (!gone_[peer]) {  // it may say goodbye
    const auto frame = link.next();
    if (!frame) break;
    moved = true;
    auto notice = decode_notice(*frame, size_);
    if (!notice) {
      depart(static_cast<int>(peer), lost("it sent a malformed message"));
      return true;
    }
    hear(peer, std::move(*notice));
  }
  if (gone_[peer]) return true;
  if (!link.ended().ok()) {
    depart(static_cast<int>(peer), lost(link.ended().message()));
    return true;
  }
  const bool waiting = link.queued() > 0;
  if (waiting != writing_[peer]) {
    watch(peer, EPOLL_CTL_MOD, waiting ? EPOLLIN | EPOLLOUT : EPOLLIN);
    writing_[peer] = waiting;
  }
  return moved;
}

void Star::hear(size_t peer, Notice notice) {
  // Ranks speak for themselves only; rank 0 passes on what it heard.
  if (hub()) notice.origin = static_cast<int>(peer);
  const int origin = notice.origin;
  if (origin == rank_) return;
  if (departs(notice.kind)) return depart(origin, std::move(notice));
  if (hub()) forward(notice);
  const bool concerns_us =
      notice.members.empty() ||
      std::find(notice.members.begin(), notice.members.end(), rank_) != notice.members.end();
  if (concerns_us && on_notice) on_notice(notice);
}

// `who` said goodbye (the notice says `left`), or is lost.
void Star::depart(int who, Notice notice) {
  if (gone_[static_cast<size_t>(who)]) return;
  gone_[static_cast<size_t>(who)] = true;
  const bool left = notice.kind == Notice::Kind::left;
  notice.kind = left ? Notice::Kind::left : Notice::Kind::lost;
  notice.origin = who;
  notice.code = left ? Code::ok : Code::peer_lost;
  notice.members.clear();
  if (hub()) forward(notice);
  if (hub() || who == 0) departed_.push_back(static_cast<size_t>(who));
  if (on_notice) on_notice(notice);
}

// Closing also tells a peer that said goodbye that it has arrived. It may end now, which others
// notice; so they have been told before, and know that it was no accident.
void Star::drop_departed() {
  for (const size_t peer : std::exchange(departed_, {}))
    if (peer < links_.size()) links_[peer].reset();
}

void Star::leave() {
  const Nanoseconds deadline = steady_clock().now() + kGoodbye + size_ * kGoodbyePerRank;
  const Notice goodbye{.kind = Notice::Kind::left, .origin = rank_, .text = {}, .members = {}};
  say_goodbye(encode(goodbye), deadline);
  links_.clear();
}

// Closing at once could make the kernel throw the goodbye away (it resets a connection on which
// something arrives after the close); so each link is kept until the other side has closed it.
void Star::say_goodbye(std::string_view frame, Nanoseconds deadline) {
  std::vector<bool> finished(links_.size());
  for (const auto& link : links_) {
    if (link) link->queue(frame);
  }
  while (true) {
    std::vector<pollfd> polled;
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      Link* const link = links_[peer].get();
      if (link == nullptr) continue;
      link->write();
      link->read();
      while (link->next()) {
      }
      if (!link->ended().ok()) continue;
      if (link->queued() == 0 && !finished[peer]) {
        link->finish();
        finished[peer] = true;
      }
      const auto events = static_cast<short>(link->queued() > 0 ? POLLIN | POLLOUT : POLLIN);
      polled.push_back({link->socket().get(), events, 0});
    }
    if (polled.empty() || steady_clock().now() >= deadline) return;
    poll(polled.data(), polled.size(), milliseconds_until(deadline));
  }
}

}  // namespace

Result<std::unique_ptr<Control>> make_control(int rank, int size,
                                              std::vector<std::unique_ptr<Link>> links) {
  Descriptor epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) {
    return Status(Code::system, fmt::format("cannot make an epoll set: {}", reason(errno)));
  }
  return std::unique_ptr<Control>(
      std::make_unique<Star>(rank, size, std::move(epoll), std::move(links)));
}

}  // namespace ringfold
