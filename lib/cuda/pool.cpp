#include "lib/cuda/pool.h"

#include <fmt/core.h>

#include <bit>
#include <cstring>

#include "lib/base/base.h"
#include "lib/cuda/compute_slots.h"
#include "lib/cuda/device.h"

namespace ringfold::cuda {
namespace {

// Of one communicator, beyond the slots of its own calls: for those captured in graphs.
constexpr size_t kForCaptured = size_t{32} << 20;

size_t pool_bytes() {
  return Path::kAtOnce * SlotCompute::slots_bytes(kMaxPieceBytes, MemoryKind::cuda) + kForCaptured;
}

CUdeviceptr address(const std::byte* memory) {
  return reinterpret_cast<CUdeviceptr>(memory);
}

CUipcMemHandle handle_of(const std::array<char, 64>& bytes) {
  static_assert(sizeof(CUipcMemHandle) == sizeof(bytes));
  CUipcMemHandle handle;
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  return handle;
}

// Ranks that give the same number share this copy of the library, and its address space.
uint64_t this_library() {
  static const char kHere = 0;
  return reinterpret_cast<uintptr_t>(&kHere);
}

}  // namespace

Result<std::shared_ptr<Pool>> Pool::make() {
  if (!driver().ok()) return driver().status();
  CUcontext context = nullptr;
  Status status = check(call().cuCtxGetCurrent(&context), "the current CUDA context");
  if (!status.ok()) return status;
  if (context == nullptr) return Status(Code::unsupported, "no CUDA context is current");
  const auto device = Device::of(context);
  if (!device.ok()) return device.status();
  const auto memory = (*device)->take_shared(pool_bytes());
  if (!memory.ok()) return memory.status();
  std::shared_ptr<Pool> pool(new Pool(**device, *memory));
  pool->describe();
  return pool;
}

Pool::Pool(Device& device, std::byte* memory) : device_(device), memory_(memory) {}

Pool::~Pool() {
  for (const auto& handle : opened_) device_.close(handle_of(handle));
  device_.give_shared(memory_);
}

void Pool::describe() {
  offer_.begin = reinterpret_cast<uintptr_t>(memory_);
  offer_.bytes = pool_bytes();
  offer_.process = process_number();
  offer_.library = this_library();
  offer_.context = reinterpret_cast<uintptr_t>(device_.context());
  const InContext in(device_.context());
  CUdevice number = -1;
  call().cuCtxGetDevice(&number);
  offer_.device = number;
  CUdeviceptr base = 0;
  size_t bytes = 0;
  CUipcMemHandle handle{};
  CUresult result = call().cuMemGetAddressRange(&base, &bytes, address(memory_));
  if (result == CUDA_SUCCESS) result = call().cuIpcGetMemHandle(&handle, base);
  offer_.exported = result == CUDA_SUCCESS ? 1 : 0;
  if (Status status = check(result, "exporting device memory"); !status.ok())
    std::strncpy(offer_.why.data(), status.message().c_str(), offer_.why.size() - 1);
  offer_.offset = address(memory_) - base;
  std::memcpy(offer_.handle.data(), &handle, sizeof(handle));
}

Result<const std::byte*> Pool::reach(const Offer& theirs) {
  if (theirs.bytes == 0) return Status(Code::unsupported, theirs.why.data());
  if (theirs.process == offer_.process && theirs.library == offer_.library) {
    if (Status status = allow_peer(theirs); !status.ok()) return status;
    return std::bit_cast<const std::byte*>(theirs.begin);
  }
  if (theirs.exported == 0) return Status(Code::unsupported, theirs.why.data());
  const auto memory = device_.open(handle_of(theirs.handle));
  if (!memory.ok()) return memory.status();
  const std::lock_guard guard(lock_);
  opened_.push_back(theirs.handle);
  return *memory + theirs.offset;
}

// Within this process: the same context, or another device that this one may access.
Status Pool::allow_peer(const Offer& theirs) {
  if (theirs.context == offer_.context) return {};
  if (theirs.device == offer_.device)
    return {Code::unsupported, "two CUDA contexts of one device in one process"};
  const InContext in(device_.context());
  int can = 0;
  const CUresult asked = call().cuDeviceCanAccessPeer(&can, offer_.device, theirs.device);
  if (asked != CUDA_SUCCESS || can == 0)
    return {Code::unsupported,
            fmt::format("CUDA device {} cannot access device {}", offer_.device, theirs.device)};
  const CUresult result = call().cuCtxEnablePeerAccess(std::bit_cast<CUcontext>(theirs.context), 0);
  if (result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) return {};
  return check(result, "enabling access to another device", Code::unsupported);
}

std::byte* Pool::take(size_t bytes) {
  const std::lock_guard guard(lock_);
  if (bytes > offer_.bytes - used_) return nullptr;
  std::byte* const taken = memory_ + used_;
  used_ += bytes;
  return taken;
}

}  // namespace ringfold::cuda
