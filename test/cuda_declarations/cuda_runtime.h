/* What nccl.h wants of CUDA's header, for machines without it. */
#pragma once
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
