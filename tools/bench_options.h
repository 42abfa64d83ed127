// What `ringfold bench` is asked to do.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ringfold/schedule.h"
#include "ringfold/types.h"

namespace ringfold::tools {

enum class Baseline : uint8_t {
  none,
  gather_to_root,
  parameter_server,
  parameter_server_async,  // bench_async.h
};
std::string_view name(Baseline baseline);

struct BenchOptions {
  std::string collective = "all_reduce";
  std::optional<Collective> kind = Collective::all_reduce;  // empty: send_recv
  uint64_t first_bytes = 8, last_bytes = uint64_t{64} << 20, step_bytes = uint64_t{1} << 20;
  double factor = 2;  // at most 1: fixed increments of step_bytes
  int iterations = 20, warm_up = 5, cycles = 1, checked = 1;
  bool fixed_iterations = false;  // -n was given: no fewer for slow sizes
  std::vector<Op> ops = {Op::sum};
  std::vector<DType> types = {DType::f32};
  int root = 0;  // -1: every root in turn
  int unalign = 0;
  int blocking = 0;
  double timeout = 0;  // seconds; 0: the library's
  bool percentiles = false;
  bool cliffs = false;  // look for jumps instead of printing the table
  bool audit = false;   // compare the library's choice with every algorithm instead

  int ranks = 0;  // 0: as many as the launcher started
  std::string device = "host", transport = "auto";
  std::optional<Algorithm> algorithm;
  int random_sizes = 0;  // 0: the sweep
  uint64_t seed = 1;
  Baseline baseline = Baseline::none;
  std::string json, csv, plot, machine, compare;
  double tolerance = 0.1;

  [[nodiscard]] bool reduces() const;  // has the collective an operation?
  [[nodiscard]] bool rooted() const;
  [[nodiscard]] bool samples() const {  // is every call to be timed on its own?
    return percentiles || !json.empty() || !compare.empty() || !plot.empty();
  }
};

// Adds the options to the subcommand; parsing fills `options`, which must outlive it.
void add_options(CLI::App& bench, BenchOptions& options);

// What parsing one option alone cannot see; empty if all is well, else the sentence.
std::string contradiction(const BenchOptions& options);

// The sizes of the sweep in bytes, whole elements of `type`; the same on every rank.
std::vector<uint64_t> sizes(const BenchOptions& options, DType type);

}  // namespace ringfold::tools
