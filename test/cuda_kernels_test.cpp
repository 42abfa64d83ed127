// The CUDA kernels, looked at without a GPU. Their bodies compiled for the host against the
// reference: every type, operation, phase, length, aliasing and number of threads, bit for bit. And
// what the assembler made of them: registers, memory, and the width of the accesses.
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <vector>

#include "kernels/entries.h"
#include "kernels/images.h"
#include "kernels/range.h"
#include "test/elements.h"
#include "test/skip.h"

using namespace ringfold;

namespace {

// All threads of a launch of a type's kernel, one after the other.
void run_as(DType type, const Command& command, size_t threads) {
  for (size_t thread = 0; thread < threads; ++thread) {
    switch (type) {
#define RINGFOLD_CASE(name, Type)                     \
  case DType::name:                                   \
    carry_out<Type>(command, Share{thread, threads}); \
    break;
      RINGFOLD_KERNEL_TYPES(RINGFOLD_CASE)
#undef RINGFOLD_CASE
    }
  }
}

struct Ranges {
  std::vector<std::byte> a, b, out, mirror;
};

Command command_of(DType dtype, Op op) {
  Command command;
  command.dtype = dtype;
  command.op = op;
  command.scale_a = op == Op::premul_sum ? 0.3 : 1.0;
  command.count_a = 2, command.count_b = 5, command.total = 7;
  return command;
}

// Where each range begins: elements behind a 16-byte boundary.
struct Phases {
  size_t a, b, out, mirror;
};

// Runs a command on fresh ranges by `run`; returns all memory, guards included.
template <class Run>
std::vector<std::byte> outcome(Command command, const Phases& phases, bool mirrored, bool in_place,
                               const Run& run) {
  const size_t element = size_of(command.dtype), room = 64 + command.count * element + 64;
  std::vector<Words> memory(4 * room / sizeof(Words) + 8, Words{0xa5a5a5a5a5a5a5a5, 0xa5a5});
  auto* const base = reinterpret_cast<std::byte*>(memory.data());
  const auto place = [&](size_t range, size_t phase) {
    return base + (range * room + 15) / 16 * 16 + 32 + phase * element % 16;
  };
  command.a = place(0, phases.a);
  command.out = in_place ? place(0, phases.a) : place(2, phases.out);
  test::fill_hashed(command.dtype, place(0, phases.a), command.count, 1);
  if (command.b != nullptr) {
    command.b = place(1, phases.b);
    test::fill_hashed(command.dtype, place(1, phases.b), command.count, 2);
  }
  if (mirrored) command.mirror = place(3, phases.mirror);
  run(command);
  return {base, base + memory.size() * sizeof(Words)};
}

void by_reference(const Command& command) {
  if (command.b != nullptr) return reduce_reference(command);
  scale_reference(command.dtype, command.a, command.out, command.count, command.scale_a);
  if (command.mirror != nullptr && command.count > 0)
    std::memcpy(command.mirror, command.out, command.count * size_of(command.dtype));
}

void check_shapes(Command command) {
  const std::vector<Phases> phases = {{0, 0, 0, 0}, {3, 3, 3, 3}, {15, 15, 15, 15},
                                      {1, 2, 3, 0}, {0, 0, 1, 0}, {5, 5, 5, 1}};
  for (const size_t count : {0, 1, 7, 16, 33, 1000})
    for (const Phases& phase : phases)
      for (const size_t threads : {1, 3, 32})
        for (const bool mirrored : {false, true})
          for (const bool in_place : {false, true}) {
            command.count = count;
            const auto expected = outcome(command, phase, mirrored, in_place, by_reference);
            const auto got = outcome(command, phase, mirrored, in_place,
                                     [&](const Command& c) { run_as(c.dtype, c, threads); });
            if (got != expected)
              FAIL(name(command.dtype) << " " << name(command.op) << " of " << count << ", phase "
                                       << phase.a << ", " << threads << " threads");
          }
}

const std::byte kSome{};  // a command with two inputs; outcome() puts them in place

}  // namespace

TEST_CASE("the kernels' bodies on the host equal the reference, bit for bit") {
  for (int type = 0; type < kDTypes; ++type)
    for (int op = 0; op < kOps; ++op) {
      Command command = command_of(static_cast<DType>(type), static_cast<Op>(op));
      command.b = &kSome;
      check_shapes(command);
    }
}

TEST_CASE("a command without second operand scales") {
  for (int type = 0; type < kDTypes; ++type)
    for (const double factor : {0.3, -1.7e3}) {
      Command command = command_of(static_cast<DType>(type), Op::premul_sum);
      command.scale_a = factor;
      check_shapes(command);
    }
}

TEST_CASE("or copies bytes, whatever the type of the kernel") {
  Command command;
  command.dtype = DType::u8;
  check_shapes(command);
  std::vector<std::byte> from(1001), to(1001);
  test::fill_hashed(DType::u8, from.data(), from.size(), 3);
  command.a = from.data(), command.out = to.data(), command.count = from.size();
  for (int type = 0; type < kDTypes; ++type) {
    std::fill(to.begin(), to.end(), std::byte{0});
    run_as(static_cast<DType>(type), command, 3);
    CHECK(to == from);
  }
}

TEST_CASE("fat binaries are embedded") {
  constexpr uint32_t kMagic = 0xba55ed50;
  for (const auto* image : {ringfold_worker_image, ringfold_reduce_image})
    CHECK(static_cast<uint32_t>(*image) == kMagic);
}

// ---- what the assembler says ------------------------------------------------------------------

namespace {

struct Usage {
  int stack = -1, spilled = -1, registers = -1, shared = 0;
};
using Usages = std::map<std::pair<std::string, std::string>, Usage>;  // by kernel, processor

// Reads the report of `ptxas -v`.
void read_report(const std::string& path, Usages& usages) {
  std::ifstream file(path);
  REQUIRE(file);
  const std::regex entry("Compiling entry function '(\\w+)' for '(\\w+)'");
  const std::regex memory("(\\d+) bytes stack frame, (\\d+) bytes spill stores, (\\d+) bytes");
  const std::regex used("Used (\\d+) registers"), shared("(\\d+) bytes smem");
  Usage* now = nullptr;
  std::smatch found;
  for (std::string line; std::getline(file, line);) {
    if (std::regex_search(line, found, entry)) now = &usages[{found[1], found[2]}];
    if (now == nullptr) continue;
    if (std::regex_search(line, found, memory)) {
      now->stack = std::stoi(found[1]);
      now->spilled = std::stoi(found[2]) + std::stoi(found[3]);
    }
    if (std::regex_search(line, found, shared)) now->shared = std::stoi(found[1]);
    if (std::regex_search(line, found, used)) now->registers = std::stoi(found[1]);
  }
}

// Blocks of a kernel that one multiprocessor holds at once. All three processors have 65536
// registers, given to a warp in units of 256, and room for 2048 threads; shared memory is not
// short.
int resident_blocks(int registers) {
  constexpr int kRegisters = 65536, kUnit = 256, kWarp = 32, kThreads = 2048;
  const int a_warp = (registers * kWarp + kUnit - 1) / kUnit * kUnit;
  const int by_registers = kRegisters / (a_warp * (kWorkerThreads / kWarp));
  return std::min(by_registers, kThreads / kWorkerThreads);
}

const std::vector<std::string> kProcessors = {"sm_80", "sm_90", "sm_100"};

}  // namespace

TEST_CASE("kernels use no local memory, and two blocks fit a multiprocessor") {
  Usages usages;
  read_report(RINGFOLD_KERNEL_REPORTS "/reduce.report", usages);
  read_report(RINGFOLD_KERNEL_REPORTS "/worker.report", usages);
  fmt::print("{:24}{}\n", "kernel", "  registers / blocks a multiprocessor (of 256 threads)");
  fmt::print("{:24}{:>12}{:>12}{:>12}\n", "", "sm_80", "sm_90", "sm_100");
  for (const std::string kind : {"reduce", "worker"})
    for (const std::string_view type : kDTypeNames) {
      const std::string kernel = "ringfold_" + kind + "_" + std::string(type);
      std::string line = fmt::format("{:24}", kernel);
      for (const std::string& processor : kProcessors) {
        INFO(kernel << " on " << processor);
        const auto found = usages.find({kernel, processor});
        REQUIRE(found != usages.end());
        const Usage& usage = found->second;
        CHECK(usage.stack == 0);
        CHECK(usage.spilled == 0);
        REQUIRE(usage.registers > 0);
        const int blocks = resident_blocks(usage.registers);
        CHECK(blocks >= 2);
        line += fmt::format("{:>8} / {}", usage.registers, blocks);
      }
      fmt::print("{}\n", line);
    }
  CHECK(usages.size() == 2 * kDTypes * kProcessors.size());
}

// ---- the instructions -------------------------------------------------------------------------

namespace {

// A tool of the CUDA toolkit or of PyPI's wheels (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm).
std::string output_of(const std::string& command) {
  std::string text;
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return text;
  std::vector<char> buffer(1 << 16);
  for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    text.append(buffer.data(), n);
  pclose(pipe);
  return text;
}

std::string folder_of_tools() {
  const std::string on_path = output_of("command -v cuobjdump");
  if (!on_path.empty()) return on_path.substr(0, on_path.rfind('/'));
  std::string found = output_of(
      "python3 -c 'import nvidia, glob; print(next((g for p in nvidia.__path__ for g in "
      "glob.glob(p + \"/*/bin\") if glob.glob(g + \"/cuobjdump\")), \"\"))' 2>/dev/null");
  while (!found.empty() && found.back() == '\n') found.pop_back();
  return found;
}

// How often each kernel uses each memory instruction: "LDG.E.128", "STL", ...
using Counts = std::map<std::string, std::map<std::string, int>>;
Counts memory_instructions(const std::string& tools, const std::string& image,
                           const std::string& processor) {
  std::istringstream listing(output_of("PATH=\"" + tools + ":$PATH\" cuobjdump -sass -arch " +
                                       processor + " " + image + " 2>&1"));
  const std::string mark = "Function : ";
  Counts counts;
  std::string kernel;
  for (std::string line; std::getline(listing, line);) {
    if (const size_t at = line.find(mark); at != std::string::npos) {
      kernel = line.substr(at + mark.size());
      continue;
    }
    // "  /*06a0*/   @P0 LDG.E.128 R28, ..."
    for (const char* access : {" LD", " ST"}) {
      const size_t at = line.find(access);
      if (at != std::string::npos)
        ++counts[kernel][line.substr(at + 1, line.find(' ', at + 1) - at - 1)];
    }
  }
  return counts;
}

}  // namespace

TEST_CASE("kernels load and store 16 bytes at a time, from global memory") {
  const std::string tools = folder_of_tools();
  if (tools.empty())
    return test::skip("no cuobjdump (in PyPI's nvidia-cuda-cuobjdump, with nvidia-cuda-nvdisasm)");
  const std::string kind = GENERATE("reduce", "worker");
  // Disassembling takes seconds each.
  const auto processor = GENERATE(from_range(std::getenv("RINGFOLD_TEST_SLOW") != nullptr
                                                 ? kProcessors
                                                 : std::vector<std::string>{"sm_90"}));
  Counts counts =
      memory_instructions(tools, RINGFOLD_KERNEL_REPORTS "/" + kind + ".fatbin", processor);
  REQUIRE(counts.size() == kDTypes);
  for (auto& [kernel, used] : counts) {
    INFO(kernel << " on " << processor);
    int wide_loads = 0, wide_stores = 0;
    for (const auto& [instruction, times] : used) {
      INFO(instruction << " " << times << " times");
      const auto begins = [&](const char* with) { return instruction.rfind(with, 0) == 0; };
      const bool wide = instruction.find(".128") != std::string::npos;
      if (begins("LDG") && wide) wide_loads += times;
      if (begins("STG") && wide) wide_stores += times;
      CHECK_FALSE(begins("LDL"));  // local memory
      CHECK_FALSE(begins("STL"));
      // Accesses that must find out where they go: only to the words of a lane.
      if (begins("LD.") || begins("ST.")) CHECK(instruction.find("STRONG") != std::string::npos);
    }
    // Two inputs, six operations, and batches of at least two.
    CHECK(wide_loads >= 24);
    CHECK(wide_stores >= 24);
  }
}
