// libnccl.so.2 on device memory: scenarios of the program nccl_device, each in a process of its own
// (one holds one driver), under several seeds of the emulated driver.
#include <fmt/core.h>

#include <catch2/catch.hpp>
#include <filesystem>

#include "test/nccl_at_hand.h"

using namespace ringfold::test;

namespace {

const std::string kProgram = RINGFOLD_NCCL_DEVICE;
constexpr const char* kLimit = "timeout -k 1 60 ";

std::string environment(int seed, bool blocking) {
  return fmt::format("RINGFOLD_INTERFACES=lo RINGFOLD_TEST_DRIVER_SEED={} {}", seed,
                     blocking ? "CUDA_LAUNCH_BLOCKING=1 " : "");
}

// All ranks in one process.
void in_process(const std::string& scenario, const char* mode, int ranks, int seed,
                const char* stream = "own", bool blocking = false) {
  const std::string command = fmt::format("{}{}{} {} {} {} {}", environment(seed, blocking), kLimit,
                                          kProgram, scenario, mode, ranks, stream);
  const Ran ran = run(command);
  INFO(command << "\n" << ran.output);
  CHECK(ran.status == 0);
}

// Each rank a process, with a device of its own.
void as_processes(const std::string& scenario, int ranks, int seed, const char* stream = "own",
                  bool blocking = false) {
  char folder[] = "/tmp/ringfold_nccl_XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  std::string script, wait = "bad=0; ";
  for (int r = 0; r < ranks; ++r) {
    script +=
        fmt::format("{}{}{} {} process {} {} {} {} & p{}=$!; ", environment(seed + r, blocking),
                    kLimit, kProgram, scenario, ranks, r, folder, stream, r);
    wait += fmt::format("wait $p{} || bad=1; ", r);
  }
  const Ran ran = run("sh -c '" + script + wait + "exit $bad'");
  std::filesystem::remove_all(folder);
  INFO(script << "\n" << ran.output);
  CHECK(ran.status == 0);
}

}  // namespace

TEST_CASE("all collectives, ranks as threads") {
  const int seed = GENERATE(1, 2);
  in_process("collectives", "threads", 1 + seed, seed);
}

TEST_CASE("all collectives, one thread with groups") {
  const int seed = GENERATE(3, 4);
  in_process("collectives", "group", seed, seed);
}

TEST_CASE("all collectives, ranks as processes") {
  as_processes("collectives", 2, 5);
  as_processes("few_collectives", 4, 7);
}

TEST_CASE("default streams, by all of their handles") {
  const char* const stream = GENERATE("legacy", "legacy1", "per_thread");
  as_processes("few_collectives", 2, 11, stream);
  in_process("few_collectives", "group", 3, 12, stream);
}

TEST_CASE("per-thread default streams of several ranks") {
  in_process("few_collectives", "threads", 3, 13, "per_thread");
}

TEST_CASE("CUDA_LAUNCH_BLOCKING=1") {
  in_process("few_collectives", "threads", 2, 21, "own", true);
  as_processes("few_collectives", 2, 22, "own", true);
  for (const char* scenario : {"operations", "messages", "abort", "non_blocking", "ends"})
    in_process(scenario, "threads", 2, 23, "own", true);
  in_process("blocked_group", "group", 2, 24, "own", true);
}

TEST_CASE("in place") {
  in_process("in_place", "threads", 3, 31);
  in_process("in_place", "group", 4, 32);
}

TEST_CASE("calls return before their streams have come to them") {
  in_process("asynchronous", "threads", 3, 41);
  in_process("asynchronous", "group", 2, 42);
  as_processes("asynchronous", 2, 43);
}

TEST_CASE("operations made at run time, and averages") {
  in_process("operations", "threads", 3, 51);
  in_process("operations", "group", 2, 52);
  as_processes("operations", 2, 53);
}

TEST_CASE("messages") {
  in_process("messages", "threads", 3, 61);
  in_process("messages", "group", 4, 62);
  as_processes("messages", 2, 63);
}

TEST_CASE("several communicators and streams") {
  const int seed = GENERATE(71, 72, 73);
  in_process("several_communicators", "threads", 2, seed);
  in_process("several_communicators", "group", 3, seed);
}

TEST_CASE("graphs") {
  in_process("graphs", "threads", 2, 81);
  in_process("graphs", "threads", 3, 82);
  in_process("graphs", "group", 2, 84);
  as_processes("graphs", 2, 83);
}

TEST_CASE("memory of the device") {
  in_process("memory", "threads", 2, 91);
  in_process("memory", "group", 2, 92);
}

TEST_CASE("what cannot be used is refused with a text, and host memory still works") {
  in_process("refusals", "threads", 2, 101);
  in_process("refusals", "group", 3, 102);
}

TEST_CASE("failures: streams pass, and communicators tell") {
  for (const char* scenario : {"mismatch", "abort", "abort_before"}) {
    in_process(scenario, "threads", 2, 111);
    as_processes(scenario, 3, 112);
  }
  in_process("mismatch", "group", 2, 113);
  in_process("abort_before", "group", 2, 114);
  in_process("revoke", "group", 2, 115);
}

TEST_CASE("communicators that do not block, are split, shrunk, finalized and destroyed") {
  for (const char* scenario : {"non_blocking", "split_and_shrink", "ends"}) {
    in_process(scenario, "threads", 3, 121);
    in_process(scenario, "group", 3, 122);
  }
}

TEST_CASE("one rank alone") {
  in_process("alone", "threads", 1, 131);
}
