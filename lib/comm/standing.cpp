#include "lib/comm/standing.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

namespace ringfold {
namespace {

// A number at the front of `text`, which is shortened to what follows it and a blank.
std::optional<uint32_t> take(std::string_view& text) {
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(std::min<size_t>(static_cast<size_t>(end - text.data()) + 1, text.size()));
  return value;
}

// "rank 2 called X as operation 17; rank 3 called Y as operation 17", lower ranks first.
std::string both_sides(int mine, const std::string& my_words, int other,
                       const std::string& other_words) {
  const auto side = [](int rank, const std::string& words) {
    return fmt::format("rank {} called {}", rank, words);
  };
  return mine < other ? side(mine, my_words) + "; " + side(other, other_words)
                      : side(other, other_words) + "; " + side(mine, my_words);
}

// The entry of collective `seq` of one way; null: it is not remembered.
const record::OperationView* entry_of(const record::CommunicatorView& view, bool region,
                                      uint32_t seq) {
  for (const record::OperationView& o : view.operations)
    if (o.region == region && o.what.kind == record::Kind::collective &&
        seq - o.first <= o.last - o.first)
      return &o;
  return nullptr;
}

}  // namespace

Standings::Stand Standings::stand_of(const record::CommunicatorView& view,
                                     const Question& question) {
  Stand stand;
  stand.known = true;
  stand.text = record::standing(view, Nanoseconds(0));
  for (const record::OperationView& o : view.operations) {
    if (o.region != question.region || o.what.kind != record::Kind::collective) continue;
    if (static_cast<int32_t>(o.last - question.seq) >= 0) stand.called = true;
  }
  if (const auto* const o = entry_of(view, question.region, question.seq)) {
    stand.fingerprint = o->what.fingerprint;
    stand.what = fmt::format("{} as operation {}", o->text(), question.seq);
  }
  return stand;
}

// A communicator with a region has two ways: collectives on device memory go by messages. A rank
// that has not called the one in question may have called one of the other way in its place.
void Standings::look_beside(const Channel& channel, const record::CommunicatorView& view,
                            const Question& question, Stand* stand) {
  if (!channel.companion) return;
  const uint32_t in_region = channel.companion->called(), by_messages = channel.called;
  const uint32_t these = question.region ? in_region : by_messages;
  const uint32_t others = question.region ? by_messages : in_region;
  const auto past = [](uint32_t called, uint32_t seq) {
    return static_cast<int32_t>(called - seq) > 0;
  };
  if (past(these, question.seq) || !past(others, question.beside)) return;
  const auto* const o = entry_of(view, !question.region, question.beside);
  if (o == nullptr) return;
  stand->fingerprint = o->what.fingerprint;
  stand->what = fmt::format("{} instead, {}", o->text(),
                            question.region ? "on a device or its stream" : "in host memory");
}

// ---- asking and answering ---------------------------------------------------------------------

void Standings::ask(uint32_t comm, const Question& question, std::vector<int> members) {
  Notice notice;
  notice.kind = Notice::Kind::asks;
  notice.comm = comm;
  notice.text = fmt::format("{} {} {} {}", question.seq, question.region ? 1 : 0,
                            question.fingerprint, question.beside);
  notice.members = std::move(members);
  control_.tell(std::move(notice));
}

void Standings::asked(const Notice& notice) {
  std::string_view rest = notice.text;
  const auto seq = take(rest), way = take(rest), theirs = take(rest), beside = take(rest);
  if (!seq || !way || !theirs || !beside) return;
  Stand stand;
  if (const auto channel = engine_.find(notice.comm); channel && channel->record) {
    const auto view = record::decode(channel->record->slot());
    const Question question{*seq, *theirs, *way != 0, *beside};
    stand = stand_of(view, question);
    look_beside(*channel, view, question, &stand);
  } else {
    stand.text = "has not made this communicator, or given it up";
  }
  Notice answer;
  answer.kind = Notice::Kind::stands;
  answer.comm = notice.comm;
  answer.text = fmt::format("{} {} {} {} {} {}{}", *seq, *way, stand.called ? 1 : 0,
                            stand.fingerprint, stand.what.size(), stand.what, stand.text);
  answer.members = {notice.origin};
  control_.tell(std::move(answer));
}

void Standings::answered(const Notice& notice) {
  std::string_view rest = notice.text;
  const auto seq = take(rest), way = take(rest), called = take(rest), theirs = take(rest),
             length = take(rest);
  if (!seq || !way || !called || !theirs || !length || *length > rest.size()) return;
  Stand stand;
  stand.known = true;
  stand.called = *called != 0;
  stand.fingerprint = *theirs;
  stand.what = rest.substr(0, *length);
  stand.text = rest.substr(*length);
  if (const auto inquiry = open_.find(notice.comm); inquiry != open_.end()) {
    const auto& peers = inquiry->second.peers;
    const auto at = std::ranges::find(peers, notice.origin);
    if (at != peers.end())
      inquiry->second.stands[static_cast<size_t>(at - peers.begin())] = std::move(stand);
    return;
  }
  // It was asked because it kept an operation waiting.
  const auto channel = engine_.find(notice.comm);
  if (!channel || !channel->record || !channel->failed.ok() || stand.fingerprint == 0) return;
  const Stand mine =
      stand_of(record::decode(channel->record->slot()), {*seq, stand.fingerprint, *way != 0, 0});
  if (mine.fingerprint == 0 || mine.fingerprint == stand.fingerprint) return;
  const auto at = std::ranges::find(channel->peers, notice.origin);
  const auto other = static_cast<int>(at - channel->peers.begin());
  engine_.fail(notice.comm,
               Status(Code::mismatch, both_sides(channel->named(channel->rank), mine.what,
                                                 channel->named(other), stand.what)),
               true);
}

// The operations of graphs have numbers of their own, and their channels no records.
void Standings::quiet(const Channel& channel, const Question& question, Peer peer) {
  if (!channel.stalled && (channel.id & kCapturedChannel) == 0) ask(channel.id, question, {peer});
}

// ---- an operation that is not over at its deadline --------------------------------------------

void Standings::stalled(const Channel& channel, const Engine::Stalled& what) {
  // The records know the communicator that a graph's channel belongs to, not the channel.
  if ((channel.id & kCapturedChannel) != 0) return engine_.fail(channel.id, what.why, true);
  Inquiry& inquiry = open_[channel.id];
  inquiry.stalled = what;
  inquiry.rank = channel.rank;
  inquiry.peers = channel.peers;
  inquiry.names.clear();
  for (size_t r = 0; r < channel.peers.size(); ++r)
    inquiry.names.push_back(channel.named(static_cast<int>(r)));
  inquiry.stands.resize(channel.peers.size());
  if (channel.record)
    inquiry.stands[static_cast<size_t>(channel.rank)] =
        stand_of(record::decode(channel.record->slot()), inquiry.stalled.question);
  read_records(channel.id, inquiry);
  std::vector<int> unknown;
  for (size_t r = 0; r < inquiry.peers.size(); ++r)
    if (!inquiry.stands[r].known) unknown.push_back(inquiry.peers[r]);
  const Nanoseconds now = engine_.clock().now();
  inquiry.until = unknown.empty() ? now : now + kAnswers;
  if (!unknown.empty()) ask(channel.id, inquiry.stalled.question, std::move(unknown));
}

// Of the ranks whose processes can be seen from here.
void Standings::read_records(uint32_t comm, Inquiry& inquiry) const {
  const Member& me = members_[static_cast<size_t>(rank_)];
  for (size_t r = 0; r < inquiry.peers.size(); ++r) {
    const Member& member = members_[static_cast<size_t>(inquiry.peers[r])];
    if (inquiry.stands[r].known || member.host != me.host) continue;
    const auto process = record::look_at(static_cast<int>(member.pid));
    if (!process.ok()) continue;
    for (const auto& view : process->communicators) {
      if (view.world != world_ || view.id != comm || view.rank != static_cast<int>(r)) continue;
      inquiry.stands[r] = stand_of(view, inquiry.stalled.question);
      inquiry.stands[r].kernel_state = process->kernel_state;
    }
  }
}

bool Standings::check() {
  bool any = false;
  for (auto at = open_.begin(); at != open_.end();) {
    const auto& [comm, inquiry] = *at;
    const bool complete =
        std::ranges::all_of(inquiry.stands, [](const Stand& s) { return s.known; });
    if (!complete && engine_.clock().now() < inquiry.until) {
      ++at;
      continue;
    }
    conclude(comm, inquiry);
    at = open_.erase(at);
    any = true;
  }
  return any;
}

Nanoseconds Standings::deadline() const {
  Nanoseconds first = Nanoseconds::max();
  for (const auto& [comm, inquiry] : open_) first = std::min(first, inquiry.until);
  return first;
}

void Standings::conclude(uint32_t comm, const Inquiry& inquiry) {
  const auto me = static_cast<size_t>(inquiry.rank);
  for (size_t r = 0; r < inquiry.stands.size() && inquiry.stalled.partner < 0; ++r) {
    const Stand& stand = inquiry.stands[r];
    if (stand.fingerprint == 0 || stand.fingerprint == inquiry.stalled.question.fingerprint)
      continue;
    return engine_.fail(
        comm,
        Status(Code::mismatch, both_sides(inquiry.names[me], inquiry.stands[me].what,
                                          inquiry.names[r], stand.what)),
        true);
  }
  const std::string text =
      fmt::format("{}. {}. {}", inquiry.stalled.why.message(), missing(inquiry), table(inquiry));
  engine_.fail(comm, Status(Code::timeout, text), true);
}

std::string Standings::who(Peer peer) const {
  const Member& member = members_[static_cast<size_t>(peer)];
  return fmt::format("process {} on {}", member.pid, member.host_name);
}

// Who is to blame: whoever has not called it; else whoever is stopped, or does not answer.
std::string Standings::missing(const Inquiry& inquiry) const {
  const auto listed = [&](const char* what, auto which) {
    std::string text;
    for (size_t r = 0; r < inquiry.stands.size(); ++r)
      if (static_cast<int>(r) != inquiry.rank && which(inquiry.stands[r]))
        text += fmt::format("{}rank {} ({})", text.empty() ? "" : ", ", inquiry.names[r],
                            who(inquiry.peers[r]));
    return text.empty() ? text : fmt::format("{} {}", text, what);
  };
  const auto stopped = [](const Stand& s) {
    return s.kernel_state == 'T' || s.kernel_state == 't';
  };
  const std::string silent = listed("not heard of", [](const Stand& s) { return !s.known; });
  const std::string still = listed("stopped", stopped);
  std::string absent;
  if (inquiry.stalled.partner < 0)
    absent = listed("did not call it", [](const Stand& s) { return s.known && !s.called; });
  std::string text;
  for (const std::string& part : {absent, still, silent})
    if (!part.empty()) text += (text.empty() ? "" : "; ") + part;
  if (!text.empty()) return "Missing: " + text;
  if (inquiry.stalled.partner >= 0)
    return fmt::format("Missing: the other half, on rank {}", inquiry.stalled.partner);
  return "All ranks have called it";
}

// Ranks that stand alike share a line.
std::string Standings::table(const Inquiry& inquiry) {
  std::vector<std::pair<std::string, std::vector<int>>> lines;
  for (size_t r = 0; r < inquiry.stands.size(); ++r) {
    const Stand& stand = inquiry.stands[r];
    const std::string text = stand.known ? stand.text : "unknown";
    auto line = std::ranges::find(lines, text, [](const auto& entry) { return entry.first; });
    if (line == lines.end()) line = lines.insert(lines.end(), {text, {}});
    line->second.push_back(inquiry.names[r]);
  }
  std::string text = "Where each rank stands:";
  for (const auto& [line, ranks] : lines)
    text += fmt::format("{} rank {}: {}", line == lines.front().first ? "" : ";", rank_list(ranks),
                        line);
  return text;
}

}  // namespace ringfold
