// The worker kernel, an entry for each element type: stream gate and compute of the collectives on
// device memory. See worker.h for what it does and serve.h for how.
#include "kernels/entries.h"
#include "kernels/serve.h"

namespace ringfold {
namespace {

struct DeviceBlock {
  __device__ unsigned thread() const { return threadIdx.x; }
  __device__ unsigned threads() const { return blockDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ Command reach(const Command& command) const { return command; }
  __device__ void pause() const {}  // a look at host memory takes long enough
};

}  // namespace

// Two blocks to a multiprocessor at least: they shall find room beside the user's kernels.
#define RINGFOLD_WORKER(name, Type)                                                         \
  extern "C" __global__ void __launch_bounds__(kWorkerThreads, 2)                           \
      ringfold_worker_##name(Lane* lanes) {                                                 \
    __shared__ alignas(16) unsigned char memory[sizeof(ServeShared)];                       \
    serve<Type>(DeviceBlock(), lanes[blockIdx.x], *reinterpret_cast<ServeShared*>(memory)); \
  }
RINGFOLD_KERNEL_TYPES(RINGFOLD_WORKER)

}  // namespace ringfold
