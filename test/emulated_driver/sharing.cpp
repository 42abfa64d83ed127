// Device memory that processes share, with the traps of CUDA's IPC: it takes only what cuMemAlloc
// gave, whole; a handle is not for the process that made it, and is opened once in a context.
#include <unistd.h>

#include <cstring>

#include "test/emulated_driver/state.h"

namespace ringfold::test::emulated {

CUresult mem_get_address_range(CUdeviceptr* begin, size_t* bytes, CUdeviceptr pointer) {
  const Found found = find(pointer);
  if (found.kind == Kind::none) return CUDA_ERROR_NOT_FOUND;
  if (begin != nullptr) *begin = found.begin;
  if (bytes != nullptr) *bytes = found.bytes;
  return CUDA_SUCCESS;
}

CUresult ipc_get(CUipcMemHandle* handle, CUdeviceptr pointer) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  if (!state().options.ipc) return CUDA_ERROR_NOT_SUPPORTED;
  const Found found = find(pointer);
  if (found.kind != Kind::device || found.begin != pointer) return CUDA_ERROR_INVALID_VALUE;
  const Exported exported = export_block(found);
  static_assert(sizeof(exported) <= sizeof(*handle));
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &exported, sizeof(exported));
  return CUDA_SUCCESS;
}

CUresult ipc_open(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
  if (const CUresult r = before_allocation(); r != CUDA_SUCCESS) return r;
  Exported exported;
  std::memcpy(static_cast<void*>(&exported), &handle, sizeof(exported));
  if (exported.magic != Exported().magic || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return CUDA_ERROR_INVALID_VALUE;
  if (exported.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  if (is_open(exported, current_device())) return CUDA_ERROR_ALREADY_MAPPED;
  if (exported.device != current_device() && !state().options.peer_access)
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  *pointer = reinterpret_cast<CUdeviceptr>(open_block(exported, current_device()));
  return *pointer == 0 ? CUDA_ERROR_MAP_FAILED : CUDA_SUCCESS;
}

CUresult ipc_close(CUdeviceptr pointer) {
  if (const CUresult r = before_allocation(); r != CUDA_SUCCESS) return r;
  return close_block(pointer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace ringfold::test::emulated
