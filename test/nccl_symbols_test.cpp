// libnccl.so.2 as the loader sees it: its names, its version, and other libraries beside it.
#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "lib/adapters/nccl_abi.h"
#include "test/environment.h"
#include "test/nccl_at_hand.h"
#include "test/nccl_minimal.h"
#include "test/processes.h"
#include "test/skip.h"

using namespace ringfold::test;

namespace {

// What a shared library exports and needs.
struct Exports {
  std::map<std::string, char> bindings;  // 'W'eak or 'T', strong
  std::map<std::string, uint64_t> addresses;
  std::string soname;
  std::set<std::string> needed;
  bool versioned = false;
};

template <class T>
T read(const std::string& file, uint64_t at) {
  T value;
  REQUIRE(at + sizeof value <= file.size());
  std::memcpy(&value, file.data() + at, sizeof value);
  return value;
}

Exports exports(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(in), {}};
  const auto header = read<Elf64_Ehdr>(file, 0);
  const auto section = [&](size_t i) {
    return read<Elf64_Shdr>(file, header.e_shoff + i * sizeof(Elf64_Shdr));
  };
  const auto text = [&](const Elf64_Shdr& strings, uint64_t offset) {
    return std::string(file.c_str() + strings.sh_offset + offset);
  };
  Exports found;
  for (size_t i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr table = section(i);
    found.versioned |= table.sh_type == SHT_GNU_verdef;
    if (table.sh_type != SHT_DYNSYM && table.sh_type != SHT_DYNAMIC) continue;
    const Elf64_Shdr strings = section(table.sh_link);
    for (uint64_t at = 0; at < table.sh_size; at += table.sh_entsize) {
      if (table.sh_type == SHT_DYNSYM) {
        const auto symbol = read<Elf64_Sym>(file, table.sh_offset + at);
        if (symbol.st_shndx == SHN_UNDEF) continue;
        const std::string name = text(strings, symbol.st_name);
        found.bindings[name] = ELF64_ST_BIND(symbol.st_info) == STB_WEAK ? 'W' : 'T';
        found.addresses[name] = symbol.st_value;
      } else {
        const auto entry = read<Elf64_Dyn>(file, table.sh_offset + at);
        if (entry.d_tag == DT_SONAME) found.soname = text(strings, entry.d_un.d_val);
        if (entry.d_tag == DT_NEEDED) found.needed.insert(text(strings, entry.d_un.d_val));
      }
    }
  }
  return found;
}

// Name and version of every function in the list; the newest header's version under "".
std::map<std::string, std::string> listed() {
  std::ifstream in(RINGFOLD_NCCL_SYMBOLS);
  std::map<std::string, std::string> all;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string name, version;
    words >> name >> version;
    if (name == "#")
      all[""] = version;
    else
      all[name] = version;
  }
  return all;
}

int number_of(const std::string& version) {
  int major = 0, minor = 0, patch = 0;
  REQUIRE(std::sscanf(version.c_str(), "%d.%d.%d", &major, &minor, &patch) == 3);
  return major * 10000 + minor * 100 + patch;
}

// A copy of the library, opened by path.
class Loaded {
 public:
  Loaded(const std::string& path, int mode) : handle_(dlopen(path.c_str(), mode | RTLD_NOW)) {
    if (handle_ == nullptr) FAIL(dlerror());
  }
  ~Loaded() { dlclose(handle_); }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;
  template <class Function>
  Function* function(Function*, const char* name) const {
    auto* const found = reinterpret_cast<Function*>(dlsym(handle_, name));
    INFO(name);
    REQUIRE(found != nullptr);
    return found;
  }

 private:
  void* handle_;
};
#define CALL(library, name) (library).function(static_cast<decltype(name)*>(nullptr), #name)

int version_of(const Loaded& library) {
  int version = -1;
  const auto result = CALL(library, ncclGetVersion)(&version);
  return result == ncclSuccess ? version : -static_cast<int>(result);
}

// A communicator of one rank that adds up right.
ncclComm_t alone(const Loaded& library) {
  ncclUniqueId id;
  ncclComm_t comm = nullptr;
  CHECK(CALL(library, ncclGetUniqueId)(&id) == ncclSuccess);
  CHECK(CALL(library, ncclCommInitRank)(&comm, 1, id, 0) == ncclSuccess);
  return comm;
}

float reduced_alone(const Loaded& library, ncclComm_t comm) {
  const float in = 7;
  float out = 0;
  CHECK(CALL(library, ncclAllReduce)(&in, &out, 1, ncclFloat32, ncclSum, comm, nullptr) ==
        ncclSuccess);
  return out;
}

// A second copy: the same path would be the same library.
struct Copy {
  Copy() {
    char folder[] = "/tmp/ringfold_nccl_XXXXXX";
    REQUIRE(mkdtemp(folder) != nullptr);
    path = std::string(folder) + "/libnccl.so.2";
    std::filesystem::copy_file(RINGFOLD_NCCL_LIBRARY, path);
  }
  ~Copy() { std::filesystem::remove_all(std::filesystem::path(path).parent_path()); }
  std::string path;
};

}  // namespace

TEST_CASE("the library exports what the list says, weak and strong, and nothing else") {
  const Exports ours = exports(RINGFOLD_NCCL_LIBRARY);
  CHECK(ours.soname == "libnccl.so.2");
  CHECK_FALSE(ours.versioned);
  std::map<std::string, char> expected = {{"ringfold_nccl_identity", 'T'}};
  for (const auto& [name, version] : listed()) {
    if (name.empty()) continue;
    expected[name] = 'W';
    expected["p" + name] = 'T';
    INFO(name);
    REQUIRE(ours.addresses.count(name) == 1);
    CHECK(ours.addresses.at(name) == ours.addresses.at("p" + name));
  }
  CHECK(expected.size() > 150);
  CHECK(ours.bindings == expected);
}

TEST_CASE("it needs neither CUDA nor NCCL nor libsodium") {
  for (const std::string& needed : exports(RINGFOLD_NCCL_LIBRARY).needed) {
    INFO(needed);
    CHECK(needed.find("cuda") == std::string::npos);
    CHECK(needed.find("nccl") == std::string::npos);
    CHECK(needed.find("ringfold") == std::string::npos);
  }
}

TEST_CASE("the list has every function of the headers at hand") {
  const auto headers = nccl_includes();
  if (headers.empty()) return skip("no nccl.h here: install PyPI's nvidia-nccl-cu13");
  const auto list = listed();
  for (const std::string& folder : headers) {
    INFO(folder);
    const Ran made = run("python3 " RINGFOLD_NCCL_SYMBOLS_SCRIPT " " + folder);
    REQUIRE(made.status == 0);
    const auto functions = lines(made.output);
    CHECK(functions.size() >= 21);
    for (const std::string& line : functions) {
      const std::string name = line.substr(0, line.find(' '));
      const std::string version = line.substr(line.find(' ') + 1);
      INFO(line);
      REQUIRE(list.count(name) == 1);
      CHECK(number_of(list.at(name)) <= number_of(version));
    }
    for (const auto& [name, version] : list) {
      const std::string newest = functions.front().substr(functions.front().find(' ') + 1);
      if (name.empty() || number_of(newest) != number_of(list.at(""))) continue;
      CHECK(made.output.find(name + " ") != std::string::npos);  // nothing is invented
    }
  }
}

TEST_CASE("the libraries at hand export nothing that ours does not") {
  const auto libraries = nccl_libraries();
  if (libraries.empty()) return skip("no other libnccl.so.2 here: install PyPI's nvidia-nccl-cu13");
  const Exports ours = exports(RINGFOLD_NCCL_LIBRARY);
  for (const std::string& path : libraries) {
    INFO(path);
    const Exports theirs = exports(path);
    CHECK(theirs.soname == ours.soname);
    CHECK(theirs.bindings.size() > 40);
    for (const auto& [name, binding] : theirs.bindings) {
      if (name == "ncclResetDebugInitInternal") continue;  // in no header
      INFO(name);
      REQUIRE(ours.bindings.count(name) == 1);
      CHECK(ours.bindings.at(name) == binding);
    }
  }
}

TEST_CASE("layouts and numbers are those of the headers at hand") {
  const auto headers = nccl_includes();
  if (headers.empty()) return skip("no nccl.h here: install PyPI's nvidia-nccl-cu13");
  for (const std::string& folder : headers) {
    const std::string source = RINGFOLD_SOURCE_ROOT "/test/";
    // The toolkit's CUDA headers if there are any, else forward declarations.
    const Ran compiled = run(
        "c++ -std=c++20 -fsyntax-only -Wno-deprecated-declarations -I" RINGFOLD_SOURCE_ROOT " -I" +
        folder + " -I/usr/local/cuda/include -idirafter " + source + "cuda_declarations " + source +
        "nccl_layout.cpp");
    INFO(folder << "\n" << compiled.output);
    CHECK(compiled.status == 0);
  }
}

TEST_CASE("the version: that of the list, or what the environment says") {
  Environment environment;
  const Loaded library(RINGFOLD_NCCL_LIBRARY, RTLD_LOCAL);
  CHECK(version_of(library) == number_of(listed().at("")));
  CHECK(version_of(library) == ringfold::nccl::kVersion);
  environment.set("RINGFOLD_NCCL_VERSION", "22809");
  CHECK(version_of(library) == 22809);
  for (const char* wrong : {"2.28.9", "2289", "100000", "-1", "x"}) {
    environment.set("RINGFOLD_NCCL_VERSION", wrong);
    INFO(wrong);
    CHECK(version_of(library) == -ncclInvalidArgument);
    const std::string text = CALL(library, ncclGetLastError)(nullptr);
    CHECK(text.find("RINGFOLD_NCCL_VERSION") != std::string::npos);
  }
}

TEST_CASE("what is not offered says so, by name, and never succeeds") {
  const Loaded library(RINGFOLD_NCCL_LIBRARY, RTLD_LOCAL);
  int refused = 0;
  for (const char* name : {"ncclCommGrow",
                           "ncclCommGetUniqueId",
                           "ncclCommSuspend",
                           "ncclCommResume",
                           "ncclCommMemStats",
                           "ncclCommQueryProperties",
                           "ncclSetEncryption",
                           "ncclCommWindowRegister",
                           "ncclCommWindowDeregister",
                           "ncclWinGetUserPtr",
                           "ncclPutSignal",
                           "ncclSignal",
                           "ncclWaitSignal",
                           "ncclDevCommCreate",
                           "ncclDevCommDestroy",
                           "ncclGetLsaDevicePointer",
                           "ncclGetPeerDevicePointer",
                           "ncclLLA2ACreateRequirement",
                           "ncclGinBarrierCreateRequirement",
                           "ncclParamBind",
                           "ncclParamGetStr",
                           "ncclParamGetAllParameterKeys"}) {
    INFO(name);
    using Any = ncclResult_t(void*, void*, void*, void*, void*, void*, void*, void*);
    Any* const function = library.function(static_cast<Any*>(nullptr), name);
    CHECK(function(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr) ==
          ncclInvalidUsage);
    const std::string text = CALL(library, ncclGetLastError)(nullptr);
    CHECK(text.find(std::string(name) + " is not offered") != std::string::npos);
    ++refused;
  }
  CHECK(refused == 22);
  using Team = ringfold::nccl::ncclTeam_t(ncclComm_t);
  const auto team = library.function(static_cast<Team*>(nullptr), "ncclTeamWorld")(nullptr);
  CHECK((team.nRanks == 0 && team.rank == 0 && team.stride == 0));
  CHECK(std::string(CALL(library, ncclGetLastError)(nullptr)).find("ncclTeamWorld") !=
        std::string::npos);
}

TEST_CASE("C69: two copies of it, and another library with the same names, do not mix") {
  Environment environment;
  environment.set("RINGFOLD_INTERFACES", "lo");
  const Copy copy;
  const Loaded other(RINGFOLD_NCCL_OTHER, RTLD_GLOBAL);  // first, and for everybody to see
  const Loaded local(RINGFOLD_NCCL_LIBRARY, RTLD_LOCAL);
  const Loaded global(copy.path, RTLD_GLOBAL);
  CHECK(version_of(other) == 12345);
  CHECK(version_of(local) == ringfold::nccl::kVersion);
  CHECK(version_of(global) == ringfold::nccl::kVersion);
  CHECK(CALL(local, ncclAllReduce) != CALL(global, ncclAllReduce));

  const ncclComm_t in_local = alone(local), in_global = alone(global);
  CHECK(CALL(local, ncclGroupStart)() == ncclSuccess);  // of one copy only
  CHECK(reduced_alone(global, in_global) == 7);
  CHECK(CALL(other, ncclAllReduce)(nullptr, nullptr, 0, ncclFloat32, ncclSum, nullptr, nullptr) ==
        ncclSystemError);
  CHECK(CALL(global, ncclGroupEnd)() == ncclInvalidUsage);
  const float in = 5;
  float out = 0;
  CHECK(CALL(local, ncclAllReduce)(&in, &out, 1, ncclFloat32, ncclSum, in_local, nullptr) ==
        ncclSuccess);
  CHECK(out == 0);  // not before the end of the group
  CHECK(CALL(local, ncclGroupEnd)() == ncclSuccess);
  CHECK(out == 5);
  CHECK(reduced_alone(local, in_local) == 7);
  CHECK(CALL(local, ncclCommDestroy)(in_local) == ncclSuccess);
  CHECK(CALL(global, ncclCommDestroy)(in_global) == ncclSuccess);

  // Even the two ranks of one communicator may live in two copies.
  ncclUniqueId id;
  REQUIRE(CALL(local, ncclGetUniqueId)(&id) == ncclSuccess);
  const auto rank = [&](const Loaded& library, int r) {
    ncclComm_t comm = nullptr;
    double x = r + 1;
    if (CALL(library, ncclCommInitRank)(&comm, 2, id, r) != ncclSuccess) return 0.0;
    if (CALL(library, ncclAllReduce)(&x, &x, 1, ncclFloat64, ncclSum, comm, nullptr) != ncclSuccess)
      x = 0;
    (void)CALL(library, ncclCommDestroy)(comm);
    return x;
  };
  double second = 0;
  std::thread thread([&] { second = rank(global, 1); });
  CHECK(rank(local, 0) == 3);
  thread.join();
  CHECK(second == 3);
}

TEST_CASE("with a CUDA driver that is too old device memory is known, and refused") {
  Environment environment;
  environment.set("RINGFOLD_INTERFACES", "lo");
  const Copy copy;  // it remembers the driver
  const Loaded library(copy.path, RTLD_LOCAL);
  const ncclComm_t comm = alone(library);
  int device = -1;
  CHECK(CALL(library, ncclCommCuDevice)(comm, &device) == ncclSuccess);
  CHECK(device == 0);
  const Loaded driver(RINGFOLD_NCCL_FAKE_CUDA, RTLD_LOCAL);
  float* const on_device = static_cast<float*>(
      driver.function(static_cast<void* (*)()>(nullptr), "fake_device_memory")());
  float on_host = 1;
  CHECK(reduced_alone(library, comm) == 7);  // host memory stays welcome
  const auto refused = [&](ncclResult_t result) {
    const std::string text = CALL(library, ncclGetLastError)(comm);
    INFO(text);
    CHECK(result == ncclInvalidUsage);
    CHECK(text.find("is device memory, which ringfold cannot use here") != std::string::npos);
  };
  const auto all_reduce = CALL(library, ncclAllReduce);
  refused(all_reduce(on_device, &on_host, 1, ncclFloat32, ncclSum, comm, nullptr));
  refused(all_reduce(&on_host, on_device + 1, 1, ncclFloat32, ncclSum, comm, nullptr));
  refused(CALL(library, ncclSend)(on_device, 1, ncclFloat32, 0, comm, nullptr));
  void* handle = nullptr;
  refused(CALL(library, ncclCommRegister)(comm, on_device, 16, &handle));
  ncclRedOp_t op = ncclSum;
  refused(
      CALL(library, ncclRedOpCreatePreMulSum)(&op, on_device, ncclFloat32, ncclScalarDevice, comm));
  // Who has a context wants device memory: none is handed out in its place.
  void* block = nullptr;
  CHECK(CALL(library, ncclMemAlloc)(&block, 100) == ncclInvalidUsage);
  CHECK(block == nullptr);
  const ncclComm_t second = alone(library);
  CHECK(CALL(library, ncclCommCuDevice)(second, &device) == ncclSuccess);
  CHECK(device == 3);
  for (const ncclComm_t done : {comm, second})
    CHECK(CALL(library, ncclCommDestroy)(done) == ncclSuccess);
}

TEST_CASE("C65: copies of a program that share no id do not compute alone") {
  Environment environment;
  environment.set("RINGFOLD_INTERFACES", "lo");
  environment.set("RINGFOLD_TIMEOUT", "300ms");
  const Loaded library(RINGFOLD_NCCL_LIBRARY, RTLD_LOCAL);
  for (const int rank : {0, 1}) {  // each with an id of its own, as if it were the only one
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    REQUIRE(CALL(library, ncclGetUniqueId)(&id) == ncclSuccess);
    const ncclResult_t result = CALL(library, ncclCommInitRank)(&comm, 4, id, rank);
    CHECK(result == ncclTimeout);
    CHECK(comm == nullptr);
    const std::string text = CALL(library, ncclGetLastError)(nullptr);
    INFO(text);
    CHECK(text.find(rank == 0 ? "1-3" : "rank 0") != std::string::npos);
    environment.set("RINGFOLD_NCCL_VERSION", "22809");  // whose header knows no ncclTimeout
    CHECK(CALL(library, ncclCommInitRank)(&comm, 4, id, rank) != ncclTimeout);
    environment.unset("RINGFOLD_NCCL_VERSION");
  }
}

TEST_CASE("NCCL_COMM_ID stands for the id on all ranks") {
  Environment environment;
  environment.set("RINGFOLD_INTERFACES", "lo");
  const Loaded library(RINGFOLD_NCCL_LIBRARY, RTLD_LOCAL);
  ncclUniqueId first, second;
  for (const char* wrong : {"localhost", "x"}) {
    environment.set("NCCL_COMM_ID", wrong);
    CHECK(CALL(library, ncclGetUniqueId)(&first) == ncclInvalidArgument);
  }
  environment.set("NCCL_COMM_ID", fmt::format("127.0.0.1:{}", free_port()));
  REQUIRE(CALL(library, ncclGetUniqueId)(&first) == ncclSuccess);
  REQUIRE(CALL(library, ncclGetUniqueId)(&second) == ncclSuccess);
  CHECK(std::memcmp(&first, &second, sizeof first) == 0);
  double sum[2] = {1, 2};
  ncclComm_t comms[2];
  REQUIRE(CALL(library, ncclGroupStart)() == ncclSuccess);
  for (int r = 0; r < 2; ++r)
    CHECK(CALL(library, ncclCommInitRank)(&comms[r], 2, r == 0 ? first : second, r) == ncclSuccess);
  REQUIRE(CALL(library, ncclGroupEnd)() == ncclSuccess);
  REQUIRE(CALL(library, ncclGroupStart)() == ncclSuccess);
  for (int r = 0; r < 2; ++r)
    CHECK(CALL(library, ncclAllReduce)(&sum[r], &sum[r], 1, ncclFloat64, ncclSum, comms[r],
                                       nullptr) == ncclSuccess);
  REQUIRE(CALL(library, ncclGroupEnd)() == ncclSuccess);
  CHECK((sum[0] == 3 && sum[1] == 3));
  for (int r = 0; r < 2; ++r) CHECK(CALL(library, ncclCommDestroy)(comms[r]) == ncclSuccess);
}
