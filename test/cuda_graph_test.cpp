// Collectives captured in CUDA graphs, and their replays.
#include <catch2/catch.hpp>
#include <numeric>

#include "test/cuda_ranks.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr size_t kCount = 3000;

Options with(Nanoseconds timeout) {
  Options options;
  options.timeout = timeout;
  options.piece_bytes = 4096;
  return options;
}

// A graph captured from a stream, ready to be launched.
class Graph {
 public:
  template <class Calls>
  Graph(const CudaWorld& world, const CudaStream& stream, Problems& problems, const Calls& calls)
      : driver_(world.driver()) {
    const auto need = [&](CUresult result, const char* what) {
      problems.check(result == CUDA_SUCCESS, what);
    };
    need(driver_.cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "begin");
    calls();
    CUgraph graph = nullptr;
    need(driver_.cuStreamEndCapture(stream.get(), &graph), "end");
    need(driver_.cuGraphInstantiate(&exec_, graph, 0), "instantiate");
    need(driver_.cuGraphDestroy(graph), "destroy");
  }
  ~Graph() { (void)driver_.cuGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(const CudaStream& stream) const {
    if (driver_.cuGraphLaunch(exec_, stream.get()) != CUDA_SUCCESS) std::abort();
  }

 private:
  const TestDriver& driver_;
  CUgraphExec exec_ = nullptr;
};

bool all_are(const std::vector<int32_t>& numbers, int32_t value) {
  return numbers == std::vector<int32_t>(numbers.size(), value);
}

}  // namespace

TEST_CASE("captured collectives run at every replay, between other calls in any order") {
  const auto seed = static_cast<uint64_t>(GENERATE(range(1, 6)));
  const int ranks = GENERATE(2, 3);
  const CudaWorld world(roomy(seed));
  const auto problems = run_cuda_ranks(world, ranks, with(20s), [ranks](const CudaRank& me) {
    const Memory x(me.world, kCount * 4), y(me.world, kCount * 4), z(me.world, kCount * 4);
    const Memory gathered(me.world, kCount * 4 * me.size());
    const CudaStream other(me.world);
    x.set(me.stream, std::vector<int32_t>(kCount, 1));
    y.set(me.stream, std::vector<int32_t>(kCount, 1));
    me.stream.wait();
    std::vector<Work> works;
    {
      const Graph graph(me.world, me.stream, me.problems, [&] {
        works.push_back(
            me.comm.all_reduce(x.get(), x.get(), kCount, DType::i32, Op::sum, me.handle()));
        ringfold::Group group;
        works.push_back(
            me.comm.all_reduce(y.get(), y.get(), kCount, DType::i32, Op::max, me.handle()));
        works.push_back(
            me.comm.all_gather(x.get(), gathered.get(), kCount, DType::i32, me.handle()));
        works.push_back(group.submit());
        const Status message = me.comm
                                   .send(x.get(), kCount, DType::i32,
                                         (me.comm.rank() + 1) % me.comm.size(), me.handle())
                                   .wait();
        me.problems.check(message.code() == Code::unsupported, message.to_string());
      });
      for (Work& work : works) me.problems.ok(work.wait(), "captured");
      me.problems.check(all_are(x.get<int32_t>(me.stream, kCount), 1), "nothing has run yet");
      int32_t power = 1;
      for (int replay = 1; replay <= 6; ++replay) {
        power *= ranks;
        z.set(other, std::vector<int32_t>(kCount, replay));
        // Ranks differ in what they start first.
        const auto eager = [&] {
          works.push_back(
              me.comm.all_reduce(z.get(), z.get(), kCount, DType::i32, Op::sum, {other.get()}));
        };
        if ((me.rank() + static_cast<size_t>(replay)) % 2 == 0) eager();
        graph.launch(me.stream);
        if ((me.rank() + static_cast<size_t>(replay)) % 2 != 0) eager();
        me.problems.check(all_are(z.get<int32_t>(other, kCount), replay * ranks), "eager");
        if (replay % 2 == 0) continue;  // two replays in a row without a look
        me.problems.check(all_are(x.get<int32_t>(me.stream, kCount), power), "all_reduce");
        me.problems.check(all_are(gathered.get<int32_t>(me.stream, kCount * me.size()), power),
                          "all_gather");
      }
      me.problems.check(all_are(x.get<int32_t>(me.stream, kCount), power), "all_reduce");
      for (Work& work : works) me.problems.ok(work.wait(), "eager");
      me.problems.ok(me.comm.barrier().wait(), "barrier");
    }
  });
  CHECK(problems == "");
  if (!real_driver()) CHECK(EmulatedDriver::user_objects() == 0);
}

TEST_CASE("a graph outlives its communicator") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(20s), [](const CudaRank& me) {
    const Memory x(me.world, kCount * 4);
    x.set(me.stream, std::vector<int32_t>(kCount, 1));
    me.stream.wait();
    std::unique_ptr<Graph> graph;
    {
      auto second = me.comm.split(0, 0);
      me.problems.ok(second.status(), "split");
      if (!second.ok()) return;
      graph = std::make_unique<Graph>(me.world, me.stream, me.problems, [&] {
        me.problems.ok(
            second->all_reduce(x.get(), x.get(), kCount, DType::i32, Op::sum, me.handle()).wait(),
            "captured");
      });
    }
    for (int replay = 0; replay < 3; ++replay) graph->launch(me.stream);
    me.problems.check(all_are(x.get<int32_t>(me.stream, kCount), 8), "three replays");
    me.problems.ok(me.comm.barrier().wait(), "barrier");
  });
  CHECK(problems == "");
}

TEST_CASE("after a failure replays do nothing, and the stream passes") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(20s), [](const CudaRank& me) {
    const Memory x(me.world, kCount * 4);
    x.set(me.stream, std::vector<int32_t>(kCount, 1));
    me.stream.wait();
    const Graph graph(me.world, me.stream, me.problems, [&] {
      me.comm.all_reduce(x.get(), x.get(), kCount, DType::i32, Op::sum, me.handle());
    });
    graph.launch(me.stream);
    me.problems.check(all_are(x.get<int32_t>(me.stream, kCount), 2), "before");
    me.problems.ok(me.comm.barrier().wait(), "barrier");
    if (me.rank() == 0) {
      graph.launch(me.stream);  // alone
      std::this_thread::sleep_for(20ms);
      me.comm.abort("enough");
    }
    me.stream.wait();
    while (me.comm.health().ok()) std::this_thread::sleep_for(1ms);
    me.problems.check(me.comm.health().code() == Code::aborted, me.comm.health().to_string());
    graph.launch(me.stream);
    me.stream.wait();
  });
  CHECK(problems == "");
}

TEST_CASE("a replay that misses another rank times out, and the communicator has failed") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(200ms), [](const CudaRank& me) {
    const Memory x(me.world, kCount * 4);
    const Graph graph(me.world, me.stream, me.problems, [&] {
      me.comm.all_reduce(x.get(), x.get(), kCount, DType::i32, Op::sum, me.handle());
    });
    me.problems.ok(me.comm.barrier().wait(), "barrier");
    if (me.rank() == 0) graph.launch(me.stream);
    me.stream.wait();
    while (me.comm.health().ok()) std::this_thread::sleep_for(1ms);
    me.problems.check(me.comm.health().code() == Code::timeout, me.comm.health().to_string());
  });
  CHECK(problems == "");
}

TEST_CASE("two replays of one graph at once are refused, and both streams pass") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(20s), [](const CudaRank& me) {
    const Memory x(me.world, kCount * 4);
    const auto& driver = me.world.driver();
    CUgraph graph = nullptr;
    (void)driver.cuStreamBeginCapture(me.stream.get(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    me.comm.all_reduce(x.get(), x.get(), kCount, DType::i32, Op::sum, me.handle());
    (void)driver.cuStreamEndCapture(me.stream.get(), &graph);
    std::array<CUgraphExec, 2> execs{};
    for (CUgraphExec& exec : execs) (void)driver.cuGraphInstantiate(&exec, graph, 0);
    me.problems.ok(me.comm.barrier().wait(), "barrier");
    if (me.rank() == 0) {
      const CudaStream other(me.world);
      (void)driver.cuGraphLaunch(execs[0], me.stream.get());
      (void)driver.cuGraphLaunch(execs[1], other.get());
      me.stream.wait();
      other.wait();
    }
    while (me.comm.health().ok()) std::this_thread::sleep_for(1ms);
    me.problems.check(me.comm.health().message().find("two replays") != std::string::npos,
                      me.comm.health().to_string());
    for (const CUgraphExec exec : execs) (void)driver.cuGraphExecDestroy(exec);
    (void)driver.cuGraphDestroy(graph);
  });
  CHECK(problems == "");
}
