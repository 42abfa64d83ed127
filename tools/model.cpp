// ringfold model: what a collective costs, from the formulas alone.
#include "ringfold/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/command.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

using nlohmann::ordered_json;

struct Question {
  int ranks = 0, hosts = 1;
  double bytes = 0, bandwidth = 0, latency = 0;
  Collective collective = Collective::all_reduce;
  std::string json;
};

// Messages that follow one another, each waiting for the one before.
int steps_in_a_row(Collective collective, int ranks) {
  const bool two_halves = collective == Collective::all_reduce;
  return (two_halves ? 2 : 1) * (ranks - 1);
}

struct Answer {
  double factor = 0, sent = 0;
  int steps = 0;
  double latency_seconds = 0, seconds = 0, algbw = 0, busbw = 0;
  double even_bytes = 0;  // where latency and bandwidth cost the same
};

Answer answer(const Question& q) {
  Answer a;
  a.factor = bus_factor(q.collective, q.ranks);
  a.sent = model_bytes(q.collective, q.ranks, q.bytes);
  a.steps = steps_in_a_row(q.collective, q.ranks);
  a.latency_seconds = a.steps * q.latency;
  a.seconds = a.latency_seconds + a.sent / q.bandwidth;
  a.algbw = a.seconds > 0 ? q.bytes / a.seconds : 0;
  a.busbw = a.algbw * a.factor;
  a.even_bytes = a.factor > 0 ? a.latency_seconds * q.bandwidth / a.factor : 0;
  return a;
}

// Through the one link of the hub: everybody's whole buffer in, the result to everybody out.
struct Hub {
  double each_way = 0;
  double server_seconds = 0;  // all ranks at once
  double gather_seconds = 0;  // one rank after another: every message's latency counts
};
Hub hub(const Question& q) {
  Hub h;
  h.each_way = hub_bytes(q.ranks, q.bytes);
  h.server_seconds = hub_seconds(q.ranks, q.bytes, {q.latency, 1 / q.bandwidth});
  h.gather_seconds = h.server_seconds + 2 * std::max(0, q.ranks - 2) * q.latency;
  return h;
}

struct Candidate {
  Choice choice;
  int steps = 0;
};

// The algorithms of the library, each with the pieces that its own cost model chooses.
std::vector<Candidate> candidates(const Question& q) {
  Machine machine;
  machine.local = machine.remote = {q.latency, 1 / q.bandwidth};
  machine.gamma = 0;
  machine.per_host = q.ranks / q.hosts;
  auto count = static_cast<size_t>(q.bytes);
  if (has_parts(q.collective)) count -= count % static_cast<size_t>(q.ranks);
  std::vector<Candidate> result;
  for (int i = 0; i < kAlgorithms; ++i) {
    Constraints only;
    only.algorithm = static_cast<Algorithm>(i);
    if (!offers(q.collective, *only.algorithm)) continue;
    if (only.algorithm == Algorithm::two_level && (q.hosts == 1 || q.hosts == q.ranks)) continue;
    const auto choice = choose(q.collective, q.ranks, count, 1, machine, only);
    if (choice) result.push_back({*choice, step_count(choice->schedule)});
  }
  return result;
}

ordered_json to_json(const Question& q, const Answer& a, const Hub& h,
                     const std::vector<Candidate>& all) {
  ordered_json j = {{"schema", 1},
                    {"collective", name(q.collective)},
                    {"ranks", q.ranks},
                    {"hosts", q.hosts},
                    {"bytes", q.bytes},
                    {"bandwidth", q.bandwidth},
                    {"latency", q.latency},
                    {"factor", a.factor},
                    {"bytes_sent_per_rank", a.sent},
                    {"steps", a.steps},
                    {"seconds", a.seconds},
                    {"latency_share", a.seconds > 0 ? a.latency_seconds / a.seconds : 0},
                    {"algbw", a.algbw},
                    {"busbw", a.busbw},
                    {"even_bytes", a.even_bytes}};
  if (q.collective == Collective::all_reduce) {
    const auto way = [&](double seconds) -> ordered_json {
      return {
          {"hub_bytes_received", h.each_way}, {"hub_bytes_sent", h.each_way}, {"seconds", seconds}};
    };
    j["gather_to_root"] = way(h.gather_seconds);
    j["parameter_server"] = way(h.server_seconds);
  }
  for (const Candidate& c : all) {
    j["algorithms"].push_back({{"algorithm", name(c.choice.schedule.algorithm)},
                               {"steps", c.steps},
                               {"piece_bytes", c.choice.piece_bytes},
                               {"seconds", c.choice.seconds}});
  }
  return j;
}

void print(const Question& q, const Answer& a, const Hub& h, const std::vector<Candidate>& all) {
  const bool reduces_all = q.collective == Collective::all_reduce;
  fmt::print("{} of {} on {} ranks, {} host{}, {}/s a link, {} a message\n\n", name(q.collective),
             show_amount(q.bytes), q.ranks, q.hosts, q.hosts == 1 ? "" : "s",
             show_amount(q.bandwidth), show_seconds(q.latency));
  fmt::print("factor{:<15}: {:.6g}\n", reduces_all ? " 2(N-1)/N" : "", a.factor);
  fmt::print("bytes sent per rank  : {}\n", show_amount(a.sent));
  fmt::print("time                 : {}\n", show_seconds(a.seconds));
  fmt::print("  of which latency   : {} ({} messages in a row, {:.3g} %)\n",
             show_seconds(a.latency_seconds), a.steps,
             a.seconds > 0 ? 100 * a.latency_seconds / a.seconds : 0);
  fmt::print("busbw                : {}/s\n", show_amount(a.busbw));
  fmt::print("algbw                : {}/s\n", show_amount(a.algbw));
  fmt::print("latency = bandwidth  : at {}\n", show_amount(a.even_bytes));
  if (reduces_all) {
    const auto line = [&](const char* what, double seconds) {
      fmt::print("{:<21}: {} into the hub, {} out; {}\n", what, show_amount(h.each_way),
                 show_amount(h.each_way), show_seconds(seconds));
    };
    line("gather to root", h.gather_seconds);
    line("parameter server", h.server_seconds);
  }
  fmt::print("\n{:<21}  {:>9}  {}\n", "algorithm", "steps", "time, in pieces");
  for (const Candidate& c : all) {
    fmt::print("{:<21}  {:>9}  {}\n", name(c.choice.schedule.algorithm), c.steps,
               show_seconds(c.choice.seconds));
  }
}

int run_model(const Question& q) {
  if (q.ranks % q.hosts != 0) {
    return fail(kBadArguments,
                fmt::format("model: --hosts {} with --ranks {}; accepted: hosts with equally many "
                            "ranks each",
                            q.hosts, q.ranks));
  }
  const Answer a = answer(q);
  const Hub h = hub(q);
  const auto all = candidates(q);
  print(q, a, h, all);
  if (q.json.empty()) return kSuccess;
  std::ofstream file(q.json);
  file << to_json(q, a, h, all).dump(2) << '\n';
  file.close();
  return file ? kSuccess : fail(kFailed, "model: cannot write " + q.json);
}

// A required option whose text is an amount of something.
CLI::Option* add_amount(CLI::App& model, const std::string& name, double& out,
                        std::optional<double> (*parse)(std::string_view),
                        const std::string& accepted, const std::string& help) {
  return model.add_option_function<std::string>(
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

}  // namespace

Command add_model(CLI::App& app) {
  auto* const model = app.add_subcommand("model", "Predict a collective: bytes, time, bandwidth");
  auto q = std::make_shared<Question>();
  model->add_option("--ranks", q->ranks, "how many")->required()->check(CLI::Range(1, 1 << 20));
  add_amount(*model, "--bytes", q->bytes, parse_amount, "4GB (10^9), 4GiB or 4G (2^30), 512",
             "size of the data on one rank")
      ->required();
  add_amount(*model, "--bandwidth", q->bandwidth, parse_rate, "200GB/s, 100Gbit/s, 2GiB/s",
             "of a rank's link, each way")
      ->required();
  add_amount(*model, "--latency", q->latency, parse_seconds, "5us, 1.5ms, 200ns, 0",
             "of one message; 0 when not given");
  model->add_option("--hosts", q->hosts, "the ranks are spread over so many hosts")
      ->check(CLI::Range(1, 1 << 20));
  model
      ->add_option_function<std::string>(
          "--collective",
          [q = q.get()](const std::string& text) {
            for (int i = 0; i < kCollectives; ++i) {
              const auto c = static_cast<Collective>(i);
              if (name(c) == text) return void(q->collective = c);
            }
            throw CLI::ValidationError(
                fmt::format("--collective: \"{}\"; accepted: {}", text, listed(kCollectiveNames)));
          },
          listed(kCollectiveNames))
      ->default_str("all_reduce");
  model->add_option("--json", q->json, "write the answer there");
  model->footer(
      "GB is 10^9 bytes, GiB and a bare G are 2^30; Gbit are 10^9 bits.\n"
      "time = messages in a row * latency + bytes sent per rank / bandwidth.");
  return [q]() -> int { return run_model(*q); };
}

}  // namespace ringfold::tools
