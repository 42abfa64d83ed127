// `ringfold bench --device cuda`, on the emulated driver: found as the real one would be.
#include <dlfcn.h>
#include <fmt/core.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "test/nccl_at_hand.h"
#include "test/skip.h"

using Catch::Matchers::Contains;
using namespace ringfold::test;

namespace {

const std::string kTool = RINGFOLD_TOOL;
const std::string kEmulated = "LD_LIBRARY_PATH=" RINGFOLD_EMULATED_FOLDER " ";

// Few and small: an emulated device is slow.
Ran bench(const std::string& arguments, const std::string& before = "") {
  return run(
      fmt::format("{}RINGFOLD_INTERFACES=lo timeout 60 {}{} bench {} -b 8 -e 32K -f 16 -n 2 "
                  "-w 1",
                  kEmulated, before, kTool, arguments));
}

}  // namespace

TEST_CASE("every collective is timed and checked on the device, its ranks as threads") {
  for (const char* collective : {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                 "reduce", "all_to_all", "gather", "scatter", "send_recv"}) {
    const Ran ran = bench(fmt::format("{} --device cuda --ranks 2", collective));
    INFO(ran.output);
    CHECK(ran.status == 0);
    CHECK_THAT(ran.output, Contains("memory cuda"));
    CHECK_THAT(ran.output, Contains("ranks 2"));
    CHECK_THAT(ran.output, Contains("# Out of bounds values : 0 OK"));
  }
}

TEST_CASE("other types, operations, shifted buffers and single calls; JSON says cuda") {
  char path[] = "/tmp/ringfold_bench_XXXXXX";
  const int file = mkstemp(path);
  REQUIRE(file >= 0);
  close(file);
  const Ran ran =
      bench(fmt::format("--device cuda --ranks 3 -d bf16 -o avg -u 1 -z 1 --json {}", path));
  INFO(ran.output);
  CHECK(ran.status == 0);
  std::ifstream in(path);
  const auto json = nlohmann::json::parse(in);
  std::filesystem::remove(path);
  CHECK(json.at("device") == "cuda");
  CHECK(json.at("wrong") == 0);
  REQUIRE(json.at("results").size() == 4);
  const auto& last = json.at("results").back();
  CHECK(last.at("transport") == "direct");
  CHECK(last.at("bytes_sent_per_rank") == last.at("bytes_model_per_rank"));
  CHECK(last.at("out_of_place").at("p50_us") > 0);
}

TEST_CASE("ranks that a launcher started are processes") {
  const Ran ran = bench("all_reduce --device cuda", kTool + " run --ranks 2 -- ");
  INFO(ran.output);
  CHECK(ran.status == 0);
  CHECK_THAT(ran.output, Contains("# Out of bounds values : 0 OK"));
}

TEST_CASE("one rank alone") {
  const Ran ran = bench("all_reduce --device cuda --ranks 1");
  INFO(ran.output);
  CHECK(ran.status == 0);
  CHECK_THAT(ran.output, Contains("n/a"));
}

TEST_CASE("what is for the host only is refused, and a machine without a GPU told") {
  const Ran hub = bench("--device cuda --ranks 2 --baseline gather_to_root");
  CHECK(WEXITSTATUS(hub.status) == 2);
  CHECK_THAT(hub.output, Contains("--baseline"));
  if (dlopen("libcuda.so.1", RTLD_LAZY) != nullptr) return skip("this machine has a CUDA driver");
  const Ran none = run(kTool + " bench --device cuda --ranks 2");
  CHECK(WEXITSTATUS(none.status) == 3);
  CHECK_THAT(none.output, Contains("no CUDA driver"));
}
