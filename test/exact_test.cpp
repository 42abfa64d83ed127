// The inputs of exact.h keep their promise: folded in any order and grouping they give the expected
// bits. Folded by the reference kernel, in random trees as collectives may do it.
#include "test/exact.h"

#include <catch2/catch.hpp>
#include <random>
#include <vector>

#include "kernels/reduce.h"

using namespace ringfold;

namespace {

struct Part {
  std::vector<unsigned char> bytes;
  int ranks = 1;
};

// Folds the contributions of all ranks in a random order and grouping.
std::vector<unsigned char> fold(const test::Exact& exact, int ranks, DType type, Op op,
                                size_t first, size_t count, std::mt19937& random) {
  std::vector<Part> parts(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    Part& part = parts[static_cast<size_t>(rank)];
    part.bytes.resize(count * size_of(type));
    exact.fill(part.bytes.data(), rank, first, count);
    if (op == Op::premul_sum) {
      scale_reference(type, part.bytes.data(), part.bytes.data(), count, test::premul_factor(rank));
    }
  }
  while (parts.size() > 1) {
    std::shuffle(parts.begin(), parts.end(), random);
    const Part other = std::move(parts.back());
    parts.pop_back();
    Part& part = parts.back();
    ReduceCall call;
    call.dtype = type, call.op = op == Op::premul_sum ? Op::sum : op;
    call.a = part.bytes.data(), call.b = other.bytes.data(), call.out = part.bytes.data();
    call.count = count;
    call.count_a = part.ranks, call.count_b = other.ranks, call.total = ranks;
    reduce_reference(call);
    part.ranks += other.ranks;
  }
  return parts.front().bytes;
}

}  // namespace

TEST_CASE("exact inputs reduce to the expected bits in any order, for every type and operation") {
  constexpr size_t kFirst = 12345, kCount = 500;
  std::mt19937 random(1);
  for (int t = 0; t < kDTypes; ++t) {
    for (int o = 0; o < kOps; ++o) {
      for (const int ranks : {1, 2, 3, 4, 5, 7, 8, 12, 64}) {
        const auto type = static_cast<DType>(t);
        const auto op = static_cast<Op>(o);
        INFO(name(type) << " " << name(op) << " on " << ranks << " ranks");
        const test::Exact exact(7, ranks, type, op);
        // One rank has no fold in which an average could be divided: nothing to do there.
        const auto folded = fold(exact, ranks, type, op, kFirst, kCount, random);
        CHECK(exact.wrong(folded.data(), kFirst, kCount) == 0);
      }
    }
  }
}

TEST_CASE("a rank left out, a changed bit and a shifted buffer all count as wrong") {
  constexpr size_t kCount = 1000;
  for (int t = 0; t < kDTypes; ++t) {
    const auto type = static_cast<DType>(t);
    INFO(name(type));
    const test::Exact exact(7, 4, type, Op::sum);
    std::vector<unsigned char> expected(kCount * size_of(type));
    exact.expect(expected.data(), 0, kCount);
    CHECK(exact.wrong(expected.data(), 0, kCount) == 0);
    CHECK(exact.wrong(expected.data(), 1, kCount) > kCount / 2);
    expected[5] ^= 1;
    CHECK(exact.wrong(expected.data(), 0, kCount) == 1);
    std::mt19937 random(1);
    const auto three = fold(exact, 3, type, Op::sum, 0, kCount, random);
    CHECK(exact.wrong(three.data(), 0, kCount) > kCount / 4);
  }
}

TEST_CASE("only averages of narrow floats over many ranks share one value") {
  CHECK(test::Exact(1, 4, DType::f16, Op::avg).tells_ranks_apart());
  CHECK(test::Exact(1, 4, DType::bf16, Op::avg).tells_ranks_apart());
  CHECK(test::Exact(1, 64, DType::f32, Op::avg).tells_ranks_apart());
  CHECK(test::Exact(1, 64, DType::f8e5m2, Op::sum).tells_ranks_apart());
  CHECK_FALSE(test::Exact(1, 64, DType::f16, Op::avg).tells_ranks_apart());
}
