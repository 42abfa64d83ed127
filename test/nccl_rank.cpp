// One rank of a comparison: opens a libnccl.so.2, ours or the real one, and writes what its
// all-reduces give.
//
//   nccl_rank LIBRARY host|device exact|rough all|small RANK RANKS FOLDER
//
// The id travels through FOLDER/id, the results of all cases go to FOLDER/<rank>. Exit status 0, or
// 1 with a sentence on stderr. Neither ringfold nor CUDA is linked in.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "test/nccl_cases.h"
#include "test/nccl_cuda.h"
#include "test/nccl_minimal.h"

using namespace ringfold;
using namespace ringfold::test;

namespace {

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "nccl_rank: %s\n", why.c_str());
  std::exit(1);
}

class Nccl {
 public:
  explicit Nccl(const char* path) : handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) stop(dlerror());
  }
  template <class Function>
  Function* function(Function*, const char* name) const {
    auto* const found = reinterpret_cast<Function*>(dlsym(handle_, name));
    if (found == nullptr) stop(std::string("no ") + name);
    return found;
  }
  void check(ncclResult_t result, const char* what) const {
    if (result == ncclSuccess) return;
    auto* const last =
        function(static_cast<decltype(ncclGetLastError)*>(nullptr), "ncclGetLastError");
    stop(std::string(what) + ": " + std::to_string(result) + ": " + last(nullptr));
  }

 private:
  void* handle_;
};
#define CALL(name, ...) \
  nccl.check(nccl.function(static_cast<decltype(name)*>(nullptr), #name)(__VA_ARGS__), #name)

ncclUniqueId exchanged_id(const Nccl& nccl, int rank, const std::string& folder) {
  ncclUniqueId id{};
  const std::string path = folder + "/id";
  if (rank == 0) {
    CALL(ncclGetUniqueId, &id);
    std::ofstream(path + ".new", std::ios::binary).write(id.internal, sizeof id.internal);
    std::rename((path + ".new").c_str(), path.c_str());
    return id;
  }
  while (access(path.c_str(), R_OK) != 0) usleep(2000);
  std::ifstream(path, std::ios::binary).read(id.internal, sizeof id.internal);
  return id;
}

// The bytes of a factor in the case's type. REQUIRES that the type holds it.
uint64_t scalar_bits(DType type, double factor) {
  return is_float(type) ? float_bits(type, factor)
                        : static_cast<uint64_t>(static_cast<int64_t>(factor));
}

}  // namespace

int main(int count, char** words) {
  if (count != 8) stop("LIBRARY host|device exact|rough all|small RANK RANKS FOLDER");
  const Nccl nccl(words[1]);
  const bool device = std::string(words[2]) == "device";
  const NcclInputs inputs =
      std::string(words[3]) == "exact" ? NcclInputs::exact : NcclInputs::rough;
  const int rank = std::atoi(words[5]), ranks = std::atoi(words[6]);
  const std::string folder = words[7];
  Cuda cuda;
  if (device && !cuda.start(rank)) stop("no CUDA device: " + cuda.why());
  ncclComm_t comm = nullptr;
  const ncclUniqueId id = exchanged_id(nccl, rank, folder);
  CALL(ncclCommInitRank, &comm, ranks, id, rank);
  std::ofstream out(folder + "/" + std::to_string(rank), std::ios::binary);
  const bool fp8 = !device || cuda.compute_capability() >= 90;
  for (const NcclCase& c : nccl_cases(fp8, std::string(words[4]) == "all")) {
    const auto bytes = nccl_case_input(c, inputs, ranks, rank);
    ncclRedOp_t op = static_cast<ncclRedOp_t>(c.op);
    const auto type = static_cast<ncclDataType_t>(c.type);
    uint64_t scalar = scalar_bits(c.type, nccl_factor(inputs, c.type, rank));
    if (c.op == Op::premul_sum)
      CALL(ncclRedOpCreatePreMulSum, &op, &scalar, type, ncclScalarHostImmediate, comm);
    std::vector<unsigned char> result(bytes.size());
    if (device) {
      const Cuda::Memory send(cuda, bytes), recv(cuda, result);
      CALL(ncclAllReduce, send.pointer(), recv.pointer(), c.count, type, op, comm, nullptr);
      recv.read(&result);
    } else {
      CALL(ncclAllReduce, bytes.data(), result.data(), c.count, type, op, comm, nullptr);
    }
    if (c.op == Op::premul_sum) CALL(ncclRedOpDestroy, op, comm);
    out.write(reinterpret_cast<const char*>(result.data()),
              static_cast<std::streamsize>(result.size()));
  }
  CALL(ncclCommDestroy, comm);
  return out.flush().good() ? 0 : 1;
}
