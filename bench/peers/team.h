// The ranks of one program that is measured. They meet in memory that all of them map, so that
// neither their barrier nor the gathering of times depends on the library under measurement.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace peers {

constexpr int kMaxRanks = 16;

// "--key value" pairs of a command line. Every program gets
//   --meeting FILE   memory to meet in, empty at first
//   --jobs PATH      Unix socket of the one who gives the jobs; a path, for abstract names end at
//                    the border of a network namespace
//   --rank R --size N, unless the library knows
//   --bind 0|1       1: one core a rank, rank % cores
struct Arguments {
  Arguments(int argc, char** argv);
  [[nodiscard]] std::string get(const std::string& key, const std::string& fallback) const;
  [[nodiscard]] int number(const std::string& key, int fallback) const;

  std::map<std::string, std::string> pairs;
};

// Ends the program with a sentence on stderr.
[[noreturn]] void die(const std::string& why);

double now_us();

class Team {
 public:
  Team(const Arguments& arguments, int rank, int size);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] int cores() const { return static_cast<int>(cores_.size()); }

  // Keeps the calling thread on its core, as a launcher that binds would.
  void bind() const;

  // All of these: every rank calls them, in the same order.
  void barrier();
  int64_t from_first(int64_t value);  // rank 0's
  double sum(double mine);
  std::vector<double> largest(const std::vector<double>& mine);  // over ranks, one by one
  // `bytes` at `data` become those of rank 0; 4 KiB at most.
  void share(void* data, size_t bytes);

  // One-way time of a cache line between the first two cores, in ns: the least of several batches.
  // 0 when there is one rank or one core.
  double line_latency_ns();

  // Fresh memory that all ranks see, at least `bytes`, until the next call.
  std::byte* common(size_t bytes);

  static constexpr size_t kSamples = 4096;  // most values for largest()

 private:
  struct Meeting;
  Meeting* meeting_;
  int file_;
  int rank_, size_;
  std::vector<int> cores_;
  std::byte* common_ = nullptr;
  size_t common_bytes_ = 0;
};

}  // namespace peers
