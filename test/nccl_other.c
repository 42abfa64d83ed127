/* Another library with NCCL's names, as a process may hold one beside ours. */
#include "test/nccl_minimal.h"

ncclResult_t ncclGetVersion(int* version) {
  *version = 12345;
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  (void)sendbuff, (void)recvbuff, (void)count, (void)datatype, (void)op, (void)comm, (void)stream;
  return ncclSystemError;
}

ncclResult_t pncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                            ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                            cudaStream_t stream) {
  return ncclAllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream);
}

ncclResult_t ncclGroupStart(void) {
  return ncclSystemError;
}
ncclResult_t ncclGroupEnd(void) {
  return ncclSystemError;
}
