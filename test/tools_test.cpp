// Drives the built executable as a user does.
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "ringfold/model.h"
#include "test/tool_runs.h"

using Catch::Matchers::Contains;
using nlohmann::json;
using namespace ringfold::test;

namespace {

Outcome run_shell(int ranks, const std::string& script) {
  return tool({"run", "--ranks", std::to_string(ranks), "--", "sh", "-c", script});
}

std::set<std::string> lines_of(const std::string& text) {
  std::set<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.insert(line);
  return lines;
}

// Whether a process ends within a few seconds. A zombie has ended: only its parent is slow.
bool ends(pid_t pid) {
  for (int i = 0; i < 300; ++i) {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string id, command, state;
    if (!(stat >> id >> command >> state) || state == "Z") return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

// The number that another process writes into the file, once it is there.
pid_t number_in(const std::string& file) {
  for (int i = 0; i < 500; ++i) {
    std::ifstream stream(file);
    std::string line;
    // Whole lines only: the file may be seen between its making and its writing.
    if (std::getline(stream, line) && !stream.eof()) return std::stoi(line);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return -1;
}

}  // namespace

TEST_CASE("--version and --help succeed, and each subcommand has help") {
  CHECK(tool({"--version"}).out == "ringfold " RINGFOLD_VERSION_TEXT "\n");
  for (const Words& words : {Words{"--help"}, Words{"bench", "--help"}, Words{"run", "--help"},
                             Words{"model", "--help"}, Words{"doctor", "--help"}}) {
    const Outcome o = tool(words);
    CHECK(o.status == 0);
    CHECK(o.err.empty());
    CHECK(o.out.size() > 200);
  }
}

TEST_CASE("bad arguments: status 2, what was given and what is accepted, nothing on stdout") {
  struct Case {
    Words words;
    std::string given, accepted;
  };
  const std::vector<Case> cases = {
      {{}, "subcommand is required", "bench"},
      {{"brench"}, "\"brench\"", "bench"},
      {{"bench", "--bogus"}, "--bogus", "--datatype"},
      {{"bench", "all_redcue"}, "all_redcue", "reduce_scatter"},
      {{"bench", "-d", "flaot"}, "flaot", "bf16"},
      {{"bench", "-o", "plus"}, "plus", "premul_sum"},
      {{"bench", "-b", "12Q"}, "12Q", "64K"},
      {{"bench", "-b", "2M", "-e", "1M", "--ranks", "2"}, "2097152", "up to the last"},
      {{"bench", "--sizes", "some"}, "some", "random:N"},
      {{"bench", "--device", "tpu"}, "tpu", "host"},
      {{"bench", "--transport", "tcp"}, "tcp", "ucx"},
      {{"bench", "--algorithm", "rnig"}, "rnig", "halving_doubling"},
      {{"bench", "--ranks", "0"}, "0", "1 to"},
      {{"bench", "--tolerance", "much"}, "much", "10%"},
      {{"bench", "--json", "/no/such/place/x.json", "--ranks", "2"}, "/no/such/place", "folder"},
      {{"bench", "broadcast", "--baseline", "gather_to_root"}, "broadcast", "all_reduce"},
      {{"bench", "--cliffs", "--ranks", "2", "-I", "1"}, "--cliffs", "without -I"},
      {{"bench", "--baseline", "parameter_server_async", "-d", "f16"}, "-d", "sums of f32"},
      {{"bench", "gradients", "--layers", "3y4"}, "3y4", "COUNTxSIZE"},
      {{"bench", "gradients", "--layers", "0x4M"}, "0x4M", "COUNTxSIZE"},
      {{"bench", "gradients", "--compute", "fast"}, "fast", "20ms"},
      {{"bench", "gradients", "--hook", "sparse:2"}, "sparse:2", "0 < share"},
      {{"run", "--ranks", "2"}, "no program", "PROGRAM"},
      {{"model", "--ranks", "2", "--bytes", "4X", "--bandwidth", "1GB/s"}, "4X", "4GiB"},
      {{"sim", "--ranks", "2", "--bytes", "4X", "--bandwidth", "1GB/s", "--latency", "1us"},
       "4X",
       "4GiB"},
      {{"sim", "--ranks", "2", "--bytes", "4G", "--bandwidth", "1GB/s", "--latency", "1us",
        "--faults", "lose=1"},
       "lose=1",
       "lose=RANK@TIME"},
      {{"sim", "--ranks", "2", "--bytes", "4G", "--bandwidth", "1GB/s", "--latency", "1us",
        "--faults", "lose=2@1s"},
       "rank 2",
       "0 to 1"},
      {{"model", "--ranks", "2", "--bytes", "4G", "--bandwidth", "7"}, "\"7\"", "100Gbit/s"},
      {{"model", "--ranks", "8", "--hosts", "3", "--bytes", "1G", "--bandwidth", "1GB/s"},
       "--hosts 3",
       "equally many"},
  };
  for (const Case& c : cases) {
    const Outcome o = tool(c.words);
    INFO("looking for " << c.given << " in " << o.err);
    CHECK(o.status == 2);
    CHECK(o.out.empty());
    CHECK_THAT(o.err, Contains(c.given));
    CHECK_THAT(o.err, Contains(c.accepted));
  }
}

TEST_CASE("what the environment does not allow: status 3 and a sentence") {
  const Outcome o = tool({"bench", "--device", "cuda"});
  CHECK(o.status == 3);
  CHECK_THAT(o.err, Contains("cuda"));
  const Outcome large = tool({"bench", "--ranks", "64", "-e", "1024G"});
  CHECK(large.status == 3);
  CHECK_THAT(large.err, Contains("lower -e"));
}

TEST_CASE("model: the reference points of 2(N-1)/N") {
  const Folder folder;
  struct Point {
    int ranks;
    double factor, sent, seconds, hub;
  };
  for (const Point& p : {Point{4, 1.5, 6e9, 0.030, 12e9}, Point{8, 1.75, 7e9, 0.035, 28e9},
                         Point{64, 1.96875, 7.875e9, 0.039375, 252e9},
                         Point{1000, 1.998, 7.992e9, 0.03996, 3996e9}}) {
    const std::string file = folder.file("model.json");
    const Outcome o = tool({"model", "--ranks", std::to_string(p.ranks), "--bytes", "4.0GB",
                            "--bandwidth", "200GB/s", "--json", file});
    CHECK(o.status == 0);
    const json j = read_json(file);
    CHECK(j["factor"].get<double>() == Approx(p.factor).epsilon(1e-12));
    CHECK(j["bytes_sent_per_rank"].get<double>() == Approx(p.sent).epsilon(1e-12));
    CHECK(j["seconds"].get<double>() == Approx(p.seconds).epsilon(1e-12));
    CHECK(j["busbw"].get<double>() == Approx(200e9).epsilon(1e-12));
    CHECK(j["gather_to_root"]["hub_bytes_received"].get<double>() == Approx(p.hub));
    CHECK(j["parameter_server"]["hub_bytes_sent"].get<double>() == Approx(p.hub));
    CHECK((o.out.find("35 ms") != std::string::npos) == (p.ranks == 8));
  }
}

TEST_CASE("sim: agrees with the model, traces every message, reports what ranks would") {
  Folder folder;
  const std::string file = folder.file("sim.json"), trace = folder.file("trace.json");
  const Words ring = {"sim",         "--ranks", "64",        "--bytes", "1MiB",
                      "--bandwidth", "10GB/s",  "--latency", "2us",     "--algorithm",
                      "ring",        "--json",  file};
  Words traced = ring, lossy = ring;
  traced.insert(traced.end(), {"--trace", trace});
  REQUIRE(tool(traced).status == 0);
  const json plain = read_json(file);
  CHECK(plain["ok"] == true);
  CHECK(plain["ratio"].get<double>() == Approx(1).epsilon(0.01));
  CHECK(plain["bytes_sent_per_rank"] == 2 * 63 * (1 << 20) / 64);
  size_t sent = 0;
  const json events = read_json(trace)["traceEvents"];
  for (const json& event : events) {
    if (event["name"] == "send") sent += event["args"]["bytes"].get<size_t>();
  }
  CHECK(sent == size_t{64} * 2 * 63 * (1 << 20) / 64);
  lossy.insert(lossy.end(), {"--faults", "lose=5@50us,notice=1ms,jitter=1us"});
  const Outcome o = tool(lossy);
  CHECK(o.status == 0);
  CHECK_THAT(o.out, Contains("rank 6: rank 5 is gone"));
  const json reports = read_json(file)["reports"];
  REQUIRE(reports.size() == 64);
  CHECK(reports[5]["seconds"].get<double>() == Approx(50e-6));
  CHECK(reports[6]["seconds"].get<double>() == Approx(1.05e-3));
}

TEST_CASE("model: units, latency share and the size at which both terms are equal") {
  const Folder folder;
  const std::string file = folder.file("model.json");
  // 12.5 GB/s, 6 messages of 10 us in a row, factor 1.5: 60 us are 750 kB of wire, 500 kB of data.
  CHECK(tool({"model", "--ranks", "4", "--bytes", "500kB", "--bandwidth", "100Gbit/s", "--latency",
              "10us", "--json", file})
            .status == 0);
  const json j = read_json(file);
  CHECK(j["bandwidth"].get<double>() == Approx(12.5e9));
  CHECK(j["steps"] == 6);
  CHECK(j["even_bytes"].get<double>() == Approx(500e3));
  CHECK(j["latency_share"].get<double>() == Approx(0.5));
  CHECK(j["seconds"].get<double>() == Approx(120e-6));
  CHECK_THAT(tool({"model", "--ranks", "2", "--bytes", "4GiB", "--bandwidth", "1GiB/s"}).out,
             Contains("4.29497 GB"));
}

TEST_CASE("run: every rank has its number, its output and its stream") {
  const Outcome o = run_shell(
      3, "echo rank $RINGFOLD_RANK of $RINGFOLD_SIZE local $RINGFOLD_LOCAL_RANK; echo to err >&2");
  CHECK(o.status == 0);
  CHECK(lines_of(o.out) == std::set<std::string>{"[0] rank 0 of 3 local 0",
                                                 "[1] rank 1 of 3 local 1",
                                                 "[2] rank 2 of 3 local 2"});
  CHECK(lines_of(o.err) == std::set<std::string>{"[0] to err", "[1] to err", "[2] to err"});
}

TEST_CASE("run: one coordinator and one secret for all, another secret each time") {
  const std::string script = "echo $RINGFOLD_COORDINATOR $RINGFOLD_SECRET";
  const auto start = [&] {
    return lines_of(tool({"run", "--ranks", "3", "--no-prefix", "--", "sh", "-c", script}).out);
  };
  const auto first = start(), second = start();
  REQUIRE(first.size() == 1);
  CHECK(first.begin()->rfind("127.0.0.1:", 0) == 0);
  CHECK(first.begin()->size() > 64);
  CHECK(first != second);
}

TEST_CASE("run: lines stay whole, also without a newline at the end") {
  const Outcome o = run_shell(4,
                              "for i in 1 2 3 4 5 6 7 8 9; do printf first; sleep 0.001; printf "
                              "' second\\n'; done; printf last");
  CHECK(lines_of(o.out).size() == 8);
  CHECK(lines_of(o.out).count("[3] first second") == 1);
  CHECK(lines_of(o.out).count("[3] last") == 1);
}

TEST_CASE("run: stdin is empty, arguments after -- are the program's own") {
  CHECK(run_shell(2, "read line && exit 9; exit 0").status == 0);
  CHECK_THAT(tool({"run", "--ranks", "1", "--", "echo", "--ranks", "--", "--help"}).out,
             Contains("[0] --ranks -- --help"));
}

TEST_CASE("run --nccl: programs load ringfold's libnccl.so.2, whatever path they name it by") {
  Folder folder;
  const std::string script = folder.file("client.py");
  std::ofstream(script) << R"(import ctypes, os, sys
names = ["libnccl.so.2", os.environ["VLLM_NCCL_SO_PATH"], None]  # None: what is loaded already
for name in names:
    library = ctypes.CDLL(name)
    library.ringfold_nccl_identity.restype = ctypes.c_char_p
    print(library.ringfold_nccl_identity().decode(), os.environ.get("RINGFOLD_RANK", "none"))
)";
  const std::string identity = "ringfold " RINGFOLD_VERSION_TEXT;
  const Outcome once = tool({"run", "--nccl", "--", "python3", script});
  CHECK(once.err.empty());
  CHECK(once.out == identity + " none\n" + identity + " none\n" + identity + " none\n");
  CHECK(once.status == 0);
  const Outcome twice = tool({"run", "--nccl", "--ranks", "2", "--", "python3", script});
  CHECK(lines_of(twice.out) ==
        std::set<std::string>{"[0] " + identity + " 0", "[1] " + identity + " 1"});
  // What was set before stays, behind ours.
  const Outcome kept = tool({"run", "--nccl", "--", "sh", "-c", "echo $LD_LIBRARY_PATH; exit 5"},
                            {{"LD_LIBRARY_PATH", "/some/where"}});
  CHECK(kept.status == 5);
  CHECK_THAT(kept.out, Contains(":/some/where\n"));
  CHECK(tool({"run", "--nccl", "--", "/no/such/program"}).status == 127);
}

TEST_CASE("run: the first to fail decides, and the others are ended") {
  const Outcome o =
      run_shell(3, "if [ $RINGFOLD_RANK = 1 ]; then exit 7; fi; sleep 60; echo survived");
  CHECK(o.status == 7);
  CHECK(o.seconds < 1.9);  // SIGTERM was enough
  CHECK(o.out.empty());
}

TEST_CASE("run: a signal counts as 128 more") {
  const Outcome o = run_shell(2, "if [ $RINGFOLD_RANK = 0 ]; then kill -9 $$; fi; sleep 60");
  CHECK(o.status == 137);
  CHECK(o.seconds < 1.9);
  CHECK(o.err.find("rank 0 (process ") != std::string::npos);
  CHECK(o.err.find("signal 9") != std::string::npos);
}

TEST_CASE("run: who ignores SIGTERM gets SIGKILL after two seconds") {
  const Outcome o = run_shell(
      2,
      "if [ $RINGFOLD_RANK = 1 ]; then sleep 0.2; exit 5; fi; trap '' TERM; sleep 60 & wait; "
      "sleep 60");
  CHECK(o.status == 5);
  CHECK(o.seconds > 1.9);
  CHECK(o.seconds < 10);
}

TEST_CASE("run: a program that is not there") {
  const Outcome o = tool({"run", "--ranks", "2", "--", "/no/such/program"});
  CHECK(o.status == 127);
  CHECK_THAT(o.err, Contains("/no/such/program: No such file"));
}

TEST_CASE("run: SIGTERM and SIGINT end everything, children of ranks included") {
  for (const int number : {SIGTERM, SIGINT}) {
    const Folder folder;
    const std::string file = folder.file("pid");
    Running running(
        {"run", "--ranks", "1", "--", "sh", "-c", "sleep 60 & echo $! > " + file + "; wait"});
    const pid_t grandchild = number_in(file);
    REQUIRE(grandchild > 0);
    running.signal(number);
    const Outcome o = running.wait();
    CHECK(o.status == 128 + number);
    CHECK(o.seconds < 5);
    CHECK(ends(grandchild));
  }
}

TEST_CASE("run: what a rank leaves behind ends with the run") {
  const Folder folder;
  const std::string file = folder.file("pid"), other = folder.file("daemon");
  const Outcome o = run_shell(1, "sleep 60 & echo $! > " + file + "; setsid sh -c 'echo $$ > " +
                                     other + "; exec sleep 60' & sleep 0.3");
  CHECK(o.status == 0);
  CHECK(o.seconds < 5);
  CHECK(ends(number_in(file)));
  CHECK(ends(number_in(other)));
}

TEST_CASE("run: ranks do not outlive a launcher that is killed") {
  const Folder folder;
  const std::string file = folder.file("pid");
  Running running(
      {"run", "--ranks", "1", "--", "sh", "-c", "echo $$ > " + file + "; exec sleep 60"});
  const pid_t rank = number_in(file);
  REQUIRE(rank > 0);
  running.signal(SIGKILL);
  CHECK(running.wait().status == 137);
  CHECK(ends(rank));
}

// C65
TEST_CASE("bench: without ranks it refuses, with instructions and without a table") {
  for (int copy = 0; copy < 4; ++copy) {
    const Outcome o = tool({"bench", "all_reduce", "-e", "64"});
    CHECK(o.status == 3);
    CHECK(o.out.empty());
    CHECK_THAT(o.err, Contains("--ranks"));
    CHECK_THAT(o.err, Contains("mpirun"));
  }
}

TEST_CASE("bench: another number of ranks than was asked for is refused") {
  const Outcome o = tool(
      {"bench", "--ranks", "4", "-e", "64"},
      {{"RINGFOLD_RANK", "0"}, {"RINGFOLD_SIZE", "1"}, {"RINGFOLD_COORDINATOR", "127.0.0.1:1"}});
  CHECK(o.status == 3);
  CHECK(o.out.empty());
  CHECK_THAT(o.err, Contains("--ranks 4"));
  CHECK_THAT(o.err, Contains("RINGFOLD"));
}

TEST_CASE("bench: one rank has no bus bandwidth") {
  const Outcome o = tool({"bench", "--ranks", "1", "-e", "1K", "-f", "4", "-n", "2"});
  CHECK(o.status == 0);
  CHECK_THAT(o.out, Contains("n/a"));
  CHECK_THAT(o.out, Contains("one rank"));
  CHECK_THAT(o.out, Contains("# Out of bounds values : 0 OK"));
}

TEST_CASE("bench: --cliffs says what it looked at, and its status is its verdict") {
  const Outcome o = tool({"bench", "reduce_scatter", "--cliffs", "--ranks", "2", "-e", "16"});
  CHECK_THAT(o.out, Contains("8 B to 16 B") && Contains("lines,"));
  CHECK(o.status == (o.out.find("# Cliffs : 0 OK\n") != std::string::npos ? 0 : 1));
  if (o.status != 0) CHECK_THAT(o.out, Contains("cliff: ") && Contains(" FAILED\n"));
  CHECK(o.err.empty());
}

TEST_CASE("bench: the JSON is schema 1, and the bytes that leave are those of the model") {
  const Folder folder;
  const std::string file = folder.file("bench.json"), csv = folder.file("bench.csv");
  const Outcome o = tool({"bench", "all_reduce", "--ranks", "2", "-b", "4K", "-e", "1M", "-f", "16",
                          "-n", "3", "--algorithm", "ring", "--json", file, "--csv", csv});
  INFO(o.err);
  REQUIRE(o.status == 0);
  const json j = read_json(file);
  CHECK(j["schema"] == 1);
  CHECK(j["ranks"] == 2);
  CHECK(j["hosts"] == 1);
  CHECK(j["wrong"] == 0);
  CHECK(j["errors"].empty());
  REQUIRE(j["results"].size() == 3);
  for (const json& row : j["results"]) {
    CHECK(row["collective"] == "all_reduce");
    CHECK(row["root"] == -1);
    CHECK(row["algorithm"] == "ring");
    const auto size = row["size"].get<double>();
    CHECK(row["bytes_sent_per_rank"] ==
          ringfold::bus_factor(ringfold::Collective::all_reduce, 2) * size);
    CHECK(row["bytes_model_per_rank"] == row["bytes_sent_per_rank"]);
    for (const char* place : {"out_of_place", "in_place"}) {
      const json& t = row[place];
      CHECK(t["time_us"] > 0);
      CHECK(t["min_us"] <= t["p50_us"]);
      CHECK(t["p50_us"] <= t["p99_us"]);
      CHECK(t["p99_us"] <= t["max_us"]);
      CHECK(t["algbw"].get<double>() == Approx(size / t["time_us"].get<double>() / 1e3));
      CHECK(t["busbw"] == t["algbw"]);  // N = 2: factor 1
      CHECK(t["wrong"] == 0);
    }
  }
  std::stringstream table;
  table << std::ifstream(csv).rdbuf();
  CHECK(lines_of(table.str()).size() == 7);
}

TEST_CASE("bench: every collective comes out right") {
  for (const char* collective : {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                 "reduce", "all_to_all", "gather", "scatter", "send_recv"}) {
    const Outcome o = tool({"bench", collective, "--ranks", "3", "-b", "1000", "-e", "100K", "-f",
                            "10", "-n", "1", "-w", "1", "-r", "-1", "-u", "1"});
    INFO(collective << ": " << o.err);
    CHECK(o.status == 0);
    CHECK_THAT(o.out, Contains("# Out of bounds values : 0 OK"));
  }
}

TEST_CASE("bench: baselines are right and carry (N-1)*D through the hub") {
  for (const char* baseline : {"gather_to_root", "parameter_server"}) {
    const Outcome o = tool({"bench", "--ranks", "3", "-b", "3072", "-e", "3072", "-n", "1",
                            "--transport", "shm", "--algorithm", "ring", "--baseline", baseline});
    INFO(baseline << ": " << o.err);
    CHECK(o.status == 0);
    // Counted; 3 ranks: 2 D through the hub, where a ring sends 4/3 D from each rank.
    CHECK_THAT(o.out, Contains("6144 B received, 6144 B sent"));
    CHECK_THAT(o.out, Contains("all_reduce (ring) sends 4096 B a rank"));
    CHECK_THAT(o.out, Contains("# Out of bounds values : 0 OK"));
  }
}

TEST_CASE("bench: --compare fails on what became slower, and only then") {
  const Folder folder;
  const std::string file = folder.file("bench.json"), edited = folder.file("edited.json");
  const Words measure = {"bench", "--ranks", "2", "-b", "64", "-e", "64", "-n", "5"};
  Words first = measure;
  first.insert(first.end(), {"--json", file});
  REQUIRE(tool(first).status == 0);
  const auto against = [&](double p50) {
    json earlier = read_json(file);
    for (const char* place : {"out_of_place", "in_place"}) {
      earlier["results"][0][place]["p50_us"] = p50;
    }
    std::ofstream(edited) << earlier;
    Words words = measure;
    words.insert(words.end(), {"--compare", edited, "--tolerance", "10%"});
    return tool(words);
  };
  CHECK(against(1e9).status == 0);
  const Outcome slower = against(1e-6);
  CHECK(slower.status == 1);
  CHECK_THAT(slower.out, Contains("# Slower: 64 B"));
}

// C66
TEST_CASE("the library prints nothing of its own, to stdout or stderr") {
  const Outcome o = tool({"run", "--ranks", "2", "--no-prefix", "--", RINGFOLD_QUIET_PROGRAM});
  CHECK(o.status == 0);
  CHECK(o.out.empty());
  CHECK(o.err.empty());
}

// Of the process with this number, as soon as there are so many.
std::vector<pid_t> children_of(pid_t parent, size_t count) {
  std::vector<pid_t> children;
  for (int i = 0; i < 1000 && children.size() < count; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    children.clear();
    std::ifstream list("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) +
                       "/children");
    for (pid_t child = 0; list >> child;) children.push_back(child);
  }
  return children;
}

TEST_CASE("doctor --attach: where the communicators of a process stand, even of a stopped one") {
  Running running({"bench", "all_reduce", "--ranks", "2", "-b", "4M", "-e", "4M", "-n", "1000000"});
  const auto ranks = children_of(running.pid(), 2);
  REQUIRE(ranks.size() == 2);
  const std::string number = std::to_string(ranks[1]);
  Outcome o;
  for (int i = 0; i < 500; ++i) {  // until it has begun
    o = tool({"doctor", "--attach", number});
    if (o.out.find("all_reduce f32 sum of 1048576") != std::string::npos) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  kill(ranks[0], SIGSTOP);
  kill(ranks[1], SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  o = tool({"doctor", "--attach", number});
  kill(ranks[0], SIGKILL);
  kill(ranks[1], SIGKILL);
  (void)running.wait();
  CHECK(o.status == 0);
  INFO(o.out);
  CHECK_THAT(o.out, Contains("process " + number + ", stopped; ringfold " RINGFOLD_VERSION_TEXT));
  CHECK_THAT(o.out, Contains("communicator 0: rank 1 of 2, region"));
  CHECK_THAT(o.out, Contains("rank 0 (process " + std::to_string(ranks[0]) + ", stopped): in "));
  CHECK_THAT(o.out, Contains("all_reduce f32 sum of 1048576 elements (region): done in"));
  CHECK_THAT(o.out, Contains("operations called"));

  const Outcome none = tool({"doctor", "--attach", std::to_string(getpid())});
  CHECK(none.status == 3);
  CHECK_THAT(none.err, Contains("has made no communicator"));
  CHECK(tool({"doctor", "--attach", "-1"}).status == 2);
}

TEST_CASE("doctor: findings, settings with what is wrong, and no secrets") {
  const Folder folder;
  const std::string file = folder.file("doctor.json");
  const Outcome o = tool({"doctor", "--json", file}, {{"RINGFOLD_TIMEOT", "3"},
                                                      {"RINGFOLD_TIMEOUT", "soon"},
                                                      {"RINGFOLD_SECRET", "do not show me"}});
  CHECK(o.status == 0);
  const json j = read_json(file);
  CHECK(j["cores"]["online"] == sysconf(_SC_NPROCESSORS_ONLN));
  CHECK(j["interfaces"]["lo"]["loopback"] == true);
  CHECK(j["memory"].contains("memfd"));
  CHECK(j["kernel"].contains("cross_memory_attach"));
  CHECK(j["settings"]["RINGFOLD_TIMEOUT"]["value"] == "soon");
  const std::string problems = j["problems"].dump();
  CHECK_THAT(problems, Contains("did you mean RINGFOLD_TIMEOUT?"));
  CHECK_THAT(problems, Contains("RINGFOLD_TIMEOUT=") && Contains("soon"));
  CHECK(o.out.find("do not show me") == std::string::npos);
  CHECK(j.dump().find("do not show me") == std::string::npos);
}
