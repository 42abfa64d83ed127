// The other ranks' side of start-up: find rank 0, prove to belong to it, wait for everybody.
#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <thread>

#include "lib/base/auth.h"
#include "lib/base/base.h"
#include "lib/base/wire.h"
#include "lib/comm/rendezvous.h"

namespace ringfold {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Nanoseconds kFirstPause = milliseconds(20), kLongestPause = milliseconds(250);
constexpr Nanoseconds kFirstAttempt = seconds(1), kLongestAttempt = seconds(10);
// Longer than rank 0's patience with strangers: it decides, not we.
constexpr Nanoseconds kAnswerPatience = seconds(20);
// Rank 0 tells at our deadline who is missing; this is for the message to arrive.
constexpr Nanoseconds kGrace = seconds(1);

class Joiner {
 public:
  Joiner(const Meeting& meeting, const std::vector<HostPort>& where, Joined mine)
      : meeting_(meeting), where_(where), mine_(std::move(mine)) {}

  Result<Met> run();

 private:
  Result<std::unique_ptr<Link>> reach();
  Result<std::unique_ptr<Link>> try_once(const Address& address, Nanoseconds attempt);
  [[nodiscard]] bool final(const Status& status, size_t candidates) const;
  Result<std::vector<Member>> introduce(Link& link);
  Result<std::vector<Member>> wait_for_all(Link& link);
  Result<Member> understand(const std::string& frame) const;

  const Meeting meeting_;
  const std::vector<HostPort> where_;
  Joined mine_;
  bool refused_ = false;  // by rank 0, in its own words
};

Result<Met> Joiner::run() {
  auto link = reach();
  if (!link.ok()) return link.status();
  note_reached((*link)->socket(), &mine_.member);
  auto members = introduce(**link);
  if (members.ok() && meeting_.second.wanted && meeting_.second.wanted(*members)) {
    if (Status status = meeting_.second.say(*members, &mine_.member); !status.ok()) return status;
    members = introduce(**link);
  }
  if (!members.ok()) return members.status();
  Met met;
  met.members = std::move(*members);
  met.links.push_back(std::move(*link));
  return met;
}

// Says who we are, and hears who everybody is.
Result<std::vector<Member>> Joiner::introduce(Link& link) {
  mine_.patience = std::max(meeting_.deadline - steady_clock().now(), Nanoseconds::zero());
  link.queue(encode(mine_));
  return wait_for_all(link);
}

// Tries every address in turn, again and again: rank 0 may start much later than we.
Result<std::unique_ptr<Link>> Joiner::reach() {
  Nanoseconds pause = kFirstPause, attempt = kFirstAttempt;
  Status last(Code::timeout, "no attempt was made");
  while (true) {
    std::vector<Address> addresses;
    for (const HostPort& host : where_) {
      auto found = resolve(host);
      if (!found.ok()) last = found.status();
      if (found.ok()) addresses.insert(addresses.end(), found->begin(), found->end());
    }
    for (const Address& address : addresses) {
      auto link = try_once(address, attempt);
      if (link.ok()) return link;
      last = link.status();
      if (final(last, addresses.size())) return last;
      if (steady_clock().now() >= meeting_.deadline) break;
    }
    const Nanoseconds left = meeting_.deadline - steady_clock().now();
    if (left <= Nanoseconds::zero()) break;
    // Ranks started together should not knock together for ever.
    const int64_t spread = 75 + static_cast<int64_t>(randombytes_uniform(51));
    std::this_thread::sleep_for(std::min(left, pause * spread / 100));
    pause = std::min(2 * pause, kLongestPause);
    attempt = std::min(2 * attempt, kLongestAttempt);
  }
  return Status(Code::timeout,
                fmt::format("rank {} could not reach rank 0 at {} within {}: {}", meeting_.rank,
                            meeting_.coordinator, seconds_text(meeting_.deadline - meeting_.begun),
                            last.message()));
}

// Refused by rank 0 itself, or the only place to go does not share our secret.
bool Joiner::final(const Status& status, size_t candidates) const {
  return refused_ || (candidates == 1 && status.message().ends_with(kAuthenticationFailed));
}

Result<std::unique_ptr<Link>> Joiner::try_once(const Address& address, Nanoseconds attempt) {
  const auto at = [&](const Status& status) {
    return Status(status.code(), fmt::format("{}: {}", address.to_string(), status.message()));
  };
  const auto soon = [&](Nanoseconds patience) {
    return std::min(meeting_.deadline, steady_clock().now() + patience);
  };
  auto socket = connect_to(address, soon(attempt));
  if (!socket.ok()) return socket.status();

  JoinerHandshake handshake(meeting_.key,
                            Claim{meeting_.version, static_cast<uint32_t>(meeting_.rank),
                                  static_cast<uint32_t>(meeting_.size)});
  const Nanoseconds patience = soon(kAnswerPatience);
  if (Status sent = send_all(*socket, handshake.hello(), patience); !sent.ok()) return at(sent);
  std::string challenge(kChallengeBytes, '\0');
  if (Status got = recv_all(*socket, challenge, patience); !got.ok()) return at(got);
  const auto proof = handshake.answer(challenge);
  if (!proof.ok()) return at(proof.status());
  if (Status sent = send_all(*socket, *proof, patience); !sent.ok()) return at(sent);
  // From here on rank 0 counts us as arrived: a second attempt would look like a second process.
  std::string verdict(kVerdictBytes, '\0');
  if (Status got = recv_all(*socket, verdict, meeting_.deadline + kGrace); !got.ok()) {
    return at(got);
  }
  if (Status concluded = handshake.conclude(verdict); !concluded.ok()) {
    refused_ = concluded.message() != kAuthenticationFailed;
    return refused_ ? concluded : at(concluded);
  }
  const SessionKeys keys = handshake.keys();
  return std::make_unique<Link>(std::move(*socket), keys.to_coordinator, keys.to_joiner);
}

Result<std::vector<Member>> Joiner::wait_for_all(Link& link) {
  std::vector<Member> members;
  const Nanoseconds until = meeting_.deadline + kGrace;
  while (true) {
    link.write();
    link.read();
    // Frames behind the last Member belong to the control star.
    while (members.size() < static_cast<size_t>(meeting_.size)) {
      const auto frame = link.next();
      if (!frame) break;
      auto member = understand(*frame);
      if (!member.ok()) return member.status();
      if (member->rank != static_cast<int>(members.size())) {
        return Status(Code::internal, "rank 0 listed the ranks in the wrong order");
      }
      members.push_back(std::move(*member));
    }
    if (members.size() == static_cast<size_t>(meeting_.size)) return members;
    if (!link.ended().ok()) {
      return Status(Code::peer_lost, fmt::format("rank 0 at {} went away during start-up: {}",
                                                 meeting_.coordinator, link.ended().message()));
    }
    const auto events = static_cast<short>(link.queued() > 0 ? POLLIN | POLLOUT : POLLIN);
    if (Status waited = wait_for(link.socket(), events, until); !waited.ok()) {
      return Status(waited.code(),
                    fmt::format("rank {} waited {} for rank 0 at {} to say who is there: {}",
                                meeting_.rank, seconds_text(until - meeting_.begun),
                                meeting_.coordinator, waited.message()));
    }
  }
}

Result<Member> Joiner::understand(const std::string& frame) const {
  Reader in(frame);
  if (in.u8() == static_cast<uint8_t>(Frame::refused)) {
    const uint8_t code = in.u8();
    const std::string text(in.text());
    if (in.complete() && code > 0 && code <= static_cast<uint8_t>(Code::internal)) {
      return Status(static_cast<Code>(code), text);
    }
  }
  auto member = decode_member(frame);
  if (!member.ok()) return Status(Code::peer_lost, "rank 0 sent a malformed message");
  return member;
}

}  // namespace

Result<Met> join(const Meeting& meeting, const std::vector<HostPort>& where, Joined mine) {
  return Joiner(meeting, where, std::move(mine)).run();
}

}  // namespace ringfold
