// Inputs whose reduction is known exactly, whatever the order of the additions and the type: so
// that a check needs no tolerance. Shared by `ringfold bench` and the tests; header only.
//
// Every element is a hash of (seed, rank, index), cut down until nothing can ever be rounded:
//   sum         integers: any bits (they wrap). Floats: whole numbers so small that the sum over
//   all
//               ranks is still a whole number the type can hold. If there are more ranks than that
//               allows, some hold 0: which ones depends on the index.
//   prod        integers: odd numbers (they wrap, and never become 0). Floats: +-2^k, with few
//   enough
//               k != 0 that no partial product leaves the exponent range.
//   min, max    whole numbers the type can hold; never -0.
//   premul_sum  as sum, times premul_factor(rank), a power of two.
//   avg         integers: any bits. f32, f64: multiples of the number of ranks. 16- and 8-bit
//   floats
//               keep a running mean, so the mean over *every* subset of ranks must be
//               representable: multiples of all odd numbers up to the number of ranks, where the
//               type has the bits for that; otherwise one value that all ranks share (which cannot
//               show a rank counted twice: sum does).
// What only moves (all_gather, broadcast, ...) gets plain hashed bits, NaNs and all: fill_bits().
//
// Thread-safety: immutable values and pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "ringfold/types.h"

namespace ringfold::test {

constexpr uint64_t exact_hash(uint64_t seed, uint64_t rank, uint64_t index) {
  uint64_t x = seed * 0x9e3779b97f4a7c15U + (rank + 1) * 0xd1342543de82ef95U + index;
  x = (x ^ (x >> 32)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 29)) * 0x94d049bb133111ebU;
  return x ^ (x >> 32);
}

// This rank's factor for Op::premul_sum.
constexpr double premul_factor(int rank) {
  return static_cast<double>(1 << (rank % 3));
}

// What a binary float can hold. Infinities and NaN play no part here.
struct FloatFormat {
  int mantissa_bits;  // stored ones
  int exponent_bits;
  int smallest, largest;  // exponents of the powers of two among its normal numbers
};
constexpr FloatFormat float_format(DType type) {
  switch (type) {
    case DType::f16:
      return {10, 5, -14, 15};
    case DType::bf16:
      return {7, 8, -126, 127};
    case DType::f8e4m3:
      return {3, 4, -6, 8};
    case DType::f8e5m2:
      return {2, 5, -14, 15};
    case DType::f32:
      return {23, 8, -126, 127};
    case DType::f64:
      return {52, 11, -1022, 1023};
    case DType::i8:
    case DType::u8:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64:
      break;
  }
  return {};
}

// The bits of a number that the type holds exactly; anything else is a mistake of the caller.
inline uint64_t float_bits(DType type, double value) {
  const FloatFormat format = float_format(type);
  const int bits = static_cast<int>(size_of(type)) * 8;
  const uint64_t sign = std::signbit(value) ? uint64_t{1} << (bits - 1) : 0;
  if (value == 0) return sign;
  int exponent = 0;
  const double fraction = std::frexp(std::abs(value), &exponent);  // in [0.5, 1)
  const double scaled = std::ldexp(fraction, format.mantissa_bits + 1);
  const auto mantissa = static_cast<uint64_t>(scaled);
  assert(static_cast<double>(mantissa) == scaled && "more digits than the type has");
  assert(exponent - 1 >= format.smallest && exponent - 1 <= format.largest && "out of range");
  const auto biased = static_cast<uint64_t>(exponent - 1 + (1 << (format.exponent_bits - 1)) - 1);
  return sign | (biased << format.mantissa_bits) |
         (mantissa & ((uint64_t{1} << format.mantissa_bits) - 1));
}

class Exact {
 public:
  // For `ranks` contributions to `op`.
  Exact(uint64_t seed, int ranks, DType type, Op op)
      : seed_(seed), ranks_(ranks), type_(type), op_(op) {
    if (is_float(type)) plan_float();
  }

  // Elements [first, first + count) of what `rank` contributes.
  void fill(void* out, int rank, size_t first, size_t count) const {
    for (size_t i = 0; i < count; ++i) store(out, i, input(rank, first + i));
  }
  // Elements [first, first + count) of the result.
  void expect(void* out, size_t first, size_t count) const {
    for (size_t i = 0; i < count; ++i) store(out, i, result(first + i));
  }
  // How many of `count` elements at `got`, which hold the result from `first` on, are wrong.
  [[nodiscard]] size_t wrong(const void* got, size_t first, size_t count) const {
    const size_t bytes = size_of(type_);
    size_t wrong = 0;
    for (size_t i = 0; i < count; ++i) {
      const uint64_t expected = result(first + i);
      wrong += std::memcmp(static_cast<const char*>(got) + i * bytes, &expected, bytes) != 0;
    }
    return wrong;
  }
  // Whether a rank left out or counted twice would show: false only for the shared value of avg.
  [[nodiscard]] bool tells_ranks_apart() const { return !shared_; }

 private:
  static constexpr int64_t kWidest = int64_t{1} << 30;

  void store(void* out, size_t i, uint64_t bits) const {  // little-endian: the low bytes
    std::memcpy(static_cast<char*>(out) + i * size_of(type_), &bits, size_of(type_));
  }

  // Chooses span_ (the magnitudes drawn), unit_ and stride_ so that nothing can be rounded.
  void plan_float() {
    const FloatFormat format = float_format(type_);
    const int64_t whole = std::min(kWidest, int64_t{1} << (format.mantissa_bits + 1));
    switch (op_) {
      case Op::sum:
        share(whole);
        break;
      case Op::premul_sum:
        share(whole / 4);
        break;  // 4: the largest premul_factor
      case Op::prod:
        share(std::min(format.largest, -format.smallest));
        break;
      case Op::min:
      case Op::max:
        span_ = whole;
        break;
      case Op::avg:
        plan_average(whole);
        break;
    }
  }
  void share(int64_t limit) {
    stride_ = (ranks_ + limit - 1) / limit;
    span_ = std::max<int64_t>(1, limit / ranks_);
  }
  void plan_average(int64_t whole) {
    unit_ = ranks_;
    span_ = whole / (static_cast<int64_t>(ranks_) * ranks_);
    if (is_small_float(type_)) {
      // Means of k ranks: an odd factor of k must divide the sum, a power of two costs fraction
      // bits.
      unit_ = 1;
      for (int64_t k = 3; k <= ranks_ && unit_ <= whole; k += 2) unit_ = std::lcm(unit_, k);
      int64_t fraction = 1;
      while (fraction * 2 <= ranks_) fraction *= 2;
      span_ = whole / (unit_ * fraction);
    }
    if (span_ > 0) return;
    shared_ = true;
    unit_ = 1;
    span_ = whole;
  }

  [[nodiscard]] int64_t draw(int rank, size_t index) const {  // in [-span_, span_]
    const uint64_t h = exact_hash(seed_, shared_ ? 0 : static_cast<uint64_t>(rank), index);
    if (stride_ > 1 && (static_cast<uint64_t>(rank) + index) % static_cast<uint64_t>(stride_) != 0)
      return 0;
    const auto width = 2 * static_cast<uint64_t>(span_) + 1;  // below 2^32
    return static_cast<int64_t>((h >> 32) * width >> 32) - span_;
  }
  [[nodiscard]] double real(int rank, size_t index) const {
    const int64_t n = draw(rank, index);
    if (op_ != Op::prod) return static_cast<double>(n * unit_);
    const double power = std::ldexp(1.0, static_cast<int>(n));
    return exact_hash(~seed_, static_cast<uint64_t>(rank), index) % 2 == 0 ? power : -power;
  }

  [[nodiscard]] bool is_signed() const {
    return type_ == DType::i8 || type_ == DType::i32 || type_ == DType::i64;
  }
  // The low bits of `bits`, as the type reads them.
  [[nodiscard]] uint64_t wrapped(uint64_t bits) const {
    const int unused = 64 - static_cast<int>(size_of(type_)) * 8;
    if (is_signed()) return static_cast<uint64_t>(static_cast<int64_t>(bits << unused) >> unused);
    return bits << unused >> unused;
  }
  [[nodiscard]] uint64_t integer(int rank, size_t index) const {
    const uint64_t h = exact_hash(seed_, static_cast<uint64_t>(rank), index);
    switch (op_) {
      case Op::prod:
        return wrapped(h | 1);
      case Op::premul_sum:
        return h >> 33 & 31;  // four times that still fits an i8
      case Op::sum:
      case Op::min:
      case Op::max:
      case Op::avg:
        break;
    }
    return wrapped(h);
  }

  [[nodiscard]] uint64_t input(int rank, size_t index) const {
    return is_float(type_) ? float_bits(type_, real(rank, index)) : integer(rank, index);
  }
  [[nodiscard]] uint64_t result(size_t index) const {
    return is_float(type_) ? float_bits(type_, real_result(index)) : integer_result(index);
  }

  [[nodiscard]] double real_result(size_t index) const {
    double all = real(0, index) * (op_ == Op::premul_sum ? premul_factor(0) : 1);
    for (int rank = 1; rank < ranks_; ++rank) {
      const double x = real(rank, index);
      switch (op_) {
        case Op::sum:
        case Op::avg:
          all += x;
          break;
        case Op::premul_sum:
          all += x * premul_factor(rank);
          break;
        case Op::prod:
          all *= x;
          break;
        case Op::min:
          all = std::min(all, x);
          break;
        case Op::max:
          all = std::max(all, x);
          break;
      }
    }
    return op_ == Op::avg ? all / ranks_ : all;
  }
  [[nodiscard]] uint64_t integer_result(size_t index) const {
    uint64_t all = integer(0, index);
    const auto less = [this](uint64_t a, uint64_t b) {
      return is_signed() ? static_cast<int64_t>(a) < static_cast<int64_t>(b) : a < b;
    };
    for (int rank = 1; rank < ranks_; ++rank) {
      const uint64_t x = integer(rank, index);
      switch (op_) {
        case Op::sum:
        case Op::avg:
          all += x;
          break;
        case Op::premul_sum:
          all += x * static_cast<uint64_t>(premul_factor(rank));
          break;
        case Op::prod:
          all *= x;
          break;
        case Op::min:
          all = less(x, all) ? x : all;
          break;
        case Op::max:
          all = less(all, x) ? x : all;
          break;
      }
    }
    all = wrapped(all);
    if (op_ != Op::avg) return all;
    if (is_signed()) return static_cast<uint64_t>(static_cast<int64_t>(all) / ranks_);
    return all / static_cast<uint64_t>(ranks_);
  }

  uint64_t seed_;
  int ranks_;
  DType type_;
  Op op_;
  int64_t span_ = 1, unit_ = 1, stride_ = 1;
  bool shared_ = false;
};

// Hashed bits for what is only moved: elements [first, first + count) of rank's data.
inline void fill_bits(void* out, DType type, uint64_t seed, int rank, size_t first, size_t count) {
  const size_t bytes = size_of(type);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = exact_hash(seed, static_cast<uint64_t>(rank), first + i);
    std::memcpy(static_cast<char*>(out) + i * bytes, &bits, bytes);
  }
}
inline size_t wrong_bits(const void* got, DType type, uint64_t seed, int rank, size_t first,
                         size_t count) {
  const size_t bytes = size_of(type);
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = exact_hash(seed, static_cast<uint64_t>(rank), first + i);
    wrong += std::memcmp(static_cast<const char*>(got) + i * bytes, &bits, bytes) != 0;
  }
  return wrong;
}

}  // namespace ringfold::test
