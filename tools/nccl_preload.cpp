#include "tools/nccl_preload.h"

#include <cstdlib>
#include <filesystem>

namespace ringfold::tools {
namespace {

namespace fs = std::filesystem;

void prepend(const char* variable, const std::string& value) {
  const char* const before = std::getenv(variable);
  const bool more = before != nullptr && *before != '\0';
  setenv(variable, (more ? value + ":" + before : value).c_str(), 1);
}

}  // namespace

std::string nccl_library() {
  std::error_code error;
  const fs::path parent = fs::read_symlink("/proc/self/exe", error).parent_path().parent_path();
  for (const char* place : {"libnccl.so.2", RINGFOLD_LIBDIR "/ringfold/libnccl.so.2"})
    if (fs::exists(parent / place, error)) return (parent / place).string();
  return "";
}

void preload_nccl(const std::string& library) {
  prepend("LD_PRELOAD", library);
  prepend("LD_LIBRARY_PATH", fs::path(library).parent_path().string());
  setenv("VLLM_NCCL_SO_PATH", library.c_str(), 1);
}

}  // namespace ringfold::tools
