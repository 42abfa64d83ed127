// What kind of memory a pointer means, asked of the CUDA driver that the application has loaded.
// This library needs no driver: without one all memory is host memory.
#include <dlfcn.h>

#include "lib/adapters/nccl_state.h"

namespace ringfold::nccl {
namespace {

// The functions of the driver that tell, with its own numbers.
struct Driver {
  int (*pointer_attribute)(void* out, int attribute, unsigned long long pointer) = nullptr;
  int (*current_context)(void** context) = nullptr;
  int (*context_device)(int* device) = nullptr;
};
constexpr int kMemoryType = 2, kIsManaged = 8;  // CU_POINTER_ATTRIBUTE_*
constexpr unsigned kDeviceMemory = 2;           // CU_MEMORYTYPE_DEVICE

template <class Function>
void look_up(void* library, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
}

// Null as long as the application has not loaded it.
const Driver* driver() {
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  static const Driver kLoaded = [library] {
    Driver found;
    look_up(library, "cuPointerGetAttribute", &found.pointer_attribute);
    look_up(library, "cuCtxGetCurrent", &found.current_context);
    look_up(library, "cuCtxGetDevice", &found.context_device);
    return found;
  }();
  dlclose(library);  // our reference; the application keeps its own
  return kLoaded.pointer_attribute != nullptr ? &kLoaded : nullptr;
}

}  // namespace

Status usable_memory(const void* pointer) {
  const Driver* const cuda = pointer != nullptr ? driver() : nullptr;
  if (cuda == nullptr) return {};
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  unsigned type = 0, managed = 0;
  // The driver knows nothing of plain host memory: an error, then.
  if (cuda->pointer_attribute(&type, kMemoryType, address) != 0 || type != kDeviceMemory) return {};
  if (cuda->pointer_attribute(&managed, kIsManaged, address) == 0 && managed != 0) return {};
  return usage(fmt::format(
      "{} is device memory: this version of ringfold works on host memory only", pointer));
}

bool has_context() {
  const Driver* const cuda = driver();
  void* context = nullptr;
  return cuda != nullptr && cuda->current_context != nullptr &&
         cuda->current_context(&context) == 0 && context != nullptr;
}

int current_device() {
  int device = 0;
  const Driver* const cuda = has_context() ? driver() : nullptr;
  if (cuda == nullptr || cuda->context_device == nullptr || cuda->context_device(&device) != 0)
    return 0;
  return device;
}

}  // namespace ringfold::nccl
