// Not built with the rest: nccl_symbols_test compiles it against each nccl.h at hand. Where it
// compiles, our declarations of what crosses the boundary equal NCCL's.
#include <nccl.h>

#include <cstddef>

#include "lib/adapters/nccl_abi.h"

namespace ours = ringfold::nccl;

static_assert(sizeof(ncclUniqueId) == sizeof(ours::ncclUniqueId));
static_assert(alignof(ncclUniqueId) == alignof(ours::ncclUniqueId));

// Enumerations: as wide, and the same numbers.
static_assert(sizeof(ncclResult_t) == sizeof(ours::ncclResult_t));
static_assert(sizeof(ncclRedOp_t) == sizeof(ours::ncclRedOp_t));
static_assert(sizeof(ncclDataType_t) == sizeof(ours::ncclDataType_t));
#define SAME(name) static_assert(static_cast<int>(::name) == static_cast<int>(ours::name))
SAME(ncclSuccess);
SAME(ncclUnhandledCudaError);
SAME(ncclSystemError);
SAME(ncclInternalError);
SAME(ncclInvalidArgument);
SAME(ncclInvalidUsage);
SAME(ncclSum);
SAME(ncclProd);
SAME(ncclMax);
SAME(ncclMin);
SAME(ncclInt8);
SAME(ncclUint8);
SAME(ncclInt32);
SAME(ncclUint32);
SAME(ncclInt64);
SAME(ncclUint64);
SAME(ncclFloat16);
SAME(ncclFloat32);
SAME(ncclFloat64);
#if NCCL_VERSION_CODE >= 21400
SAME(ncclAvg);
SAME(ncclNumOps);
SAME(ncclBfloat16);
SAME(ncclRemoteError);
SAME(ncclInProgress);
SAME(ncclScalarDevice);
SAME(ncclScalarHostImmediate);
static_assert(NCCL_CONFIG_UNDEF_INT == ours::kUndefined);

// The configuration: this header's is one of the layouts we know, field for field.
#define AT(field) \
  static_assert(offsetof(ncclConfig_t, field) == offsetof(ours::ncclConfig_t, field))
AT(size);
AT(magic);
AT(version);
AT(blocking);
constexpr ncclConfig_t kInitial = NCCL_CONFIG_INITIALIZER;
static_assert(kInitial.magic == ours::kMagic && kInitial.size == sizeof(ncclConfig_t));
static_assert([] {
  size_t size = 0;
  for (const ours::ConfigLayout& layout : ours::kConfigLayouts)
    if (layout.version <= NCCL_VERSION_CODE) size = layout.size;
  return size;
}() == sizeof(ncclConfig_t) ||
              NCCL_VERSION_CODE > ours::kVersion);
#endif
#if NCCL_VERSION_CODE >= 21700
AT(cgaClusterSize);
AT(maxCTAs);
AT(netName);
#endif
#if NCCL_VERSION_CODE >= 21800
AT(splitShare);
static_assert(NCCL_SPLIT_NOCOLOR == ours::kNoColor);
#endif
#if NCCL_VERSION_CODE >= 22200
static_assert(sizeof(ncclSimInfo_t) == sizeof(ours::ncclSimInfo_t));
static_assert(offsetof(ncclSimInfo_t, estimatedTime) ==
              offsetof(ours::ncclSimInfo_t, estimatedTime));
constexpr ncclSimInfo_t kSimulation = NCCL_SIM_INFO_INITIALIZER;
static_assert(kSimulation.magic == ours::kSimInfoMagic);
#endif
#if NCCL_VERSION_CODE >= 22400
SAME(ncclFloat8e4m3);
SAME(ncclFloat8e5m2);
#endif
#if NCCL_VERSION_CODE >= 22600
AT(trafficClass);
#endif
#if NCCL_VERSION_CODE >= 22700
AT(commName);
AT(shrinkShare);
AT(nvlsCTAs);
static_assert(NCCL_SHRINK_ABORT == ours::kShrinkAbort);
#endif
#if NCCL_VERSION_CODE >= 22800
AT(nvlinkCentricSched);
#endif
#if NCCL_VERSION_CODE >= 22900
AT(graphUsageMode);
AT(numRmaCtx);
#endif
#if NCCL_VERSION_CODE >= 23003
AT(maxP2pPeers);
SAME(ncclTimeout);
#endif
#if NCCL_VERSION_CODE >= 23005
AT(graphStreamOrdering);
#endif
#if NCCL_VERSION_CODE >= 23203
AT(launchOrderImplicit);
AT(nvlsHostMode);
#define IN(field) \
  static_assert(offsetof(ncclCollConfig_t, field) == offsetof(ours::ncclCollConfig_t, field))
static_assert(sizeof(ncclCollConfig_t) == sizeof(ours::ncclCollConfig_t));
IN(magic);
IN(ext);
IN(cgaClusterSize);
IN(algSelection);
IN(forceAlgSelection);
IN(userProfilerTag);
IN(launchCompletionEvent);
#endif
