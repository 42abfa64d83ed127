// Ranks as processes over each transport; one of them dies, stands still, aborts or calls something
// else at a random moment. The others must say so, in time and by name, and go on without it.
//   chaos_processes_test          some dozens of scenarios
//   CHAOS_SCENARIOS=300 ...       as many
//   CHAOS_SEED=17 ...             that one alone
// Ends with a table of how long it took until the last of the others knew.
#include <dirent.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "lib/base/base.h"
#include "test/cases.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

enum class Blow : uint8_t { kill, exit, stop, abort, mismatch };
enum class Moment : uint8_t { bootstrap, idle, operation, split, destroy };
constexpr std::array<const char*, 5> kBlows = {"SIGKILL", "_exit", "SIGSTOP", "abort", "mismatch"};
constexpr std::array<const char*, 5> kMoments = {"bootstrap", "idle", "operation", "split",
                                                 "destroy"};
constexpr Nanoseconds kPatience = 800ms;  // deadline of an operation where a rank stands still
constexpr Nanoseconds kLong = 20s;        // ... otherwise: no failure may wait for it
constexpr Nanoseconds kRendezvous = 3s;
constexpr Nanoseconds kSoon = 1s;  // within which all others know

struct Plan {
  uint64_t seed = 0;
  std::string transport;
  int ranks = 3, victim = 1;
  Blow blow = Blow::kill;
  Moment moment = Moment::operation;
  Nanoseconds delay{};  // from the moment's begin to the blow
  uint16_t second_port = 0;

  [[nodiscard]] bool dies() const { return blow == Blow::kill || blow == Blow::exit; }
  [[nodiscard]] std::string describe() const {
    return fmt::format("CHAOS_SEED={}: {} of rank {} of {} over {}, {} us into {}", seed,
                       kBlows[static_cast<size_t>(blow)], victim, ranks, transport,
                       delay.count() / 1000, kMoments[static_cast<size_t>(moment)]);
  }
};

Plan make_plan(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto ways = transports();
  Plan plan;
  plan.seed = seed;
  plan.transport = ways[seed % ways.size()];
  plan.ranks = 3 + static_cast<int>(random() % 2);
  plan.victim = static_cast<int>(random() % static_cast<uint64_t>(plan.ranks));
  plan.blow = static_cast<Blow>(random() % kBlows.size());
  // Only who dies or stands still can do so where there is no communicator.
  const bool anywhere = plan.dies() || plan.blow == Blow::stop;
  plan.moment = static_cast<Moment>(anywhere ? random() % kMoments.size() : 1 + random() % 3);
  if (plan.blow == Blow::mismatch && plan.moment == Moment::split) plan.moment = Moment::operation;
  plan.delay = Nanoseconds(random() % (random() % 2 == 0 ? 1'000'000 : 30'000'000));
  plan.second_port = free_port();
  return plan;
}

// What the ranks and the parent tell each other.
struct Board {
  std::atomic<int64_t> struck{0};    // when, on the clock of all
  std::atomic<bool> stopped{false};  // the victim wants to be woken
  std::array<std::atomic<int64_t>, 4> knew{};
};

int64_t now() {
  return steady_clock().now().count();
}

// One rank of a scenario.
class Actor {
 public:
  Actor(const Rendezvous& me, const Plan& plan, Board& board)
      : me_(me), plan_(plan), board_(board), random_(plan.seed) {
    options_.transports = plan.transport;
    options_.timeout = plan.blow == Blow::stop ? kPatience : kLong;
    me_.timeout = kRendezvous;
  }
  ~Actor() {
    if (bomb_.joinable()) bomb_.join();
  }
  int run();

 private:
  [[nodiscard]] bool victim() const { return me_.rank == plan_.victim; }
  void light(Communicator comm = {});
  void start_up();
  Status work(int i);
  Status one_split();
  void suffer();
  void judge(const Status& status);
  void go_on();
  void exact(Communicator& comm, int size);

  Rendezvous me_;
  const Plan& plan_;
  Board& board_;
  std::mt19937_64 random_;  // the same numbers on all ranks
  Options options_;
  Communicator comm_;
  Status first_;  // of start-up
  std::atomic<bool> odd_{false};
  std::thread bomb_;
  int64_t called_ = 0;
};

// The victim's blow, after the delay.
void Actor::light(Communicator comm) {
  if (!victim()) return;
  bomb_ = std::thread([this, comm]() mutable {
    std::this_thread::sleep_for(plan_.delay);
    board_.struck = now();
    switch (plan_.blow) {
      case Blow::kill:
        ::kill(getpid(), SIGKILL);
        return;
      case Blow::exit:
        _exit(7);
      case Blow::stop:
        board_.stopped = true;
        ::kill(getpid(), SIGSTOP);
        return;
      case Blow::abort:
        comm.abort("enough");
        return;
      case Blow::mismatch:
        odd_ = true;
        return;
    }
  });
}

void Actor::start_up() {
  if (plan_.moment == Moment::bootstrap) light();
  called_ = now();
  auto made = Communicator::create(me_, options_);
  first_ = made.status();
  if (made.ok()) comm_ = *made;
}

// A call like any other, which must be right if it ends well.
Status Actor::work(int i) {
  const size_t counts[] = {1, 1000, 100'000, 1'000'000};
  const size_t count = counts[random_() % 4] + (odd_.exchange(false) ? 1 : 0);
  const auto kind = random_() % 3;
  const auto root = static_cast<int>(random_() % static_cast<uint64_t>(comm_.size()));
  std::vector<int32_t> x(count, me_.rank + i);
  called_ = now();
  Status status;
  int32_t right = 0;
  if (kind == 0) {
    status = comm_.broadcast(x.data(), count, DType::i32, root).wait();
    right = root + i;
  } else {
    Work pending = comm_.all_reduce(x.data(), x.data(), count, DType::i32, Op::sum);
    if (kind == 1) std::this_thread::yield();
    status = pending.wait();
    right = comm_.size() * (comm_.size() - 1) / 2 + comm_.size() * i;
  }
  if (status.ok() && x != std::vector<int32_t>(count, right))
    rank_fail(fmt::format("call {} of {} elements: a wrong result", i, count));
  return status;
}

Status Actor::one_split() {
  called_ = now();
  auto part = comm_.split(me_.rank % 2, 0);
  if (!part.ok()) return part.status();
  int64_t x = 1;
  called_ = now();
  // Not all may have got as far as this: what failed is then the communicator that was split.
  Work pending = part->all_reduce(&x, &x, 1, DType::i64, Op::sum);
  while (pending.wait(10ms).code() == Code::timeout && !pending.done())
    if (const Status health = comm_.health(); !health.ok()) {
      part->abort();
      (void)pending.wait();
      return health;
    }
  return pending.wait();
}

// What the others hear of it, and when.
void Actor::judge(const Status& status) {
  const int64_t heard = now();
  const auto rank = static_cast<size_t>(me_.rank);
  const Nanoseconds took(heard - std::max(called_, board_.struck.load()));
  static constexpr Code kExpected[] = {Code::peer_lost, Code::peer_lost, Code::timeout,
                                       Code::aborted, Code::mismatch};
  const Code expected = kExpected[static_cast<size_t>(plan_.blow)];
  if (status.code() != expected) return rank_fail("told: " + status.to_string());
  if (plan_.blow == Blow::stop) {
    const Nanoseconds waited(heard - called_);
    if (waited > kPatience + kSoon)
      rank_fail(fmt::format("waited for {} ms", waited.count() / 1'000'000));
    board_.knew[rank] = std::max<int64_t>(1, (waited - kPatience).count());
    return;
  }
  board_.knew[rank] = std::max<int64_t>(1, took.count());
  if (took > kSoon)
    rank_fail(fmt::format("knew after {} ms: {}", took.count() / 1'000'000, status.to_string()));
  const std::string name = fmt::format("rank {}", plan_.victim);
  if (!victim() && plan_.blow != Blow::mismatch && status.message().find(name) == std::string::npos)
    rank_fail("does not name the rank: " + status.to_string());
}

void Actor::exact(Communicator& comm, int size) {
  for (int i = 0; i < 3; ++i) {
    std::vector<int64_t> x(5000, i + 1);
    if (!rank_ok(comm.all_reduce(x.data(), x.data(), x.size(), DType::i64, Op::sum).wait(10s)))
      return;
    RANK_CHECK(comm.size() == size);
    if (x != std::vector<int64_t>(5000, (i + 1) * static_cast<int64_t>(size)))
      rank_fail("a wrong result afterwards");
  }
}

// Those that are left, by themselves; where there was no communicator, by a new rendezvous.
void Actor::go_on() {
  const bool without = plan_.dies() || plan_.blow == Blow::stop;
  if (without && victim()) return;
  const int size = plan_.ranks - (without ? 1 : 0);
  Options options;
  options.transports = plan_.transport;
  options.timeout = 10s;
  if (comm_.valid()) {
    const std::vector<int> gone = without ? std::vector<int>{plan_.victim} : std::vector<int>{};
    auto rest = comm_.shrink(gone);
    if (rank_ok(rest.status())) exact(*rest, size);
    return;
  }
  Rendezvous again = me_;
  again.rank -= without && me_.rank > plan_.victim ? 1 : 0;
  again.size = size;
  again.coordinator = fmt::format("127.0.0.1:{}", plan_.second_port);
  again.timeout = 15s;
  auto fresh = Communicator::create(again, options);
  if (rank_ok(fresh.status())) exact(*fresh, size);
}

// Calls until the blow is felt.
void Actor::suffer() {
  if (plan_.moment == Moment::idle) std::this_thread::sleep_for(plan_.delay + 20ms);
  const int64_t end = now() + Nanoseconds(10s).count();
  Status status;
  for (int i = 0; status.ok() && now() < end; ++i)
    status = plan_.moment == Moment::split ? one_split() : work(i);
  if (plan_.dies() || !victim() || plan_.blow != Blow::stop) judge(status);
}

int Actor::run() {
  start_up();
  if (!first_.ok()) {
    // Whoever died before it came is missed, and later; or was never seen by those that came.
    const bool known = first_.code() == Code::peer_lost || first_.code() == Code::timeout;
    if (plan_.moment != Moment::bootstrap || !plan_.dies() || !known)
      rank_fail("start-up: " + first_.to_string());
    if (first_.code() == Code::peer_lost && board_.struck != 0) {
      const Nanoseconds took(now() - std::max(called_, board_.struck.load()));
      board_.knew[static_cast<size_t>(me_.rank)] = std::max<int64_t>(1, took.count());
      if (took > kSoon) rank_fail(fmt::format("knew after {} ms", took.count() / 1'000'000));
    }
  } else if (plan_.moment == Moment::destroy) {
    rank_ok(comm_.barrier().wait());
    light();
    const int64_t begun = now();
    comm_ = Communicator();
    if (victim() && plan_.dies()) bomb_.join();
    if (now() - begun > Nanoseconds(kSoon + kRendezvous).count() && !victim())
      rank_fail(fmt::format("leaving took {} ms", (now() - begun) / 1'000'000));
  } else if (plan_.moment != Moment::bootstrap || plan_.dies()) {
    if (plan_.moment != Moment::bootstrap) light(comm_);
    suffer();
  } else {
    return 0;  // a rank that stood still during start-up: all met nevertheless
  }
  if (bomb_.joinable()) bomb_.join();
  go_on();
  return 0;
}

std::set<std::string> entries(const char* directory) {
  std::set<std::string> names;
  if (DIR* dir = opendir(directory)) {
    while (const dirent* entry = readdir(dir)) names.insert(entry->d_name);
    closedir(dir);
  }
  return names;
}

// Segments that nobody maps any more.
std::set<std::string> orphans() {
  std::set<std::string> names = entries("/dev/shm");
  for (const std::string& process : entries("/proc")) {
    std::ifstream maps("/proc/" + process + "/maps");
    for (std::string line; std::getline(maps, line);)
      if (const size_t at = line.find("/dev/shm/"); at != std::string::npos)
        names.erase(line.substr(at + 9));
  }
  return names;
}

// How long it took until the last rank knew.
struct Sample {
  size_t blow, transport;
  double milliseconds;
};
// What the ranks print, by process: UCX tells of each connection to a dead rank.
std::string log_folder() {
  return fmt::format("/tmp/ringfold-chaos-{}", getpgrp());
}

// Debian's UCX has assertions that a dying peer can trip while a connection is being made; they end
// the process, which no library above it can prevent. Its sources are in C, ours are not.
bool ended_by_ucx(pid_t process) {
  std::ifstream log(fmt::format("{}/{}", log_folder(), process));
  for (std::string line; std::getline(log, line);)
    if (line.find(".c:") != std::string::npos && line.find("Assertion") != std::string::npos)
      return true;
  return false;
}

struct Samples {
  std::atomic<int> ended_by_ucx{0};
  static constexpr size_t kMost = 4096;
  std::atomic<size_t> count{0};
  std::array<Sample, kMost> all{};
  void add(const Sample& sample) {
    if (const size_t at = count.fetch_add(1); at < kMost) all[at] = sample;
  }
};

// Empty, or what went wrong.
std::string play(const Plan& plan, Samples& samples) {
  Shared<Board> board;
  const size_t descriptors = entries("/proc/self/fd").size();
  std::string wrong;
  {
    Processes ranks(plan.ranks, [&](const Rendezvous& me) {
      const std::string log = fmt::format("{}/{}", log_folder(), getpid());
      const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
      RANK_CHECK(dup2(file, STDOUT_FILENO) >= 0);
      RANK_CHECK(dup2(file, STDERR_FILENO) >= 0);
      close(file);
      return Actor(me, plan, *board).run();
    });
    // Whoever stands still goes on when the others are through with it.
    if (plan.blow == Blow::stop) {
      for (int i = 0; i < 2000 && !board->stopped; ++i) std::this_thread::sleep_for(5ms);
      std::this_thread::sleep_for(plan.moment == Moment::bootstrap ? 500ms : kPatience + 1200ms);
      ranks.resume(plan.victim);
    }
    std::vector<pid_t> processes;
    for (int r = 0; r < plan.ranks; ++r) processes.push_back(ranks.pid(r));
    const auto ends = ranks.wait(40s);
    for (int r = 0; r < plan.ranks; ++r) {
      if (ends[static_cast<size_t>(r)].signal != SIGABRT) continue;
      if (!ended_by_ucx(processes[static_cast<size_t>(r)])) continue;
      ++samples.ended_by_ucx;
      return {};
    }
    for (int r = 0; r < plan.ranks; ++r) {
      const Outcome& end = ends[static_cast<size_t>(r)];
      const bool fell = r == plan.victim && plan.dies();
      if (!end.ok() && !(fell && !end.hung && end.text.empty()))
        wrong += fmt::format("rank {} {}\n", r, end.to_string());
    }
  }
  if (entries("/proc/self/fd").size() != descriptors) wrong += "descriptors are left\n";
  int64_t last = 0;
  for (const auto& knew : board->knew) last = std::max(last, knew.load());
  if (last > 0)
    samples.add({static_cast<size_t>(plan.blow), plan.seed % transports().size(),
                 1e-6 * static_cast<double>(last)});
  return wrong;
}

void print(const Samples& samples) {
  std::map<std::pair<size_t, size_t>, std::vector<double>> times;
  for (size_t i = 0; i < std::min(samples.count.load(), Samples::kMost); ++i)
    times[{samples.all[i].blow, samples.all[i].transport}].push_back(samples.all[i].milliseconds);
  fmt::print(
      "from the blow to the last that knew (of a rank that stands still: after the "
      "deadline)\n{:<10} {:<8} {:>6} {:>12} {:>12}\n",
      "fault", "over", "times", "median (ms)", "worst (ms)");
  for (auto& [what, all] : times) {
    std::ranges::sort(all);
    fmt::print("{:<10} {:<8} {:>6} {:>12.1f} {:>12.1f}\n", kBlows[what.first],
               transports()[what.second], all.size(), all[all.size() / 2], all.back());
  }
}

std::optional<uint64_t> number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  const auto number = text == nullptr ? std::nullopt : parse_integer(text);
  return number ? std::optional(static_cast<uint64_t>(*number)) : std::nullopt;
}

// Plays the plans, several side by side: most of the time everybody waits for somebody.
void play_all(uint64_t scenarios, const std::function<Plan(uint64_t)>& plan_of) {
  constexpr uint64_t kShards = 3;
  constexpr double kMostEndedByUcx = 0.05;
  std::filesystem::create_directory(log_folder());
  const std::set<std::string> before = orphans();
  Shared<Samples> samples;
  CHECK(run_ranks(static_cast<int>(std::min(kShards, scenarios)), 900s, [&](const Rendezvous& me) {
          int broken = 0;
          for (uint64_t i = static_cast<uint64_t>(me.rank); i < scenarios && broken < 3;
               i += kShards) {
            const Plan plan = plan_of(i);
            const std::string wrong = play(plan, *samples);
            if (wrong.empty()) continue;
            rank_fail(fmt::format("{}\n{}", plan.describe(), wrong));
            ++broken;
          }
          return 0;
        }) == "");
  std::filesystem::remove_all(log_folder());
  CHECK(samples->ended_by_ucx <= 1 + kMostEndedByUcx * static_cast<double>(scenarios));
  for (const std::string& name : orphans()) {
    INFO("left in /dev/shm: " << name);
    CHECK(before.contains(name));
  }
  fmt::print("chaos: {} scenarios with processes; in {} UCX ended one by an assertion of its own\n",
             scenarios, samples->ended_by_ucx.load());
  print(*samples);
}

}  // namespace

TEST_CASE("a process fails somehow, somewhere: the others say so, in time, and go on") {
  const auto only = number_in("CHAOS_SEED");
  const uint64_t first = only.value_or(0);
  const uint64_t scenarios = only ? 1 : number_in("CHAOS_SCENARIOS").value_or(24);
  play_all(scenarios, [&](uint64_t i) { return make_plan(first + i); });
}

// All news of the others goes through it.
TEST_CASE("rank 0 dies at any moment, on any transport: the others name it, and go on") {
  if (number_in("CHAOS_SEED")) return;
  const uint64_t ways = transports().size(), moments = kMoments.size();
  const uint64_t blows = number_in("CHAOS_SCENARIOS") ? 2 : 1;
  play_all(ways * moments * blows, [&](uint64_t i) {
    Plan plan = make_plan(i);  // over transport i % ways
    plan.victim = 0;
    plan.moment = static_cast<Moment>(i / ways % moments);
    plan.blow = i / ways / moments == 0 ? Blow::kill : Blow::exit;
    return plan;
  });
}
