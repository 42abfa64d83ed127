#include "bench/peers/harness.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bench/peers/load.h"

namespace peers {
namespace {

struct Job {
  size_t bytes = 0;
  bool in_place = false;
  double budget_us = 0;
  int repetitions = 1;
};

struct Timings {
  std::vector<double> loop, sync;  // us per call
  int64_t iterations = 0;          // of one loop
  double cpu = 0;                  // us per call in loops, of all ranks together
};

double least(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Small whole numbers: their sum is exact in any order.
constexpr size_t kPeriod = 251;
void fill(float* at, size_t count, int rank) {
  for (size_t i = 0; i < count; ++i) at[i] = static_cast<float>((rank + 1) * (i % kPeriod + 1));
}
size_t wrong_elements(const float* at, size_t count, int ranks) {
  const int factor = ranks * (ranks + 1) / 2;
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i)
    wrong += at[i] != static_cast<float>(factor * (i % kPeriod + 1));
  return wrong;
}

// The buffers of one job.
class Buffers {
 public:
  Buffers(Library& library, const Job& job) : library_(library), bytes_(job.bytes) {
    if (!job.in_place) in_ = library.allocate(bytes_, Role::input);
    out_ = library.allocate(bytes_, Role::output);
    if (job.in_place) in_ = out_;
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    if (in_ != out_) library_.release(in_);
    library_.release(out_);
  }
  [[nodiscard]] float* in() const { return in_; }
  [[nodiscard]] float* out() const { return out_; }
  [[nodiscard]] size_t count() const { return bytes_ / sizeof(float); }
  // Zeros stay zeros however often they are summed up in place.
  void clear() const {
    std::fill_n(in_, count(), 0.F);
    std::fill_n(out_, count(), 0.F);
  }

 private:
  Library& library_;
  size_t bytes_;
  float *in_ = nullptr, *out_ = nullptr;
};

class Measurement {
 public:
  Measurement(Team& team, Library& library, const Job& job)
      : team_(team), library_(library), job_(job), buffers_(library, job) {
    call_ = library.prepare(buffers_.in(), buffers_.out(), buffers_.count());
  }

  std::string run() {
    const double wrong = check();
    buffers_.clear();
    warm_up();
    const double line_before = team_.line_latency_ns();
    const Load load(team_);
    Timings timings;
    time_loops(timings);
    time_single_calls(timings);
    const Load::Share others = load.others();
    const double line_after = team_.line_latency_ns();
    char line[512];
    std::snprintf(
        line, sizeof line, "%zu,%s,%lld,%.4f,%.4f,%.4f,%.4f,%.0f,%.1f,%.1f,%.1f,%.1f,%.3f\n",
        job_.bytes, job_.in_place ? "ip" : "oop", static_cast<long long>(timings.iterations),
        least(timings.loop), median(timings.loop), least(timings.sync), median(timings.sync), wrong,
        others.foreign_percent, others.steal_percent, line_before, line_after, timings.cpu);
    return line;
  }

 private:
  double check() {
    if (!library_.sums()) return 0;
    std::fill_n(buffers_.out(), buffers_.count(), -1.F);
    fill(buffers_.in(), buffers_.count(), team_.rank());
    team_.barrier();
    call_();
    const size_t wrong = wrong_elements(buffers_.out(), buffers_.count(), team_.size());
    return team_.sum(static_cast<double>(wrong));
  }

  // Two calls, then a twentieth of the budget; leaves behind what a call takes.
  void warm_up() {
    team_.barrier();
    for (int i = 0; i < 2; ++i) {
      const double start = now_us();
      call_();
      per_call_ = now_us() - start;
    }
    const int64_t more = calls(0.05 * job_.budget_us, 0, 5000);
    const double start = now_us();
    for (int64_t i = 0; i < more; ++i) call_();
    if (more > 2) per_call_ = (now_us() - start) / static_cast<double>(more);
  }

  // So many calls take so long; the same number on every rank.
  int64_t calls(double budget_us, double at_least, double at_most) {
    const double wanted = budget_us / std::max(0.02, per_call_);
    return team_.from_first(static_cast<int64_t>(std::clamp(wanted, at_least, at_most)));
  }

  void time_loops(Timings& timings) {
    // Many short loops: an interruption spoils few of them, and the median does not see it.
    const int64_t repetitions = calls(job_.budget_us, 3, job_.repetitions);
    timings.iterations = calls(job_.budget_us / static_cast<double>(repetitions), 1, 20000);
    const double cpu_before = cpu_seconds();
    for (int64_t r = 0; r < repetitions; ++r) {
      team_.barrier();
      library_.untimed_us();
      const double start = now_us();
      for (int64_t i = 0; i < timings.iterations; ++i) call_();
      const double spent = now_us() - start - library_.untimed_us();
      const double mine = spent / static_cast<double>(timings.iterations);
      timings.loop.push_back(team_.largest({mine})[0]);
    }
    timings.cpu = team_.sum(cpu_seconds() - cpu_before) * 1e6 /
                  static_cast<double>(repetitions * timings.iterations);
  }

  void time_single_calls(Timings& timings) {
    constexpr int kFirst = 3;  // to see what a call takes together with its barrier
    const double start = now_us();
    for (int i = 0; i < kFirst; ++i) single_call();
    per_call_ = (now_us() - start) / kFirst;
    std::vector<double> mine(static_cast<size_t>(calls(0.6 * job_.budget_us, 3, 3000)));
    for (double& one : mine) one = single_call();
    timings.sync = team_.largest(mine);
  }

  double single_call() {
    team_.barrier();
    library_.untimed_us();
    const double start = now_us();
    call_();
    return now_us() - start - library_.untimed_us();
  }

  Team& team_;
  Library& library_;
  const Job& job_;
  Buffers buffers_;
  Library::Call call_;
  double per_call_ = 0;  // us, as far as is known
};

int connect_to(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() + 1 > sizeof address.sun_path) die("no --jobs to serve");
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    die("nobody listens at --jobs " + path);
  }
  return fd;
}

Job parse_job(const char* line) {
  Job job;
  char place[8];
  if (std::sscanf(line, "measure %zu %7s %lf %d", &job.bytes, place, &job.budget_us,
                  &job.repetitions) != 4) {
    die(std::string("not a job: ") + line);
  }
  job.in_place = std::strcmp(place, "ip") == 0;
  return job;
}

}  // namespace

float* Library::allocate(size_t bytes, Role) {
  constexpr size_t kAlign = size_t{2} << 20;  // so that huge pages are as likely for everybody
  const size_t whole = (bytes + kAlign - 1) / kAlign * kAlign;
  auto* const buffer = static_cast<float*>(std::aligned_alloc(kAlign, whole));
  if (buffer == nullptr) die("out of memory");
  return buffer;
}

void Library::release(float* buffer) {
  std::free(buffer);
}

bool Library::offers(bool) const {
  return true;
}

void serve(const Arguments& arguments, Team& team, Library& library) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // no rank outlives its launcher
  if (arguments.number("bind", 1) != 0) team.bind();
  const int fd = connect_to(arguments.get("jobs", ""));
  FILE* const jobs = fdopen(fd, "r");
  dprintf(fd, "rank %d pid %d\n", team.rank(), getpid());
  for (char line[256]; std::fgets(line, sizeof line, jobs) != nullptr;) {
    const Job job = parse_job(line);
    if (!library.offers(job.in_place)) die("this library has no such form");
    const std::string answer = Measurement(team, library, job).run();
    team.barrier();
    if (team.rank() == 0) dprintf(fd, "%s", answer.c_str());
  }
  std::fclose(jobs);
}

}  // namespace peers
