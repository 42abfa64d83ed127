// What a build without CUDA knows of device memory: nothing.
#include "lib/cuda/path.h"

namespace ringfold::cuda {
namespace {

Status no_cuda() {
  return {Code::unsupported, "this library was built without CUDA"};
}

}  // namespace

void prepare() {}

Status usable() {
  return no_cuda();
}

bool is_device_memory(const void*) {
  return false;
}

Result<std::unique_ptr<Compute>> make_compute(const DeviceCall&, std::shared_ptr<Path>&) {
  return no_cuda();
}

Status enqueue_copy(const void*, void*, size_t, DType, double, Stream) {
  return no_cuda();
}

Result<double> wait_for_factor(const void*, DType, Stream) {
  return no_cuda();
}

Status move(const void*, Stream, void*, Stream, size_t, DType) {
  return no_cuda();
}

bool is_captured(Stream) {
  return false;
}

Status record(const DeviceCall&, std::unique_ptr<Replayed>) {
  return no_cuda();
}

Status can_launch_workers() {
  return {};
}

Status launch_workers() {
  return {};
}

}  // namespace ringfold::cuda
