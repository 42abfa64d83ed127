#include "lib/cuda/driver.h"

#include <dlfcn.h>
#include <fmt/core.h>

#include <memory>
#include <mutex>

namespace ringfold::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kOldest = CUDA_VERSION / 1000 * 1000;  // of the CUDA major version built for

std::mutex lock;  // guards what follows
FindFunction replacement = nullptr;
Driver table;
std::unique_ptr<const Result<const Driver*>> answer;

void* find_in_library(const char* name) {
  // Never closed: the driver does not survive that.
  static void* const kOpened = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  return kOpened == nullptr ? nullptr : dlsym(kOpened, name);
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

Result<const Driver*> fill(FindFunction find) {
  if (find == find_in_library && find("cuInit") == nullptr) {
    const char* const why = dlerror();
    return Status(Code::unsupported, fmt::format("this machine has no CUDA driver ({})",
                                                 why == nullptr ? kLibrary : why));
  }
  // The version first: an old driver lacks functions, and shall be told by its age.
  using GetVersion = decltype(&::cuDriverGetVersion);
  const auto get_version = reinterpret_cast<GetVersion>(find("cuDriverGetVersion"));
  int version = 0;
  if (get_version == nullptr || get_version(&version) != CUDA_SUCCESS || version < kOldest)
    return Status(Code::unsupported,
                  fmt::format("the CUDA driver is for CUDA {}, but this library needs one for CUDA "
                              "{} or newer (driver 580): please update it",
                              version_text(version), version_text(kOldest)));
  const char* missing = nullptr;
  const auto get = [&](auto& function, const char* name) {
    void* const address = find(name);
    if (address == nullptr && missing == nullptr) missing = name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
#define RINGFOLD_DRIVER_STRING(name) #name
#define RINGFOLD_DRIVER_GET(name) get(table.name, RINGFOLD_DRIVER_STRING(name));
  RINGFOLD_DRIVER_FUNCTIONS(RINGFOLD_DRIVER_GET)
#undef RINGFOLD_DRIVER_GET
#undef RINGFOLD_DRIVER_STRING
  if (missing != nullptr)
    return Status(Code::unsupported, fmt::format("the CUDA driver (for CUDA {}) lacks {}",
                                                 version_text(version), missing));
  return &table;
}

}  // namespace

const Result<const Driver*>& driver() {
  const std::lock_guard guard(lock);
  if (!answer)
    answer = std::make_unique<const Result<const Driver*>>(
        fill(replacement != nullptr ? replacement : find_in_library));
  return *answer;
}

const Driver& call() {
  return **driver();
}

Status check(CUresult result, const char* what, Code code) {
  if (result == CUDA_SUCCESS) return {};
  const char* text = nullptr;
  if (call().cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr)
    text = "unknown error";
  return {code, fmt::format("{}: {} (CUDA error {})", what, text, static_cast<int>(result))};
}

void replace_driver(FindFunction find) {
  const std::lock_guard guard(lock);
  replacement = find;
  answer.reset();
}

}  // namespace ringfold::cuda
