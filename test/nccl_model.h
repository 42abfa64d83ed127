// What NCCL computes, modelled in plain C++ without any code of the library: the order in which its
// ring adds (one channel, Simple protocol), where it cuts chunks, and its rounding at every hop.
//
//   order    chunk c of a loop is first sent by rank c+1; each next rank adds its own; rank c ends
//   it. chunks   loops over N * 2 MiB; in the last, shorter one a chunk is its N-th part, rounded
//   up to 16
//            bytes.
//   hops     f16, bf16, f32, f64 round the exact result of one operation; fp8 goes through f16 and
//            saturates; integers wrap.
//   avg      floats: every input times T(1/N), rounded, before it is added. Integers: the sum
//   divided.
//
// Not modelled: NaN (its payload, and that NCCL's min and max ignore it), and -0 under min and max.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ringfold/types.h"

namespace ringfold::test {

// A binary float of `bits` bits. Values are doubles, which hold all of them exactly.
struct SmallFormat {
  int bits, mantissa, bias;
  bool infinity;   // its highest exponent is for infinity and NaN
  bool saturates;  // too large becomes the largest finite number
  double largest;

  [[nodiscard]] double decode(uint32_t code) const {
    const bool negative = (code >> (bits - 1)) != 0;
    const auto exponent = static_cast<int>((code & ((1u << (bits - 1)) - 1)) >> mantissa);
    const double fraction = code & ((1u << mantissa) - 1);
    double value = exponent == 0
                       ? std::ldexp(fraction, 1 - bias - mantissa)
                       : std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa);
    if (infinity && exponent == (1 << (bits - 1 - mantissa)) - 1) value = HUGE_VAL;
    return negative ? -value : value;
  }
  // To the nearest, ties to even; NaN does not occur.
  [[nodiscard]] double round(double x) const {
    if (x == 0 || std::isinf(x)) return std::isinf(x) && saturates ? std::copysign(largest, x) : x;
    int exponent = 0;
    std::frexp(x, &exponent);
    const int last = std::max(exponent - 1, 1 - bias) - mantissa;  // the place of the last bit
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -last)), last);
    if (std::abs(rounded) <= largest) return rounded;
    return std::copysign(saturates ? largest : HUGE_VAL, x);
  }
  [[nodiscard]] uint32_t encode(double x) const {  // x is one of its values
    const uint32_t sign = std::signbit(x) ? 1u << (bits - 1) : 0;
    x = std::abs(x);
    if (std::isinf(x)) return sign | ((1u << (bits - 1)) - (1u << mantissa));
    if (x == 0) return sign;
    int exponent = 0;
    std::frexp(x, &exponent);
    const int field = std::max(exponent - 1 + bias, 0);
    const int last = std::max(exponent - 1, 1 - bias) - mantissa;
    const auto significand = static_cast<uint32_t>(std::ldexp(x, -last));
    if (field == 0) return sign | significand;
    return sign | ((static_cast<uint32_t>(field) << mantissa) + significand - (1u << mantissa));
  }
};
inline constexpr SmallFormat kModelF16{16, 10, 15, true, false, 65504};
inline constexpr SmallFormat kModelBF16{16, 7, 127, true, false, 0x1.fep127};
inline constexpr SmallFormat kModelE4M3{8, 3, 7, false, true, 448};
inline constexpr SmallFormat kModelE5M2{8, 2, 15, true, true, 57344};

// One element in the arithmetic of its type: integers as wrapped words, floats as doubles.
struct ModelValue {
  uint64_t word = 0;
  double real = 0;
};

class NcclModel {
 public:
  NcclModel(DType type, Op op, int ranks) : type_(type), op_(op), ranks_(ranks) {}

  // `inputs`: of every rank, as bytes. The bytes of the result of an all-reduce, of every
  // `stride`-th element.
  [[nodiscard]] std::vector<unsigned char> all_reduce(
      const std::vector<std::vector<unsigned char>>& inputs, const std::vector<double>& factors,
      size_t count, size_t stride = 1) const {
    std::vector<unsigned char> out((count + stride - 1) / stride * size_of(type_));
    for (size_t i = 0; i < count; i += stride)
      put(&out, i / stride, element(inputs, factors, i, last_rank(i, count)));
    return out;
  }
  // The same with rank `last` ending every element: a reduce to it, or its part of a
  // reduce-scatter.
  [[nodiscard]] std::vector<unsigned char> reduce(
      const std::vector<std::vector<unsigned char>>& inputs, const std::vector<double>& factors,
      size_t begin, size_t count, int last) const {
    std::vector<unsigned char> out(count * size_of(type_));
    for (size_t i = 0; i < count; ++i) put(&out, i, element(inputs, factors, begin + i, last));
    return out;
  }
  // The rank that adds element i last: the number of its chunk.
  [[nodiscard]] int last_rank(size_t i, size_t count) const {
    const auto n = static_cast<size_t>(ranks_);
    size_t chunk = (size_t{2} << 20) / size_of(type_);
    const size_t loop = n * chunk, begin = i / loop * loop, left = count - begin;
    if (left < loop) {
      const size_t grain = 16 / size_of(type_), even = (left + n - 1) / n;
      chunk = (even + grain - 1) / grain * grain;
    }
    return static_cast<int>((i - begin) / chunk);
  }

 private:
  [[nodiscard]] ModelValue element(const std::vector<std::vector<unsigned char>>& inputs,
                                   const std::vector<double>& factors, size_t i, int last) const {
    ModelValue sum;
    for (int k = 1; k <= ranks_; ++k) {
      const auto rank = static_cast<size_t>((last + k) % ranks_);
      const ModelValue own = scaled(get(inputs[rank], i), factors[rank]);
      sum = k == 1 ? own : hop(sum, own);
    }
    if (op_ != Op::avg || is_float(type_)) return sum;
    // Divided in the type, as it is signed or not.
    const auto n = static_cast<uint64_t>(ranks_);
    const bool negative = is_signed() && static_cast<int64_t>(sum.word) < 0;
    sum.word = negative ? 0 - (0 - sum.word) / n : sum.word / n;
    return wrapped(sum);
  }
  [[nodiscard]] ModelValue scaled(ModelValue x, double factor) const {
    if (op_ == Op::avg && is_float(type_)) factor = rounded(static_cast<float>(1.0 / ranks_));
    if (op_ == Op::avg && type_ == DType::f64) factor = 1.0 / ranks_;
    if (op_ != Op::premul_sum && !(op_ == Op::avg && is_float(type_))) return x;
    if (is_float(type_)) return {0, product(x.real, factor)};
    return wrapped({x.word * static_cast<uint64_t>(static_cast<int64_t>(factor)), 0});
  }
  [[nodiscard]] ModelValue hop(ModelValue a, ModelValue b) const {
    switch (op_) {
      case Op::sum:
      case Op::avg:
      case Op::premul_sum:
        return is_float(type_) ? ModelValue{0, sum(a.real, b.real)} : wrapped({a.word + b.word, 0});
      case Op::prod:
        return is_float(type_) ? ModelValue{0, product(a.real, b.real)}
                               : wrapped({a.word * b.word, 0});
      case Op::min:
        return less(a, b) ? a : b;
      case Op::max:
        return less(a, b) ? b : a;
    }
    return a;
  }
  [[nodiscard]] bool less(ModelValue a, ModelValue b) const {
    if (is_float(type_)) return a.real < b.real;
    if (is_signed()) return static_cast<int64_t>(a.word) < static_cast<int64_t>(b.word);
    return a.word < b.word;
  }
  [[nodiscard]] double sum(double a, double b) const {
    if (type_ == DType::f32) return static_cast<float>(a) + static_cast<float>(b);
    return rounded(a + b);  // of small floats exact enough in f64 to be rounded again
  }
  [[nodiscard]] double product(double a, double b) const {
    if (type_ == DType::f32) return static_cast<float>(a) * static_cast<float>(b);
    return rounded(a * b);
  }
  [[nodiscard]] double rounded(double x) const {
    switch (type_) {
      case DType::f16:
        return kModelF16.round(x);
      case DType::bf16:
        return kModelBF16.round(x);
      case DType::f8e4m3:
        return kModelE4M3.round(kModelF16.round(x));
      case DType::f8e5m2:
        return kModelE5M2.round(kModelF16.round(x));
      case DType::f32:
        return static_cast<float>(x);
      case DType::f64:
      case DType::i8:
      case DType::u8:
      case DType::i32:
      case DType::u32:
      case DType::i64:
      case DType::u64:
        break;
    }
    return x;
  }

  [[nodiscard]] bool is_signed() const {
    return type_ == DType::i8 || type_ == DType::i32 || type_ == DType::i64;
  }
  // A word cut to the type and extended again.
  [[nodiscard]] ModelValue wrapped(ModelValue x) const {
    const int gone = 64 - static_cast<int>(size_of(type_)) * 8;
    x.word <<= gone;
    x.word =
        is_signed() ? static_cast<uint64_t>(static_cast<int64_t>(x.word) >> gone) : x.word >> gone;
    return x;
  }
  [[nodiscard]] const SmallFormat* format() const {
    if (type_ == DType::f16) return &kModelF16;
    if (type_ == DType::bf16) return &kModelBF16;
    if (type_ == DType::f8e4m3) return &kModelE4M3;
    return type_ == DType::f8e5m2 ? &kModelE5M2 : nullptr;
  }
  [[nodiscard]] ModelValue get(const std::vector<unsigned char>& bytes, size_t i) const {
    uint64_t raw = 0;
    std::memcpy(&raw, bytes.data() + i * size_of(type_), size_of(type_));
    if (format() != nullptr) return {0, format()->decode(static_cast<uint32_t>(raw))};
    if (type_ == DType::f64) return {0, __builtin_bit_cast(double, raw)};
    if (type_ == DType::f32) return {0, __builtin_bit_cast(float, static_cast<uint32_t>(raw))};
    return wrapped({raw, 0});
  }
  void put(std::vector<unsigned char>* bytes, size_t i, ModelValue x) const {
    uint64_t raw = x.word;
    if (format() != nullptr)
      raw = format()->encode(x.real);
    else if (type_ == DType::f64)
      raw = __builtin_bit_cast(uint64_t, x.real);
    else if (type_ == DType::f32)
      raw = __builtin_bit_cast(uint32_t, static_cast<float>(x.real));
    std::memcpy(bytes->data() + i * size_of(type_), &raw, size_of(type_));
  }

  const DType type_;
  const Op op_;
  const int ranks_;
};

}  // namespace ringfold::test
