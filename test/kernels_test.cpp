// The SIMD kernels against the element bodies: every type, operation, target, alignment, length,
// aliasing and mirror, bit for bit, and not a byte outside.
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "kernels/reduce.h"
#include "test/elements.h"

using namespace ringfold;

namespace {

// An operation with the constants that make it take another way.
struct Case {
  Op op = Op::sum;
  double scale_a = 1, scale_b = 1;
  int count_a = 1, count_b = 1, total = 0;
};
const std::vector<Case> kCases = {
    {.op = Op::sum},
    {.op = Op::prod},
    {.op = Op::max},
    {.op = Op::min},
    {.op = Op::avg, .count_a = 2, .count_b = 1, .total = 4},
    {.op = Op::avg, .count_a = 2, .count_b = 5, .total = 7},
    {.op = Op::premul_sum},
    {.op = Op::premul_sum, .scale_a = 0.3},
    {.op = Op::premul_sum, .scale_a = -1.7e3, .scale_b = 1e-3},
    {.op = Op::premul_sum, .scale_a = 3e19, .scale_b = 5e9},
};

ReduceCall call_of(DType dtype, const Case& what) {
  ReduceCall call;
  call.dtype = dtype;
  call.op = what.op;
  call.scale_a = what.scale_a, call.scale_b = what.scale_b;
  call.count_a = what.count_a, call.count_b = what.count_b, call.total = what.total;
  return call;
}

// `count` elements `offset` elements behind an aligned address, between guard bytes.
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
  // Whether the elements equal `elements`, and the guards are whole.
  bool holds(const std::byte* elements) const {
    for (size_t i = 0; i < begin_; ++i) {
      if (memory_[i] != std::byte{0xa5}) return false;
    }
    for (size_t i = begin_ + bytes_; i < memory_.size(); ++i) {
      if (memory_[i] != std::byte{0xa5}) return false;
    }
    return bytes_ == 0 || std::memcmp(memory_.data() + begin_, elements, bytes_) == 0;
  }

 private:
  static constexpr size_t kGuard = 64;
  size_t begin_, bytes_;
  std::vector<std::byte> memory_;
};

enum class Result { apart, over_a, over_b };

// One shape on the target in force, with all ways to place the result.
void check_shape(DType dtype, const Case& what, size_t count, size_t offset,
                 std::string_view target) {
  const Guarded a(dtype, count, offset, 1), b(dtype, count, (offset * 7 + 3) % 16, 2);
  Guarded out(dtype, count, (offset * 5 + 1) % 16, 3), mirror(dtype, count, (offset + 9) % 16, 4);
  Guarded work_a = a, work_b = b;
  std::vector<std::byte> expected(count * size_of(dtype) + 1), first_a(expected), first_b(expected);
  std::memcpy(first_a.data(), work_a.data(), count * size_of(dtype));
  std::memcpy(first_b.data(), work_b.data(), count * size_of(dtype));
  ReduceCall call = call_of(dtype, what);
  call.count = count;
  call.a = work_a.data(), call.b = work_b.data(), call.out = expected.data();
  reduce_reference(call);
  for (const Result result : {Result::apart, Result::over_a, Result::over_b}) {
    for (const bool mirrored : {false, true}) {
      work_a.restore(a), work_b.restore(b);
      Guarded& to = result == Result::apart ? out : result == Result::over_a ? work_a : work_b;
      call.out = to.data();
      call.mirror = mirrored ? mirror.data() : nullptr;
      reduce_host(call);
      const bool right = to.holds(expected.data()) &&
                         (!mirrored || mirror.holds(expected.data())) &&
                         (result == Result::over_a || work_a.holds(first_a.data())) &&
                         (result == Result::over_b || work_b.holds(first_b.data()));
      if (right) continue;
      FAIL(target << " " << name(dtype) << " " << name(what.op) << " count " << count << " offset "
                  << offset << " result " << static_cast<int>(result) << " mirrored " << mirrored);
    }
  }
}

void for_each_target(const auto& body) {
  for (const std::string_view target : reduce_targets()) {
    REQUIRE(force_reduce_target(target));
    body(target);
  }
  REQUIRE(force_reduce_target(""));
}

}  // namespace

TEST_CASE("targets are listed and can be forced by name") {
  REQUIRE_FALSE(reduce_targets().empty());
  for (const std::string_view target : reduce_targets()) CHECK(force_reduce_target(target));
  CHECK_FALSE(force_reduce_target("no such target"));
  CHECK(force_reduce_target(""));
}

TEST_CASE("short and ragged lengths at every alignment") {
  for_each_target([](std::string_view target) {
    for (int type = 0; type < kDTypes; ++type) {
      for (const Case& what : kCases) {
        for (size_t count = 0; count <= 70; ++count) {
          check_shape(static_cast<DType>(type), what, count, count % 16, target);
        }
        for (size_t offset = 0; offset < 16; ++offset) {
          for (const size_t count : {3, 31, 64, 257, 515}) {
            check_shape(static_cast<DType>(type), what, count, offset, target);
          }
        }
      }
    }
  });
}

TEST_CASE("lengths beyond the block of a mirror") {
  for_each_target([](std::string_view target) {
    for (int type = 0; type < kDTypes; ++type) {
      for (const Case& what : kCases) {
        for (const size_t count : {1024, 4099, 8192, 16411}) {
          check_shape(static_cast<DType>(type), what, count, count % 7, target);
        }
      }
    }
  });
}

// Every pair of fp8 elements, so every result there is.
TEST_CASE("all pairs of fp8 elements") {
  std::vector<uint8_t> a(65536), b(65536), out(65536), expected(65536);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<uint8_t>(i), b[i] = i >> 8;
  for_each_target([&](std::string_view target) {
    for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
      for (const Case& what : kCases) {
        ReduceCall call = call_of(dtype, what);
        call.count = a.size();
        call.a = a.data(), call.b = b.data(), call.out = expected.data();
        reduce_reference(call);
        call.out = out.data();
        reduce_host(call);
        INFO(target << " " << name(dtype) << " " << name(what.op) << " " << what.scale_a);
        CHECK(out == expected);
      }
    }
  });
}

// Every 16-bit element with partners near and far: all ties, overflows and subnormals.
TEST_CASE("all half floats with many partners") {
  std::vector<uint16_t> a(65536), b(65536), out(65536), expected(65536);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<uint16_t>(i);
  for_each_target([&](std::string_view target) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      for (const Case& what : kCases) {
        for (uint64_t round = 0; round < 8; ++round) {
          for (size_t i = 0; i < b.size(); ++i) {
            const uint64_t word = test::hashed(round, i);
            // Odd rounds: the same exponent or one or two less, where sums need rounding.
            const uint64_t near = i - ((word >> 16) % 3 << (dtype == DType::f16 ? 10 : 7));
            b[i] = static_cast<uint16_t>(round % 2 == 0 ? word : near ^ (word & 0x3f));
          }
          ReduceCall call = call_of(dtype, what);
          call.count = a.size();
          call.a = a.data(), call.b = b.data(), call.out = expected.data();
          reduce_reference(call);
          call.out = out.data();
          reduce_host(call);
          INFO(target << " " << name(dtype) << " " << name(what.op) << " round " << round);
          CHECK(out == expected);
        }
      }
    }
  });
}

// Long enough to be written past the caches.
TEST_CASE("large results into memory of their own") {
  for (const DType dtype : {DType::f32, DType::u8, DType::f16, DType::bf16, DType::f8e4m3}) {
    const size_t count = (8 << 20) / size_of(dtype) + 13;
    for (const size_t offset : {0, 3}) {
      Guarded a(dtype, count, offset, 1), b(dtype, count, 1, 2), out(dtype, count, offset, 3);
      std::vector<std::byte> expected(count * size_of(dtype));
      ReduceCall call = call_of(dtype, Case());
      call.count = count;
      call.a = a.data(), call.b = b.data(), call.out = expected.data();
      reduce_reference(call);
      call.out = out.data();
      for_each_target([&](std::string_view target) {
        std::memset(out.data(), 0, expected.size());
        reduce_host(call);
        INFO(target << " " << name(dtype) << " offset " << offset);
        CHECK(out.holds(expected.data()));
      });
    }
  }
}

TEST_CASE("scaling, in place and apart") {
  for_each_target([](std::string_view target) {
    for (int type = 0; type < kDTypes; ++type) {
      const auto dtype = static_cast<DType>(type);
      for (const double factor : {1.0, 0.3, -2.5, 1e-30, 7e8}) {
        for (size_t count = 0; count <= 300; count += count < 40 ? 1 : 37) {
          const Guarded in(dtype, count, count % 5, 1);
          Guarded apart(dtype, count, count % 3, 2), place = in;
          std::vector<std::byte> expected(count * size_of(dtype) + 1);
          scale_reference(dtype, place.data(), expected.data(), count, factor);
          scale_host(dtype, place.data(), apart.data(), count, factor);
          scale_host(dtype, place.data(), place.data(), count, factor);
          INFO(target << " " << name(dtype) << " count " << count << " factor " << factor);
          if (apart.holds(expected.data()) && place.holds(expected.data())) continue;
          FAIL("scale_host differs from scale_reference");
        }
      }
    }
  });
}

TEST_CASE("a factor of one copies the bits, NaN included") {
  const uint16_t in[] = {0x7d01, 0xffff, 0x0000, 0x8000, 0x7c00};
  uint16_t out[5] = {};
  scale_host(DType::f16, in, out, 5, 1.0);
  CHECK(std::memcmp(in, out, sizeof(in)) == 0);
}

TEST_CASE("streaming copies are whole and touch nothing else") {
  for_each_target([](std::string_view target) {
    for (const size_t bytes : {0, 1, 63, 4095, 4096, 4097, 4200, 65537, 1 << 20}) {
      for (size_t offset = 0; offset < 70; offset += 23) {
        Guarded in(DType::u8, bytes, 69 - offset, 1), out(DType::u8, bytes, offset, 2);
        copy_streaming(out.data(), in.data(), bytes);
        INFO(target << " " << bytes << " bytes, offset " << offset);
        CHECK(out.holds(in.data()));
      }
    }
  });
}
