// Our libnccl.so.2 against the real NCCL, and against the model of it: exact where the inputs are
// made so, bit for bit on a ring in NCCL's numerics, and otherwise within the bound of rounding
// (test/nccl_bounds.h). The ranks are processes of their own: one process can hold one NCCL only.
//
// Ours is tried on host memory, and on device memory of the emulated driver or, with
// RINGFOLD_TEST_DRIVER=real, of this machine's.
//
// The comparison with the real one needs a GPU and a libnccl.so.2 (PyPI's nvidia-nccl-cu13, or
// TEST_NCCL=/its/include). One GPU is enough: every rank pretends to be a host of its own.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "test/environment.h"
#include "test/nccl_at_hand.h"
#include "test/nccl_bounds.h"
#include "test/nccl_cases.h"
#include "test/nccl_cuda.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;

namespace {

struct Side {
  std::string library;
  std::string memory;       // "host" or "device"
  std::string environment;  // for /bin/sh; {rank} is replaced
};

// NCCL with a ring of one channel: the order of additions is then known.
const std::string kOneRing =
    "NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_MIN_NCHANNELS=1 NCCL_MAX_NCHANNELS=1 ";
// Several ranks on one GPU, each as if on a host of its own, over loopback sockets.
const std::string kOneGpu =
    "NCCL_HOSTID=rank{rank} NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo "
    "NCCL_NET_PLUGIN=none NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0 "
    "NCCL_MNNVL_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_RAS_ENABLE=0 ";

std::string in_ring(bool ring) {
  return std::string("RINGFOLD_INTERFACES=lo ") + (ring ? "RINGFOLD_ALGORITHM=ring " : "");
}
Side ours(bool ring) {
  return {RINGFOLD_NCCL_LIBRARY, "host", in_ring(ring)};
}
Side ours_on_device(bool ring) {
  const char* const driver = std::getenv("RINGFOLD_TEST_DRIVER");
  const bool emulated = driver == nullptr || std::strcmp(driver, "real") != 0;
  return {RINGFOLD_NCCL_LIBRARY, "device",
          in_ring(ring) + (emulated ? "RINGFOLD_TEST_DRIVER_SEED=1{rank} LD_LIBRARY_PATH=" +
                                          std::string(RINGFOLD_EMULATED_FOLDER) + " "
                                    : "")};
}
Side in_exact_numerics(Side side) {
  side.environment += "RINGFOLD_NUMERICS=exact ";
  return side;
}
Side real(const std::string& library, bool ring) {
  return {library, "device", kOneGpu + (ring ? kOneRing : "")};
}

std::string with_rank(std::string text, int rank) {
  for (size_t at = 0; (at = text.find("{rank}")) != std::string::npos;)
    text.replace(at, 6, std::to_string(rank));
  return text;
}

// The results of all ranks, each the bytes of all cases; empty with a failed check if any fails.
std::vector<std::string> results(const Side& side, NcclInputs inputs, bool large, int ranks) {
  char folder[] = "/tmp/ringfold_nccl_XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  std::string script = "set -u; ";
  for (int r = 0; r < ranks; ++r)
    script += fmt::format("{} timeout 100 {} {} {} {} {} {} {} {} & p{}=$!; ",
                          with_rank(side.environment, r), RINGFOLD_NCCL_RANK, side.library,
                          side.memory, inputs == NcclInputs::exact ? "exact" : "rough",
                          large ? "all" : "small", r, ranks, folder, r);
  script += "bad=0; ";
  for (int r = 0; r < ranks; ++r) script += fmt::format("wait $p{} || bad=1; ", r);
  const Ran ran = run("sh -c '" + script + "exit $bad'");
  std::vector<std::string> all;
  for (int r = 0; r < ranks; ++r) {
    std::ifstream in(std::string(folder) + "/" + std::to_string(r), std::ios::binary);
    all.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  std::filesystem::remove_all(folder);
  INFO(side.library << ": " << ran.output);
  CHECK(ran.status == 0);
  return ran.status == 0 ? all : std::vector<std::string>();
}

std::string title(const NcclCase& c) {
  return fmt::format("{} {} of {}", name(c.op), name(c.type), c.count);
}

// Calls `compare(case, bytes of its result)` for every case of one rank's results.
template <class Compare>
void for_each_case(const std::string& bytes, bool fp8, bool large, Compare compare) {
  size_t at = 0;
  for (const NcclCase& c : nccl_cases(fp8, large)) {
    const size_t size = c.count * size_of(c.type);
    REQUIRE(at + size <= bytes.size());
    compare(c, bytes.substr(at, size));
    at += size;
  }
  CHECK(at == bytes.size());
}

std::string modelled(const NcclCase& c, int ranks) {
  std::vector<std::vector<unsigned char>> inputs;
  std::vector<double> factors;
  for (int r = 0; r < ranks; ++r) {
    inputs.push_back(nccl_case_input(c, NcclInputs::rough, ranks, r));
    factors.push_back(nccl_factor(NcclInputs::rough, c.type, r));
  }
  const auto out = NcclModel(c.type, c.op, ranks).all_reduce(inputs, factors, c.count);
  return {out.begin(), out.end()};
}

void check_exact(const std::vector<std::string>& all, bool fp8, int ranks) {
  for (const std::string& bytes : all)
    for_each_case(bytes, fp8, false, [&](const NcclCase& c, const std::string& got) {
      INFO(title(c));
      CHECK(Exact(11, ranks, c.type, c.op).wrong(got.data(), 0, c.count) == 0);
    });
}

void check_model(const std::vector<std::string>& all, bool fp8, bool large, int ranks) {
  for (const std::string& bytes : all)
    for_each_case(bytes, fp8, large, [&](const NcclCase& c, const std::string& got) {
      INFO(title(c));
      CHECK(got == modelled(c, ranks));
    });
}

// Rough inputs: within the bound, and where nothing is rounded as the model says.
void check_bound(const std::vector<std::string>& all, bool fp8, int ranks) {
  for (const std::string& bytes : all)
    for_each_case(bytes, fp8, false, [&](const NcclCase& c, const std::string& got) {
      INFO(title(c));
      if (!rounds(c.type, c.op)) {
        CHECK(got == modelled(c, ranks));
        return;
      }
      std::vector<std::vector<unsigned char>> inputs;
      std::vector<double> factors;
      for (int r = 0; r < ranks; ++r) {
        inputs.push_back(nccl_case_input(c, NcclInputs::rough, ranks, r));
        factors.push_back(nccl_factor(NcclInputs::rough, c.type, r));
      }
      const auto counted = RoundingBound(c.type, c.op, ranks).check(inputs, factors, got, c.count);
      CHECK(counted.beyond == 0);
      // Only fp8 leaves its range.
      if (size_of(c.type) > 1) CHECK(counted.checked == c.count);
    });
}

bool have_device() {
  return !std::string(RINGFOLD_EMULATED_FOLDER).empty();
}

// The GPU and the real library, or why not.
struct Machine {
  Machine() {
    Cuda cuda;
    if (!cuda.start(0)) {
      lacks = "no GPU here (" + cuda.why() + ")";
      return;
    }
    fp8 = cuda.compute_capability() >= 90;
    const auto libraries = nccl_libraries();
    if (libraries.empty())
      lacks = "a GPU, but no libnccl.so.2: install PyPI's nvidia-nccl-cu13";
    else
      library = libraries.front();
  }
  std::string library, lacks;
  bool fp8 = false;
};

}  // namespace

TEST_CASE("ours: inputs whose result is exact give it, whatever the algorithm") {
  const int ranks = GENERATE(2, 4);
  check_exact(results(ours(false), NcclInputs::exact, false, ranks), true, ranks);
}

TEST_CASE("ours: on a ring every bit is as the model of NCCL says") {
  const int ranks = GENERATE(2, 3);
  check_model(results(ours(true), NcclInputs::rough, false, ranks), true, false, ranks);
}

TEST_CASE("ours on a device: exact inputs, and every bit of the model on a ring") {
  if (!have_device()) return skip("this build has no CUDA");
  const int ranks = GENERATE(2, 3);
  check_model(results(ours_on_device(true), NcclInputs::rough, false, ranks), true, false, ranks);
  if (ranks == 2)  // a third has no exact average
    check_exact(results(ours_on_device(false), NcclInputs::exact, false, ranks), true, ranks);
}

TEST_CASE("ours: rough inputs stay within the bound of rounding, in both numerics") {
  constexpr int kRanks = 3;
  check_bound(results(ours(false), NcclInputs::rough, false, kRanks), true, kRanks);
  check_bound(results(in_exact_numerics(ours(false)), NcclInputs::rough, false, kRanks), true,
              kRanks);
  if (!have_device()) return skip("the device's part: this build has no CUDA");
  check_bound(results(in_exact_numerics(ours_on_device(false)), NcclInputs::rough, false, kRanks),
              true, kRanks);
}

TEST_CASE("the real NCCL, as it chooses by itself: within the same bound") {
  const Machine machine;
  if (!machine.lacks.empty()) return skip(machine.lacks);
  check_bound(results(real(machine.library, false), NcclInputs::rough, false, 2), machine.fp8, 2);
}

TEST_CASE("the real NCCL, as it chooses by itself: exact where the inputs are") {
  const Machine machine;
  if (!machine.lacks.empty()) return skip(machine.lacks);
  check_exact(results(real(machine.library, false), NcclInputs::exact, false, 2), machine.fp8, 2);
}

TEST_CASE("the real NCCL on one ring: the bits of the model, and of ours") {
  const Machine machine;
  if (!machine.lacks.empty()) return skip(machine.lacks);
  const int ranks = GENERATE(2, 3);
  const auto theirs = results(real(machine.library, true), NcclInputs::rough, true, ranks);
  check_model(theirs, machine.fp8, true, ranks);
  const auto mine = results(ours_on_device(true), NcclInputs::rough, true, ranks);
  if (machine.fp8) CHECK(mine == theirs);  // else an emulated device has the fp8 cases besides
}
