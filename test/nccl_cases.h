// The all-reduces that ours and the real NCCL do alike, each rank in a process of its own.
#pragma once

#include <string>
#include <vector>

#include "test/exact.h"
#include "test/nccl_inputs.h"

namespace ringfold::test {

enum class NcclInputs : uint8_t {
  exact,  // no order and no rounding shows
  rough,  // both show
};

struct NcclCase {
  DType type;
  Op op;
  size_t count;
};

// fp8 is reduced from Hopper on only.
inline std::vector<NcclCase> nccl_cases(bool fp8, bool large) {
  std::vector<NcclCase> cases;
  for (int type = 0; type < kDTypes; ++type) {
    const auto dtype = static_cast<DType>(type);
    if (size_of(dtype) == 1 && is_float(dtype) && !fp8) continue;
    for (int op = 0; op < kOps; ++op)
      for (const size_t count : {1, 20, 1000, 4099})
        cases.push_back({dtype, static_cast<Op>(op), count});
  }
  if (large)
    for (const DType type : {DType::f16, DType::bf16, DType::f32})  // several loops of NCCL's ring
      cases.push_back({type, Op::sum, (size_t{9} << 20) / size_of(type) + 77});
  return cases;
}

inline double nccl_factor(NcclInputs inputs, DType type, int rank) {
  return inputs == NcclInputs::exact ? premul_factor(rank) : nccl_factors(type, rank + 1).back();
}

// The input of one rank, as bytes.
inline std::vector<unsigned char> nccl_case_input(const NcclCase& c, NcclInputs inputs, int ranks,
                                                  int rank) {
  std::vector<unsigned char> bytes(c.count * size_of(c.type));
  if (inputs == NcclInputs::exact)
    Exact(11, ranks, c.type, c.op).fill(bytes.data(), rank, 0, c.count);
  else
    bytes = nccl_inputs(c.type, c.op, ranks, c.count, 5)[static_cast<size_t>(rank)];
  return bytes;
}

}  // namespace ringfold::test
