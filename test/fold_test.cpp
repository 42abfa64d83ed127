// The fold of many sources: every type, operation, number of ranks, target, alignment, length,
// aliasing, mirror and way to memory against the element bodies, and these against the pairwise
// chain and numbers worked out by hand.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "kernels/element.h"
#include "test/elements.h"

using namespace ringfold;

namespace {

constexpr int kRanks[] = {2, 3, 4, 5, 8, 64};
constexpr size_t kGuard = 64;

// An operation with a factor and the place among the ranks where it is to be applied.
struct Case {
  Op op = Op::sum;
  double factor = 1;
  enum class Own { none, first, last } own = Own::none;
};
const std::vector<Case> kCases = {
    {.op = Op::sum},
    {.op = Op::prod},
    {.op = Op::max},
    {.op = Op::min},
    {.op = Op::avg},
    {.op = Op::premul_sum, .factor = 0.3},
    {.op = Op::premul_sum, .factor = 1, .own = Case::Own::first},
    {.op = Op::premul_sum, .factor = 0.3, .own = Case::Own::first},
    {.op = Op::premul_sum, .factor = -3e19, .own = Case::Own::last},
};

FoldCall call_of(DType dtype, const Case& what, int ranks, size_t count) {
  FoldCall call;
  call.dtype = dtype;
  call.op = what.op;
  call.ranks = ranks;
  call.factor = what.factor;
  call.own = what.own == Case::Own::none ? -1 : what.own == Case::Own::first ? 0 : ranks - 1;
  call.count = count;
  return call;
}

// Elements at any offset from an aligned address, between guard bytes.
class Guarded {
 public:
  Guarded(DType dtype, size_t count, size_t offset, uint64_t seed)
      : begin_(kGuard + offset * size_of(dtype)), bytes_(count * size_of(dtype)) {
    memory_.assign(begin_ + bytes_ + kGuard, std::byte{0xa5});
    test::fill_hashed(dtype, data(), count, seed);
  }
  std::byte* data() { return memory_.data() + begin_; }
  void restore(const Guarded& other) {
    std::memcpy(memory_.data(), other.memory_.data(), memory_.size());
  }
  bool operator==(const Guarded& other) const { return memory_ == other.memory_; }
  // Whether the elements equal `elements`, and the guards are whole.
  bool holds(const std::byte* elements) const {
    const auto guard = [](std::byte b) { return b == std::byte{0xa5}; };
    const auto* const begin = memory_.data();
    return std::all_of(begin, begin + begin_, guard) &&
           std::all_of(begin + begin_ + bytes_, begin + memory_.size(), guard) &&
           (bytes_ == 0 || std::memcmp(begin + begin_, elements, bytes_) == 0);
  }

 private:
  size_t begin_, bytes_;
  std::vector<std::byte> memory_;
};

struct Sources {
  std::vector<Guarded> memory;
  std::vector<const void*> pointers;
  // With `spread`, each at another offset.
  Sources(DType dtype, int ranks, size_t count, size_t offset, bool spread = true) {
    for (int r = 0; r < ranks; ++r) {
      const auto rank = static_cast<size_t>(r);
      memory.emplace_back(dtype, count, (offset + (spread ? rank * 5 : 0)) % 64, rank + 1);
      if (size_of(dtype) == 1) calm(count);
      pointers.push_back(memory.back().data());
    }
  }
  // Most elements of 8 bits would be NaN or saturated in the end: makes four of five a small one.
  void calm(size_t count) {
    for (size_t i = 0; i < count; ++i)
      if (i % 5 != 0) memory.back().data()[i] &= std::byte{0xbf};
  }
};

void for_each_target(const auto& body) {
  for (const std::string_view target : reduce_targets()) {
    REQUIRE(force_reduce_target(target));
    body(target);
  }
  REQUIRE(force_reduce_target(""));
}

// One shape on all targets, with all ways to place the result: apart, and over each source (of
// many ranks over a few).
void check_shape(DType dtype, const Case& what, int ranks, size_t count, size_t offset) {
  const Sources original(dtype, ranks, count, offset);
  Sources work(dtype, ranks, count, offset);
  Guarded out(dtype, count, (offset * 3 + 1) % 64, 99), mirror(dtype, count, (offset + 9) % 64, 98);
  std::vector<std::byte> expected(count * size_of(dtype) + 1);
  FoldCall call = call_of(dtype, what, ranks, count);
  call.sources = work.pointers.data();
  call.out = expected.data();
  fold_reference(call);
  for_each_target([&](std::string_view target) {
    for (int place = -1; place < ranks; place += ranks == 64 && place > 0 ? 31 : 1) {
      for (int way = 0; way < 4; ++way) {
        Guarded& to = place < 0 ? out : work.memory[static_cast<size_t>(place)];
        call.out = to.data();
        call.mirror = way % 2 == 1 ? mirror.data() : nullptr;
        call.stream = way / 2 == 1;
        std::memset(mirror.data(), 0, expected.size() - 1);
        if (place < 0) std::memset(out.data(), 0, expected.size() - 1);
        fold_host(call);
        bool right =
            to.holds(expected.data()) && (call.mirror == nullptr || mirror.holds(expected.data()));
        if (place >= 0) to.restore(original.memory[static_cast<size_t>(place)]);
        right = right && work.memory == original.memory;
        if (right) continue;
        FAIL(target << " " << name(dtype) << " " << name(what.op) << " factor " << what.factor
                    << " ranks " << ranks << " count " << count << " offset " << offset << " place "
                    << place << " way " << way);
      }
    }
  });
}

// The sources joined two by two in rank order, as the ring does it.
std::vector<std::byte> chain(const FoldCall& fold) {
  std::vector<std::byte> sum(fold.count * size_of(fold.dtype));
  ReduceCall call;
  call.dtype = fold.dtype;
  call.op = fold.op;
  call.count = fold.count;
  call.out = sum.data();
  call.total = fold.ranks;
  for (int r = 1; r < fold.ranks; ++r) {
    call.a = r == 1 ? fold.sources[0] : sum.data();
    call.b = fold.sources[r];
    call.scale_a = r == 1 && fold.own == 0 ? fold.factor : 1.0;
    call.scale_b = fold.own == r ? fold.factor : 1.0;
    call.count_a = r;
    reduce_reference(call);
  }
  return sum;
}

// The result of folding one small float of each rank, the same on every target and in every lane.
template <class T>
float folded(DType dtype, Op op, const std::vector<T>& of_ranks) {
  constexpr size_t kCount = 8000;
  std::vector<std::vector<T>> memory;
  std::vector<const void*> sources;
  for (const T x : of_ranks) memory.emplace_back(kCount, x);
  for (const auto& source : memory) sources.push_back(source.data());
  std::vector<T> out(kCount);
  FoldCall call = call_of(dtype, {.op = op}, static_cast<int>(of_ranks.size()), kCount);
  call.sources = sources.data();
  call.out = out.data();
  fold_reference(call);
  const T first = out[0];
  for_each_target([&](std::string_view target) {
    std::fill(out.begin(), out.end(), T{});
    fold_host(call);
    INFO(target);
    CHECK(std::all_of(out.begin(), out.end(), [&](T x) { return x.bits == first.bits; }));
  });
  return to_f32(first);
}

}  // namespace

TEST_CASE("folds of short and ragged lengths") {
  for (int type = 0; type < kDTypes; ++type) {
    for (const Case& what : kCases) {
      for (const int ranks : kRanks) {
        // All short lengths of the two commonest shapes of loop, a few of the others.
        const size_t step = ranks == 2 ? 1 : ranks == 5 ? 3 : 37;
        for (size_t count = 0; count <= 70; count += step) {
          check_shape(static_cast<DType>(type), what, ranks, count, count % 16);
        }
        check_shape(static_cast<DType>(type), what, ranks, 64, 0);
        check_shape(static_cast<DType>(type), what, ranks, 293, 7);
      }
    }
  }
}

TEST_CASE("folds long enough to be written past the caches") {
  for (int type = 0; type < kDTypes; ++type) {
    const auto dtype = static_cast<DType>(type);
    for (const Case& what : kCases) {
      for (const int ranks : kRanks) {
        check_shape(dtype, what, ranks, 4096 / size_of(dtype) + 19, ranks == 64 ? 0 : 13);
      }
    }
  }
}

TEST_CASE("folds at every alignment") {
  for (int type = 0; type < kDTypes; ++type) {
    for (size_t offset = 0; offset < 64; ++offset) {
      const auto dtype = static_cast<DType>(type);
      const Case what{.op = offset % 2 == 0 ? Op::sum : Op::max};
      check_shape(dtype, what, 2, 4096 / size_of(dtype) + offset, offset);
    }
  }
}

TEST_CASE("folds of wide types have the bits of the pairwise chain") {
  for (const DType dtype : {DType::i8, DType::u8, DType::i32, DType::u32, DType::i64, DType::u64,
                            DType::f32, DType::f64}) {
    for (const Case& what : kCases) {
      for (const int ranks : kRanks) {
        const Sources sources(dtype, ranks, 3000, 0);
        FoldCall call = call_of(dtype, what, ranks, 3000);
        std::vector<std::byte> out(3000 * size_of(dtype));
        call.sources = sources.pointers.data();
        call.out = out.data();
        fold_reference(call);
        INFO(name(dtype) << " " << name(what.op) << " ranks " << ranks);
        CHECK(out == chain(call));
      }
    }
  }
}

// Of two ranks there is nothing to round between; but min and max round at no number of ranks.
TEST_CASE("folds of small floats have the bits of the pairwise chain where nothing is rounded") {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
    for (const Case& what : kCases) {
      for (const int ranks : kRanks) {
        if (ranks > 2 && what.op != Op::min && what.op != Op::max) continue;
        if (what.op == Op::avg && dtype == DType::bf16) continue;  // other shares, see kShare
        const Sources sources(dtype, ranks, 3000, 0);
        FoldCall call = call_of(dtype, what, ranks, 3000);
        std::vector<std::byte> out(3000 * size_of(dtype));
        call.sources = sources.pointers.data();
        call.out = out.data();
        fold_reference(call);
        INFO(name(dtype) << " " << name(what.op) << " ranks " << ranks);
        CHECK(out == chain(call));
      }
    }
  }
}

// Every 16-bit element with three partners of all kinds.
TEST_CASE("folds of all half floats") {
  constexpr size_t kCount = 65536;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Sources sources(dtype, 4, kCount, 0, false);
    auto* const all = reinterpret_cast<uint16_t*>(sources.memory[0].data());
    for (size_t i = 0; i < kCount; ++i) all[i] = static_cast<uint16_t>(i);
    std::vector<std::byte> out(2 * kCount), expected(2 * kCount);
    for (const Case& what : kCases) {
      FoldCall call = call_of(dtype, what, 4, kCount);
      call.sources = sources.pointers.data();
      call.out = expected.data();
      fold_reference(call);
      call.out = out.data();
      for_each_target([&](std::string_view target) {
        fold_host(call);
        INFO(target << " " << name(dtype) << " " << name(what.op));
        CHECK(out == expected);
      });
    }
  }
}

TEST_CASE("C56: a fold of bf16 rounds once") {
  std::vector<BF16> of_ranks(8, from_f32<BF16>(1));
  for (size_t at = 0; at < 8; ++at) {
    auto moved = of_ranks;
    moved[at] = from_f32<BF16>(256);
    CHECK(folded(DType::bf16, Op::sum, moved) == 264);
  }
}

TEST_CASE("C57: the fold's average of f16 neither overflows nor loses small values") {
  CHECK(folded(DType::f16, Op::avg, std::vector<F16>(4, from_f32<F16>(40000))) == 40000);
  CHECK(folded(DType::f16, Op::avg, std::vector<F16>(4, from_f32<F16>(0x1p-24f))) == 0x1p-24f);
}

TEST_CASE("the fold's average of equal bf16 is exact, however large or small") {
  for (const size_t ranks : {2, 3, 8, 64}) {
    for (const uint16_t bits : {0x7f7f, 0xff7f, 0x7f00, 0x0001, 0x7f80}) {
      const BF16 x{bits};
      INFO(ranks << " ranks, bits " << bits);
      CHECK(folded(DType::bf16, Op::avg, std::vector<BF16>(ranks, x)) == to_f32(x));
    }
  }
  const BF16 most{0x7f7f}, least{0xff7f}, zero{0};
  CHECK(folded(DType::bf16, Op::avg, std::vector{most, most, least, least}) == 0);
  CHECK(folded(DType::bf16, Op::avg, std::vector{most, most, zero, zero}) == to_f32(BF16{0x7eff}));
  CHECK(folded(DType::bf16, Op::avg, std::vector{most, most, BF16{0xff80}}) == -INFINITY);
}

TEST_CASE("the own source of a fold is scaled and rounded to its type first") {
  const auto own = from_f32<BF16>(3), other = from_f32<BF16>(1);
  BF16 scaled{}, out{};
  scale_reference(DType::bf16, &own, &scaled, 1, 0.3);
  const std::array<const void*, 3> sources = {&other, &own, &other};
  FoldCall call = call_of(DType::bf16, {.op = Op::premul_sum, .factor = 0.3}, 3, 1);
  call.own = 1;
  call.sources = sources.data();
  call.out = &out;
  fold_host(call);
  CHECK(out.bits == from_f32<BF16>(1 + to_f32(scaled) + 1).bits);
}
