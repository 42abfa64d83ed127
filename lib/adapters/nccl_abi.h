// The binary interface of NCCL's host library: what crosses the boundary, byte for byte, declared
// by ourselves so that building needs neither NCCL nor CUDA. test/nccl_layout_test.cpp compares it
// with a real nccl.h where there is one.
//
// Names are NCCL's own, in a namespace, so that both headers can be seen by one test. Values of the
// enumerations come from callers unchecked: any int may be in them.
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>

namespace ringfold::nccl {

// The version whose functions are exported (lib/adapters/nccl_symbols.txt), as ncclGetVersion says
// it: major * 10000 + minor * 100 + patch.
inline constexpr int kVersion = 23203;

// NOLINTBEGIN(readability-identifier-naming): NCCL's names
using ncclComm_t = struct ncclComm*;
using ncclWindow_t = struct ncclWindow_vidmem*;
using cudaStream_t = struct CUstream_st*;

struct ncclUniqueId {  // passed by value: trivial, on the stack
  char internal[128];
};
static_assert(sizeof(ncclUniqueId) == 128);

enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclTimeout = 8,  // since 2.30
};

enum ncclRedOp_t : int {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,  // the first number of an operation made at run time
};

enum ncclDataType_t : int {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
};

enum ncclScalarResidence_t : int { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };

inline constexpr int kUndefined = INT_MIN;  // a field of a configuration that was not set
inline constexpr int kNoColor = -1;         // of ncclCommSplit
inline constexpr int kShrinkAbort = 1;      // flag of ncclCommShrink
inline constexpr unsigned kMagic = 0xcafebeef;
inline constexpr unsigned kSimInfoMagic = 0x74685283;

// Grown at its end from version to version. `size` does not tell which fields are valid: twice a
// field took what had been padding, which old callers leave uninitialised. `version`, that of the
// caller's header, does.
struct ncclConfig_t {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;  // 2.14
  int cgaClusterSize, minCTAs, maxCTAs;
  const char* netName;  // 2.17
  int splitShare;       // 2.18
  int trafficClass;     // 2.26
  const char* commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;                          // 2.27
  int nChannelsPerNetPeer, nvlinkCentricSched;                                  // 2.28
  int graphUsageMode, numRmaCtx;                                                // 2.29
  int maxP2pPeers;                                                              // 2.30.3
  int graphStreamOrdering;                                                      // 2.30.5
  int launchOrderImplicit, numRmaSig, rmaEagerInit, hostCftMode, nvlsHostMode;  // 2.31, 2.32
};

// sizeof(ncclConfig_t) of each header and the end of its last field.
struct ConfigLayout {
  int version;
  size_t size, end;
};
inline constexpr std::array kConfigLayouts = {
    ConfigLayout{21400, 24, offsetof(ncclConfig_t, blocking) + sizeof(int)},
    ConfigLayout{21700, 40, offsetof(ncclConfig_t, netName) + sizeof(char*)},
    ConfigLayout{21800, 48, offsetof(ncclConfig_t, splitShare) + sizeof(int)},
    ConfigLayout{22600, 48, offsetof(ncclConfig_t, trafficClass) + sizeof(int)},
    ConfigLayout{22700, 72, offsetof(ncclConfig_t, nvlsCTAs) + sizeof(int)},
    ConfigLayout{22800, 80, offsetof(ncclConfig_t, nvlinkCentricSched) + sizeof(int)},
    ConfigLayout{22900, 88, offsetof(ncclConfig_t, numRmaCtx) + sizeof(int)},
    ConfigLayout{23003, 96, offsetof(ncclConfig_t, maxP2pPeers) + sizeof(int)},
    ConfigLayout{23005, 96, offsetof(ncclConfig_t, graphStreamOrdering) + sizeof(int)},
    ConfigLayout{23203, 120, offsetof(ncclConfig_t, nvlsHostMode) + sizeof(int)},
};
constexpr bool fits(const ConfigLayout& layout) {
  constexpr size_t kAlignment = alignof(ncclConfig_t);
  return (layout.end + kAlignment - 1) / kAlignment * kAlignment == layout.size;
}
static_assert([] {
  for (const ConfigLayout& layout : kConfigLayouts)
    if (!fits(layout)) return false;
  return kConfigLayouts.back().size == sizeof(ncclConfig_t);
}());
inline constexpr size_t kLeastConfig = kConfigLayouts.front().size;

// 2.32: of one collective.
struct ncclCollConfig_t {
  size_t size;
  unsigned magic;
  unsigned version;
  struct ncclConfigExt* ext;
  int minCTAs, maxCTAs, nvlsCTAs, cgaClusterSize;
  const char* algSelection;
  int forceAlgSelection;
  int CTAPolicy;
  uint64_t userProfilerTag;
  struct CUevent_st* launchCompletionEvent;
};
static_assert(sizeof(ncclCollConfig_t) == 72);
static_assert(offsetof(ncclCollConfig_t, algSelection) == 40);
static_assert(offsetof(ncclCollConfig_t, launchCompletionEvent) == 64);

// 2.22
struct ncclSimInfo_t {
  size_t size;
  unsigned magic;
  unsigned version;
  float estimatedTime;
};
static_assert(sizeof(ncclSimInfo_t) == 24 && offsetof(ncclSimInfo_t, estimatedTime) == 16);

// A set of ranks, as the device interface (2.28) names them; passed and returned by value.
struct ncclTeam_t {
  int nRanks, rank, stride;
};
static_assert(sizeof(ncclTeam_t) == 12);
// NOLINTEND(readability-identifier-naming)

}  // namespace ringfold::nccl

// Begins the definition of an exported function: pnccl<name>, and nccl<name> as a weak alias of it,
// so that a profiler may define the latter and call the former.
#define RINGFOLD_NCCL_EXPORT(result, name, ...)                                 \
  extern "C" __attribute__((visibility("default"), weak, alias("pnccl" #name))) \
  result nccl##name __VA_ARGS__;                                                \
  extern "C" __attribute__((visibility("default"))) result pnccl##name __VA_ARGS__
