// Gloo's all-reduce over TCP under the common protocol.
//   --algorithm ring | bcube       gloo::allreduce
//               halving_doubling   the older class, in place only, in synchronous mode: it polls
//   --store DIR                    an empty folder, where the ranks find each other
//   --address A                    where this rank listens; default: 127.0.0.1
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>

#include <memory>

#include "bench/peers/harness.h"

namespace {

using Context = std::shared_ptr<gloo::rendezvous::Context>;

Context connect(const peers::Arguments& arguments, const peers::Team& team) {
  const gloo::transport::tcp::attr attributes(arguments.get("address", "127.0.0.1").c_str());
  std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attributes);
  gloo::rendezvous::FileStore store(arguments.get("store", "."));
  auto context = std::make_shared<gloo::rendezvous::Context>(team.rank(), team.size());
  context->connectFullMesh(store, device);
  return context;
}

class Collective : public peers::Library {
 public:
  Collective(Context context, gloo::AllreduceOptions::Algorithm algorithm)
      : context_(std::move(context)), algorithm_(algorithm) {}

  Call prepare(const float* in, float* out, size_t count) override {
    return [=, this] {
      gloo::AllreduceOptions options(context_);
      options.setAlgorithm(algorithm_);
      if (in != out) options.setInput(const_cast<float*>(in), count);
      options.setOutput(out, count);
      options.setTag(1);
      void (*const sum)(void*, const void*, const void*, size_t) = &gloo::sum<float>;
      options.setReduceFunction(sum);
      gloo::allreduce(options);
    };
  }

 private:
  Context context_;
  gloo::AllreduceOptions::Algorithm algorithm_;
};

class HalvingDoubling : public peers::Library {
 public:
  HalvingDoubling(Context context, peers::Team& team) : context_(std::move(context)), team_(team) {
    for (int peer = 0; peer < team.size(); ++peer) {
      if (peer != team.rank()) context_->getPair(peer)->setSync(true, true);
    }
  }
  Call prepare(const float*, float* out, size_t count) override {
    using Algorithm = gloo::AllreduceHalvingDoubling<float>;
    auto algorithm =
        std::make_shared<Algorithm>(context_, std::vector<float*>{out}, static_cast<int>(count));
    team_.barrier();
    return [algorithm] { algorithm->run(); };
  }
  [[nodiscard]] bool offers(bool in_place) const override { return in_place; }

 private:
  Context context_;
  peers::Team& team_;
};

}  // namespace

int main(int argc, char** argv) {
  const peers::Arguments arguments(argc, argv);
  peers::Team team(arguments, arguments.number("rank", 0), arguments.number("size", 1));
  const Context context = connect(arguments, team);
  team.barrier();
  const std::string algorithm = arguments.get("algorithm", "ring");
  std::unique_ptr<peers::Library> library;
  if (algorithm == "halving_doubling") {
    library = std::make_unique<HalvingDoubling>(context, team);
  } else {
    library = std::make_unique<Collective>(context, algorithm == "bcube"
                                                        ? gloo::AllreduceOptions::Algorithm::BCUBE
                                                        : gloo::AllreduceOptions::Algorithm::RING);
  }
  peers::serve(arguments, team, *library);
  team.barrier();
  std::_Exit(0);  // its threads complain when the first rank closes
}
