// What tests ask of a CUDA driver, emulated or real, besides what the library itself calls.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "lib/cuda/driver.h"

#define RINGFOLD_TEST_DRIVER_FUNCTIONS(X) \
  X(cuInit)                               \
  X(cuCtxSetCurrent)                      \
  X(cuCtxSynchronize)                     \
  X(cuDeviceGet)                          \
  X(cuDeviceGetAttribute)                 \
  X(cuDeviceGetCount)                     \
  X(cuDeviceGetName)                      \
  X(cuDevicePrimaryCtxRetain)             \
  X(cuDevicePrimaryCtxRelease)            \
  X(cuEventElapsedTime)                   \
  X(cuEventSynchronize)                   \
  X(cuGraphDestroy)                       \
  X(cuGraphExecDestroy)                   \
  X(cuGraphInstantiate)                   \
  X(cuGraphLaunch)                        \
  X(cuMemAllocAsync)                      \
  X(cuMemAllocManaged)                    \
  X(cuMemFree)                            \
  X(cuMemcpyDtoH)                         \
  X(cuMemcpyDtoHAsync)                    \
  X(cuMemcpyDtoDAsync)                    \
  X(cuMemcpyHtoD)                         \
  X(cuMemcpyHtoDAsync)                    \
  X(cuMemsetD8Async)                      \
  X(cuStreamBeginCapture)                 \
  X(cuStreamDestroy)                      \
  X(cuStreamEndCapture)

// Those that the library calls, too.
#define RINGFOLD_TEST_DRIVER_SHARED_FUNCTIONS(X) \
  X(cuCtxGetDevice)                              \
  X(cuMemAlloc)                                  \
  X(cuStreamSynchronize)

namespace ringfold::test {

struct TestDriver {
#define RINGFOLD_TEST_DRIVER_MEMBER(name) decltype(&::name) name;
  RINGFOLD_TEST_DRIVER_FUNCTIONS(RINGFOLD_TEST_DRIVER_MEMBER)
  RINGFOLD_TEST_DRIVER_SHARED_FUNCTIONS(RINGFOLD_TEST_DRIVER_MEMBER)
#undef RINGFOLD_TEST_DRIVER_MEMBER
};

// From `find`: emulated_function, or dlsym of the real driver. Ends the process if one is missing.
inline TestDriver test_driver(cuda::FindFunction find) {
  TestDriver table{};
  const auto get = [find](auto& function, const char* name) {
    void* const address = find(name);
    if (address == nullptr) {
      std::fprintf(stderr, "the CUDA driver lacks %s\n", name);
      std::abort();
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
#define RINGFOLD_TEST_DRIVER_STRING(name) #name
#define RINGFOLD_TEST_DRIVER_GET(name) get(table.name, RINGFOLD_TEST_DRIVER_STRING(name));
  RINGFOLD_TEST_DRIVER_FUNCTIONS(RINGFOLD_TEST_DRIVER_GET)
  RINGFOLD_TEST_DRIVER_SHARED_FUNCTIONS(RINGFOLD_TEST_DRIVER_GET)
#undef RINGFOLD_TEST_DRIVER_GET
#undef RINGFOLD_TEST_DRIVER_STRING
  return table;
}

}  // namespace ringfold::test
