// ringfold's all-reduce under the common protocol, over its C interface.
//   --transports LIST   allowed ones, as in ringfold_options; the library chooses if not given
#include "bench/peers/harness.h"
#include "ringfold/c.h"

namespace {

void must(ringfold_status status) {
  if (status != RINGFOLD_OK) peers::die(std::string("ringfold: ") + ringfold_last_error());
}

class Ringfold : public peers::Library {
 public:
  Ringfold(peers::Team& team, const std::string& transports) {
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

  // Buffers of the library's own, or registered with it, are to come from here.
  float* allocate(size_t bytes, peers::Role role) override {
    return peers::Library::allocate(bytes, role);
  }

 private:
  ringfold_comm_t communicator_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const peers::Arguments arguments(argc, argv);
  peers::Team team(arguments, arguments.number("rank", 0), arguments.number("size", 1));
  Ringfold library(team, arguments.get("transports", ""));
  peers::serve(arguments, team, library);
  team.barrier();  // nobody leaves while others are still at work
}
