// The control star: news of failures, of lost ranks and of goodbyes; nothing left behind.
#include "lib/comm/control.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <map>

#include "lib/base/auth.h"
#include "lib/comm/rendezvous.h"
#include "test/ranks.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;
using Catch::Contains;
using Kind = Notice::Kind;

namespace {

Nanoseconds now() {
  return steady_clock().now();
}

// Ranks of this process whose controls this thread drives; what each of them heard.
struct Stars {
  explicit Stars(int size) : ranks(meet(size)), heard(static_cast<size_t>(size)) { listen(); }
  explicit Stars(Ranks met) : ranks(std::move(met)), heard(ranks.size()) { listen(); }
  void listen() {
    for (size_t r = 0; r < ranks.size(); ++r) {
      REQUIRE(ranks[r].status().to_string() == "ok");
      controls.push_back(ranks[r]->control.get());
      controls[r]->on_notice = [this, r](const Notice& notice) { heard[r].push_back(notice); };
    }
  }
  // One rank goes away; it must be the last in `controls` that is driven.
  void remove(size_t r) {
    std::erase(controls, ranks[r]->control.get());
    ranks[r]->control.reset();
  }
  Ranks ranks;
  std::vector<std::vector<Notice>> heard;
  std::vector<Control*> controls;
};

Notice failure(std::vector<int> members, std::string text = "it broke") {
  Notice notice;
  notice.comm = 77;
  notice.code = Code::timeout;
  notice.text = std::move(text);
  notice.members = std::move(members);
  return notice;
}

}  // namespace

TEST_CASE("a failure reaches the members concerned, whole, and nobody else") {
  Stars stars(5);
  stars.controls[3]->tell(failure({0, 1, 3}));
  REQUIRE(
      drive(stars.controls, [&] { return stars.heard[0].size() + stars.heard[1].size() == 2; }));
  drive(
      stars.controls, [] { return false; }, 20ms);  // whatever else would come
  for (const size_t r : {size_t{0}, size_t{1}}) {
    const Notice& notice = stars.heard[r].at(0);
    CHECK(notice.kind == Kind::failed);
    CHECK(notice.origin == 3);
    CHECK(notice.comm == 77);
    CHECK(notice.code == Code::timeout);
    CHECK(notice.text == "it broke");
    CHECK(notice.members == std::vector<int>{0, 1, 3});
  }
  for (const size_t r : {2, 3, 4}) CHECK(stars.heard[r].empty());

  stars.controls[3]->tell(failure({2, 3}));  // past rank 0, which only passes it on
  REQUIRE(drive(stars.controls, [&] { return stars.heard[2].size() == 1; }));
  CHECK(stars.heard[0].size() == 1);
  stars.heard[2].clear();

  stars.controls[0]->tell(failure({}));  // from rank 0, to all
  REQUIRE(drive(stars.controls, [&] { return stars.heard[4].size() == 1; }));
  drive(
      stars.controls, [] { return false; }, 20ms);
  CHECK(stars.heard[0].size() == 1);
  for (const size_t r : {2, 3, 4}) CHECK(stars.heard[r].size() == 1);
  leave_all(stars.ranks);
}

TEST_CASE("notices may be told from inside on_notice, are cut at their limit, and keep order") {
  Stars stars(3);
  stars.controls[1]->on_notice = [&](const Notice& notice) {
    stars.heard[1].push_back(notice);
    stars.controls[1]->tell(failure({2}, "answer " + notice.text.substr(0, 2)));
  };
  for (int i = 10; i < 30; ++i) {
    stars.controls[0]->tell(failure({1}, std::to_string(i) + std::string(kMaxNoticeText, 'x')));
  }
  REQUIRE(drive(stars.controls, [&] { return stars.heard[2].size() == 20; }));
  for (int i = 0; i < 20; ++i) {
    CHECK(stars.heard[1][static_cast<size_t>(i)].text.size() == kMaxNoticeText);
    CHECK(stars.heard[2][static_cast<size_t>(i)].text == fmt::format("answer {}", 10 + i));
  }
  leave_all(stars.ranks);
}

TEST_CASE("arm() becomes readable on news and not before") {
  Stars stars(2);
  drive(
      stars.controls, [] { return false; }, 20ms);
  pollfd one{stars.controls[1]->arm(), POLLIN, 0};
  CHECK(poll(&one, 1, 0) == 0);
  stars.controls[0]->tell(failure({1}));
  CHECK(poll(&one, 1, 1000) == 1);
  CHECK(stars.controls[1]->progress());
  CHECK(stars.heard[1].size() == 1);
  CHECK(poll(&one, 1, 0) == 0);
  leave_all(stars.ranks);
}

TEST_CASE("news that came together with the end of start-up is not overlooked") {
  const uint16_t port = free_port();
  Ranks ranks = in_threads(3, [&](int rank) {
    auto met = bootstrap(rendezvous(rank, 3, port), this_process(), {});
    // Rank 0 speaks at once, so that the notice can sit behind the table in the same packet.
    if (rank == 0 && met.ok()) met->control->tell(failure({}));
    if (rank == 1) std::this_thread::sleep_for(100ms);
    return met;
  });
  Stars stars(std::move(ranks));
  for (const size_t r : {1, 2}) {
    pollfd one{stars.controls[r]->arm(), POLLIN, 0};
    CHECK(poll(&one, 1, 1000) == 1);
    REQUIRE(drive({stars.controls[r]}, [&] { return stars.heard[r].size() == 1; }));
  }
  leave_all(stars.ranks);
}

TEST_CASE("a goodbye is told as such, once, and after what was said before") {
  const int leaver = GENERATE(0, 2);
  Stars stars(4);
  stars.controls[static_cast<size_t>(leaver)]->tell(failure({}));
  std::thread leaving([control = stars.controls[static_cast<size_t>(leaver)]] {
    const Nanoseconds begin = now();
    control->leave();
    CHECK(now() - begin < 900ms);  // the others were there to hear it
  });
  std::vector<Control*> rest = stars.controls;
  std::erase(rest, stars.controls[static_cast<size_t>(leaver)]);
  const auto all_heard = [&] {
    for (size_t r = 0; r < 4; ++r) {
      if (static_cast<int>(r) != leaver && stars.heard[r].size() < 2) return false;
    }
    return true;
  };
  const bool heard = drive(rest, all_heard);
  leaving.join();
  REQUIRE(heard);
  stars.remove(static_cast<size_t>(leaver));
  drive(
      rest, [] { return false; }, 20ms);
  for (size_t r = 0; r < 4; ++r) {
    if (static_cast<int>(r) == leaver) continue;
    REQUIRE(stars.heard[r].size() == 2);
    CHECK(stars.heard[r][0].kind == Kind::failed);
    CHECK(stars.heard[r][1].kind == Kind::left);
    CHECK(stars.heard[r][1].origin == leaver);
  }
  for (Control* control : rest) control->tell(failure({}));  // to ranks that are gone: nothing
  leave_all(stars.ranks);
}

TEST_CASE("leaving takes at most a second when nobody listens") {
  Stars stars(2);
  const Nanoseconds begin = now();
  stars.controls[1]->leave();
  CHECK(now() - begin >= 900ms);
  CHECK(now() - begin < 1500ms);
  CHECK_FALSE(stars.controls[1]->progress());
  stars.controls[1]->tell(failure({}));
  REQUIRE(drive({stars.controls[0]}, [&] { return stars.heard[0].size() == 1; }));
  CHECK(stars.heard[0][0].kind == Kind::left);
}

TEST_CASE("a control dropped without goodbye is lost") {
  Stars stars(3);
  stars.remove(1);
  REQUIRE(
      drive(stars.controls, [&] { return stars.heard[0].size() + stars.heard[2].size() == 2; }));
  CHECK(stars.heard[2][0].kind == Kind::lost);
  CHECK(stars.heard[2][0].origin == 1);
  CHECK(stars.heard[2][0].code == Code::peer_lost);
  leave_all(stars.ranks);
}

TEST_CASE("a killed process is reported to all within a second") {
  const int victim = GENERATE(0, 1, 2);
  const uint16_t port = free_port();
  const pid_t child = fork();
  if (child == 0) {
    const auto met = bootstrap(rendezvous(victim, 4, port), this_process(), {});
    while (met.ok()) {
      met->control->progress();
      usleep(1000);
    }
    _exit(1);
  }
  Ranks ranks = in_threads(3, [&](int i) {
    return bootstrap(rendezvous(i < victim ? i : i + 1, 4, port), this_process(), {});
  });
  Stars stars(std::move(ranks));
  CHECK_FALSE(drive(
      stars.controls, [&] { return !stars.heard[0].empty(); }, 20ms));
  const Nanoseconds begin = now();
  kill(child, SIGKILL);
  const bool heard = drive(stars.controls, [&] {
    return stars.heard[0].size() == 1 && stars.heard[1].size() == 1 && stars.heard[2].size() == 1;
  });
  const Nanoseconds took = now() - begin;
  waitpid(child, nullptr, 0);
  REQUIRE(heard);
  CHECK(took < 1s);
  for (const auto& notices : stars.heard) {
    CHECK(notices[0].kind == Kind::lost);
    CHECK(notices[0].origin == victim);
  }
  if (victim != 0) leave_all(stars.ranks);
}

TEST_CASE("a malformed frame costs the connection that sent it, and no other") {
  const std::string said = GENERATE(std::string("\xff\xff\xff\x7f"),  // beyond the limit
                                    std::string("\x20\0\0\0", 4) +    // does not open
                                        std::string(32, 'x'),         //
                                    std::string());                   // sealed nonsense
  const uint16_t port = free_port();
  std::optional<Result<Met>> raw;
  Ranks ranks = in_threads(3, [&](int rank) -> Result<Bootstrapped> {
    if (rank < 2) return bootstrap(rendezvous(rank, 3, port), this_process(), {});
    Meeting meeting;
    meeting.rank = rank;
    meeting.size = 3;
    meeting.key = key_of("a secret");
    meeting.begun = now();
    meeting.deadline = meeting.begun + 10s;
    Joined mine{this_process(), {}, {}};
    mine.member.rank = rank;
    // The agreement of the library itself, as bootstrap() adds it.
    mine.agreement = own_agreement();
    raw.emplace(join(meeting, {{"127.0.0.1", port}}, mine));
    return raw->status();
  });
  REQUIRE((raw && raw->ok()));
  Link& link = *(*raw)->links[0];
  if (said.empty()) {
    link.queue("\x04nonsense");
    link.write();
  } else {
    REQUIRE(send_all(link.socket(), said, now() + 1s).ok());
  }
  ranks.pop_back();
  Stars stars(std::move(ranks));
  REQUIRE(
      drive(stars.controls, [&] { return !stars.heard[0].empty() && !stars.heard[1].empty(); }));
  CHECK(stars.heard[0][0].kind == Kind::lost);
  CHECK(stars.heard[0][0].origin == 2);
  CHECK(stars.heard[1][0].origin == 2);
  stars.controls[1]->tell(failure({0}));
  CHECK(drive(stars.controls, [&] { return stars.heard[0].size() == 2; }));
  leave_all(stars.ranks);
}

TEST_CASE("a rank that reads nothing costs bounded memory and is then lost") {
  Stars stars(3);
  const std::vector<Control*> reading = {stars.controls[0], stars.controls[1]};
  const Notice large = failure({2}, std::string(kMaxNoticeText, 'x'));
  // Far more than the queue and the kernel's buffers hold together.
  for (int i = 0; i < 4000 && stars.heard[1].empty(); ++i) {
    stars.controls[0]->tell(large);
    for (Control* control : reading) control->progress();
  }
  REQUIRE(drive(reading, [&] { return !stars.heard[0].empty() && !stars.heard[1].empty(); }));
  CHECK(stars.heard[1][0].kind == Kind::lost);
  CHECK(stars.heard[1][0].origin == 2);
  CHECK_THAT(stars.heard[0][0].text, Contains("reads no messages"));
  stars.remove(2);
  leave_all(stars.ranks);
}

TEST_CASE("meeting and leaving two hundred times leaves nothing behind (C52, C54)") {
  int descriptors = 0, threads = 0;
  for (int i = 0; i < 200; ++i) {
    Ranks ranks = meet(2);
    std::vector<int> lost(2);
    for (size_t r = 0; r < 2; ++r) {
      REQUIRE(ranks[r].status().to_string() == "ok");
      ranks[r]->control->on_notice = [&lost, r](const Notice& notice) {
        lost[r] += notice.kind == Kind::lost ? 1 : 0;
      };
    }
    leave_all(ranks);
    CHECK((lost[0] == 0 && lost[1] == 0));
    ranks.clear();
    if (i == 0) descriptors = open_descriptors(), threads = running_threads();
  }
  CHECK(open_descriptors() == descriptors);
  CHECK(running_threads() == threads);
}
