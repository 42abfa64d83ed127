// Cases from bugs of other libraries, on device memory: C56, C57, C58.
#include <catch2/catch.hpp>
#include <cmath>
#include <set>

#include "test/cuda_ranks.h"
#include "test/nccl_model.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

Options with(Numerics numerics) {
  Options options;
  options.timeout = 30s;
  options.numerics = numerics;
  return options;
}

// An all-reduce of one value a rank, `count` times; what is there afterwards.
template <class T>
std::vector<T> reduced(const CudaRank& me, DType type, Op op, size_t count, T mine) {
  const Memory in(me.world, count * sizeof(T)), out(me.world, count * sizeof(T));
  in.set(me.stream, std::vector<T>(count, mine));
  Work work = me.comm.all_reduce(in.get(), out.get(), count, type, op, me.handle());
  auto result = out.get<T>(me.stream, count);
  me.problems.ok(work.wait(), name(op));
  return result;
}

constexpr uint16_t kBf16One = 0x3f80, kBf16TwoFiftySix = 0x4380;
constexpr uint16_t kF16FortyThousand = 0x78e2, kF16Smallest = 0x0001;

}  // namespace

// 256 and seven times 1 are 263, and bf16 has 262 and 264 there. Messages round once a hop: of
// seven sums below 512 each is off by at most half of the last place, 2, so the result by at
// most 7.
TEST_CASE("C56: bf16 is rounded at each hop, within its bound, to the same bits on all ranks") {
  constexpr size_t kCount = 8000;
  const CudaWorld world(roomy(5));
  std::vector<std::vector<uint16_t>> results(8);
  const auto problems = run_cuda_ranks(world, 8, with(Numerics::exact), [&](const CudaRank& me) {
    results[me.rank()] = reduced<uint16_t>(me, DType::bf16, Op::sum, kCount,
                                           me.rank() == 0 ? kBf16TwoFiftySix : kBf16One);
  });
  CHECK(problems == "");
  size_t beyond = 0;
  for (const uint16_t bits : results[0]) beyond += std::abs(kModelBF16.decode(bits) - 263) > 7;
  CHECK(beyond == 0);
  for (const auto& result : results) CHECK(result == results[0]);
}

TEST_CASE("C56: in NCCL's numerics a ring has the bits that NCCL's has") {
  constexpr size_t kCount = 8000;
  constexpr int kRanks = 8;
  const CudaWorld world(roomy(6));
  Options options = with(Numerics::nccl);
  options.algorithm = Algorithm::ring;
  std::vector<std::vector<unsigned char>> inputs(kRanks);
  for (size_t r = 0; r < kRanks; ++r) {
    const std::vector<uint16_t> mine(kCount, r == 0 ? kBf16TwoFiftySix : kBf16One);
    inputs[r].resize(kCount * 2);
    std::memcpy(inputs[r].data(), mine.data(), kCount * 2);
  }
  const auto modelled = NcclModel(DType::bf16, Op::sum, kRanks)
                            .all_reduce(inputs, std::vector<double>(kRanks, 1.0), kCount);
  std::vector<uint16_t> expected(kCount);
  std::memcpy(expected.data(), modelled.data(), kCount * 2);
  const auto problems = run_cuda_ranks(world, kRanks, options, [&](const CudaRank& me) {
    const auto got = reduced<uint16_t>(me, DType::bf16, Op::sum, kCount,
                                       me.rank() == 0 ? kBf16TwoFiftySix : kBf16One);
    me.problems.check(got == expected, "other bits than the model's");
  });
  CHECK(problems == "");
  // The order shows: each chunk meets the 256 at another hop.
  CHECK(std::set<uint16_t>(expected.begin(), expected.end()).size() > 1);
}

TEST_CASE("C57: averages of f16 neither overflow nor, but in NCCL's numerics, vanish") {
  const Numerics numerics = GENERATE(Numerics::exact, Numerics::nccl);
  const CudaWorld world(roomy(7));
  const auto problems = run_cuda_ranks(world, 4, with(numerics), [numerics](const CudaRank& me) {
    constexpr size_t kCount = 100;
    const auto large = reduced(me, DType::f16, Op::avg, kCount, kF16FortyThousand);
    me.problems.check(large == std::vector<uint16_t>(kCount, kF16FortyThousand), "40000");
    const uint16_t smallest = numerics == Numerics::exact ? kF16Smallest : 0;  // times 1/4 first
    const auto small = reduced(me, DType::f16, Op::avg, kCount, kF16Smallest);
    me.problems.check(small == std::vector<uint16_t>(kCount, smallest), "2^-24");
  });
  CHECK(problems == "");
}

TEST_CASE("C58: averages divide by the number of ranks, those of integers truncating") {
  const Numerics numerics = GENERATE(Numerics::exact, Numerics::nccl);
  const CudaWorld world(roomy(8));
  const auto problems = run_cuda_ranks(world, 2, with(numerics), [](const CudaRank& me) {
    const bool first = me.rank() == 0;
    for (const size_t count : {1, 2, 5}) {
      const auto up = reduced<int32_t>(me, DType::i32, Op::avg, count, first ? 3 : 4);
      me.problems.check(up == std::vector<int32_t>(count, 3), "3 and 4");
      const auto down = reduced<int32_t>(me, DType::i32, Op::avg, count, first ? -3 : -4);
      me.problems.check(down == std::vector<int32_t>(count, -3), "-3 and -4");
      const auto real = reduced<float>(me, DType::f32, Op::avg, count, first ? 3 : 4);
      me.problems.check(real == std::vector<float>(count, 3.5F), "3.0 and 4.0");
    }
  });
  CHECK(problems == "");
}
