// ringfold's all-reduce under the common protocol, over its C interface.
//   --transports LIST   allowed ones, as in ringfold_options; the library chooses if not given
//   --memory own        buffers from ringfold_mem_alloc
#include "bench/peers/harness.h"
#include "ringfold/c.h"

namespace {

void must(ringfold_status status) {
  if (status != RINGFOLD_OK) peers::die(std::string("ringfold: ") + ringfold_last_error());
}

class Ringfold : public peers::Library {
 public:
  Ringfold(peers::Team& team, const std::string& transports, bool own_memory)
      : own_memory_(own_memory) {
    ringfold_unique_id id{};
    if (team.rank() == 0) must(ringfold_get_unique_id(&id));
    team.share(&id, sizeof id);
    ringfold_options options{};
    options.start_timeout = 30;
    options.timeout = 60;
    options.transports = transports.empty() ? nullptr : transports.c_str();
    must(ringfold_init_id(&communicator_, id, team.rank(), team.size(), &options));
  }
  ~Ringfold() override { must(ringfold_destroy(communicator_)); }

  Call prepare(const float* in, float* out, size_t count) override {
    return [=, this] {
      must(ringfold_all_reduce(communicator_, in, out, count, RINGFOLD_F32, RINGFOLD_SUM, 1,
                               nullptr));
    };
  }

  float* allocate(size_t bytes, peers::Role role) override {
    if (!own_memory_) return peers::Library::allocate(bytes, role);
    void* memory = nullptr;
    must(ringfold_mem_alloc(&memory, bytes));
    must(ringfold_register(communicator_, memory, bytes));
    return static_cast<float*>(memory);
  }
  void release(float* buffer) override {
    if (!own_memory_) return peers::Library::release(buffer);
    must(ringfold_mem_free(buffer));
  }

 private:
  ringfold_comm_t communicator_ = nullptr;
  const bool own_memory_;
};

}  // namespace

int main(int argc, char** argv) {
  const peers::Arguments arguments(argc, argv);
  peers::Team team(arguments, arguments.number("rank", 0), arguments.number("size", 1));
  Ringfold library(team, arguments.get("transports", ""), arguments.get("memory", "") == "own");
  peers::serve(arguments, team, library);
  team.barrier();  // nobody leaves while others are still at work
}
