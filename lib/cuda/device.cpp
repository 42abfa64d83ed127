#include "lib/cuda/device.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>

#include "kernels/images.h"
#include "kernels/words.h"
#include "lib/base/base.h"

namespace ringfold::cuda {
namespace {

constexpr size_t kGatesAtOnce = 256;
constexpr size_t kPinnedAtOnce = size_t{64} << 20;
// A handle exports the whole of this, so that nobody else's memory goes with it.
constexpr size_t kSharedUnit = size_t{2} << 20;

std::mutex devices_lock;
std::map<CUcontext, std::unique_ptr<Device>> devices;  // guarded by it

Result<void*> allocate_pinned(size_t bytes) {
  void* memory = nullptr;
  const CUresult result =
      call().cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  if (Status status = check(result, "pinned memory"); !status.ok()) return status;
  return memory;
}

// Whether all lanes have left what was launched: only then may they be launched again.
bool left(const Gate& gate) {
  for (size_t i = 0; i < gate.launches.size(); ++i)
    if (load_acquire(gate.lanes[i].left) != gate.launches[i]) return false;
  return true;
}

// While a graph is captured, allocations of others must not fail, nor spoil it.
class Relaxed {
 public:
  Relaxed() { call().cuThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { call().cuThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

std::string key_of(const CUipcMemHandle& handle) {
  return {handle.reserved, sizeof(handle.reserved)};
}

}  // namespace

InContext::InContext(CUcontext context) {
  CUcontext now = nullptr;
  if (call().cuCtxGetCurrent(&now) == CUDA_SUCCESS && now != context)
    pushed_ = call().cuCtxPushCurrent(context) == CUDA_SUCCESS;
}

InContext::~InContext() {
  if (pushed_) call().cuCtxPopCurrent(nullptr);
}

Result<Device*> Device::of(CUcontext context) {
  const std::lock_guard guard(devices_lock);
  auto& device = devices[context];
  if (!device) {
    const InContext in(context);
    const Relaxed relaxed;
    std::unique_ptr<Device> made(new Device(context));
    if (Status status = made->make_ready(); !status.ok()) return status;
    device = std::move(made);
  }
  return device.get();
}

Status Device::make_ready() {
  if (Status status = load(ringfold_worker_image, "worker", workers_); !status.ok()) return status;
  if (Status status = load(ringfold_reduce_image, "reduce", reduces_); !status.ok()) return status;
  if (Status status = add_gates(); !status.ok()) return status;
  return add_pinned(kPinnedAtOnce);
}

// Loads each kernel now: at its first launch that would wait for what runs.
Status Device::load(const void* image, const char* kind, Functions& functions) {
  CUmodule module = nullptr;
  if (Status status = check(call().cuModuleLoadData(&module, image), "loading the CUDA kernels",
                            Code::unsupported);
      !status.ok())
    return status;
  for (size_t type = 0; type < functions.size(); ++type) {
    const std::string name = fmt::format("ringfold_{}_{}", kind, kDTypeNames[type]);
    CUresult result = call().cuModuleGetFunction(&functions[type], module, name.c_str());
    if (result == CUDA_SUCCESS) result = call().cuFuncLoad(functions[type]);
    if (Status status = check(result, name.c_str(), Code::unsupported); !status.ok()) return status;
  }
  return {};
}

Status Device::add_gates() {
  const auto memory = allocate_pinned(kGatesAtOnce * kMaxLanes * sizeof(Lane));
  if (!memory.ok()) return memory.status();
  auto* const lanes = static_cast<Lane*>(*memory);
  for (size_t i = 0; i < kGatesAtOnce; ++i) {
    auto gate = std::make_unique<Gate>();
    gate->lanes = lanes + i * kMaxLanes;
    for (int lane = 0; lane < kMaxLanes; ++lane) new (gate->lanes + lane) Lane();
    free_gates_.push_back(gate.get());
    gates_.push_back(std::move(gate));
  }
  return {};
}

Result<Gate*> Device::take_gate() {
  const std::lock_guard guard(lock_);
  auto found = std::ranges::find_if(free_gates_, [](const Gate* gate) { return left(*gate); });
  if (found == free_gates_.end()) {
    const Relaxed relaxed;
    if (Status status = add_gates(); !status.ok()) return status;
    found = std::prev(free_gates_.end());
  }
  Gate* const gate = *found;
  *found = free_gates_.back();
  free_gates_.pop_back();
  for (std::byte* const memory : gate->kept) pinned_.give(memory);
  gate->kept.clear();
  return gate;
}

void Device::give_gate(Gate* gate) {
  const std::lock_guard guard(lock_);
  free_gates_.push_back(gate);
}

Result<CUstream> Device::take_stream() {
  const std::lock_guard guard(lock_);
  if (!free_streams_.empty()) {
    const CUstream stream = free_streams_.back();
    free_streams_.pop_back();
    return stream;
  }
  CUstream stream = nullptr;
  if (Status status =
          check(call().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "a CUDA stream");
      !status.ok())
    return status;
  return stream;
}

void Device::give_stream(CUstream stream) {
  const std::lock_guard guard(lock_);
  free_streams_.push_back(stream);
}

// ---- pinned memory ----------------------------------------------------------------------------

Status Device::add_pinned(size_t bytes) {
  const auto memory = allocate_pinned(bytes);
  if (!memory.ok()) return memory.status();
  pinned_.add(static_cast<std::byte*>(*memory), bytes);
  return {};
}

Result<std::byte*> Device::take_pinned(size_t bytes) {
  const std::lock_guard guard(lock_);
  if (std::byte* const found = pinned_.take(bytes)) return found;
  log_line(LogLevel::info, fmt::format("more pinned memory: {} bytes", bytes));
  const InContext in(context_);
  const Relaxed relaxed;
  if (Status status = add_pinned(std::max(bytes + kAlignment, kPinnedAtOnce)); !status.ok())
    return status;
  return pinned_.take(bytes);
}

void Device::give_pinned(std::byte* memory) {
  const std::lock_guard guard(lock_);
  pinned_.give(memory);
}

// ---- memory that others may map ---------------------------------------------------------------

Result<std::byte*> Device::take_shared(size_t bytes) {
  const std::lock_guard guard(lock_);
  if (std::byte* const found = shared_.take(bytes)) return found;
  const InContext in(context_);
  const Relaxed relaxed;
  const size_t chunk = (bytes + kSharedUnit - 1) / kSharedUnit * kSharedUnit;
  CUdeviceptr memory = 0;
  if (Status status = check(call().cuMemAlloc(&memory, chunk), "device memory"); !status.ok())
    return status;
  shared_.add(std::bit_cast<std::byte*>(memory), chunk);
  return shared_.take(bytes);
}

void Device::give_shared(std::byte* memory) {
  const std::lock_guard guard(lock_);
  shared_.give(memory);
}

Result<std::byte*> Device::open(const CUipcMemHandle& handle) {
  const std::lock_guard guard(lock_);
  const InContext in(context_);
  const Relaxed relaxed;
  Opened& opened = opened_[key_of(handle)];
  ++opened.users;
  std::erase_if(opened_, [](const auto& entry) {
    if (entry.second.users != 0) return false;
    call().cuIpcCloseMemHandle(reinterpret_cast<CUdeviceptr>(entry.second.memory));
    return true;
  });
  if (opened.memory == nullptr) {
    CUdeviceptr memory = 0;
    Status status =
        check(call().cuIpcOpenMemHandle(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
              "mapping another process's device memory", Code::unsupported);
    if (!status.ok()) {
      opened_.erase(key_of(handle));
      return status;
    }
    opened.memory = std::bit_cast<std::byte*>(memory);
  }
  return opened.memory;
}

void Device::close(const CUipcMemHandle& handle) {
  const std::lock_guard guard(lock_);
  --opened_.at(key_of(handle)).users;
}

void forget_devices() {
  const std::lock_guard guard(devices_lock);
  devices.clear();
}

}  // namespace ringfold::cuda
