#include "tools/bench_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "lib/base/base.h"
#include "test/exact.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

constexpr std::string_view kSendRecv = "send_recv";
// nccl-tests' names beside ours.
constexpr std::array<std::string_view, kDTypes> kOtherTypeNames = {
    "int8", "uint8", "int32",  "uint32",   "int64",   "uint64",
    "half", "float", "double", "bfloat16", "fp8e4m3", "fp8e5m2"};
constexpr std::array<std::string_view, kOps> kOtherOpNames = {"", "", "", "", "", "mulsum"};
constexpr std::array<std::string_view, 4> kBaselines = {
    "none", "gather_to_root", "parameter_server", "parameter_server_async"};

const std::array<std::string_view, kAlgorithms> kScheduled = [] {
  std::array<std::string_view, kAlgorithms> names;
  std::copy_n(kAlgorithmNames.begin(), names.size(), names.begin());
  return names;
}();

template <size_t N>
std::optional<size_t> find(const std::array<std::string_view, N>& names, std::string_view name) {
  const auto at = std::find(names.begin(), names.end(), name);
  if (name.empty() || at == names.end()) return std::nullopt;
  return static_cast<size_t>(at - names.begin());
}

// Throws what CLI11 wants to hear about an unusable value.
[[noreturn]] void refuse(std::string_view option, std::string_view given,
                         std::string_view accepted) {
  throw CLI::ValidationError(fmt::format("{}: \"{}\"; accepted: {}", option, given, accepted));
}

// An option whose text `parse` turns into a value, or refuses.
template <class Parse, class T>
void add_parsed(CLI::App& app, const std::string& names, T& out, Parse parse,
                std::string_view accepted, const std::string& help, const std::string& fallback) {
  const std::string shown = names.substr(0, names.find(','));
  auto* const option = app.add_option_function<std::string>(
      names,
      [&out, parse, shown, accepted](const std::string& text) {
        const auto value = parse(text);
        if (!value) refuse(shown, text, accepted);
        out = static_cast<T>(*value);
      },
      help);
  option->default_str(fallback);
}

constexpr std::string_view kSizeWords = "a number with B, K, M or G (binary): 8, 64K, 1.5M";

void add_sweep(CLI::App& bench, BenchOptions& o) {
  const auto size = [](const std::string& text) { return parse_bytes(text); };
  add_parsed(bench, "-b,--minbytes", o.first_bytes, size, kSizeWords, "first size", "8");
  add_parsed(bench, "-e,--maxbytes,--max-size", o.last_bytes, size, kSizeWords, "last size",
             "64M, with --cliffs 256M");
  bench.add_flag("--cliffs", o.cliffs,
                 "instead of the table: exit status 1 if the time jumps somewhere between -b and "
                 "-e: twice the bytes, one element, another type");
  bench.add_flag("--audit-choice", o.audit,
                 "instead of the table: every algorithm in turns; exit status 1 if the library's "
                 "choice is clearly more than 5 % slower than the best at some size");
  bench.parse_complete_callback([&bench, &o] {
    if (o.cliffs && bench.count("-e") == 0) o.last_bytes = uint64_t{256} << 20;
  });
  auto* const factor = bench.add_option("-f,--stepfactor", o.factor, "next size = this times last")
                           ->check(CLI::Range(1.0, 1e9))
                           ->default_str("2");
  bench
      .add_option_function<std::string>(
          "-i,--stepbytes",
          [&o, factor](const std::string& text) {
            const auto value = parse_bytes(text);
            if (!value || *value == 0) refuse("-i", text, kSizeWords);
            o.step_bytes = *value;
            if (factor->count() == 0) o.factor = 1;
          },
          "next size = last + this; -f wins when above 1")
      ->default_str("1M when -f is 1");
  bench.add_option_function<std::string>(
      "--sizes",
      [&o](const std::string& text) {
        const auto number =
            text.starts_with("random:") ? parse_bytes(text.substr(7)) : std::nullopt;
        if (!number || *number == 0 || *number > 100000) refuse("--sizes", text, "random:N");
        o.random_sizes = static_cast<int>(*number);
      },
      "random:N: N sizes from -b to -e drawn from --seed instead of the sweep");
  bench.add_option("--seed", o.seed, "of random sizes and of the checked data")->default_str("1");
}

void add_repetition(CLI::App& bench, BenchOptions& o) {
  bench
      .add_option_function<int>(
          "-n,--iters", [&o](int n) { o.iterations = n, o.fixed_iterations = true; },
          "timed calls a size; when not given, fewer where 20 would take longer than 2 s")
      ->check(CLI::Range(1, 1 << 24))
      ->default_str("20");
  bench.add_option("-w,--warmup_iters", o.warm_up, "untimed calls before")
      ->check(CLI::Range(0, 1 << 24))
      ->default_str("5");
  bench.add_option("-N,--run_cycles", o.cycles, "run the whole sweep so often; 0: for ever")
      ->check(CLI::Range(0, 1 << 30))
      ->default_str("1");
  bench.add_option("-c", o.checked, "checked calls a size, 0: none; they are not timed")
      ->check(CLI::Range(0, 1 << 24))
      ->default_str("1");
  bench.add_flag_callback(
      "--check", [&o] { o.checked = std::max(1, o.checked); }, "as -c 1");
  bench
      .add_option("-T,--timeout", o.timeout,
                  "deadline in seconds of each operation and of start-up")
      ->check(CLI::Range(0.0, 1e6))
      ->default_str("RINGFOLD_TIMEOUT");
  bench.add_option("-u,--unalign", o.unalign, "shift the buffers by so many elements")
      ->check(CLI::Range(0, 1 << 20))
      ->default_str("0");
  bench
      .add_option("-z,--blocking", o.blocking,
                  "0, 2: wait for each call; 1: also a barrier after it; 3: the barrier is not "
                  "timed")
      ->check(CLI::Range(0, 3))
      ->default_str("0");
  bench
      .add_option("-I,--per_iter_timing", o.percentiles,
                  "1: time calls one by one, too, and show min, p50, p95, p99, max")
      ->default_str("0");
}

void add_operation(CLI::App& bench, BenchOptions& o) {
  bench
      .add_option_function<std::string>(
          "-o,--op",
          [&o](const std::string& text) {
            o.ops.clear();
            auto at = find(kOpNames, text);
            if (!at) at = find(kOtherOpNames, text);
            for (size_t i = 0; i < kOps; ++i) {
              if (text == "all" || at == i) o.ops.push_back(static_cast<Op>(i));
            }
            if (o.ops.empty()) {
              refuse("-o", text, fmt::format("{}, mulsum, all", listed(kOpNames)));
            }
          },
          "sum, prod, max, min, avg, premul_sum (mulsum), all")
      ->default_str("sum");
  bench
      .add_option_function<std::string>(
          "-d,--datatype",
          [&o](const std::string& text) {
            o.types.clear();
            auto at = find(kDTypeNames, text);
            if (!at) at = find(kOtherTypeNames, text);
            for (size_t i = 0; i < kDTypes; ++i) {
              if (text == "all" || at == i) o.types.push_back(static_cast<DType>(i));
            }
            if (o.types.empty()) {
              refuse("-d", text,
                     fmt::format("{}, all; also {}", listed(kDTypeNames), listed(kOtherTypeNames)));
            }
          },
          "element type: i8 u8 i32 u32 i64 u64 f16 f32 f64 bf16 f8e4m3 f8e5m2, nccl-tests' names, "
          "all")
      ->default_str("f32");
  bench.add_option("-r,--root", o.root, "root where there is one; -1: every rank in turn")
      ->check(CLI::Range(-1, 1 << 20))
      ->default_str("0");
}

void add_output(CLI::App& bench, BenchOptions& o) {
  bench.add_option("--json", o.json, "write the results there, schema 1");
  bench.add_option("--csv", o.csv, "write the table there");
  bench
      .add_option("--plot", o.plot, "write time and bus bandwidth as FILE.svg (python3-matplotlib)")
      ->check([](const std::string& file) {
        return file.ends_with(".svg") ? "" : "\"" + file + "\"; accepted: a name ending in .svg";
      });
  bench.add_option("--model", o.machine, "MACHINE.json for the model's prediction")
      ->check(CLI::ExistingFile);
  bench
      .add_option("--compare", o.compare,
                  "results of an earlier --json; exit status 1 if a p50 grew by more than the "
                  "tolerance")
      ->check(CLI::ExistingFile);
  add_parsed(
      bench, "--tolerance", o.tolerance, [](const std::string& text) { return parse_share(text); },
      "a share such as 10% or 0.1", "for --compare", "10%");
}

void add_environment(CLI::App& bench, BenchOptions& o) {
  bench
      .add_option("--ranks", o.ranks, "start so many local ranks; else a launcher has started them")
      ->check(CLI::Range(1, 1024));
  bench
      .add_option("--device", o.device,
                  "where the buffers lie; cuda: calls are on a stream, timed by its events, and "
                  "ranks started by --ranks are threads")
      ->check(CLI::IsMember({"host", "cuda"}))
      ->default_str("host");
  bench.add_option("--transport", o.transport, "loopback: the ranks are threads of one process")
      ->check(CLI::IsMember({"auto", "region", "shm", "ucx", "loopback"}))
      ->default_str("auto");
  bench
      .add_option_function<std::string>(
          "--algorithm",
          [&o](const std::string& text) {
            const auto at = find(kScheduled, text);
            if (text != "auto" && !at) {
              refuse("--algorithm", text, fmt::format("auto, {}", listed(kScheduled)));
            }
            if (at) o.algorithm = static_cast<Algorithm>(*at);
          },
          fmt::format("auto, {}", listed(kScheduled)))
      ->default_str("auto");
  bench.add_option_function<std::string>(
      "--baseline",
      [&o](const std::string& text) {
        const auto at = find(kBaselines, text);
        if (!at) refuse("--baseline", text, listed(kBaselines));
        o.baseline = static_cast<Baseline>(*at);
      },
      "measure the naive way instead: gather_to_root, parameter_server, parameter_server_async "
      "(with the staleness of its updates)");
}

}  // namespace

std::string_view name(Baseline baseline) {
  return kBaselines[static_cast<size_t>(baseline)];
}

bool BenchOptions::reduces() const {
  return kind == Collective::all_reduce || kind == Collective::reduce_scatter ||
         kind == Collective::reduce;
}

bool BenchOptions::rooted() const {
  return kind == Collective::broadcast || kind == Collective::reduce ||
         kind == Collective::gather || kind == Collective::scatter;
}

void add_options(CLI::App& bench, BenchOptions& options) {
  bench
      .add_option_function<std::string>(
          "COLLECTIVE",
          [&options](const std::string& text) {
            const auto at = find(kCollectiveNames, text);
            if (!at && text != kSendRecv) {
              refuse("COLLECTIVE", text,
                     fmt::format("{}, {}", listed(kCollectiveNames), kSendRecv));
            }
            options.collective = text;
            options.kind = at ? std::optional(static_cast<Collective>(*at)) : std::nullopt;
          },
          fmt::format("{}, {}", listed(kCollectiveNames), kSendRecv))
      ->default_str("all_reduce");
  add_sweep(bench, options);
  add_repetition(bench, options);
  add_operation(bench, options);
  add_environment(bench, options);
  add_output(bench, options);
}

std::string contradiction(const BenchOptions& o) {
  if (o.first_bytes > o.last_bytes) {
    return fmt::format("-b {} is above -e {}; accepted: a first size up to the last", o.first_bytes,
                       o.last_bytes);
  }
  if (o.audit && (o.kind != Collective::all_reduce || o.algorithm || o.cliffs || o.samples() ||
                  !o.csv.empty() || o.baseline != Baseline::none || o.device != "host")) {
    return "--audit-choice is of all_reduce in host memory and writes no results; accepted without "
           "--algorithm, --cliffs, -I, --json, --csv, --plot, --compare, --baseline, --device";
  }
  if (o.cliffs && (o.samples() || !o.csv.empty() || o.baseline != Baseline::none)) {
    return "--cliffs writes no results; accepted without -I, --json, --csv, --plot, --compare, "
           "--baseline";
  }
  if (o.device != "host" && (o.cliffs || o.baseline != Baseline::none)) {
    return fmt::format("--device {} with {}; accepted: --device host", o.device,
                       o.cliffs ? "--cliffs" : "--baseline");
  }
  if (o.baseline == Baseline::none) return {};
  if (o.kind != Collective::all_reduce) {
    return fmt::format("--baseline with {}; accepted: all_reduce", o.collective);
  }
  if (std::find(o.ops.begin(), o.ops.end(), Op::premul_sum) != o.ops.end()) {
    return "--baseline with -o premul_sum; accepted: sum, prod, max, min, avg";
  }
  if (o.baseline != Baseline::parameter_server_async) return {};
  if (o.ops != std::vector{Op::sum} || o.types != std::vector{DType::f32}) {
    return "--baseline parameter_server_async with -o or -d; accepted: sums of f32";
  }
  if (o.percentiles || !o.csv.empty() || !o.plot.empty() || !o.compare.empty()) {
    return "--baseline parameter_server_async with -I, --csv, --plot or --compare; accepted: "
           "--json";
  }
  return {};
}

std::vector<uint64_t> sizes(const BenchOptions& o, DType type) {
  const auto whole = [&](uint64_t bytes) { return bytes / size_of(type) * size_of(type); };
  std::vector<uint64_t> result;
  for (int i = 0; i < o.random_sizes; ++i) {
    // Uniform in the logarithm: as many small ones as large ones.
    const double share = std::ldexp(
        static_cast<double>(test::exact_hash(o.seed, 0, static_cast<uint64_t>(i)) >> 11), -53);
    const double low = std::log(static_cast<double>(o.first_bytes) + 1);
    const double high = std::log(static_cast<double>(o.last_bytes) + 1);
    const double bytes = std::exp(low + share * (high - low)) - 1;
    result.push_back(whole(std::clamp(static_cast<uint64_t>(bytes), o.first_bytes, o.last_bytes)));
  }
  if (o.random_sizes > 0) return result;
  for (uint64_t bytes = o.first_bytes; bytes <= o.last_bytes;) {
    result.push_back(whole(bytes));
    const uint64_t next =
        o.factor > 1 ? static_cast<uint64_t>(std::ceil(static_cast<double>(bytes) * o.factor))
                     : bytes + o.step_bytes;
    bytes = std::max(next, bytes + 1);  // from 0 a factor leads nowhere
  }
  return result;
}

}  // namespace ringfold::tools
