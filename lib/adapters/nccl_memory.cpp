// What kind of memory a pointer means, and the little that this library itself asks of CUDA: all of
// the driver that the application has loaded. Without one all memory is host memory.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

#include "lib/adapters/nccl_state.h"
#include "lib/cuda/path.h"

namespace ringfold::nccl {
namespace {

// The functions used here, with the driver's own numbers: this builds without CUDA, too, so that a
// library without it knows what it must refuse.
struct Driver {
  int (*pointer_attribute)(void* out, int attribute, unsigned long long pointer) = nullptr;
  int (*current_context)(void** context) = nullptr;
  int (*push_context)(void* context) = nullptr;
  int (*pop_context)(void** context) = nullptr;
  int (*context_device)(int* device) = nullptr;
  int (*device_count)(int* devices) = nullptr;
  int (*retain_context)(void** context, int device) = nullptr;
  int (*allocate)(unsigned long long* memory, size_t bytes) = nullptr;
  int (*release)(unsigned long long memory) = nullptr;
};
constexpr int kMemoryType = 2, kIsManaged = 8;  // CU_POINTER_ATTRIBUTE_*
constexpr unsigned kDeviceMemory = 2;           // CU_MEMORYTYPE_DEVICE

// All of them, or none.
std::optional<Driver> look_up(void* library) {
  Driver found;
  bool all = true;
  const auto get = [&](const char* name, auto* out) {
    *out = reinterpret_cast<std::remove_pointer_t<decltype(out)>>(dlsym(library, name));
    all &= *out != nullptr;
  };
  get("cuPointerGetAttribute", &found.pointer_attribute);
  get("cuCtxGetCurrent", &found.current_context);
  get("cuCtxPushCurrent_v2", &found.push_context);
  get("cuCtxPopCurrent_v2", &found.pop_context);
  get("cuCtxGetDevice", &found.context_device);
  get("cuDeviceGetCount", &found.device_count);
  get("cuDevicePrimaryCtxRetain", &found.retain_context);
  get("cuMemAlloc_v2", &found.allocate);
  get("cuMemFree_v2", &found.release);
  return all ? std::optional(found) : std::nullopt;
}

// Null as long as the application has not loaded it.
const Driver* driver() {
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  static const std::optional<Driver> kLoaded = look_up(library);
  dlclose(library);  // our reference; the application keeps its own
  return kLoaded ? &*kLoaded : nullptr;
}

enum class Kind : uint8_t {
  none,    // null
  host,    // CUDA does not know it
  pinned,  // host memory that kernels can use
  managed,
  device,
};

Kind kind_of(const void* pointer) {
  if (pointer == nullptr) return Kind::none;
  const Driver* const cuda = driver();
  if (cuda == nullptr) return Kind::host;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  unsigned type = 0, managed = 0;
  // The driver knows nothing of plain host memory: an error, then.
  if (cuda->pointer_attribute(&type, kMemoryType, address) != 0) return Kind::host;
  if (cuda->pointer_attribute(&managed, kIsManaged, address) == 0 && managed != 0)
    return Kind::managed;
  return type == kDeviceMemory ? Kind::device : Kind::pinned;
}

void* current_context() {
  const Driver* const cuda = driver();
  void* context = nullptr;
  return cuda != nullptr && cuda->current_context(&context) == 0 ? context : nullptr;
}

Status cuda_error(const std::string& what, int error) {
  return {Code::system, fmt::format("{}: CUDA error {}", what, error)};
}

Status unusable(const void* pointer, const Status& why) {
  return usage(fmt::format("{} is device memory, which ringfold cannot use here: {}", pointer,
                           why.message()));
}

// Memory given out by ncclMemAlloc, so that only such memory is freed.
struct Allocation {
  size_t bytes;
  Place place;  // of device memory; no context: of the host
};
struct Allocations {
  std::mutex lock;
  std::map<void*, Allocation> live;
};
Allocations& allocations() {
  static auto& all = *new Allocations;  // never destroyed
  return all;
}
constexpr size_t kPage = 4096;

Result<void*> allocate_on_device(size_t bytes) {
  if (const Status cuda = cuda::usable(); !cuda.ok()) return usage(cuda.message());
  unsigned long long memory = 0;
  const int result = driver()->allocate(&memory, std::max<size_t>(bytes, 1));
  if (result == 0) return reinterpret_cast<void*>(memory);  // NOLINT(performance-no-int-to-ptr)
  return cuda_error(fmt::format("ncclMemAlloc: {} bytes of device memory", bytes), result);
}

Result<void*> allocate_on_host(size_t bytes) {
  if (bytes > static_cast<size_t>(PTRDIFF_MAX) - kPage)
    return invalid(fmt::format("ncclMemAlloc: {} bytes are more than memory holds", bytes));
  const size_t pages = std::max<size_t>(1, (bytes + kPage - 1) / kPage);
  void* const memory = std::aligned_alloc(kPage, pages * kPage);
  if (memory != nullptr) return memory;
  return Status(Code::system, fmt::format("ncclMemAlloc: no memory for {} bytes", bytes));
}

}  // namespace

Status usable_memory(const void* pointer) {
  if (kind_of(pointer) != Kind::device) return {};
  const Status cuda = cuda::usable();
  return cuda.ok() ? cuda : unusable(pointer, cuda);
}

bool is_for_kernels(const void* pointer) {
  return kind_of(pointer) > Kind::host;
}

bool is_for_host(const void* pointer) {
  return kind_of(pointer) != Kind::device;
}

Result<bool> is_for_device(const void* send, const void* recv, cudaStream_t stream) {
  const Kind sent = kind_of(send), received = kind_of(recv);
  const bool for_kernels = std::max(sent, received) > Kind::host;
  const bool for_host = sent == Kind::host || received == Kind::host;
  const void* const on_host = sent == Kind::host ? send : recv;
  if (for_kernels) {
    if (const Status cuda = cuda::usable(); !cuda.ok())
      return unusable(sent > Kind::host ? send : recv, cuda);
    if (!for_host) return true;
    return invalid(fmt::format(
        "sendbuff {} and recvbuff {} cannot be used together: {} is host memory that CUDA does not "
        "know; pin it (cudaHostRegister), or keep both on the host",
        send, recv, on_host));
  }
  if (!for_host) return current_context() != nullptr && cuda::usable().ok();
  if (stream != nullptr && current_context() != nullptr)
    return invalid(
        fmt::format("{} is host memory that CUDA does not know, so no stream can use it: pin it "
                    "(cudaHostRegister), or give stream 0 for a call that returns when it is done",
                    on_host));
  return false;
}

// ---- places -----------------------------------------------------------------------------------

Place current_place() {
  Place place;
  place.context = current_context();
  const Driver* const cuda = driver();
  int device = 0;
  if (place.context != nullptr && cuda->context_device(&device) == 0) place.device = device;
  return place;
}

Result<Place> place_of(int device) {
  Place place{device, nullptr};
  const Driver* const cuda = driver();
  int devices = 0;
  if (cuda == nullptr || cuda->device_count(&devices) != 0)
    return place;  // CUDA is not in use: the numbers are the caller's own affair
  if (device < 0 || device >= devices)
    return invalid(fmt::format("device {}: this machine has {}", device, devices));
  // Kept for the life of the process.
  const int result = cuda->retain_context(&place.context, device);
  return result == 0 ? Result<Place>(place)
                     : cuda_error(fmt::format("the context of device {}", device), result);
}

InPlace::InPlace(const Place& place) {
  if (place.context == nullptr || place.context == current_context()) return;
  pushed_ = driver()->push_context(place.context) == 0;
}

InPlace::~InPlace() {
  void* context = nullptr;
  if (pushed_) (void)driver()->pop_context(&context);
}

// ---- ncclMemAlloc -----------------------------------------------------------------------------

Status allocate(void** out, size_t bytes) {
  if (out == nullptr) return null_argument("ptr");
  *out = nullptr;
  const Place place = current_place();
  const auto memory =
      place.context != nullptr ? allocate_on_device(bytes) : allocate_on_host(bytes);
  if (!memory.ok()) return memory.status();
  Allocations& all = allocations();
  const std::lock_guard guard(all.lock);
  all.live[*memory] = {bytes, place};
  *out = *memory;
  return {};
}

Status release(void* memory) {
  if (memory == nullptr) return {};
  Allocations& all = allocations();
  Place place;
  {
    const std::lock_guard guard(all.lock);
    const auto found = all.live.find(memory);
    if (found == all.live.end())
      return invalid(
          fmt::format("ncclMemFree: {} is not from ncclMemAlloc, or free already", memory));
    place = found->second.place;
    all.live.erase(found);
  }
  if (place.context == nullptr) {
    std::free(memory);
    return {};
  }
  const InPlace in(place);
  const int result = driver()->release(reinterpret_cast<uintptr_t>(memory));
  return result == 0 ? Status() : cuda_error(fmt::format("ncclMemFree: {}", memory), result);
}

}  // namespace ringfold::nccl
