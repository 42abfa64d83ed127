// Elements for tests of arithmetic: hashed bit patterns with the special values well represented.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "ringfold/types.h"

namespace ringfold::test {

// splitmix64: one well mixed word for every index.
inline uint64_t hashed(uint64_t seed, uint64_t index) {
  uint64_t x = seed * 0x9e3779b97f4a7c15 + (index + 1) * 0xd1b54a32d192ed03;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Zeros, ones, the least subnormal, the largest numbers, infinity, NaN; or the ends of an integer.
inline std::vector<uint64_t> special_bits(DType type) {
  const int bits = static_cast<int>(size_of(type)) * 8;
  const uint64_t sign = uint64_t{1} << (bits - 1), all = sign | (sign - 1);
  std::vector<uint64_t> special = {0, 1, sign, all, sign - 1, sign | 1};
  switch (type) {
    case DType::f16:
      special.insert(special.end(), {0x3c00, 0x7bff, 0x7c00, 0xfc00, 0x7d00});
      break;
    case DType::bf16:
      special.insert(special.end(), {0x3f80, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7f81, 0xffc0});
      break;
    case DType::f8e4m3:
      special.insert(special.end(), {0x38, 0x7e, 0xfe});
      break;
    case DType::f8e5m2:
      special.insert(special.end(), {0x3c, 0x7b, 0xfb, 0x7c, 0xfc, 0x7d});
      break;
    case DType::f32:
      special.insert(special.end(), {0x3f800000, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7f800001});
      break;
    case DType::f64:
      special.insert(special.end(), {0x3ff0000000000000, 0x7fefffffffffffff, 0x7ff0000000000000,
                                     0xfff0000000000000, 0x7ff0000000000001});
      break;
    case DType::i8:
    case DType::u8:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64:
      break;
  }
  return special;
}

// Writes `count` elements, a quarter of them special.
inline void fill_hashed(DType type, void* out, size_t count, uint64_t seed) {
  const std::vector<uint64_t> special = special_bits(type);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t word = hashed(seed, i);
    const uint64_t bits = word % 4 == 0 ? special[(word >> 8) % special.size()] : word >> 8;
    const uint64_t element = word % 4 != 0 && size_of(type) == 8 ? word : bits;
    std::memcpy(static_cast<std::byte*>(out) + i * size_of(type), &element, size_of(type));
  }
}

}  // namespace ringfold::test
