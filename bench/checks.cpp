// What it costs that ranks which call different things find out: on the way of an operation by
// messages, everything that serves this and nothing else, beside the operations themselves. (In a
// shared region a call pays less: like calls in a row are described once, and each flag is compared
// by one load.)
//
//   checks                       ns a call; AllReduce is what they are a part of
#include <benchmark/benchmark.h>

#include <array>
#include <random>
#include <thread>
#include <vector>

#include "lib/engine/engine.h"
#include "lib/engine/matcher.h"
#include "ringfold/communicator.h"

namespace {

using namespace ringfold;

constexpr size_t kBytes = 64 << 10;
constexpr int kMessages = 2;  // that a rank of two receives in an all-reduce

Description call_number(size_t number) {
  Description what;
  what.schedule.size = 2;
  what.schedule.count = kBytes / 4 + number % 2;
  what.piece = kBytes / 4;
  return what;
}

void describe(benchmark::State& state) {
  size_t number = 0;
  for (auto _ : state) benchmark::DoNotOptimize(call_number(number++).fingerprint());
}
BENCHMARK(describe)->Name("Describe");

// The matching of one operation's messages; with the checks, what the operation is said to be is
// worked out, opened and finished.
void match(benchmark::State& state) {
  const bool checks = state.range(0) != 0;
  Matcher matcher;
  uint32_t seq = 0;
  for (auto _ : state) {
    const uint32_t fingerprint = checks ? call_number(seq).fingerprint() : 1;
    if (checks) matcher.open(0, seq, fingerprint);
    for (uint32_t index = 0; index < kMessages; ++index) {
      const MessageId id{0, seq, index, fingerprint};
      Matcher::Posted posted;
      posted.fingerprint = fingerprint;
      benchmark::DoNotOptimize(matcher.post(1, id, posted));
      benchmark::DoNotOptimize(matcher.arrive(1, id, &posted));
    }
    if (checks) matcher.finish(0, seq, [](Peer, const MessageId&, const Matcher::Early&) {});
    ++seq;
  }
}
BENCHMARK(match)->Name("Match")->ArgName("checks")->Arg(0)->Arg(1);

// Two ranks of this process; the other one calls for as long as it is answered.
void all_reduce(benchmark::State& state, const char* transport) {
  std::random_device random;
  Rendezvous where;
  where.size = 2;
  where.coordinator = "127.0.0.1:" + std::to_string(20000 + random() % 12000);
  where.secret = "of the benchmark";
  Options options;
  options.transports = transport;
  const auto call = [](Communicator& comm, std::vector<float>& data) {
    return comm.all_reduce(data.data(), data.data(), data.size(), DType::f32, Op::max).wait();
  };
  std::thread other([&] {
    Rendezvous second = where;
    second.rank = 1;
    auto comm = Communicator::create(second, options);
    std::vector<float> data(kBytes / 4);
    while (comm.ok() && call(*comm, data).ok()) continue;
  });
  {
    auto comm = Communicator::create(where, options);
    std::vector<float> data(kBytes / 4);
    if (!comm.ok()) state.SkipWithError(comm.status().message().c_str());
    for (auto _ : state)
      if (Status status = call(*comm, data); !status.ok())
        state.SkipWithError(status.message().c_str());
    if (comm.ok()) comm->abort();
  }
  other.join();
}
BENCHMARK_CAPTURE(all_reduce, loopback, "loopback")
    ->Name("AllReduce of 64 KiB by loopback")
    ->UseRealTime();
BENCHMARK_CAPTURE(all_reduce, shm, "shm")->Name("AllReduce of 64 KiB by shm")->UseRealTime();
BENCHMARK_CAPTURE(all_reduce, region, "region")
    ->Name("AllReduce of 64 KiB by region")
    ->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
