// Results as JSON (schema 1), CSV and picture, and against an earlier run.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "ringfold_config.h"
#include "tools/bench_results.h"

namespace ringfold::tools {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

template <class T>
json or_null(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}

json timing_json(const std::optional<Timing>& timing) {
  if (!timing) return nullptr;
  json j = {{"time_us", timing->time_us},
            {"algbw", timing->algbw},
            {"busbw", or_null(timing->busbw)},
            {"wrong", or_null(timing->wrong)}};
  if (const auto& p = timing->percentiles) {
    j.update({{"min_us", p->min},
              {"p50_us", p->p50},
              {"p95_us", p->p95},
              {"p99_us", p->p99},
              {"max_us", p->max}});
  }
  return j;
}

json row_json(const BenchOptions& options, const Row& row) {
  json j = {{"collective", options.collective},
            {"size", row.size},
            {"count", row.count},
            {"type", name(row.type)},
            {"redop", row.op ? name(*row.op) : "none"},
            {"root", row.root},
            {"iterations", row.iterations},
            {"algorithm", row.algorithm},
            {"transport", row.transport},
            {"chunk_bytes", row.chunk_bytes},
            {"piece_bytes", row.piece_bytes},
            {"bytes_sent_per_rank", row.bytes_sent},
            {"bytes_model_per_rank", row.bytes_model},
            {"model_us", row.model_us},
            {"out_of_place", timing_json(row.out_of_place)},
            {"in_place", timing_json(row.in_place)}};
  if (options.baseline != Baseline::none) {
    j["hub"] = {{"bytes_received", row.hub_received}, {"bytes_sent", row.bytes_sent}};
    j["all_reduce"] = {{"algorithm", row.instead_algorithm},
                       {"bytes_sent_per_rank", row.instead_sent}};
  }
  return j;
}

json config_json(const BenchOptions& o) {
  return {{"min_bytes", o.first_bytes},
          {"max_bytes", o.last_bytes},
          {"step_bytes", o.step_bytes},
          {"step_factor", o.factor},
          {"random_sizes", o.random_sizes},
          {"iterations", o.iterations},
          {"warm_up", o.warm_up},
          {"cycles", o.cycles},
          {"checked", o.checked},
          {"unalign", o.unalign},
          {"blocking", o.blocking},
          {"timeout", o.timeout},
          {"seed", o.seed},
          {"transport", o.transport},
          {"algorithm", o.algorithm ? name(*o.algorithm) : "auto"},
          {"time", "average over ranks"}};
}

std::string csv_of(const BenchOptions& options, const Results& results) {
  std::string text =
      "collective,ranks,size,count,type,redop,root,placement,time_us,algbw,busbw,wrong,min_us,"
      "p50_us,p95_us,p99_us,max_us,algorithm,transport,bytes_sent_per_rank,model_us\n";
  const auto cell = [](const auto& value) { return value ? fmt::format("{}", *value) : ""; };
  for (const Row& row : results.rows) {
    for (const bool in_place : {false, true}) {
      const auto& t = in_place ? row.in_place : row.out_of_place;
      if (!t) continue;
      text += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{}", options.collective, results.ranks,
                          row.size, row.count, name(row.type), row.op ? name(*row.op) : "none",
                          row.root, in_place ? "in_place" : "out_of_place", t->time_us, t->algbw,
                          cell(t->busbw), cell(t->wrong));
      if (const auto& p = t->percentiles) {
        text += fmt::format(",{},{},{},{},{}", p->min, p->p50, p->p95, p->p99, p->max);
      } else {
        text += ",,,,,";
      }
      text +=
          fmt::format(",{},{},{},{}\n", row.algorithm, row.transport, row.bytes_sent, row.model_us);
    }
  }
  return text;
}

// plot.py lies beside this executable in the build, and in share/ringfold when installed.
fs::path plot_script() {
  std::error_code error;
  const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
  const fs::path beside = here / "plot.py";
  return fs::exists(beside, error) ? beside : here.parent_path() / "share/ringfold/plot.py";
}

int run_plot(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"python3", plot_script().string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    execvp("python3", pointers.data());
    fmt::print(stderr, "ringfold: bench: --plot needs python3, which is not here\n");
    _exit(127);
  }
  int status = 0;
  if (pid < 0 || waitpid(pid, &status, 0) != pid) return 127;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 127;
}

bool plot(const BenchOptions& options, const json& results) {
  const std::string data = options.plot + ".json.part";
  const bool drawn = write_file(data, results.dump()) && run_plot({data, options.plot}) == 0;
  std::error_code error;
  fs::remove(data, error);
  return drawn;
}

struct Key {
  std::string collective, type, redop;
  uint64_t size;
  int root;
  friend bool operator==(const Key&, const Key&) = default;
};
Key key_of(const json& row) {
  return {row.at("collective"), row.at("type"), row.at("redop"), row.at("size"), row.at("root")};
}

}  // namespace

// Through a neighbour and a rename: a reader never finds half a file.
bool write_file(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".part";
  std::ofstream file(unfinished, std::ios::binary);
  file << text;
  file.close();
  std::error_code error;
  if (file) fs::rename(unfinished, path, error);
  if (file && !error) return true;
  fmt::print(stderr, "ringfold: bench: cannot write {}\n", path);
  fs::remove(unfinished, error);
  return false;
}

json to_json(const BenchOptions& options, const Results& results) {
  json rows = json::array();
  for (const Row& row : results.rows) rows.push_back(row_json(options, row));
  return {{"schema", 1},
          {"ringfold", RINGFOLD_VERSION},
          {"started", results.started},
          {"ended", results.ended},
          {"ranks", results.ranks},
          {"hosts", results.hosts},
          {"device", options.device},
          {"config", config_json(options)},
          {"results", rows},
          {"average_busbw", or_null(results.average_busbw())},
          {"wrong", or_null(results.wrong())},
          {"errors", results.errors}};
}

bool write_files(const BenchOptions& options, const Results& results) {
  const json j = to_json(options, results);
  bool written = true;
  if (!options.json.empty()) written &= write_file(options.json, j.dump(2) + "\n");
  if (!options.csv.empty()) written &= write_file(options.csv, csv_of(options, results));
  if (!options.plot.empty()) written &= plot(options, j);
  return written;
}

std::string unwritable(const BenchOptions& options) {
  for (const std::string& file : {options.json, options.csv, options.plot}) {
    if (file.empty()) continue;
    const fs::path folder = fs::path(file).parent_path();
    if (access(folder.empty() ? "." : folder.c_str(), W_OK) != 0 || fs::is_directory(file)) {
      return fmt::format("cannot write {}; accepted: a file name in a folder that is there", file);
    }
  }
  return {};
}

bool can_plot() {
  return run_plot({"--probe"}) == 0;
}

int regressions(const BenchOptions& options, const json& earlier, const Results& results) {
  if (earlier.at("schema") != 1 || earlier.at("ranks") != results.ranks ||
      earlier.at("device") != options.device) {
    fmt::print(stderr,
               "ringfold: bench: {} has schema {}, {} ranks, device {}; this run has schema "
               "1, {} ranks, device {}\n",
               options.compare, earlier.at("schema").dump(), earlier.at("ranks").dump(),
               earlier.at("device").dump(), results.ranks, options.device);
    return -1;
  }
  int compared = 0, slower = 0;
  for (const Row& row : results.rows) {
    const json now = row_json(options, row);
    for (const json& then : earlier.at("results")) {
      if (!(key_of(then) == key_of(now))) continue;
      for (const char* place : {"out_of_place", "in_place"}) {
        if (!then.at(place).is_object() || !now.at(place).is_object()) continue;
        const double before = then.at(place).at("p50_us"), after = now.at(place).at("p50_us");
        ++compared;
        if (after <= before * (1 + options.tolerance)) continue;
        ++slower;
        fmt::print("# Slower: {} B {} {} : p50 {:.2f} us, was {:.2f} us (x {:.2f})\n", row.size,
                   name(row.type), place, after, before, after / before);
      }
      break;
    }
  }
  fmt::print("# Compared with {} : {} of {} slower by more than {:g} %\n", options.compare, slower,
             compared, options.tolerance * 100);
  if (compared == 0) {
    fmt::print(stderr, "ringfold: bench: {} has no line in common with this run\n",
               options.compare);
    return -1;
  }
  return slower;
}

}  // namespace ringfold::tools
