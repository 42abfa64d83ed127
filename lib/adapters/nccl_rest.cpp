// libnccl.so.2: version, error texts, memory and registration, and by name everything that is not
// offered.
#include <string>

#include "lib/adapters/nccl_state.h"
#include "ringfold_config.h"

namespace ringfold::nccl {
namespace {

// A registration changes nothing, but is remembered: ranges may overlap, and go in any order.
Status enter(Comm& comm, void* buffer, size_t bytes, void** handle) {
  if (handle == nullptr) return null_argument("handle");
  *handle = nullptr;
  if (buffer == nullptr || bytes == 0)
    return invalid(fmt::format("ncclCommRegister: {} bytes at {}", bytes, buffer));
  if (Status memory = usable_memory(buffer); !memory.ok()) return memory;
  const std::lock_guard guard(comm.lock);
  static uintptr_t latest = 0;
  static std::mutex latest_lock;
  {
    const std::lock_guard next(latest_lock);
    *handle = reinterpret_cast<void*>(++latest);  // NOLINT(performance-no-int-to-ptr)
  }
  comm.registered[*handle] = {buffer, bytes};
  return {};
}

Status leave(Comm& comm, void* handle) {
  const std::lock_guard guard(comm.lock);
  if (comm.registered.erase(handle) != 0) return {};
  return invalid(fmt::format("ncclCommDeregister: handle {} is not registered here", handle));
}

ncclResult_t not_offered(const char* name, const char* why) {
  return refuse(usage(fmt::format("{} is not offered by ringfold: {}", name, why)));
}

}  // namespace

RINGFOLD_NCCL_EXPORT(ncclResult_t, GetVersion, (int* version)) {
  if (version == nullptr) return answer(null_argument("version"));
  const auto reported = reported_version();
  if (reported.ok()) *version = *reported;
  return answer(reported.status());
}

RINGFOLD_NCCL_EXPORT(const char*, GetErrorString, (ncclResult_t result)) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (ncclGetLastError says more)";
    case ncclSystemError:
      return "unhandled system error (ncclGetLastError says more)";
    case ncclInternalError:
      return "internal error of libnccl (ringfold): please report it with ncclGetLastError's text";
    case ncclInvalidArgument:
      return "invalid argument (ncclGetLastError says which)";
    case ncclInvalidUsage:
      return "invalid usage, or not offered by ringfold (ncclGetLastError says more)";
    case ncclRemoteError:
      return "a remote process failed, left or aborted (ncclGetLastError says which)";
    case ncclInProgress:
      return "operation in progress";
    case ncclTimeout:
      return "the deadline passed (ncclGetLastError says who was waited for)";
  }
  return "unknown result code";
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, MemAlloc, (void** ptr, size_t size)) {
  return answer(allocate(ptr, size));
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, MemFree, (void* ptr)) {
  return answer(release(ptr));
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommRegister,
                     (const ncclComm_t comm, void* buff, size_t size, void** handle)) {
  const auto found = comms().find(comm);
  if (!found.ok()) return answer(found.status());
  return answer(enter(**found, buff, size, handle), found->get());
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommDeregister, (const ncclComm_t comm, void* handle)) {
  const auto found = comms().find(comm);
  if (!found.ok()) return answer(found.status());
  return answer(leave(**found, handle), found->get());
}

// The log is read from RINGFOLD_LOG line by line: there is nothing to reset.
RINGFOLD_NCCL_EXPORT(void, ResetDebugInit, ()) {}

// Which implementation this is: the version number is NCCL's.
extern "C" __attribute__((visibility("default"))) const char* ringfold_nccl_identity() {
  return "ringfold " RINGFOLD_VERSION;
}

// ---- what is not offered ----------------------------------------------------------------------
//
// Their arguments are not looked at, so they are not declared: the calling convention leaves them
// to the caller.

#define RINGFOLD_NCCL_REFUSE(name, why)          \
  RINGFOLD_NCCL_EXPORT(ncclResult_t, name, ()) { \
    return not_offered("nccl" #name, why);       \
  }

RINGFOLD_NCCL_REFUSE(CommGetUniqueId, "communicators do not grow; make a new one")
RINGFOLD_NCCL_REFUSE(CommGrow, "communicators do not grow; make a new one")
RINGFOLD_NCCL_REFUSE(CommSuspend, "there is no device memory to give back")
RINGFOLD_NCCL_REFUSE(CommResume, "communicators cannot be suspended")
RINGFOLD_NCCL_REFUSE(CommMemStats, "it allocates no device memory")
RINGFOLD_NCCL_REFUSE(CommQueryProperties, "there is no device interface")
RINGFOLD_NCCL_REFUSE(SetEncryption, "the bytes of collectives travel as they are")

RINGFOLD_NCCL_REFUSE(CommWindowRegister,
                     "there are no symmetric memory windows; ncclCommRegister is")
RINGFOLD_NCCL_REFUSE(CommWindowDeregister, "there are no symmetric memory windows")
RINGFOLD_NCCL_REFUSE(WinGetUserPtr, "there are no symmetric memory windows")
RINGFOLD_NCCL_REFUSE(PutSignal, "there are no one-sided operations; ncclSend and ncclRecv are")
RINGFOLD_NCCL_REFUSE(Signal, "there are no one-sided operations; ncclSend and ncclRecv are")
RINGFOLD_NCCL_REFUSE(WaitSignal, "there are no one-sided operations; ncclSend and ncclRecv are")

RINGFOLD_NCCL_REFUSE(DevCommCreate, "kernels cannot communicate by themselves")
RINGFOLD_NCCL_REFUSE(DevCommDestroy, "kernels cannot communicate by themselves")
RINGFOLD_NCCL_REFUSE(GetLsaMultimemDevicePointer, "there are no symmetric memory windows")
RINGFOLD_NCCL_REFUSE(GetMultimemDevicePointer, "there are no symmetric memory windows")
RINGFOLD_NCCL_REFUSE(GetLsaDevicePointer, "there are no symmetric memory windows")
RINGFOLD_NCCL_REFUSE(GetPeerDevicePointer, "there are no symmetric memory windows")
RINGFOLD_NCCL_REFUSE(GetMultimemDeviceLeInfo, "there are no symmetric memory windows")
RINGFOLD_NCCL_REFUSE(GetCftDeviceLeInfo, "there are no symmetric memory windows")
RINGFOLD_NCCL_REFUSE(GetPeerDeviceLeInfo, "there are no symmetric memory windows")
RINGFOLD_NCCL_REFUSE(LsaBarrierCreateRequirement, "kernels cannot communicate by themselves")
RINGFOLD_NCCL_REFUSE(GinBarrierCreateRequirement, "kernels cannot communicate by themselves")
RINGFOLD_NCCL_REFUSE(CftBarrierCreateRequirement, "kernels cannot communicate by themselves")
RINGFOLD_NCCL_REFUSE(LLA2ACreateRequirement, "kernels cannot communicate by themselves")
RINGFOLD_NCCL_REFUSE(GinOutboxCreateRequirement, "kernels cannot communicate by themselves")
RINGFOLD_NCCL_REFUSE(GinInboxA2ACreateRequirement, "kernels cannot communicate by themselves")

RINGFOLD_NCCL_REFUSE(ParamBind, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGet, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetI8, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetI16, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetI32, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetI64, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetU8, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetU16, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetU32, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetU64, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetStr, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetParameter, "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_REFUSE(ParamGetAllParameterKeys,
                     "it has no parameters of NCCL; see `ringfold doctor`")
RINGFOLD_NCCL_EXPORT(void, ParamDumpAll, ()) {
  (void)not_offered("ncclParamDumpAll", "it has no parameters of NCCL; see `ringfold doctor`");
}

// These cannot return an error: they return the empty team, or no rank, and leave the text.
#define RINGFOLD_NCCL_NO_TEAM(name)                                              \
  RINGFOLD_NCCL_EXPORT(ncclTeam_t, name, ()) {                                   \
    (void)not_offered("nccl" #name, "kernels cannot communicate by themselves"); \
    return {0, 0, 0};                                                            \
  }
#define RINGFOLD_NCCL_NO_NUMBER(name)                                            \
  RINGFOLD_NCCL_EXPORT(int, name, ()) {                                          \
    (void)not_offered("nccl" #name, "kernels cannot communicate by themselves"); \
    return -1;                                                                   \
  }
RINGFOLD_NCCL_NO_TEAM(TeamWorld)
RINGFOLD_NCCL_NO_TEAM(TeamLsa)
RINGFOLD_NCCL_NO_TEAM(TeamRail)
RINGFOLD_NCCL_NO_TEAM(TeamCft)
RINGFOLD_NCCL_NO_TEAM(TeamCftMultimem)
RINGFOLD_NCCL_NO_NUMBER(TeamRankToWorld)
RINGFOLD_NCCL_NO_NUMBER(TeamRankToLsa)
RINGFOLD_NCCL_NO_NUMBER(LLA2ACalcSlots)

}  // namespace ringfold::nccl
