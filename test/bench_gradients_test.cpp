// ringfold bench gradients, and the asynchronous parameter server: their figures hang together, and
// bytes are counted.
#include <algorithm>
#include <catch2/catch.hpp>

#include "test/tool_runs.h"

using Catch::Matchers::Contains;
using nlohmann::json;
using namespace ringfold::test;

namespace {

// 2 layers of 64 KiB and one of 8 KiB, on two ranks.
json gradients(const Folder& folder, const Words& more, const std::string& bucket = "64K") {
  const std::string file = folder.file("gradients.json");
  Words words = {"bench", "gradients", "--ranks", "2", "--transport", "shm", "--json", file};
  const Words model = {"--layers", "2x64K,8K", "--compute", "2ms", "-n", "3", "-w", "1"};
  const Words buckets = {"--first-bytes", "8K", "--bucket-bytes", bucket};
  words.insert(words.end(), model.begin(), model.end());
  words.insert(words.end(), buckets.begin(), buckets.end());
  words.insert(words.end(), more.begin(), more.end());
  const Outcome o = tool(words);
  INFO(o.err);
  CHECK(o.status == 0);
  CHECK_THAT(o.out, Contains("# Out of bounds values : 0 OK"));
  return read_json(file);
}

}  // namespace

TEST_CASE("bench gradients: the figures hang together") {
  const Folder folder;
  for (const char* on : {"core", "elsewhere"}) {
    INFO(on);
    const json j = gradients(folder, {"--on", on});
    CHECK(j["ranks"] == 2);
    CHECK(j["layers"] == 3);
    CHECK(j["buckets"] == 3);
    CHECK(j["gradient_bytes"] == 136 * 1024);
    CHECK(j["copied_bytes"] == 0);
    const double compute = j["compute_ms"], communication = j["communication_ms"],
                 step = j["step_ms"];
    CHECK(compute >= 1.99);  // the clock of a core is no finer
    CHECK(communication > 0);
    CHECK(step >= 1.99);
    CHECK(j["max_ms"] == Approx(std::max(compute, communication)));
    CHECK(j["sum_ms"] == Approx(compute + communication));
    CHECK(j["hidden_share"] ==
          Approx((compute + communication - step) / std::min(compute, communication)));
    CHECK(j["possible_ms"].get<double>() >= j["max_ms"].get<double>());
    // An accelerator leaves the core alone.
    if (std::string_view(on) == "elsewhere") CHECK(j["compute_cpu_ms"].get<double>() < 2);
    if (std::string_view(on) == "core") CHECK(j["compute_cpu_ms"].get<double>() >= 3.98);
  }
}

TEST_CASE("bench gradients: what a hook saves, and what lies apart, is counted") {
  const Folder folder;
  // On two ranks the ring sends D from each.
  CHECK(gradients(folder, {"--hook", "none"})["bytes_sent_per_rank"] == 136 * 1024);
  CHECK(gradients(folder, {"--hook", "bf16"})["bytes_sent_per_rank"] == 68 * 1024);
  CHECK(gradients(folder, {"--hook", "i8"})["bytes_sent_per_rank"] == 34 * 1040);
  CHECK(gradients(folder, {"--hook", "sparse:25%"})["bytes_sent_per_rank"] == 68 * 1024);
  CHECK(gradients(folder, {"--apart"})["copied_bytes"] == 0);  // each bucket has one layer
  CHECK(gradients(folder, {"--apart"}, "128K")["copied_bytes"] == 128 * 1024);
}

TEST_CASE("bench: the asynchronous parameter server adds every push once, and counts staleness") {
  const Folder folder;
  const std::string file = folder.file("async.json");
  struct Case {
    int ranks;
    double least, most;  // mean staleness
  };
  // One worker is never stale. Of three, one may finish before the others begin, but what each
  // misses the others have pushed: at most all that they push.
  for (const Case& one : {Case{2, 0, 0}, Case{4, 0.01, 2 * 50}}) {
    const Outcome o =
        tool({"bench", "--ranks", std::to_string(one.ranks), "-b", "4000", "-e", "4000", "-n", "50",
              "--transport", "shm", "--baseline", "parameter_server_async", "--json", file});
    INFO(o.err << o.out);
    CHECK(o.status == 0);
    CHECK_THAT(o.out, Contains("# Out of bounds values : 0 OK"));
    const json line = read_json(file)["results"][0];
    const int bytes = (one.ranks - 1) * 4000;
    CHECK(line["hub"]["bytes_received"] == bytes);
    CHECK(line["hub"]["bytes_sent"] == bytes);
    CHECK(line["wrong"] == 0);
    CHECK(line["rounds"] == 50);
    CHECK(line["staleness"]["mean"].get<double>() >= one.least);
    CHECK(line["staleness"]["mean"].get<double>() <= one.most);
    CHECK(line["staleness"]["max"].get<double>() >= line["staleness"]["mean"].get<double>());
  }
}
