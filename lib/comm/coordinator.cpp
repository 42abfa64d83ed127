// Rank 0's side of start-up: one poll loop over the listener, strangers who have not yet proved
// anything, and the ranks that have.
#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <list>

#include "lib/base/auth.h"
#include "lib/base/base.h"
#include "lib/base/wire.h"
#include "lib/comm/rendezvous.h"

namespace ringfold {
namespace {

using std::chrono::seconds;

constexpr Nanoseconds kStrangerPatience = seconds(10);  // for the whole handshake
constexpr size_t kSpareStrangers = 64;       // beyond the ranks that may all come at once
constexpr Nanoseconds kLinger = seconds(2);  // to tell a fault to ranks that come late
constexpr Nanoseconds kFlush = seconds(1);   // to tell those who are there
constexpr size_t kWindow = 256 * 1024;       // of the table, queued at once for each rank

// Somebody who connected and has not proved to belong here.
struct Stranger {
  Descriptor socket;
  CoordinatorHandshake handshake;
  Nanoseconds deadline;
  size_t wanted = kHelloBytes;
  std::string in{};
  bool challenged = false;
};

class Coordinator {
 public:
  Coordinator(const Meeting& meeting, Descriptor listener, Joined mine)
      : meeting_(meeting),
        listener_(std::move(listener)),
        deadline_(meeting.deadline),
        links_(static_cast<size_t>(meeting.size)),
        joined_(static_cast<size_t>(meeting.size)) {
    joined_[0] = std::move(mine);
  }

  Result<Met> run();

 private:
  enum class Outcome : uint8_t { waiting, done, drop };

  [[nodiscard]] std::vector<int> missing() const;
  [[nodiscard]] Status timed_out() const;
  void turn(Nanoseconds until);
  void accept_all();
  Outcome serve(Stranger& stranger);
  Outcome advance(Stranger& stranger);
  Outcome admit(Stranger& stranger);
  [[nodiscard]] std::string fault_of(const Claim& claim) const;
  void serve(int rank);
  void fail(Status why);
  void tell_fault();
  void gather();
  [[nodiscard]] Status gone(int rank) const;
  Result<std::vector<Member>> share();

  const Meeting meeting_;
  Descriptor listener_;
  Nanoseconds deadline_;
  std::list<Stranger> strangers_;  // oldest first
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<std::optional<Joined>> joined_;
  std::vector<bool> told_ = std::vector<bool>(links_.size());  // the fault, by rank
  int refused_ = 0;                                            // authentications
  Status fault_;
};

bool send_now(const Stranger& stranger, std::string_view bytes) {
  // A fresh connection has room for a few hundred bytes, or is not worth waiting for.
  const auto sent = send_some(stranger.socket, bytes);
  return sent.ok() && sent->moved == bytes.size();
}

std::vector<int> Coordinator::missing() const {
  std::vector<int> ranks;
  for (int r = 0; r < meeting_.size; ++r) {
    if (!joined_[static_cast<size_t>(r)]) ranks.push_back(r);
  }
  return ranks;
}

Status Coordinator::timed_out() const {
  std::string there;
  for (const auto& joined : joined_) {
    if (!joined) continue;
    there += fmt::format("{}{} from {}", there.empty() ? "" : ", ", joined->member.rank,
                         joined->member.host_name);
    if (there.size() > 400) {
      there += ", ...";
      break;
    }
  }
  std::string text =
      fmt::format("start-up at {} timed out after {}: rank {} did not come; there are: {}",
                  meeting_.coordinator, seconds_text(steady_clock().now() - meeting_.begun),
                  rank_list(missing()), there);
  if (refused_ > 0) {
    text += fmt::format("; {} connection(s) were refused: {}", refused_, kAuthenticationFailed);
  }
  return {Code::timeout, text};
}

Result<Met> Coordinator::run() {
  gather();
  if (fault_.ok()) {
    std::vector<Agreement> agreements;
    for (const auto& joined : joined_) agreements.push_back(joined->agreement);
    fault_ = compare(agreements);
  }
  for (const auto& link : links_)
    if (link) note_reached(link->socket(), &joined_[0]->member);
  const Joined first = *joined_[0];
  auto members = share();
  if (members.ok() && meeting_.second.wanted && meeting_.second.wanted(*members)) {
    std::fill(joined_.begin(), joined_.end(), std::nullopt);
    joined_[0] = first;
    fault_ = meeting_.second.say(*members, &joined_[0]->member);
    gather();
    members = share();
  }
  if (!members.ok()) return members.status();
  return Met{std::move(*members), std::move(links_)};
}

// Until all ranks have introduced themselves.
void Coordinator::gather() {
  while (fault_.ok() && !missing().empty()) {
    for (const int rank : missing())
      if (const auto& link = links_[static_cast<size_t>(rank)]; link && !link->ended().ok())
        return fail(gone(rank));
    if (steady_clock().now() >= deadline_) return fail(timed_out());
    turn(deadline_);
  }
}

Status Coordinator::gone(int rank) const {
  return {Code::peer_lost, fmt::format("rank {} went away during start-up: {}", rank,
                                       links_[static_cast<size_t>(rank)]->ended().message())};
}

// Waits for news and serves it.
void Coordinator::turn(Nanoseconds until) {
  std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
  std::vector<int> ranks;
  for (int r = 1; r < meeting_.size; ++r) {
    const auto& link = links_[static_cast<size_t>(r)];
    if (!link || !link->ended().ok()) continue;
    polled.push_back({link->socket().get(),
                      static_cast<short>(link->queued() > 0 ? POLLIN | POLLOUT : POLLIN), 0});
    ranks.push_back(r);
  }
  for (const Stranger& stranger : strangers_) {
    polled.push_back({stranger.socket.get(), POLLIN, 0});
    until = std::min(until, stranger.deadline);
  }
  poll(polled.data(), polled.size(), milliseconds_until(until));

  // Ranks before strangers: one that went away makes room for a second attempt.
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (polled[1 + i].revents != 0) serve(ranks[i]);
  }
  const Nanoseconds now = steady_clock().now();
  size_t at = 1 + ranks.size();
  for (auto stranger = strangers_.begin(); stranger != strangers_.end(); ++at) {
    const Outcome outcome = polled[at].revents != 0 ? serve(*stranger) : Outcome::waiting;
    const bool keep = outcome == Outcome::waiting && now < stranger->deadline;
    stranger = keep ? std::next(stranger) : strangers_.erase(stranger);
  }
  if (polled[0].revents != 0) accept_all();
}

void Coordinator::accept_all() {
  const size_t limit = static_cast<size_t>(meeting_.size) + kSpareStrangers;
  while (true) {
    auto taken = accept_from(listener_);
    if (!taken.ok()) {
      // Out of descriptors: whoever has been silent longest makes room.
      if (strangers_.empty()) return fail(taken.status());
      strangers_.pop_front();
      continue;
    }
    if (!*taken) return;
    if (strangers_.size() >= limit) strangers_.pop_front();
    strangers_.push_back({std::move(*taken), CoordinatorHandshake(meeting_.key, meeting_.version),
                          steady_clock().now() + kStrangerPatience});
  }
}

Coordinator::Outcome Coordinator::serve(Stranger& stranger) {
  while (true) {
    const size_t have = stranger.in.size();
    stranger.in.resize(stranger.wanted);
    const auto received = recv_some(stranger.socket, std::span(stranger.in).subspan(have));
    if (!received.ok() || received->ended) return Outcome::drop;
    stranger.in.resize(have + received->moved);
    if (received->moved == 0) return Outcome::waiting;
    if (stranger.in.size() < stranger.wanted) continue;
    const Outcome outcome = advance(stranger);
    if (outcome != Outcome::waiting) return outcome;
  }
}

// A complete message of the handshake has arrived.
Coordinator::Outcome Coordinator::advance(Stranger& stranger) {
  if (stranger.challenged) return admit(stranger);
  const auto challenge = stranger.handshake.challenge(stranger.in);
  if (!challenge.ok() || !send_now(stranger, *challenge)) {
    log_line(LogLevel::info, "start-up: a connection that is not ringfold was closed");
    return Outcome::drop;
  }
  stranger.challenged = true;
  stranger.wanted = kProofBytes;
  stranger.in.clear();
  return Outcome::waiting;
}

Coordinator::Outcome Coordinator::admit(Stranger& stranger) {
  if (!stranger.handshake.proves(stranger.in)) {
    ++refused_;
    log_line(LogLevel::warn, "start-up: a connection was refused: authentication failed");
    [[maybe_unused]] const bool sent =
        send_now(stranger, CoordinatorHandshake::verdict_for_stranger());
    return Outcome::drop;
  }
  const Claim& claim = stranger.handshake.claim();
  if (fault_.ok()) {
    if (const std::string fault = fault_of(claim); !fault.empty()) fail({Code::mismatch, fault});
  }
  const bool known = claim.rank < links_.size();
  if (!fault_.ok() && known && !links_[claim.rank]) told_[claim.rank] = true;
  if (!send_now(stranger, stranger.handshake.verdict(fault_)) || !fault_.ok()) {
    return Outcome::drop;
  }
  const SessionKeys keys = stranger.handshake.keys();
  links_[claim.rank] =
      std::make_unique<Link>(std::move(stranger.socket), keys.to_joiner, keys.to_coordinator);
  return Outcome::done;
}

std::string Coordinator::fault_of(const Claim& claim) const {
  if (claim.version != meeting_.version) {
    return fmt::format("rank {} speaks wire version {} of ringfold, rank 0 version {}", claim.rank,
                       claim.version, meeting_.version);
  }
  if (claim.size != static_cast<uint32_t>(meeting_.size)) {
    return fmt::format("rank {} was started for {} ranks, rank 0 for {}", claim.rank, claim.size,
                       meeting_.size);
  }
  if (claim.rank >= claim.size) {
    return fmt::format("a process claims rank {} of {}; ranks are 0 to {}", claim.rank, claim.size,
                       claim.size - 1);
  }
  const auto& first = joined_[claim.rank];
  if (claim.rank == 0 || links_[claim.rank]) {
    return fmt::format("two processes claim rank {}{}", claim.rank,
                       first ? fmt::format("; the first is process {} on {}", first->member.pid,
                                           first->member.host_name)
                             : "");
  }
  return {};
}

void Coordinator::serve(int rank) {
  Link& link = *links_[static_cast<size_t>(rank)];
  link.read();
  link.write();
  auto& joined = joined_[static_cast<size_t>(rank)];
  while (const auto frame = link.next()) {
    auto decoded = decode_joined(*frame);
    if (joined || !decoded.ok() || decoded->member.rank != rank) {
      return fail({Code::mismatch, fmt::format("rank {} sent a malformed message", rank)});
    }
    // Whoever is the first to lose patience ends it for all, so that all hear who is missing.
    deadline_ = std::min(deadline_, steady_clock().now() + decoded->patience);
    joined = std::move(*decoded);
  }
  if (!link.ended().ok()) fail(gone(rank));
}

void Coordinator::fail(Status why) {
  if (fault_.ok()) fault_ = std::move(why);
}

// Everybody who is there hears what is wrong; after a fault also those who come a little later.
void Coordinator::tell_fault() {
  const bool late_ones = fault_.code() != Code::timeout;
  const Nanoseconds until = steady_clock().now() + (late_ones ? kLinger : kFlush);
  Writer out;
  out.u8(static_cast<uint8_t>(Frame::refused));
  out.u8(static_cast<uint8_t>(fault_.code()));
  out.text(std::string_view(fault_.message()).substr(0, kMaxNoticeText));
  const std::string frame = std::move(out).take();
  while (steady_clock().now() < until) {
    bool all_told = true;
    for (size_t r = 1; r < links_.size(); ++r) {
      Link* const link = links_[r].get();
      if (link != nullptr && !told_[r]) {
        told_[r] = true;
        link->queue(frame);
        link->write();
        if (link->queued() == 0) link->finish();
      }
      // The link is kept until the other side closes it: closing first could cut off the message.
      const bool open = link != nullptr && link->ended().ok();
      if (open || (late_ones && !told_[r])) all_told = false;
    }
    if (all_told) return;
    turn(until);
  }
}

// Sends everybody's Member to everybody, or what is wrong.
Result<std::vector<Member>> Coordinator::share() {
  if (!fault_.ok()) {
    tell_fault();
    return fault_;
  }
  std::vector<Member> members;
  std::vector<std::string> table;
  for (auto& joined : joined_) {
    table.push_back(encode(joined->member));
    members.push_back(std::move(joined->member));
  }
  std::vector<size_t> next(links_.size());
  while (true) {
    std::vector<pollfd> polled;
    std::vector<int> slow;
    for (size_t r = 1; r < links_.size(); ++r) {
      Link& link = *links_[r];
      do {
        while (next[r] < table.size() && link.queued() < kWindow) link.queue(table[next[r]++]);
      } while (link.write() && next[r] < table.size());
      // One that goes away now is the control star's to report.
      if (!link.ended().ok() || link.queued() == 0) continue;
      polled.push_back({link.socket().get(), POLLOUT, 0});
      slow.push_back(static_cast<int>(r));
    }
    if (polled.empty()) break;
    if (steady_clock().now() >= deadline_) {
      return Status(Code::timeout,
                    fmt::format("start-up timed out after {}: rank {} does not read",
                                seconds_text(deadline_ - meeting_.begun), rank_list(slow)));
    }
    poll(polled.data(), polled.size(), milliseconds_until(deadline_));
  }
  return members;
}

}  // namespace

Result<Met> coordinate(const Meeting& meeting, Descriptor listener, Joined mine) {
  return Coordinator(meeting, std::move(listener), std::move(mine)).run();
}

}  // namespace ringfold
