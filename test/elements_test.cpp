// The rules of the arithmetic, with numbers worked out by hand: what wraps, what NaN and zeros do,
// how averages round. Through reduce_host, on every target.
#include "test/elements.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "kernels/element.h"

using namespace ringfold;

namespace {

template <class T>
constexpr DType kTypeOf = DType::f32;
template <>
constexpr DType kTypeOf<int8_t> = DType::i8;
template <>
constexpr DType kTypeOf<uint8_t> = DType::u8;
template <>
constexpr DType kTypeOf<int32_t> = DType::i32;
template <>
constexpr DType kTypeOf<uint32_t> = DType::u32;
template <>
constexpr DType kTypeOf<int64_t> = DType::i64;
template <>
constexpr DType kTypeOf<uint64_t> = DType::u64;
template <>
constexpr DType kTypeOf<F16> = DType::f16;
template <>
constexpr DType kTypeOf<double> = DType::f64;
template <>
constexpr DType kTypeOf<BF16> = DType::bf16;
template <>
constexpr DType kTypeOf<F8E4M3> = DType::f8e4m3;
template <>
constexpr DType kTypeOf<F8E5M2> = DType::f8e5m2;

template <class T>
T of(double value) {
  if constexpr (kIsSmallFloat<T>) {
    return from_f32<T>(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class T>
uint64_t bits(T x) {
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof(T));
  return word;
}

// The one result of 77 equal elements on every target: more than a vector, and a rest.
template <class T>
T result(ReduceCall call, T a, T b) {
  const std::vector<T> as(77, a), bs(77, b);
  std::vector<T> out(77);
  call.dtype = kTypeOf<T>;
  call.a = as.data();
  call.b = bs.data();
  call.out = out.data();
  call.count = out.size();
  reduce_reference(call);
  const T first = out[0];
  for (const std::string_view target : reduce_targets()) {
    REQUIRE(force_reduce_target(target));
    std::fill(out.begin(), out.end(), T{});
    reduce_host(call);
    for (size_t i = 0; i < out.size(); ++i) {
      if (bits(out[i]) != bits(first)) FAIL(target << " differs at " << i);
    }
  }
  force_reduce_target("");
  return first;
}

template <class T>
T result(Op op, T a, T b) {
  ReduceCall call;
  call.op = op;
  return result(call, a, b);
}

// One step of an average over `total` ranks, of which `done` are in `a`.
template <class T>
T average_step(T a, T b, int done, int total) {
  ReduceCall call;
  call.op = Op::avg;
  call.count_a = done;
  call.total = total;
  return result(call, a, b);
}

// The average of `ranks` equal elements, folded one by one.
template <class T>
T average_of_equal(T x, int ranks) {
  T average = x;
  for (int done = 1; done < ranks; ++done) average = average_step(average, x, done, ranks);
  return average;
}

}  // namespace

TEST_CASE("integers wrap") {
  CHECK(result<int8_t>(Op::sum, 120, 100) == -36);
  CHECK(result<uint8_t>(Op::sum, 200, 100) == 44);
  CHECK(result<int32_t>(Op::sum, INT32_MAX, 1) == INT32_MIN);
  CHECK(result<int64_t>(Op::sum, INT64_MAX, 1) == INT64_MIN);
  CHECK(result<int8_t>(Op::prod, -128, -1) == -128);
  CHECK(result<uint8_t>(Op::prod, 16, 17) == 16);
  CHECK(result<int32_t>(Op::prod, INT32_MIN, -1) == INT32_MIN);
  CHECK(result<uint32_t>(Op::prod, 0x10001, 0x10001) == 0x20001);
  CHECK(result<int64_t>(Op::prod, 0x100000001, -3) == -0x300000003);
  CHECK(result<uint64_t>(Op::prod, 0x100000001, 0x100000001) == 0x200000001);
}

TEMPLATE_TEST_CASE("min and max of negative numbers", "", int8_t, int32_t, int64_t, F16, BF16,
                   float, double, F8E4M3, F8E5M2) {
  CHECK(bits(result(Op::min, of<TestType>(0), of<TestType>(-1))) == bits(of<TestType>(-1)));
  CHECK(bits(result(Op::max, of<TestType>(-1), of<TestType>(-2))) == bits(of<TestType>(-1)));
}

TEMPLATE_TEST_CASE("zero and NaN in min and max", "", F16, BF16, float, double, F8E4M3, F8E5M2) {
  const TestType plus = of<TestType>(0.0), minus = of<TestType>(-0.0), one = of<TestType>(1);
  CHECK(bits(result(Op::min, plus, minus)) == bits(minus));
  CHECK(bits(result(Op::min, minus, plus)) == bits(minus));
  CHECK(bits(result(Op::max, plus, minus)) == bits(plus));
  CHECK(bits(result(Op::max, minus, plus)) == bits(plus));
  const uint64_t nan = bits(canonical_nan<TestType>());
  CHECK(nan == (uint64_t{1} << (8 * sizeof(TestType) - 1)) - 1);
  TestType negative_nan = canonical_nan<TestType>();
  reinterpret_cast<uint8_t*>(&negative_nan)[sizeof(TestType) - 1] |= 0x80;
  for (const Op op : {Op::sum, Op::prod, Op::max, Op::min, Op::avg, Op::premul_sum}) {
    INFO(name(op));
    CHECK(bits(result(op, negative_nan, one)) == nan);
    CHECK(bits(result(op, one, negative_nan)) == nan);
    CHECK(bits(result(op, negative_nan, negative_nan)) == nan);
  }
}

TEST_CASE("one NaN at any of 40 positions stays where it is") {
  for (size_t position = 0; position < 40; ++position) {
    for (const Op op : {Op::min, Op::max}) {
      std::vector<float> a(40, 1.0f), b(40, 2.0f);
      (position % 2 == 0 ? a : b)[position] = NAN;
      ReduceCall call;
      call.op = op;
      call.a = a.data();
      call.b = b.data();
      call.out = a.data();
      call.count = a.size();
      reduce_host(call);
      for (size_t i = 0; i < a.size(); ++i) {
        if (std::isnan(a[i]) != (i == position)) FAIL("position " << position << " element " << i);
      }
    }
  }
}

TEST_CASE("invalid operations give the canonical NaN") {
  CHECK(bits(result<float>(Op::sum, INFINITY, -INFINITY)) == kF32Nan);
  CHECK(bits(result<double>(Op::prod, INFINITY, 0.0)) == kF64Nan);
  CHECK(bits(result(Op::sum, F16{0x7c00}, F16{0xfc00})) == 0x7fff);
  CHECK(bits(result(Op::prod, BF16{0x7f80}, BF16{0})) == 0x7fff);
}

TEST_CASE("all 64 fp8 elements take part") {
  for (const std::string_view target : reduce_targets()) {
    REQUIRE(force_reduce_target(target));
    std::vector<uint8_t> a(64, 0x38), b(64, 0x38), out(64);
    ReduceCall call{
        .dtype = DType::f8e4m3, .a = a.data(), .b = b.data(), .out = out.data(), .count = 64};
    reduce_host(call);
    CHECK(out == std::vector<uint8_t>(64, from_f32<F8E4M3>(2.0f).bits));
  }
  force_reduce_target("");
}

TEST_CASE("fp8 sums saturate, f16 sums overflow") {
  CHECK(result(Op::sum, of<F8E4M3>(448), of<F8E4M3>(448)).bits == 0x7e);
  CHECK(result(Op::sum, of<F8E5M2>(-57344), of<F8E5M2>(-57344)).bits == 0xfb);
  CHECK(result(Op::sum, of<F16>(65504), of<F16>(65504)).bits == 0x7c00);
}

TEST_CASE("sums of small floats round once") {
  CHECK(to_f32(result(Op::sum, of<BF16>(256), of<BF16>(1))) == 256);  // a tie, to even
  CHECK(to_f32(result(Op::sum, of<BF16>(258), of<BF16>(1))) == 260);
  CHECK(to_f32(result(Op::sum, of<BF16>(256), of<BF16>(7))) == 264);
  CHECK(to_f32(result(Op::sum, of<F16>(2048), of<F16>(1))) == 2048);
  CHECK(to_f32(result(Op::sum, of<F16>(2050), of<F16>(1))) == 2052);
}

TEST_CASE("the average of equal small floats is exact, however large or small") {
  for (const int ranks : {2, 3, 4, 7, 1024}) {
    INFO(ranks << " ranks");
    CHECK(to_f32(average_of_equal(of<F16>(40000), ranks)) == 40000);
    CHECK(to_f32(average_of_equal(of<F16>(0x1p-24), ranks)) == 0x1p-24f);
    CHECK(average_of_equal(BF16{0x7f7f}, ranks).bits == 0x7f7f);
    CHECK(average_of_equal(BF16{0x0001}, ranks).bits == 0x0001);
    CHECK(average_of_equal(F8E4M3{0x7e}, ranks).bits == 0x7e);
    CHECK(average_of_equal(F8E4M3{0x81}, ranks).bits == 0x81);
    CHECK(average_of_equal(F8E5M2{0xfb}, ranks).bits == 0xfb);
  }
}

TEST_CASE("a running mean weighs what it holds") {
  CHECK(to_f32(average_step(of<F16>(1), of<F16>(5), 3, 4)) == 2);
  CHECK(to_f32(average_step(of<BF16>(2), of<BF16>(-4), 2, 9)) == 0);
}

TEST_CASE("other averages divide in the step that completes them") {
  CHECK(average_step<int32_t>(3, 4, 1, 2) == 3);
  CHECK(average_step<int32_t>(-3, -4, 1, 2) == -3);
  CHECK(average_step<int32_t>(-3, -4, 1, 3) == -7);
  CHECK(average_step<int64_t>(-3, -4, 1, 2) == -3);
  CHECK(average_step<int8_t>(-3, -4, 1, 2) == -3);
  CHECK(average_step<uint8_t>(200, 100, 1, 2) == 22);   // the wrapped sum, 44
  CHECK(average_step<int8_t>(100, 27, 199, 200) == 0);  // a divisor beyond the type
  CHECK(average_step<int8_t>(-128, 0, 1, 2) == -64);
  CHECK(average_step<uint32_t>(UINT32_MAX, 0, 1, 2) == INT32_MAX);
  CHECK(average_step<uint32_t>(0x80000000, 0x7ffffffd, 2, 3) == 1431655764);
  CHECK(average_step<uint64_t>(UINT64_MAX, 0, 1, 2) == INT64_MAX);
  CHECK(average_step<float>(3, 4, 1, 2) == 3.5f);
  CHECK(average_step<float>(3, 4, 1, 3) == 7.0f);
  CHECK(average_step<double>(1, 0, 2, 3) == 1.0 / 3);
}

TEST_CASE("factors apply in the type, integers cut and wrapped") {
  const auto scaled = [](auto x, double factor) {
    ReduceCall call;
    call.op = Op::premul_sum;
    call.scale_a = factor;
    return result(call, x, decltype(x){});
  };
  CHECK(scaled(int32_t{-7}, 0.5) == -3);
  CHECK(scaled(int8_t{100}, 3.0) == 44);
  CHECK(scaled(uint8_t{1}, -1.0) == 255);
  CHECK(scaled(uint32_t{3}, 0x1p40) == 0);
  CHECK(scaled(int32_t{3}, 0x1p60 + 512.0) == 1536);
  CHECK(scaled(int64_t{INT64_MAX}, 1.0) == INT64_MAX);
  CHECK(scaled(int64_t{3}, 0x1p62) == INT64_MIN / 2);
  CHECK(scaled(int32_t{1}, NAN) == 0);
  // Whole factors lose no low bits where f64 would.
  CHECK(scaled(int64_t{0x0123456789abcdef}, 3.0) == 0x0369d0369d0369cd);
  CHECK(scaled(uint64_t{0xfedcba9876543211}, -1.0) == 0x0123456789abcdef);
  CHECK(scaled(int32_t{0x7654321}, 0x1.fffffffcp30) == static_cast<int32_t>(0x789abcdfu));
  CHECK(scaled(int32_t{1}, INFINITY) == 0);
  CHECK(scaled(1.0f, 0.1) == 0.1f);
  CHECK(scaled(1.0, 0.1) == 0.1);
  CHECK(scaled(of<F16>(3), 0.1).bits == of<F16>(0.3).bits);
  CHECK(scaled(F8E5M2{0x7c}, 1.0).bits == 0x7b);  // infinity is summed as such, then saturates
}

TEMPLATE_TEST_CASE("every operation gives the same bits with its operands exchanged", "", int8_t,
                   uint8_t, int32_t, uint32_t, int64_t, uint64_t, F16, BF16, float, double, F8E4M3,
                   F8E5M2) {
  constexpr size_t kCount = 20'000;
  std::vector<TestType> a(kCount), b(kCount), forth(kCount), back(kCount);
  test::fill_hashed(kTypeOf<TestType>, a.data(), kCount, 1);
  test::fill_hashed(kTypeOf<TestType>, b.data(), kCount, 2);
  for (int op = 0; op < kOps; ++op) {
    ReduceCall call;
    call.dtype = kTypeOf<TestType>;
    call.op = static_cast<Op>(op);
    call.count = kCount;
    call.count_a = 2, call.count_b = 3, call.total = 5;
    call.scale_a = 0.75, call.scale_b = -1.5;
    call.a = a.data(), call.b = b.data(), call.out = forth.data();
    reduce_reference(call);
    std::swap(call.a, call.b), std::swap(call.scale_a, call.scale_b);
    std::swap(call.count_a, call.count_b), call.out = back.data();
    reduce_reference(call);
    INFO(name(call.op));
    CHECK(std::memcmp(forth.data(), back.data(), kCount * sizeof(TestType)) == 0);
  }
}
