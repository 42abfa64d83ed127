// What a build without CUDA knows of device memory: nothing.
#include "lib/cuda/path.h"
#include "lib/cuda/pool.h"

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

Status has_device() {
  return no_cuda();
}

Carried::Carried() = default;

void Carried::enter() const {}

Path::~Path() = default;

Path::Path(std::shared_ptr<Pool> pool, int at_once)
    : pool_(std::move(pool)), device_(pool_->device()), at_once_(at_once) {}

Status Path::reserve(size_t) {
  return no_cuda();
}

Pool::~Pool() = default;

Result<std::shared_ptr<Pool>> Pool::make() {
  return no_cuda();
}

Result<const std::byte*> Pool::reach(const Offer&) {
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

Result<std::shared_ptr<Path>> path_of_captured(const DeviceCall&, const std::shared_ptr<Path>&) {
  return no_cuda();
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): where there is CUDA it is kept
Status record(const DeviceCall&, std::shared_ptr<Path>, std::unique_ptr<Replayed>) {
  return no_cuda();
}

Status can_launch_workers() {
  return {};
}

Status launch_workers() {
  return {};
}

}  // namespace ringfold::cuda
