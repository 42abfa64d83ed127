// The CUDA driver's functions, found at run time: nothing of CUDA is linked, so one binary serves
// machines with and without a GPU. The library calls the driver only through this table.
//
// Threads: any.
#pragma once

#include <cuda.h>

#include "ringfold/status.h"

// The functions used, as cuda.h spells them. Its macros give them the version that was compiled
// against ("cuMemAlloc" is cuMemAlloc_v2): so do the names here, when the list is expanded.
#define RINGFOLD_DRIVER_FUNCTIONS(X)   \
  X(cuCtxEnablePeerAccess)             \
  X(cuCtxGetCurrent)                   \
  X(cuCtxGetDevice)                    \
  X(cuCtxPopCurrent)                   \
  X(cuCtxPushCurrent)                  \
  X(cuDeviceCanAccessPeer)             \
  X(cuDriverGetVersion)                \
  X(cuEventCreate)                     \
  X(cuEventDestroy)                    \
  X(cuEventRecord)                     \
  X(cuFuncLoad)                        \
  X(cuGetErrorString)                  \
  X(cuGraphRetainUserObject)           \
  X(cuLaunchHostFunc)                  \
  X(cuLaunchKernel)                    \
  X(cuIpcCloseMemHandle)               \
  X(cuIpcGetMemHandle)                 \
  X(cuIpcOpenMemHandle)                \
  X(cuMemAlloc)                        \
  X(cuMemFreeHost)                     \
  X(cuMemGetAddressRange)              \
  X(cuMemHostAlloc)                    \
  X(cuModuleGetFunction)               \
  X(cuModuleLoadData)                  \
  X(cuPointerGetAttribute)             \
  X(cuStreamCreate)                    \
  X(cuStreamGetCaptureInfo)            \
  X(cuStreamSynchronize)               \
  X(cuStreamWaitEvent)                 \
  X(cuThreadExchangeStreamCaptureMode) \
  X(cuUserObjectCreate)

namespace ringfold::cuda {

struct Driver {
  // NOLINTBEGIN(bugprone-macro-parentheses): a declaration
#define RINGFOLD_DRIVER_MEMBER(name) decltype(&::name) name;
  RINGFOLD_DRIVER_FUNCTIONS(RINGFOLD_DRIVER_MEMBER)
  // NOLINTEND(bugprone-macro-parentheses)
#undef RINGFOLD_DRIVER_MEMBER
};

// The table, or why there is none: no driver on this machine, or one that is too old. Looks once
// and remembers. Does not initialise CUDA: whoever has device memory has done that.
const Result<const Driver*>& driver();

// The same for callers that know it is there.
const Driver& call();

// ok, or `code` with "WHAT: the driver's sentence".
Status check(CUresult result, const char* what, Code code = Code::system);

// From now on functions come from here instead of libcuda.so.1; null: the real driver again. For
// tests, while no other thread uses the table.
using FindFunction = void* (*)(const char* name);
void replace_driver(FindFunction find);

}  // namespace ringfold::cuda
