// One reduction or copy as a kernel of its own, an entry for each element type: the grid shares it.
#include "kernels/entries.h"
#include "kernels/range.h"

namespace ringfold {

#define RINGFOLD_REDUCE(name, Type)                                                       \
  extern "C" __global__ void __launch_bounds__(kWorkerThreads, 2)                         \
      ringfold_reduce_##name(__grid_constant__ const Command command) {                   \
    const size_t thread = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;     \
    carry_out<Type>(command, Share{thread, static_cast<size_t>(gridDim.x) * blockDim.x}); \
  }
RINGFOLD_KERNEL_TYPES(RINGFOLD_REDUCE)

}  // namespace ringfold
