// Probes of the libraries that are opened at run time: UCX, the CUDA driver, NCCL.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "tools/probes.h"
#include "transports/ucx_transports.h"

namespace ringfold::tools {
namespace {

constexpr auto kPatience = std::chrono::seconds(10);

// What `inside` writes to stdout in a child process, and how that ended ("" is well).
struct Child {
  std::string output, trouble;
};
template <class F>
Child in_child(F inside) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return {"", "no pipe"};
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    const int nothing = open("/dev/null", O_RDWR);
    dup2(nothing, STDIN_FILENO), dup2(nothing, STDERR_FILENO);
    dup2(ends[1], STDOUT_FILENO);
    inside();
    std::fflush(stdout);
    _exit(0);
  }
  close(ends[1]);
  Child child;
  if (pid < 0) child.trouble = "cannot fork";
  const auto until = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    if (pid < 0) break;
    const auto left = until - std::chrono::steady_clock::now();
    pollfd wait{ends[0], POLLIN, 0};
    const int ready = poll(&wait, 1, static_cast<int>(left / std::chrono::milliseconds(1)));
    if (left.count() <= 0 || ready == 0) {
      kill(pid, SIGKILL);
      child.trouble = "does not answer";
      break;
    }
    std::array<char, 4096> bytes;
    const ssize_t n = read(ends[0], bytes.data(), bytes.size());
    if (n <= 0) break;
    child.output.append(bytes.data(), static_cast<size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  if (pid > 0) waitpid(pid, &status, 0);
  if (child.trouble.empty() && WIFSIGNALED(status)) {
    child.trouble = fmt::format("crashes (signal {})", WTERMSIG(status));
  }
  return child;
}

template <class F>
F* find(void* library, const char* name) {
  return reinterpret_cast<F*>(dlsym(library, name));
}

// The library, or nullptr having said so where the parent reads it.
void* open_library(const char* name) {
  void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fmt::print("missing\n");
  return library;
}

void print_path(void* inside) {
  Dl_info info{};
  if (dladdr(inside, &info) != 0) fmt::print("path {}\n", info.dli_fname);
}

// "key value" lines; a key that comes again makes a list.
Json parsed(const Child& child) {
  Json j = Json::object();
  std::istringstream lines(child.output);
  for (std::string key, value; lines >> key;) {
    if (key == "missing") return {{"found", false}};
    std::getline(lines >> std::ws, value);
    if (j.contains(key)) {
      if (!j[key].is_array()) j[key] = Json::array({j[key]});
      j[key].push_back(value);
    } else {
      j[key] = value;
    }
  }
  Json result = {{"found", true}};
  result.update(j);
  if (!child.trouble.empty()) result["trouble"] = child.trouble;
  return result;
}

// What the ranks would get, one a line.
void print_ucx_transports() {
  const auto transports = ucx_transports(ucx_transports_wanted());
  if (!transports.ok()) return fmt::print("refused {}\n", transports.status().message());
  for (const std::string& name : *transports)
    fmt::print("{} {}\n", is_rdma(name) ? "rdma" : "transports", name);
}

Json list_of(const Json& j, const char* key) {
  if (!j.contains(key)) return Json::array();
  return j[key].is_array() ? j[key] : Json::array({j[key]});
}

}  // namespace

Json probe_ucx(Problems& problems) {
  Json j = parsed(in_child([] {
    setenv("UCX_HANDLE_ERRORS", "none", 1);
    setenv("UCX_LOG_LEVEL", "fatal", 1);
    void* const library = open_library("libucp.so.0");
    if (library == nullptr) return;
    auto* const version = find<const char*()>(library, "ucp_get_version_string");
    if (version != nullptr) fmt::print("version {}\n", version());
    print_path(reinterpret_cast<void*>(version));
    print_ucx_transports();
  }));
  if (j["found"] != true) {
    problems.emplace_back(
        "no UCX (libucp.so.0): ranks on several hosts cannot meet (Debian: "
        "libucx0)");
    return j;
  }
  if (j.contains("trouble")) problems.push_back("UCX " + j["trouble"].get<std::string>());
  if (j.contains("refused")) problems.push_back(j["refused"].get<std::string>());
  Json rdma = list_of(j, "rdma");
  Json transports = list_of(j, "transports");
  transports.insert(transports.end(), rdma.begin(), rdma.end());
  j["transports"] = transports.empty() ? Json("none") : transports;
  j["rdma"] = rdma.empty() ? Json("none: the processor moves the bytes") : rdma;
  return j;
}

Json probe_cuda() {
  return parsed(in_child([] {
    void* const library = open_library("libcuda.so.1");
    if (library == nullptr) return;
    auto* const init = find<int(unsigned)>(library, "cuInit");
    auto* const get_version = find<int(int*)>(library, "cuDriverGetVersion");
    auto* const get_count = find<int(int*)>(library, "cuDeviceGetCount");
    auto* const get_name = find<int(char*, int, int)>(library, "cuDeviceGetName");
    if (init == nullptr || get_version == nullptr || get_count == nullptr || get_name == nullptr) {
      fmt::print("error not a CUDA driver\n");
      return;
    }
    int version = 0, devices = 0;
    get_version(&version);
    fmt::print("version {}.{}\n", version / 1000, version % 1000 / 10);
    if (const int error = init(0); error != 0) {
      fmt::print("error cuInit gives {}\n", error);
      return;
    }
    get_count(&devices);
    fmt::print("devices {}\n", devices);
    for (int i = 0; i < devices; ++i) {
      std::array<char, 256> name{};
      if (get_name(name.data(), name.size(), i) == 0) fmt::print("device {}\n", name.data());
    }
  }));
}

Json probe_nccl() {
  return parsed(in_child([] {
    void* const library = open_library("libnccl.so.2");
    if (library == nullptr) return;
    auto* const get_version = find<int(int*)>(library, "ncclGetVersion");
    int version = 0;
    if (get_version != nullptr && get_version(&version) == 0) {
      fmt::print("version {}.{}.{}\n", version / 10000, version % 10000 / 100, version % 100);
    }
    print_path(reinterpret_cast<void*>(get_version));
  }));
}

}  // namespace ringfold::tools
