// Makes programs load ringfold's libnccl.so.2 in place of NCCL's.
#pragma once

#include <string>

namespace ringfold::tools {

// Where the library lies: beside this executable's build or installation; empty if it is not there.
std::string nccl_library();

// Sets what makes the programs that this process starts load `library` (see README.md): LD_PRELOAD
// and LD_LIBRARY_PATH, before what they hold already, and VLLM_NCCL_SO_PATH.
void preload_nccl(const std::string& library);

}  // namespace ringfold::tools
