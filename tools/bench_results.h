// The results of a benchmark, and where they go: screen, JSON, CSV, an earlier run.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/bench_options.h"

namespace ringfold::tools {

struct Percentiles {  // of one call, the slowest rank of each; microseconds
  double min = 0, p50 = 0, p95 = 0, p99 = 0, max = 0;
};

struct Timing {
  double time_us = 0;           // per call, averaged over calls and ranks
  double algbw = 0;             // GB/s, 10^9 bytes
  std::optional<double> busbw;  // empty with one rank
  std::optional<Percentiles> percentiles;
  std::optional<uint64_t> wrong;  // elements over all ranks; empty when not checked
};

struct Row {
  uint64_t size = 0;   // bytes: of the largest buffer of a rank
  uint64_t count = 0;  // elements, as the call is given them
  DType type = DType::f32;
  std::optional<Op> op;
  int root = -1;  // -1: has none
  int iterations = 0;
  std::string algorithm, transport;
  uint64_t chunk_bytes = 0, piece_bytes = 0;
  uint64_t bytes_sent = 0;  // per rank and call, the rank that sent most, counted by the transports
  uint64_t bytes_model = 0;  // the same, as the model says it
  // Baselines: into the hub's one link, counted where it left the others; and what the library's
  // all_reduce sends instead, the rank that sends most.
  uint64_t hub_received = 0, instead_sent = 0;
  std::string instead_algorithm;
  double model_us = 0;
  std::optional<Timing> out_of_place, in_place;

  [[nodiscard]] std::optional<double> ratio() const;  // measured / model
};

struct Results {
  std::string started, ended;  // UTC, ISO 8601
  int ranks = 1, hosts = 1;
  std::vector<Row> rows;
  std::vector<std::string> errors;

  [[nodiscard]] std::optional<double> average_busbw() const;
  [[nodiscard]] std::optional<uint64_t> wrong() const;  // empty if nothing was checked
};

std::string utc_now();

// The table, line by line to stdout.
void print_header(const BenchOptions& options);
void print_row(const BenchOptions& options, const Row& row);
void print_footer(const BenchOptions& options, const Results& results);

nlohmann::json to_json(const BenchOptions& options, const Results& results);
// Writes --json, --csv and --plot as far as asked for; false, having said why, if one failed.
bool write_files(const BenchOptions& options, const Results& results);
// False, having said why, if it cannot be written; never leaves half a file.
bool write_file(const std::string& path, const std::string& text);
// Empty if those can be written, else the sentence. Before anything is measured.
std::string unwritable(const BenchOptions& options);
// Whether python3 and matplotlib are there; has said so if not.
bool can_plot();

// An earlier run read from --compare. Says what has become slower and returns how many rows did;
// a negative number, having said why, if the two cannot be compared.
int regressions(const BenchOptions& options, const nlohmann::json& earlier, const Results& results);

}  // namespace ringfold::tools
