// ringfold bench: times one collective over a sweep of sizes and checks what comes out.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <memory>
#include <set>
#include <thread>

#include "ringfold/model.h"
#include "ringfold_config.h"
#include "tools/bench_async.h"
#include "tools/bench_audit.h"
#include "tools/bench_cliffs.h"
#include "tools/bench_gradients.h"
#include "tools/bench_ranks.h"
#include "tools/bench_results.h"
#include "tools/bench_start.h"
#include "tools/bench_subject.h"
#include "tools/command.h"
#include "tools/machine.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

using nlohmann::json;
constexpr double kSecondsPerLine = 2;  // a timed pass takes no longer, unless -n insists
// After a failure the others wait so long for rank 0 to write its files; then a launcher ends it.
constexpr auto kLastWords = std::chrono::milliseconds(300);

// Runs the sweep on one rank.
class Bench {
 public:
  Bench(const BenchOptions& options, Communicator comm, const std::optional<Machine>& machine,
        const Gpu* gpu)
      : options_(options),
        comm_(std::move(comm)),
        machine_(machine),
        subject_(comm_, options, gpu) {}

  Results run() {
    results_.started = utc_now();
    results_.ranks = comm_.size();
    introduce();
    for (int cycle = 0; options_.cycles == 0 || cycle < options_.cycles; ++cycle) sweep();
    results_.ended = utc_now();
    return results_;
  }
  // What there is so far, after a failure.
  Results& results() { return results_; }
  // Elements that this rank itself found wrong: its exit status needs no other rank.
  [[nodiscard]] uint64_t wrong_here() const { return wrong_here_; }

 private:
  [[nodiscard]] bool prints() const { return comm_.rank() == 0; }

  void introduce() {
    struct Who {
      char host[120];
      int64_t pid;
    };
    Who mine{};
    gethostname(mine.host, sizeof(mine.host) - 1);
    mine.pid = getpid();
    std::vector<Who> all(static_cast<size_t>(comm_.size()));
    must(comm_.all_gather(&mine, all.data(), sizeof(Who), DType::u8).wait());
    std::set<std::string> hosts;
    for (const Who& who : all) hosts.insert(who.host);
    results_.hosts = static_cast<int>(hosts.size());
    if (!prints()) return;
    const BenchOptions& o = options_;
    fmt::print("# ringfold {} bench {}\n", RINGFOLD_VERSION, o.collective);
    fmt::print("# ranks {} on {} host{}, transport {}, memory {}, algorithm {}{}\n", comm_.size(),
               hosts.size(), hosts.size() == 1 ? "" : "s",
               o.device == "host" ? comm_.transport() : "by messages", o.device,
               o.algorithm ? name(*o.algorithm) : "auto",
               o.baseline == Baseline::none ? "" : fmt::format(", baseline {}", name(o.baseline)));
    fmt::print(
        "# minbytes {} maxbytes {} step: {} warmup iters: {} iters: {} validation: {} seed: "
        "{}\n",
        o.first_bytes, o.last_bytes,
        o.random_sizes > 0 ? fmt::format("{} random sizes", o.random_sizes)
        : o.factor > 1     ? fmt::format("x {:g}", o.factor)
                           : fmt::format("+ {}", o.step_bytes),
        o.warm_up, o.iterations, o.checked, o.seed);
    fmt::print("# time: per call, average over calls and ranks; GB = 10^9 bytes\n#\n");
    for (size_t r = 0; r < all.size(); ++r) {
      fmt::print("#  Rank {:>3} Pid {:>7} on {}\n", r, all[r].pid, all[r].host);
    }
  }

  void sweep() {
    if (prints()) print_header(options_);
    const std::vector<Op> plain = {Op::sum};  // where nothing is reduced it plays no part
    for (const DType type : options_.types) {
      for (const Op op : options_.reduces() ? options_.ops : plain) {
        for (const uint64_t bytes : sizes(options_, type)) {
          const bool every = options_.rooted() && options_.root < 0;
          const int first = every ? 0 : options_.root;
          const int last = every ? comm_.size() - 1 : first;
          for (int root = first; root <= last; ++root) line(bytes, type, op, root);
        }
      }
    }
    if (prints()) print_footer(options_, results_);
  }

  void line(uint64_t bytes, DType type, Op op, int root) {
    subject_.set(bytes, type, op, root);
    Row row;
    row.size = subject_.size(), row.count = subject_.count(), row.type = type;
    if (options_.reduces()) row.op = op;
    if (options_.rooted()) row.root = root;
    for (const bool in_place : {true, false}) {  // the model's columns are those out of place
      if (!subject_.offers(in_place)) continue;
      (in_place ? row.in_place : row.out_of_place) = measure(in_place, row);
      describe(row);
    }
    if (prints()) print_row(options_, row);
    results_.rows.push_back(std::move(row));
  }

  Timing measure(bool in_place, Row& row) {
    subject_.prepare(in_place, options_.seed);
    row.iterations = warm_up(in_place);
    Timing timing;
    timing.time_us = timed(in_place, row.iterations) * 1e6;
    timing.algbw = timing.time_us > 0 ? static_cast<double>(row.size) / timing.time_us / 1e3 : 0;
    if (comm_.size() > 1) {
      const double factor = options_.kind ? bus_factor(*options_.kind, comm_.size()) : 1;
      timing.busbw = timing.algbw * factor;
    }
    if (options_.samples()) timing.percentiles = sampled(in_place, row.iterations);
    if (options_.checked > 0) timing.wrong = check(in_place);
    return timing;
  }

  // Warms up, and decides alike on every rank how many calls the timed passes make.
  int warm_up(bool in_place) {
    must(comm_.barrier().wait());
    const double start = seconds_now();
    subject_.call(in_place);
    const double first = largest(comm_, seconds_now() - start);
    const auto affordable = [&](double seconds, int asked) {
      if (options_.fixed_iterations || first * asked <= seconds) return asked;
      return std::max(1, static_cast<int>(seconds / first));
    };
    const int more = affordable(kSecondsPerLine / 4, std::max(0, options_.warm_up - 1));
    for (int i = 0; i < more; ++i) subject_.call(in_place);
    return affordable(kSecondsPerLine, options_.iterations);
  }

  double timed(bool in_place, int iterations) {
    must(comm_.barrier().wait());
    const uint64_t sent_before = comm_.bytes_sent();  // barriers carry no bytes
    const double mine = subject_.time(in_place, iterations, barrier_after_each());
    sent_per_call_ = (comm_.bytes_sent() - sent_before) / static_cast<uint64_t>(iterations);
    return total(comm_, mine) / comm_.size();
  }

  // What -z asks for after each call; returns the seconds of it that do not count.
  std::function<double()> barrier_after_each() {
    if (options_.blocking != 1 && options_.blocking != 3) return nullptr;
    return [this] {
      const double before = seconds_now();
      must(comm_.barrier().wait());
      return options_.blocking == 3 ? seconds_now() - before : 0;
    };
  }

  // One call at a time, each as long as its slowest rank.
  Percentiles sampled(bool in_place, int iterations) {
    std::vector<double> mine;
    mine.reserve(static_cast<size_t>(iterations));
    must(comm_.barrier().wait());
    for (int i = 0; i < iterations; ++i) {
      mine.push_back(subject_.time(in_place, 1) * 1e6);
    }
    const auto all = from_all(comm_, mine);
    for (size_t i = 0; i < all.size(); ++i) {
      double& slowest = mine[i % mine.size()];
      slowest = std::max(slowest, all[i]);
    }
    std::sort(mine.begin(), mine.end());
    const auto rank = [&](double share) {  // nearest rank: a value that was measured
      const auto at = static_cast<size_t>(std::ceil(share * static_cast<double>(mine.size())));
      return mine[std::max<size_t>(at, 1) - 1];
    };
    return {mine.front(), rank(0.50), rank(0.95), rank(0.99), mine.back()};
  }

  uint64_t check(bool in_place) {
    uint64_t mine = 0;
    for (int i = 0; i < options_.checked; ++i) {
      const uint64_t seed = options_.seed + static_cast<uint64_t>(i);
      subject_.prepare(in_place, seed);
      must(comm_.barrier().wait());  // a slow neighbour's preparation is not this call's business
      subject_.call(in_place);
      mine += subject_.wrong(in_place, seed);
    }
    wrong_here_ += mine;
    return static_cast<uint64_t>(total(comm_, static_cast<double>(mine)));
  }

  void describe(Row& row) {
    const Report report = subject_.report();
    row.algorithm = options_.baseline == Baseline::none ? name(report.algorithm) : "hub";
    row.transport = report.transport;
    row.chunk_bytes = report.chunk_bytes, row.piece_bytes = report.piece_bytes;
    row.bytes_sent = static_cast<uint64_t>(largest(comm_, static_cast<double>(sent_per_call_)));
    row.bytes_model =
        static_cast<uint64_t>(largest(comm_, static_cast<double>(report.bytes_model)));
    if (options_.baseline != Baseline::none) describe_hub(row);
    row.model_us = report.predicted_seconds * 1e6;
    if (!machine_ || !options_.kind || options_.baseline != Baseline::none) return;
    Schedule schedule{*options_.kind, report.algorithm, comm_.size(), machine_->per_host};
    schedule.count = row.size / size_of(row.type);
    schedule.root = std::max(0, row.root);
    row.model_us =
        predict_seconds(schedule, size_of(row.type), report.piece_bytes, *machine_) * 1e6;
  }

  // What comes in at the hub is what leaves the others, counted there.
  void describe_hub(Row& row) {
    const uint64_t mine = comm_.rank() == 0 ? 0 : sent_per_call_;
    row.hub_received = static_cast<uint64_t>(total(comm_, static_cast<double>(mine)));
    const Report instead = subject_.library_call();
    row.instead_algorithm = name(instead.algorithm);
    row.instead_sent =
        static_cast<uint64_t>(largest(comm_, static_cast<double>(instead.bytes_sent)));
  }

  const BenchOptions& options_;
  Communicator comm_;
  const std::optional<Machine>& machine_;
  Subject subject_;
  Results results_;
  uint64_t wrong_here_ = 0;
  uint64_t sent_per_call_ = 0;  // by this rank, counted by the transports
};

// Files that rank 0 and the launcher read and check before anybody waits for anybody.
struct Inputs {
  std::optional<Machine> machine;
  json earlier;
};

int finish(const BenchOptions& options, const Inputs& inputs, const Results& results) {
  bool good = results.errors.empty() && results.wrong().value_or(0) == 0;
  good &= write_files(options, results);
  if (!options.compare.empty()) {
    const int slower = regressions(options, inputs.earlier, results);
    if (slower < 0) return kBadArguments;
    good &= slower == 0;
  }
  return good ? kSuccess : kFailed;
}

int bench_rank(const BenchOptions& options, const Inputs& inputs, Rendezvous where) {
  Options wanted;
  wanted.algorithm = options.algorithm;
  if (options.transport != "auto") wanted.transports = options.transport;
  if (options.timeout > 0) {
    const std::chrono::duration<double> seconds(options.timeout);
    wanted.timeout = std::chrono::duration_cast<Nanoseconds>(seconds);
    where.timeout = wanted.timeout;
  }
  const auto complain = [&](const Status& status) {
    return fail(kFailed, fmt::format("bench: rank {}: {}", where.rank, status.to_string()));
  };
  std::unique_ptr<Gpu> gpu;
  if (options.device == "cuda") {
    auto opened = Gpu::open(where.local_rank.value_or(where.rank));
    if (!opened.ok()) return complain(opened.status());
    gpu = std::move(*opened);
  }
  auto comm = Communicator::create(where, wanted);
  if (!comm.ok()) return complain(comm.status());
  if (options.root >= comm->size()) {
    const std::string sentence = fmt::format("bench: -r {}; accepted: -1 to {} with {} ranks",
                                             options.root, comm->size() - 1, where.size);
    return where.rank == 0 ? fail(kBadArguments, sentence) : kBadArguments;
  }
  if (options.cliffs || options.audit) {
    try {
      const int found = options.audit ? audit_choice(options, *comm) : find_cliffs(options, *comm);
      must(comm->barrier().wait());
      return found == 0 ? kSuccess : kFailed;
    } catch (const OperationFailed& failed) {
      return complain(failed.status);
    }
  }
  if (options.baseline == Baseline::parameter_server_async) {
    try {
      const bool good = serve_asynchronously(options, *comm);
      must(comm->barrier().wait());
      return good ? kSuccess : kFailed;
    } catch (const OperationFailed& failed) {
      return complain(failed.status);
    }
  }
  Bench bench(options, *comm, inputs.machine, gpu.get());
  try {
    const Results results = bench.run();
    const int mine = bench.wrong_here() == 0 ? kSuccess : kFailed;
    const int status = where.rank == 0 ? finish(options, inputs, results) : mine;
    // A launcher ends everybody when one fails: not before rank 0 has written its files.
    must(comm->barrier().wait());
    return std::max(status, mine);
  } catch (const OperationFailed& failed) {
    Results& results = bench.results();
    results.ended = utc_now();
    results.errors.push_back(failed.status.to_string());
    const int status = complain(failed.status);
    if (where.rank == 0) {
      write_files(options, results);
    } else {
      std::this_thread::sleep_for(kLastWords);
    }
    return status;
  }
}

// Two buffers a rank; the alternative is to be killed half-way.
std::string too_large(const BenchOptions& options) {
  std::ifstream file("/proc/meminfo");
  uint64_t available = 0;
  for (std::string word; file >> word;) {
    if (word == "MemAvailable:" && file >> available) break;
  }
  available *= 1024;
  const auto ranks = static_cast<uint64_t>(options.ranks);
  const bool hub = options.baseline == Baseline::parameter_server;
  const uint64_t needed = options.last_bytes * (2 * ranks + (hub ? ranks - 1 : 0));
  if (available == 0 || needed <= available) return {};
  return fmt::format("bench: {} ranks with -e {} need {}, and {} are free; lower -e or --ranks",
                     ranks, show_size(options.last_bytes), show_amount(static_cast<double>(needed)),
                     show_amount(static_cast<double>(available)));
}

int run_bench(const BenchOptions& options) {
  if (const std::string why = contradiction(options); !why.empty()) {
    return fail(kBadArguments, "bench: " + why);
  }
  if (const std::string why = unwritable(options); !why.empty()) {
    return fail(kBadArguments, "bench: " + why);
  }
  if (!options.plot.empty() && !can_plot()) return kEnvironment;
  Inputs inputs;
  if (!options.machine.empty()) {
    auto machine = read_machine(options.machine);
    if (!machine.ok()) return fail(kBadArguments, "bench: " + machine.status().message());
    inputs.machine = *machine;
  }
  if (!options.compare.empty()) {
    inputs.earlier = json::parse(std::ifstream(options.compare), nullptr, false);
    if (!inputs.earlier.is_object() || !inputs.earlier.contains("results")) {
      return fail(kBadArguments,
                  fmt::format("bench: {} is not a --json file of ringfold bench", options.compare));
    }
  }
  if (options.ranks > 0) {
    if (const std::string why = too_large(options); !why.empty()) return fail(kEnvironment, why);
  }
  if (options.device == "cuda") {
    if (const auto gpu = Gpu::open(0); !gpu.ok())
      return fail(kEnvironment, "bench: --device cuda: " + gpu.status().message());
  }
  // Processes that share a device would take turns on it.
  const bool threads = options.device == "cuda" && options.ranks > 0;
  return start_ranks({options.ranks, threads ? "loopback" : options.transport},
                     [&](const Rendezvous& where) { return bench_rank(options, inputs, where); });
}

}  // namespace

Command add_bench(CLI::App& app) {
  auto* const bench = app.add_subcommand(
      "bench", "Time and check a collective over a sweep of sizes, as nccl-tests does");
  auto options = std::make_shared<BenchOptions>();
  add_options(*bench, *options);
  bench->footer(
      "Short options are those of nccl-tests. Time is that of one call: the average over "
      "back-to-back\n"
      "calls and over ranks (nccl-tests' -a 1). Percentiles (-I 1, and always in --json) come from "
      "a\n"
      "second pass in which every call is timed on its own; a call counts as long as on its "
      "slowest\n"
      "rank. Checked data is made so that the right answer is exact in any order: no tolerance.\n"
      "#wrong counts elements over all ranks, changed input and bytes beside the buffers "
      "included.\n"
      "Sizes are those of the largest buffer of a rank; bandwidths use 10^9 bytes. With one rank "
      "the\n"
      "bus bandwidth is n/a, since nothing travels.");
  const Command gradients = add_bench_gradients(*bench);
  return [options, gradients, bench]() -> int {
    return bench->got_subcommand("gradients") ? gradients() : run_bench(*options);
  };
}

}  // namespace ringfold::tools
