// ringfold bench gradients: how much of the averaging hides behind backward.
//
// Each round times three steps, one after the other so that all meet the same machine: backward
// alone, averaging alone (every gradient ready at once), and both together. A step lasts until its
// slowest rank is through.
#include "tools/bench_gradients.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "lib/base/cores.h"
#include "ringfold/compression.h"
#include "ringfold/gradient_sync.h"
#include "ringfold_config.h"
#include "tools/bench_ranks.h"
#include "tools/bench_results.h"
#include "tools/bench_start.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

using nlohmann::json;

struct GradientOptions {
  std::vector<size_t> layers;  // elements, first layer first
  double compute = 0;          // seconds of one backward
  bool elsewhere = false;      // an accelerator computes: the rank sleeps meanwhile
  bool apart = false;          // gradients lie apart and are copied
  uint64_t first_bytes = 0, bucket_bytes = 0;
  std::string hook = "none";
  int iterations = 20, warm_up = 3;
  int ranks = 0;
  std::string transport = "auto", json_file;
};

// "4x25M,1M": bytes of each layer.
std::optional<std::vector<size_t>> parse_layers(const std::string& text) {
  std::vector<size_t> layers;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string part = text.substr(begin, end - begin);
    begin = end + 1;
    uint64_t times = 1;
    if (const size_t x = part.find('x'); x != std::string::npos) {
      const auto number = parse_bytes(part.substr(0, x));
      if (!number || *number == 0 || *number > 100000) return std::nullopt;
      times = *number;
      part = part.substr(x + 1);
    }
    const auto bytes = parse_bytes(part);
    if (!bytes || *bytes < sizeof(float)) return std::nullopt;
    layers.insert(layers.end(), times, *bytes / sizeof(float));
  }
  return layers;
}

Result<BucketHook> parse_hook(const std::string& name) {
  if (name == "none") return BucketHook();
  if (name == "f16") return cast_hook(DType::f16);
  if (name == "bf16") return cast_hook(DType::bf16);
  if (name == "i8") return quantise_hook(DType::i8);
  if (name == "f8e4m3") return quantise_hook(DType::f8e4m3);
  if (name.starts_with("sparse:"))
    if (const auto share = parse_share(name.substr(7))) return sparsify_hook(*share);
  return Status(Code::invalid_argument, "none, f16, bf16, i8, f8e4m3, sparse:SHARE");
}

double processor_seconds(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct Figures {
  double compute = 0, communication = 0, step = 0;  // seconds: the medians
  double compute_cpu = 0, communication_cpu = 0;    // processor time of all ranks of this host
  uint64_t bytes_sent = 0;                          // by a rank in a step
  uint64_t wrong = 0;                               // elements, over all ranks
  int ranks_here = 1;
  size_t cores = 1;

  [[nodiscard]] double longest() const { return std::max(compute, communication); }
  [[nodiscard]] double sum() const { return compute + communication; }
  [[nodiscard]] double hidden() const { return (sum() - step) / std::min(compute, communication); }
  // All cores of this host at work all the time, and nothing overtakes its own longer half.
  [[nodiscard]] double possible() const {
    return std::max(longest(), (compute_cpu + communication_cpu) / static_cast<double>(cores));
  }
};

class GradientBench {
 public:
  GradientBench(const GradientOptions& options, Communicator comm)
      : options_(options), comm_(std::move(comm)) {
    std::vector<Parameter> parameters;
    for (const size_t count : options.layers) {
      if (options.apart) memory_.emplace_back(count + 1);  // never one behind the other
      parameters.push_back({fmt::format("layer {}", parameters.size()), count, DType::f32,
                            options.apart ? memory_.back().data() : nullptr});
      elements_ += count;
    }
    SyncOptions chosen;
    if (options.first_bytes != 0) chosen.first_bytes = options.first_bytes;
    if (options.bucket_bytes != 0) chosen.bucket_bytes = options.bucket_bytes;
    chosen.hook = *parse_hook(options.hook);
    auto made = GradientSync::create(comm_, std::move(parameters), chosen);
    must(made.status());
    sync_ = std::make_unique<GradientSync>(std::move(*made));
  }

  Figures run() {
    Figures figures;
    look_around(&figures);
    figures.wrong = static_cast<uint64_t>(total(comm_, static_cast<double>(wrong())));
    std::array<std::vector<double>, 3> times;
    std::vector<double> compute_cpu, communication_cpu;
    for (int i = -options_.warm_up; i < options_.iterations; ++i) {
      const Step alone = timed(true, false), averaging = timed(false, true),
                 both = timed(true, true);
      if (i < 0) continue;
      times[0].push_back(alone.seconds);
      times[1].push_back(averaging.seconds);
      times[2].push_back(both.seconds);
      compute_cpu.push_back(alone.cpu);
      communication_cpu.push_back(averaging.cpu);
    }
    figures.compute = median(times[0]);
    figures.communication = median(times[1]);
    figures.step = median(times[2]);
    // The ranks of this host are alike.
    const double here = static_cast<double>(figures.ranks_here) / comm_.size();
    figures.compute_cpu = total(comm_, median(compute_cpu)) * here;
    figures.communication_cpu = total(comm_, median(communication_cpu)) * here;
    figures.bytes_sent =
        static_cast<uint64_t>(largest(comm_, static_cast<double>(sync_->report().bytes_sent)));
    return figures;
  }
  [[nodiscard]] const GradientSync& sync() const { return *sync_; }
  [[nodiscard]] size_t elements() const { return elements_; }

 private:
  struct Step {
    double seconds;  // until the slowest rank is through
    double cpu;      // processor time of this rank
  };

  static double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  void look_around(Figures* figures) {
    std::array<char, 256> mine{};
    gethostname(mine.data(), mine.size() - 1);
    std::vector<std::array<char, 256>> all(static_cast<size_t>(comm_.size()));
    must(comm_.all_gather(mine.data(), all.data(), mine.size(), DType::u8).wait());
    figures->ranks_here = static_cast<int>(std::ranges::count(all, mine));
    figures->cores = allowed_cores().size();
  }

  void compute(size_t layer) {
    const double share =
        static_cast<double>(options_.layers[layer]) / static_cast<double>(elements_);
    const double seconds = options_.compute * share;
    if (options_.elsewhere) {
      const auto length = std::chrono::duration<double>(seconds);
      std::this_thread::sleep_until(next_ = std::max(next_, Clock::now()) +
                                            std::chrono::duration_cast<Clock::duration>(length));
      return;
    }
    // So much work, however long the core is taken away meanwhile.
    const double end = processor_seconds(CLOCK_THREAD_CPUTIME_ID) + seconds;
    while (processor_seconds(CLOCK_THREAD_CPUTIME_ID) < end) continue;
  }

  Step timed(bool computes, bool averages) {
    must(comm_.barrier().wait());
    const double cpu = processor_seconds(CLOCK_PROCESS_CPUTIME_ID);
    const double start = seconds_now();
    next_ = Clock::now();
    if (averages) must(sync_->begin());
    for (size_t layer = options_.layers.size(); layer-- > 0;) {
      if (computes) compute(layer);
      if (averages) must(sync_->ready(layer));
    }
    if (averages) must(sync_->finish());
    const double seconds = seconds_now() - start;
    const double used = processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    return {largest(comm_, seconds), used};
  }

  // Elements that are not the average of the ranks' numbers. Sparse averages come later.
  uint64_t wrong() {
    for (size_t layer = 0; layer < options_.layers.size(); ++layer)
      std::fill_n(static_cast<float*>(sync_->gradient(layer)), options_.layers[layer],
                  static_cast<float>(comm_.rank() + 1));
    must(sync_->begin());
    for (size_t layer = options_.layers.size(); layer-- > 0;) must(sync_->ready(layer));
    must(sync_->finish());
    if (options_.hook.starts_with("sparse")) return 0;
    const double average = (comm_.size() + 1) / 2.0;
    const double off = options_.hook == "none" ? 1e-6 : 0.1;  // 8 bits: 1/16 of a number at most
    uint64_t sum = 0;
    for (size_t layer = 0; layer < options_.layers.size(); ++layer) {
      const auto* const values = static_cast<const float*>(sync_->gradient(layer));
      sum += static_cast<uint64_t>(
          std::count_if(values, values + options_.layers[layer],
                        [&](float x) { return !(std::abs(x - average) <= off * average); }));
    }
    return sum;
  }

  using Clock = std::chrono::steady_clock;
  const GradientOptions& options_;
  Communicator comm_;
  std::vector<std::vector<float>> memory_;
  size_t elements_ = 0;
  Clock::time_point next_;  // when the accelerator is through with what it was given
  std::unique_ptr<GradientSync> sync_;
};

void print(const GradientOptions& o, const Communicator& comm, const GradientBench& bench,
           const Figures& f) {
  const auto ms = [](double seconds) { return seconds * 1e3; };
  fmt::print("# ringfold {} bench gradients\n", RINGFOLD_VERSION);
  fmt::print("# ranks {}, transport {}, {} layers of {} f32 in {} buckets, {} copied, hook {}\n",
             comm.size(), comm.transport(), o.layers.size(), show_size(bench.elements() * 4),
             bench.sync().plan().size(), show_size(bench.sync().copied_bytes()), o.hook);
  fmt::print("# medians of {} steps, each until its slowest rank; {} bytes sent by a rank\n",
             o.iterations, f.bytes_sent);
  fmt::print("backward alone        {:10.3f} ms\n", ms(f.compute));
  fmt::print("averaging alone       {:10.3f} ms\n", ms(f.communication));
  fmt::print("both together         {:10.3f} ms\n", ms(f.step));
  fmt::print("the longer of the two {:10.3f} ms  together / longer {:.3f}\n", ms(f.longest()),
             f.step / f.longest());
  fmt::print("their sum             {:10.3f} ms  hidden {:.1f} % of the shorter\n", ms(f.sum()),
             100 * f.hidden());
  fmt::print(
      "possible              {:10.3f} ms  {} ranks with {:.3f} ms of processor time on {} "
      "core{}\n",
      ms(f.possible()), f.ranks_here, ms(f.compute_cpu + f.communication_cpu), f.cores,
      f.cores == 1 ? "" : "s");
  fmt::print("# Out of bounds values : {} {}\n", f.wrong, f.wrong == 0 ? "OK" : "FAILED");
}

bool write_json(const GradientOptions& o, const Communicator& comm, const GradientBench& bench,
                const Figures& f) {
  if (o.json_file.empty()) return true;
  const json j = {{"schema", 1},
                  {"ringfold", RINGFOLD_VERSION},
                  {"ended", utc_now()},
                  {"ranks", comm.size()},
                  {"transport", comm.transport()},
                  {"layers", o.layers.size()},
                  {"gradient_bytes", bench.elements() * sizeof(float)},
                  {"buckets", bench.sync().plan().size()},
                  {"copied_bytes", bench.sync().copied_bytes()},
                  {"hook", o.hook},
                  {"compute_on", o.elsewhere ? "elsewhere" : "core"},
                  {"iterations", o.iterations},
                  {"compute_ms", f.compute * 1e3},
                  {"communication_ms", f.communication * 1e3},
                  {"step_ms", f.step * 1e3},
                  {"max_ms", f.longest() * 1e3},
                  {"sum_ms", f.sum() * 1e3},
                  {"step_over_max", f.step / f.longest()},
                  {"hidden_share", f.hidden()},
                  {"possible_ms", f.possible() * 1e3},
                  {"compute_cpu_ms", f.compute_cpu * 1e3},
                  {"communication_cpu_ms", f.communication_cpu * 1e3},
                  {"cores", f.cores},
                  {"bytes_sent_per_rank", f.bytes_sent},
                  {"wrong", f.wrong}};
  return write_file(o.json_file, j.dump(2) + "\n");
}

int rank_of(const GradientOptions& options, const Rendezvous& where) {
  Options wanted;
  if (options.transport != "auto") wanted.transports = options.transport;
  auto comm = Communicator::create(where, wanted);
  if (!comm.ok())
    return fail(kFailed,
                fmt::format("bench gradients: rank {}: {}", where.rank, comm.status().to_string()));
  try {
    GradientBench bench(options, *comm);
    const Figures figures = bench.run();
    bool good = figures.wrong == 0;
    if (comm->rank() == 0) {
      print(options, *comm, bench, figures);
      good &= write_json(options, *comm, bench, figures);
    }
    must(comm->barrier().wait());  // a launcher ends everybody when one fails
    return good ? kSuccess : kFailed;
  } catch (const OperationFailed& failed) {
    return fail(kFailed,
                fmt::format("bench gradients: rank {}: {}", where.rank, failed.status.to_string()));
  }
}

constexpr std::string_view kFooter =
    "SPEC is a list of layers, first layer first: SIZE or COUNTxSIZE, bytes of f32 gradients, as "
    "in\n"
    "  4x25M,1M,12x768K. T takes us, ms or s, and is shared among the layers by their sizes.\n"
    "Every round times backward alone, averaging alone and both together. Were all of the shorter\n"
    "hidden, both together would take as long as the longer one; hidden is the share of it that "
    "is.\n"
    "A rank that computes on a core keeps it busy (--on core, the default), so averaging can hide\n"
    "only where cores are free; 'possible' is what all cores of the host, at work all the time,\n"
    "would need. --on elsewhere is as with an accelerator: the rank sleeps while it computes.";

template <class Parse, class T>
void add_value(CLI::App& app, const std::string& name, T& out, Parse parse,
               const std::string& accepted, const std::string& help, const std::string& fallback) {
  app.add_option_function<std::string>(
         name,
         [&out, parse, name, accepted](const std::string& text) {
           const auto value = parse(text);
           if (!value)
             throw CLI::ValidationError(
                 fmt::format("{}: \"{}\"; accepted: {}", name, text, accepted));
           out = static_cast<T>(*value);
         },
         help)
      ->default_str(fallback);
}

}  // namespace

Command add_bench_gradients(CLI::App& bench) {
  auto* const command = bench.add_subcommand(
      "gradients", "Time how much of the gradients' averaging hides behind backward");
  auto options = std::make_shared<GradientOptions>();
  GradientOptions& o = *options;
  add_value(*command, "--layers", o.layers, parse_layers, "4x25M,1M: COUNTxSIZE or SIZE, ...",
            "SPEC: bytes of gradients of each layer", "12x4M");
  o.layers = *parse_layers("12x4M");
  o.compute = 0.05;
  add_value(
      *command, "--compute", o.compute,
      [](const std::string& text) {
        const auto seconds = parse_seconds(text);
        return seconds && *seconds > 0 ? seconds : std::nullopt;
      },
      "20ms, 1.5s, 500us", "T: time of one backward on a rank", "50ms");
  command
      ->add_option_function<std::string>(
          "--on", [&o](const std::string& where) { o.elsewhere = where == "elsewhere"; },
          "core: a rank computes on its core; elsewhere: an accelerator does")
      ->check(CLI::IsMember({"core", "elsewhere"}))
      ->default_str("core");
  command->add_flag("--apart", o.apart,
                    "gradients lie apart and are copied, instead of living in the buckets");
  const auto size = [](const std::string& text) { return parse_bytes(text); };
  add_value(*command, "--first-bytes", o.first_bytes, size, "a size such as 64K",
            "of the first bucket", "1M");
  add_value(*command, "--bucket-bytes", o.bucket_bytes, size, "a size such as 64K", "of the others",
            "25M");
  command
      ->add_option_function<std::string>(
          "--hook",
          [&o](const std::string& text) {
            const auto hook = parse_hook(text);
            if (!hook.ok())
              throw CLI::ValidationError(
                  fmt::format("--hook: \"{}\"; accepted: {}", text, hook.status().message()));
            o.hook = text;
          },
          "compression: none, f16, bf16, i8, f8e4m3, sparse:SHARE")
      ->default_str("none");
  command->add_option("-n,--iters", o.iterations, "timed rounds")
      ->check(CLI::Range(1, 1 << 20))
      ->default_str("20");
  command->add_option("-w,--warmup_iters", o.warm_up, "untimed rounds before")
      ->check(CLI::Range(0, 1 << 20))
      ->default_str("3");
  command->add_option("--ranks", o.ranks, "start so many local ranks; else a launcher has")
      ->check(CLI::Range(1, 1024));
  command->add_option("--transport", o.transport, "loopback: the ranks are threads")
      ->check(CLI::IsMember({"auto", "region", "shm", "ucx", "loopback"}))
      ->default_str("auto");
  command->add_option("--json", o.json_file, "write the figures to this file");
  command->footer(std::string(kFooter));
  return [options]() -> int {
    return start_ranks({options->ranks, options->transport, false},
                       [&](const Rendezvous& where) { return rank_of(*options, where); });
  };
}

}  // namespace ringfold::tools
