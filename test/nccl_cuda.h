// Device memory for tests, by the CUDA driver opened at run time: the tests build and run without
// it.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace ringfold::test {

class Cuda {
 public:
  // The device for this rank (several ranks may share one). False, and why(), if there is none.
  bool start(int rank) {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (library_ == nullptr) return refuse(dlerror());
    int devices = 0;
    if (call("cuInit", 0U) != 0) return refuse("cuInit fails");
    if (call("cuDeviceGetCount", &devices) != 0 || devices == 0) return refuse("no device");
    if (call("cuDeviceGet", &device_, rank % devices) != 0) return refuse("cuDeviceGet fails");
    void* context = nullptr;
    if (call("cuDevicePrimaryCtxRetain", &context, device_) != 0) return refuse("no context");
    return call("cuCtxSetCurrent", context) == 0 || refuse("the context cannot be used");
  }
  [[nodiscard]] const std::string& why() const { return why_; }
  // 90 for Hopper.
  [[nodiscard]] int compute_capability() const {
    constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
    int major = 0, minor = 0;
    if (call("cuDeviceGetAttribute", &major, kMajor, device_) != 0 ||
        call("cuDeviceGetAttribute", &minor, kMinor, device_) != 0)
      return 0;
    return major * 10 + minor;
  }

  // A copy of host bytes on the device.
  class Memory {
   public:
    Memory(const Cuda& cuda, const std::vector<unsigned char>& bytes) : cuda_(cuda) {
      if (cuda_.call("cuMemAlloc_v2", &address_, bytes.size()) != 0 ||
          cuda_.call("cuMemcpyHtoD_v2", address_, static_cast<const void*>(bytes.data()),
                     bytes.size()) != 0)
        throw std::runtime_error("no device memory");
    }
    ~Memory() { cuda_.call("cuMemFree_v2", address_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    [[nodiscard]] void* pointer() const { return reinterpret_cast<void*>(address_); }
    // Waits for everything on the device first.
    void read(std::vector<unsigned char>* bytes) const {
      if (cuda_.call("cuCtxSynchronize") != 0 ||
          cuda_.call("cuMemcpyDtoH_v2", static_cast<void*>(bytes->data()), address_,
                     bytes->size()) != 0)
        throw std::runtime_error("a kernel failed");
    }

   private:
    const Cuda& cuda_;
    unsigned long long address_ = 0;
  };

 private:
  bool refuse(const std::string& why) {
    why_ = why;
    return false;
  }
  template <class... Arguments>
  int call(const char* name, Arguments... arguments) const {
    auto* const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library_, name));
    return function != nullptr ? function(arguments...) : -1;
  }

  void* library_ = nullptr;
  int device_ = 0;
  std::string why_;
};

}  // namespace ringfold::test
