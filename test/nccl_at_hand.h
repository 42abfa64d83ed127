// NCCL's headers and libraries, where they happen to be installed: tests compare with them.
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

namespace ringfold::test {

// What a command prints, and how it ended.
struct Ran {
  int status = -1;
  std::string output;
};
inline Ran run(const std::string& command) {
  Ran ran;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return ran;
  std::array<char, 4096> part;
  while (const size_t got = fread(part.data(), 1, part.size(), pipe))
    ran.output.append(part.data(), got);
  ran.status = pclose(pipe);
  return ran;
}

inline std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    if (end > begin) all.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return all;
}

// Folders with an nccl.h: those of TEST_NCCL (colon-separated), of CUDA and the system,
// and of PyPI's nvidia-nccl packages.
inline std::vector<std::string> nccl_includes() {
  std::string given = std::getenv("TEST_NCCL") != nullptr ? std::getenv("TEST_NCCL") : "";
  std::vector<std::string> candidates = {"/usr/include", "/usr/local/include",
                                         "/usr/local/cuda/include"};
  for (size_t begin = 0; begin < given.size();) {
    const size_t end = std::min(given.find(':', begin), given.size());
    candidates.push_back(given.substr(begin, end - begin));
    begin = end + 1;
  }
  const std::string python =
      "python3 -c 'import sys, glob; [print(d) for p in sys.path for d in "
      "glob.glob(p + \"/nvidia/nccl/include\")]'";
  for (const std::string& line : lines(run(python).output)) candidates.push_back(line);
  std::vector<std::string> found;
  for (const std::string& folder : candidates)
    if (std::filesystem::exists(folder + "/nccl.h")) found.push_back(folder);
  return found;
}

// The libraries that belong to those headers, and `libnccl.so.2` of the loader's path.
inline std::vector<std::string> nccl_libraries() {
  std::vector<std::string> found;
  for (const std::string& include : nccl_includes())
    for (const char* place : {"/../lib/libnccl.so.2", "/../lib64/libnccl.so.2",
                              "/../lib/x86_64-linux-gnu/libnccl.so.2"})
      if (std::filesystem::exists(include + place)) found.push_back(include + place);
  return found;
}

}  // namespace ringfold::test
