// What the ranks of a benchmark tell each other about their times.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "lib/base/base.h"
#include "tools/bench_subject.h"

namespace ringfold::tools {

// All ranks' values, rank by rank.
inline std::vector<double> from_all(Communicator& comm, const std::vector<double>& mine) {
  std::vector<double> all(mine.size() * static_cast<size_t>(comm.size()));
  must(comm.all_gather(mine.data(), all.data(), mine.size(), DType::f64).wait());
  return all;
}
inline double largest(Communicator& comm, double mine) {
  const auto all = from_all(comm, {mine});
  return *std::max_element(all.begin(), all.end());
}
inline double total(Communicator& comm, double mine) {
  double sum = 0;
  for (const double x : from_all(comm, {mine})) sum += x;
  return sum;
}

inline double seconds_now() {
  return std::chrono::duration<double>(steady_clock().now()).count();
}

}  // namespace ringfold::tools
