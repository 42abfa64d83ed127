// ringfold sim: the library's own schedules and executor on a network in virtual time.
#include <fmt/format.h>

#include <array>
#include <charconv>
#include <chrono>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lib/sim/simulation.h"
#include "ringfold/model.h"
#include "tools/command.h"
#include "tools/crossings.h"
#include "tools/sim_faults.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

using nlohmann::ordered_json;

struct Question {
  int ranks = 0, hosts = 1;
  double bytes = 0, bandwidth = 0, latency = 0, piece = 0;
  std::optional<Algorithm> algorithm;
  std::string faults, json, trace;
  FaultSpec spec;
  uint64_t seed = 1;
  bool crossings = false;
};

struct Answer {
  Choice choice;
  Simulated run;
  double wall_seconds = 0;

  [[nodiscard]] double ratio() const {
    return choice.seconds > 0 ? run.seconds / choice.seconds : 1;
  }
  [[nodiscard]] double events_per_second() const {
    return static_cast<double>(run.events) / wall_seconds;
  }
  [[nodiscard]] bool ok() const {
    return std::ranges::all_of(run.ranks, [](const SimulatedEnd& end) { return end.status.ok(); });
  }
};

size_t element_of(double bytes) {
  return static_cast<size_t>(bytes) % 4 == 0 ? 4 : 1;
}

ordered_json to_json(const Question& q, const Answer& a) {
  const double algbw = a.ok() && a.run.seconds > 0 ? q.bytes / a.run.seconds : 0;
  ordered_json j = {{"schema", 1},
                    {"collective", "all_reduce"},
                    {"ranks", q.ranks},
                    {"hosts", q.hosts},
                    {"bytes", q.bytes},
                    {"bandwidth", q.bandwidth},
                    {"latency", q.latency},
                    {"algorithm", name(a.choice.schedule.algorithm)},
                    {"piece_bytes", a.choice.piece_bytes},
                    {"faults", q.faults},
                    {"seed", q.seed},
                    {"ok", a.ok()},
                    {"seconds", a.run.seconds},
                    {"model_seconds", a.choice.seconds},
                    {"ratio", a.ratio()},
                    {"events", a.run.events},
                    {"events_per_second", a.events_per_second()},
                    {"bytes_sent_per_rank", a.run.bytes_per_rank},
                    {"algbw", algbw},
                    {"busbw", algbw * bus_factor(Collective::all_reduce, q.ranks)},
                    {"reports", ordered_json::array()}};
  for (size_t rank = 0; rank < a.run.ranks.size(); ++rank) {
    const SimulatedEnd& end = a.run.ranks[rank];
    if (end.status.ok()) continue;
    j["reports"].push_back({{"rank", rank},
                            {"seconds", end.seconds},
                            {"code", to_string(end.status.code())},
                            {"message", end.status.message()}});
  }
  return j;
}

void print(const Question& q, const Answer& a) {
  fmt::print("all_reduce of {} on {} ranks, {} host{}, {}/s a link, {} a message\n\n",
             show_amount(q.bytes), q.ranks, q.hosts, q.hosts == 1 ? "" : "s",
             show_amount(q.bandwidth), show_seconds(q.latency));
  fmt::print("algorithm            : {}, in pieces of {}\n", name(a.choice.schedule.algorithm),
             show_size(a.choice.piece_bytes));
  fmt::print("time                 : {}\n", show_seconds(a.run.seconds));
  fmt::print("model                : {} (without faults)\n", show_seconds(a.choice.seconds));
  fmt::print("ratio                : {:.4f}\n", a.ratio());
  fmt::print("events               : {} ({:.3g} million a second)\n", a.run.events,
             a.events_per_second() * 1e-6);
  fmt::print("bytes sent per rank  : {}\n", show_amount(static_cast<double>(a.run.bytes_per_rank)));
  if (a.ok() && a.run.seconds > 0)
    fmt::print("busbw                : {}/s\n",
               show_amount(q.bytes / a.run.seconds * bus_factor(Collective::all_reduce, q.ranks)));
  if (a.ok()) return;
  fmt::print("\nreports\n");
  constexpr size_t kShown = 64;
  size_t shown = 0, more = 0;
  for (const SimulatedEnd& end : a.run.ranks) {
    if (end.status.ok()) continue;
    if (shown++ < kShown)
      fmt::print("{:>14}  {}\n", show_seconds(end.seconds), end.status.to_string());
    else
      ++more;
  }
  if (more != 0) fmt::print("{:>14}  and {} more; --json has them all\n", "", more);
}

// Chrome's trace format: a process a rank, in it a thread for each of its ports and its adder.
bool write_trace(const std::string& file, const std::vector<SimSpan>& spans, int ranks) {
  constexpr std::array kThreads = {"send", "receive", "add"};
  std::ofstream out(file);
  out << "{\"traceEvents\":[\n";
  for (int rank = 0; rank < ranks; ++rank) {
    out << fmt::format(
        R"({{"ph":"M","name":"process_name","pid":{0},"args":{{"name":"rank {0}"}}}},)", rank);
    for (size_t t = 0; t < kThreads.size(); ++t)
      out << fmt::format(
          R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":"{}"}}}},)", rank, t,
          kThreads[t]);
    out << '\n';
  }
  const char* separator = "";
  for (const SimSpan& span : spans) {
    const auto kind = static_cast<size_t>(span.kind);
    out << separator
        << fmt::format(R"({{"ph":"X","name":"{}","pid":{},"tid":{},"ts":{:.6f},"dur":{:.6f},)"
                       R"("args":{{"bytes":{})",
                       kThreads[kind], span.rank, kind, static_cast<double>(span.begin) * 1e-6,
                       static_cast<double>(span.end - span.begin) * 1e-6, span.bytes);
    if (span.peer >= 0) out << fmt::format(R"(,"peer":{},"message":{})", span.peer, span.index);
    out << "}}";
    separator = ",\n";
  }
  out << "\n],\"displayTimeUnit\":\"ns\"}\n";
  out.close();
  return !out.fail();
}

std::optional<Answer> simulate(const Question& q, std::vector<SimSpan>* spans) {
  SimOptions options;
  options.machine.local = options.machine.remote = {q.latency, 1 / q.bandwidth};
  options.machine.gamma = 0;
  options.machine.per_host = q.ranks / q.hosts;
  options.faults = q.spec.faults;
  options.faults.seed = q.seed;
  const size_t element = element_of(q.bytes);
  Constraints only;
  only.algorithm = q.algorithm;
  only.piece_bytes = static_cast<size_t>(q.piece) / element * element;
  const auto choice =
      choose(Collective::all_reduce, q.ranks, static_cast<size_t>(q.bytes) / element, element,
             options.machine, only);
  if (!choice) return std::nullopt;
  SimulatedCall call;
  call.schedule = choice->schedule;
  call.element_bytes = element;
  call.piece = choice->piece_bytes / element;
  call.timeout = q.spec.deadline;
  const auto begin = std::chrono::steady_clock::now();
  Answer a{*choice, ringfold::simulate(call, options, spans), 0};
  a.wall_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return a;
}

int run_sim(Question& q) {
  if (q.crossings) {
    print_crossings(q.latency);
    return kSuccess;
  }
  if (q.ranks % q.hosts != 0) {
    return fail(kBadArguments,
                fmt::format("sim: --hosts {} with --ranks {}; accepted: hosts with equally many "
                            "ranks each",
                            q.hosts, q.ranks));
  }
  if (q.bandwidth <= 0) return fail(kBadArguments, "sim: --bandwidth 0; accepted: more than that");
  if (q.spec.largest_rank >= q.ranks) {
    return fail(kBadArguments, fmt::format("sim: --faults {}: rank {}; accepted: 0 to {}", q.faults,
                                           q.spec.largest_rank, q.ranks - 1));
  }
  std::vector<SimSpan> spans;
  const auto a = simulate(q, q.trace.empty() ? nullptr : &spans);
  if (!a) {
    return fail(kBadArguments,
                "sim: this size cannot be cut into such pieces by this algorithm; accepted: "
                "another --piece or --algorithm, or neither");
  }
  print(q, *a);
  if (!q.trace.empty() && !write_trace(q.trace, spans, q.ranks))
    return fail(kFailed, "sim: cannot write " + q.trace);
  if (q.json.empty()) return kSuccess;
  std::ofstream file(q.json);
  file << to_json(q, *a).dump(2) << '\n';
  file.close();
  return file ? kSuccess : fail(kFailed, "sim: cannot write " + q.json);
}

// An option whose text is an amount of something.
CLI::Option* add_amount(CLI::App& sim, const std::string& name, double& out,
                        std::optional<double> (*parse)(std::string_view),
                        const std::string& accepted, const std::string& help) {
  return sim.add_option_function<std::string>(
      name,
      [&out, parse, name, accepted](const std::string& text) {
        const auto value = parse(text);
        if (!value) {
          throw CLI::ValidationError(fmt::format("{}: \"{}\"; accepted: {}", name, text, accepted));
        }
        out = *value;
      },
      help);
}

void add_algorithm(CLI::App& sim, Question& q) {
  std::vector<std::string_view> names = {"auto"};
  for (int i = 0; i < kAlgorithms; ++i) {
    if (offers(Collective::all_reduce, static_cast<Algorithm>(i)))
      names.push_back(name(static_cast<Algorithm>(i)));
  }
  sim.add_option_function<std::string>(
         "--algorithm",
         [&q, names](const std::string& text) {
           if (text == "auto") return q.algorithm.reset();
           for (int i = 0; i < kAlgorithms; ++i) {
             const auto a = static_cast<Algorithm>(i);
             if (name(a) == text && offers(Collective::all_reduce, a)) return void(q.algorithm = a);
           }
           throw CLI::ValidationError(
               fmt::format("--algorithm: \"{}\"; accepted: {}", text, listed(names)));
         },
         listed(names))
      ->default_str("auto");
}

void add_faults(CLI::App& sim, Question& q) {
  sim.add_option_function<std::string>(
      "--faults",
      [&q](const std::string& text) {
        const auto spec = parse_faults(text);
        if (!spec.ok()) throw CLI::ValidationError("--faults: " + spec.status().message());
        q.spec = *spec;
        q.faults = text;
      },
      std::string(kFaultsHelp));
}

}  // namespace

Command add_sim(CLI::App& app) {
  auto* const sim = app.add_subcommand("sim", "Simulate an all-reduce of many ranks");
  auto q = std::make_shared<Question>();
  auto* const ranks = sim->add_option("--ranks", q->ranks, "how many");
  ranks->required()->check(CLI::Range(1, 1 << 16));
  auto* const bytes =
      add_amount(*sim, "--bytes", q->bytes, parse_amount, "4GB (10^9), 4GiB or 4G (2^30), 512",
                 "size of the data on one rank")
          ->required();
  auto* const bandwidth = add_amount(*sim, "--bandwidth", q->bandwidth, parse_rate,
                                     "200GB/s, 100Gbit/s, 2GiB/s", "of a rank's link, each way")
                              ->required();
  add_amount(*sim, "--latency", q->latency, parse_seconds, "5us, 1.5ms, 200ns, 0", "of one message")
      ->required();
  sim->add_option("--hosts", q->hosts, "the ranks are spread over so many hosts")
      ->check(CLI::Range(1, 1 << 16));
  add_algorithm(*sim, *q);
  add_amount(*sim, "--piece", q->piece, parse_amount, "64K, 1MiB, 4096",
             "size of one message; the model's choice when not given");
  add_faults(*sim, *q);
  sim->add_option("--seed", q->seed, "of the faults");
  sim->add_option("--json", q->json, "write the answer there");
  sim->add_option("--trace", q->trace, "write every send, receive and addition there, for Chrome");
  // Options are taken before it is looked which are required.
  sim->add_flag_callback(
         "--crossings",
         [=] {
           q->crossings = true;
           for (CLI::Option* option : {ranks, bytes, bandwidth}) option->required(false);
         },
         "print from which size on which algorithm is the fastest, for 8 to 4096 ranks at 100 and "
         "400 Gbit/s; needs --latency only")
      ->trigger_on_parse();
  sim->footer("Runs the library's own schedules and executor in virtual time.");
  return [q]() -> int { return run_sim(*q); };
}

}  // namespace ringfold::tools
