// The table on the screen: nccl-tests' columns, then the algorithm and the model.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cstdio>
#include <ctime>

#include "tools/bench_results.h"

namespace ringfold::tools {
namespace {

std::string number(double value, int decimals) {
  return fmt::format("{:.{}f}", value, value >= 10000 && decimals > 0 ? decimals - 1 : decimals);
}

std::string half(const BenchOptions& options, const std::optional<Timing>& timing) {
  const char* const blank = "N/A";
  if (!timing) {
    std::string text = fmt::format(" {:>9} {:>7} {:>7} {:>6}", blank, blank, blank, blank);
    if (options.percentiles) text += fmt::format("{:>50}", blank);
    return text;
  }
  std::string text =
      fmt::format(" {:>9} {:>7} {:>7} {:>6}", number(timing->time_us, 2), number(timing->algbw, 2),
                  timing->busbw ? number(*timing->busbw, 2) : "n/a",
                  timing->wrong ? std::to_string(*timing->wrong) : blank);
  if (options.percentiles && timing->percentiles) {
    const Percentiles& p = *timing->percentiles;
    for (const double x : {p.min, p.p50, p.p95, p.p99, p.max}) {
      text += fmt::format(" {:>9}", number(x, 2));
    }
  }
  return text;
}

}  // namespace

std::optional<double> Row::ratio() const {
  const auto& measured = out_of_place ? out_of_place : in_place;
  if (!measured || model_us <= 0) return std::nullopt;
  return measured->time_us / model_us;
}

std::optional<double> Results::average_busbw() const {
  double sum = 0;
  int number = 0;
  for (const Row& row : rows) {
    for (const auto& timing : {row.out_of_place, row.in_place}) {
      if (timing && timing->busbw) sum += *timing->busbw, ++number;
    }
  }
  return number == 0 ? std::nullopt : std::optional(sum / number);
}

std::optional<uint64_t> Results::wrong() const {
  std::optional<uint64_t> sum;
  for (const Row& row : rows) {
    for (const auto& timing : {row.out_of_place, row.in_place}) {
      if (timing && timing->wrong) sum = sum.value_or(0) + *timing->wrong;
    }
  }
  return sum;
}

std::string utc_now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

void print_header(const BenchOptions& options) {
  const char* const extra = options.percentiles ? "{:>10}{:>10}{:>10}{:>10}{:>10}" : "";
  const std::string names = fmt::format(fmt::runtime(extra), "min", "p50", "p95", "p99", "max");
  const std::string units =
      fmt::format(fmt::runtime(extra), "(us)", "(us)", "(us)", "(us)", "(us)");
  const std::string half =
      fmt::format(" {:>9} {:>7} {:>7} {:>6}", "time", "algbw", "busbw", "#wrong");
  const std::string half_units =
      fmt::format(" {:>9} {:>7} {:>7} {:>6}", "(us)", "(GB/s)", "(GB/s)", "");
  const size_t width = half.size() + names.size();
  fmt::print("#\n#{:>11} {:>12} {:>7} {:>10} {:>5}{:>{}}{:>{}}\n", "", "", "", "", "",
             "out-of-place", width, "in-place", width);
  fmt::print("#{:>11} {:>12} {:>7} {:>10} {:>5}{}{}{}{} {:>18} {:>9} {:>6}\n", "size", "count",
             "type", "redop", "root", half, names, half, names, "algo", "model", "ratio");
  fmt::print("#{:>11} {:>12} {:>7} {:>10} {:>5}{}{}{}{} {:>18} {:>9} {:>6}\n", "(B)", "(elements)",
             "", "", "", half_units, units, half_units, units, "", "(us)", "");
  std::fflush(stdout);
}

void print_row(const BenchOptions& options, const Row& row) {
  const auto ratio = row.ratio();
  fmt::print(" {:>11} {:>12} {:>7} {:>10} {:>5}{}{} {:>18} {:>9} {:>6}\n", row.size, row.count,
             name(row.type), row.op ? name(*row.op) : "none", row.root,
             half(options, row.out_of_place), half(options, row.in_place), row.algorithm,
             row.model_us > 0 ? number(row.model_us, 2) : "n/a", ratio ? number(*ratio, 2) : "n/a");
  if (row.iterations < options.iterations) {
    fmt::print("# the line above: {} of {} calls (time limit; -n {} insists)\n", row.iterations,
               options.iterations, options.iterations);
  }
  std::fflush(stdout);
}

void print_footer(const BenchOptions& options, const Results& results) {
  if (options.baseline != Baseline::none && !results.rows.empty()) {
    const Row& last = results.rows.back();
    fmt::print(
        "# Through the hub (rank 0) at {} B : {} B received, {} B sent a call; all_reduce ({}) "
        "sends {} B a rank\n",
        last.size, last.hub_received, last.bytes_sent, last.instead_algorithm, last.instead_sent);
  }
  const auto wrong = results.wrong();
  if (wrong) {
    fmt::print("# Out of bounds values : {} {}\n", *wrong, *wrong == 0 ? "OK" : "FAILED");
  } else {
    fmt::print("# Out of bounds values : not checked (-c 0)\n");
  }
  const auto average = results.average_busbw();
  fmt::print("# Avg bus bandwidth    : {}\n", average ? fmt::format("{:.6g}", *average)
                                              : results.ranks > 1
                                                  ? "n/a"
                                                  : "n/a (one rank: nothing travels)");
  fmt::print("#\n");
  std::fflush(stdout);
}

}  // namespace ringfold::tools
