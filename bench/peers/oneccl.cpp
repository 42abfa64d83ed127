// oneCCL's all-reduce of host memory under the common protocol.
#include <cstring>
#include <oneapi/ccl.hpp>

#include "bench/peers/harness.h"

namespace {

class OneCcl : public peers::Library {
 public:
  explicit OneCcl(peers::Team& team) : communicator_(create(team)) {}

  Call prepare(const float* in, float* out, size_t count) override {
    return [=, this] { ccl::allreduce(in, out, count, ccl::reduction::sum, communicator_).wait(); };
  }

 private:
  static ccl::communicator create(peers::Team& team) {
    ccl::init();
    ccl::shared_ptr_class<ccl::kvs> store;
    ccl::kvs::address_type address;
    if (team.rank() == 0) {
      store = ccl::create_main_kvs();
      address = store->get_address();
    }
    team.share(address.data(), address.size());
    if (team.rank() != 0) store = ccl::create_kvs(address);
    return ccl::create_communicator(team.size(), team.rank(), store);
  }

  ccl::communicator communicator_;
};

}  // namespace

// Started by Intel MPI's mpirun, which tells rank and size in the environment.
int main(int argc, char** argv) {
  const peers::Arguments arguments(argc, argv);
  const auto told = [](const char* name) {
    const char* const text = std::getenv(name);
    if (text == nullptr) peers::die(std::string(name) + " is not set; start it by mpirun");
    return std::atoi(text);
  };
  peers::Team team(arguments, told("PMI_RANK"), told("PMI_SIZE"));
  OneCcl library(team);
  peers::serve(arguments, team, library);
}
