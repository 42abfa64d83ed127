#include "lib/engine/engine_thread.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "lib/base/cores.h"

namespace ringfold {
namespace {

// How long the thread stays aside after the last helper left, if nothing is pending: a loop of
// blocking calls then never wakes it. Also how late it takes over where a caller was expected to.
constexpr auto kLinger = std::chrono::milliseconds(2);
// How long a caller spins for the thread to stand aside before it gives the core away.
constexpr int kTurnsBeforeYield = 200;
// It looks ever less often while one and the same caller waits.
constexpr auto kLongestDoze = std::chrono::milliseconds(500);
// Other processes that want this core get it so many times before a driver goes to sleep, which
// costs them and us far more.
constexpr int kYields = 4;
// A driver that spins keeps the core to itself so long; then it offers the core at every turn, for
// somebody it cannot know of may be waiting for it: ranks of other hosts that are none, say.
constexpr Nanoseconds kAlone = std::chrono::microseconds(3);
// Where the last wait was longer than any spinning, the next one begins with so little of it: what
// waits for links, or for ranks that still compute, is not to burn a core.
constexpr Nanoseconds kBriefly = std::chrono::microseconds(20);
constexpr Nanoseconds kLongestSleep = std::chrono::seconds(10);

}  // namespace

EngineThread::EngineThread(Engine& engine, Nanoseconds spin)
    : engine_(engine), spin_(spin), patience_(spin) {
  doorbell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  engine_.on_request = [this] { ring(); };
  // Signals belong to the application's threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

EngineThread::~EngineThread() {
  stop_.store(true);
  ring();
  thread_.join();
  close(doorbell_);
}

thread_local bool EngineThread::caller_waits_ = false;

// Somebody has work for whoever drives. A driver that is awake will see it by itself.
// Both write `meeting_`, here and in drive(): whoever comes second sees what the other did before.
// So either the driver sees the request before it sleeps, or it is seen asleep here.
void EngineThread::ring() {
  meeting_.fetch_add(1);
  if (asleep_.load() != 0) {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = write(doorbell_, &one, sizeof one);
  }
  if ((helpers_.load() == 0 && !caller_waits_) || stop_.load()) {
    const std::lock_guard lock(aside_);
    if (parked_) changed_.notify_one();
  }
}

// Polls until stop(); returns whether it slept. Asleep, it lets go of `driver` so that a caller can
// take over.
template <class Stop>
bool EngineThread::drive(std::unique_lock<std::mutex>& driver, Stop stop, Nanoseconds until) {
  Clock& clock = engine_.clock();
  Engine::Sleep sleep;
  Nanoseconds idle_since = clock.now();
  std::vector<pollfd> fds;
  int yields = 0;
  bool slept = false;
  while (!stop()) {
    if (engine_.poll()) {
      yields = 0;
      const Nanoseconds now = clock.now();
      patience_ = now - idle_since < spin_ ? spin_ : std::min(spin_, kBriefly);
      idle_since = now;
      continue;
    }
    const Nanoseconds now = clock.now();
    if (now >= until) break;
    if (now - idle_since < std::min(patience_, kAlone)) {
      relax();
      continue;
    }
    if ((now - idle_since < patience_ || yields++ < kYields) && courtesy_.offer()) continue;
    yields = 0;
    asleep_.fetch_add(1);
    meeting_.fetch_add(1);
    engine_.arm(&sleep);
    if (!sleep.now && !stop()) {  // another poll() here would undo the arming
      fds.assign(1, {doorbell_, POLLIN, 0});
      for (const int fd : sleep.fds) fds.push_back({fd, POLLIN, 0});
      const Nanoseconds wait =
          std::clamp(std::min(sleep.until, until) - now, Nanoseconds(0), kLongestSleep);
      const timespec timeout{static_cast<time_t>(wait.count() / 1'000'000'000),
                             static_cast<long>(wait.count() % 1'000'000'000)};
      driver.unlock();
      slept = true;
      ppoll(fds.data(), fds.size(), &timeout, nullptr);
      asleep_.fetch_sub(1);
      if (fds[0].revents != 0) {
        uint64_t rings = 0;
        [[maybe_unused]] const auto got = read(doorbell_, &rings, sizeof rings);
      }
      if (!driver.try_lock()) return slept;  // somebody else drives now
    } else {
      asleep_.fetch_sub(1);
    }
  }
  return slept;
}

bool EngineThread::help(const std::atomic<bool>& done, Nanoseconds until) {
  helpers_.fetch_add(1);
  helped_.fetch_add(1, std::memory_order_relaxed);
  if (asleep_.load() != 0) ring();  // the thread stands aside
  std::unique_lock driver(driver_, std::try_to_lock);
  // The thread leaves as soon as it sees us; another caller would not.
  for (int turns = 0; !driver.owns_lock() && thread_drives_.load(); ++turns) {
    if (turns < kTurnsBeforeYield)
      relax();
    else
      sched_yield();
    (void)driver.try_lock();
  }
  const bool drove = driver.owns_lock();
  bool slept = false;
  if (drove)
    slept = drive(
        driver, [&] { return done.load(std::memory_order_acquire); }, until);
  if (driver.owns_lock()) driver.unlock();
  const bool last = helpers_.fetch_sub(1) == 1;
  // Our polling undid the arming of whoever sleeps: they shall look, and arm again. After a long
  // wait the thread may have dozed off.
  if ((drove && asleep_.load() != 0) || (last && (slept || engine_.busy()))) ring();
  return drove;
}

// Stands aside while callers drive, and a moment longer.
void EngineThread::park() {
  std::unique_lock lock(aside_);
  parked_ = true;
  uint32_t seen = helped_.load();
  auto doze = kLinger;
  while (!stop_.load() && (helpers_.load() != 0 || !engine_.busy())) {
    const uint32_t helped = helped_.load();
    if (helpers_.load() == 0 && helped == seen) break;
    doze = helped == seen ? std::min(2 * doze, kLongestDoze) : kLinger;
    seen = helped;
    changed_.wait_for(lock, doze);
  }
  parked_ = false;
}

void EngineThread::run() {
  run_soon_when_woken();
  while (!stop_.load()) {
    park();
    std::unique_lock driver(driver_, std::try_to_lock);
    if (!driver.owns_lock()) {
      std::this_thread::yield();
      continue;
    }
    thread_drives_.store(true);
    drive(
        driver, [this] { return stop_.load() || helpers_.load() != 0; }, Nanoseconds::max());
    if (driver.owns_lock()) driver.unlock();
    thread_drives_.store(false);
  }
}

}  // namespace ringfold
