#include "bench/peers/team.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "tools/line_latency.h"

namespace peers {

constexpr size_t kShared = 4096;

// Fresh memory is all zeros, which is the right start of everything here.
struct Team::Meeting {
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> generation;
  alignas(128) std::atomic<uint64_t> flags[2][16];
  alignas(64) std::byte shared[kShared];
  alignas(64) double values[kMaxRanks][kSamples];
};

namespace {

constexpr size_t kPage = 4096;
constexpr size_t whole_pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

std::byte* map(int file, size_t bytes, size_t offset) {
  if (ftruncate(file, static_cast<off_t>(offset + bytes)) != 0) die("cannot grow --meeting");
  void* const at =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(offset));
  if (at == MAP_FAILED) die("cannot map --meeting");
  return static_cast<std::byte*>(at);
}

std::vector<int> allowed_cores() {
  cpu_set_t set;
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof set, &set) != 0) die("sched_getaffinity fails");
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

void stay_on(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0) die("sched_setaffinity fails");
}

}  // namespace

Arguments::Arguments(int argc, char** argv) {
  for (int i = 1; i < argc; i += 2) {
    if (std::strncmp(argv[i], "--", 2) != 0 || i + 1 == argc) {
      die(std::string(argv[i]) + "; accepted: --key value");
    }
    pairs[argv[i] + 2] = argv[i + 1];
  }
}

std::string Arguments::get(const std::string& key, const std::string& fallback) const {
  const auto at = pairs.find(key);
  return at == pairs.end() ? fallback : at->second;
}

int Arguments::number(const std::string& key, int fallback) const {
  return std::atoi(get(key, std::to_string(fallback)).c_str());
}

void die(const std::string& why) {
  std::fprintf(stderr, "peers: %s\n", why.c_str());
  std::_Exit(2);  // the library's own farewell might wait for the others
}

double now_us() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

Team::Team(const Arguments& arguments, int rank, int size)
    : rank_(rank), size_(size), cores_(allowed_cores()) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    die("rank " + std::to_string(rank) + " of " + std::to_string(size) + "; accepted: 1 to " +
        std::to_string(kMaxRanks) + " ranks");
  }
  const std::string name = arguments.get("meeting", "");
  file_ = open(name.c_str(), O_RDWR | O_CLOEXEC);
  if (file_ < 0) die("cannot open --meeting " + name);
  meeting_ = reinterpret_cast<Meeting*>(map(file_, whole_pages(sizeof(Meeting)), 0));
}

void Team::bind() const {
  stay_on(cores_[static_cast<size_t>(rank_) % cores_.size()]);
}

void Team::barrier() {
  constexpr int kSpins = 20000;
  Meeting& m = *meeting_;
  const uint32_t generation = m.generation.load(std::memory_order_acquire);
  if (m.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    m.arrived.store(0, std::memory_order_relaxed);
    m.generation.store(generation + 1, std::memory_order_release);
    return;
  }
  const bool crowded = size_ > cores();
  for (int i = 0; m.generation.load(std::memory_order_acquire) == generation; ++i) {
    if (crowded || i > kSpins) {
      sched_yield();
    } else {
      ringfold::tools::relax();
    }
  }
}

int64_t Team::from_first(int64_t value) {
  share(&value, sizeof value);
  return value;
}

void Team::share(void* data, size_t bytes) {
  if (bytes > kShared) die("too much to share");
  if (rank_ == 0) std::memcpy(meeting_->shared, data, bytes);
  barrier();
  std::memcpy(data, meeting_->shared, bytes);
  barrier();
}

std::vector<double> Team::largest(const std::vector<double>& mine) {
  if (mine.size() > kSamples) die("too many samples");
  std::copy(mine.begin(), mine.end(), meeting_->values[rank_]);
  barrier();
  std::vector<double> result(mine);
  for (int rank = 0; rank < size_; ++rank) {
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = std::max(result[i], meeting_->values[rank][i]);
    }
  }
  barrier();
  return result;
}

double Team::sum(double mine) {
  meeting_->values[rank_][0] = mine;
  barrier();
  double result = 0;
  for (int rank = 0; rank < size_; ++rank) result += meeting_->values[rank][0];
  barrier();
  return result;
}

double Team::line_latency_ns() {
  if (size_ < 2 || cores() < 2) return 0;
  cpu_set_t before;
  sched_getaffinity(0, sizeof before, &before);
  bind();
  barrier();
  double best = 0;
  if (rank_ < 2) {
    best =
        ringfold::tools::line_latency_ns(meeting_->flags[0][0], meeting_->flags[1][0], rank_ == 0);
  }
  best = largest({best})[0];
  sched_setaffinity(0, sizeof before, &before);
  return best;
}

std::byte* Team::common(size_t bytes) {
  if (common_ != nullptr) munmap(common_, common_bytes_);
  const size_t offset = whole_pages(sizeof(Meeting));
  barrier();
  if (rank_ == 0 && ftruncate(file_, static_cast<off_t>(offset)) != 0) die("cannot cut --meeting");
  barrier();  // what was there is gone, for everybody
  common_bytes_ = whole_pages(bytes);
  common_ = map(file_, common_bytes_, offset);
  barrier();
  return common_;
}

}  // namespace peers
