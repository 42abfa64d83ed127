// What goes wrong on a device: streams pass all the same, and the reason is told.
#include <atomic>
#include <catch2/catch.hpp>

#include "test/cuda_ranks.h"
#include "test/environment.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr size_t kCount = 2000;

Options with(Nanoseconds timeout) {
  Options options;
  options.timeout = timeout;
  return options;
}

Work sum_in_place(const CudaRank& me, const Memory& memory) {
  return me.comm.all_reduce(memory.get(), memory.get(), kCount, DType::i32, Op::sum, me.handle());
}

}  // namespace

TEST_CASE("an abort in mid-flight ends the operation on all ranks, and their streams pass") {
  const CudaWorld world(roomy(static_cast<uint64_t>(GENERATE(range(1, 6)))));
  const auto problems = run_cuda_ranks(world, 3, with(30s), [](const CudaRank& me) {
    const Memory memory(me.world, kCount * 4);
    memory.set(me.stream, std::vector<int32_t>(kCount, 1));
    me.stream.wait();
    if (me.rank() == 2) {  // never calls
      std::this_thread::sleep_for(20ms);
      me.comm.abort("enough");
    } else {
      Work work = sum_in_place(me, memory);
      const Status status = work.wait();
      me.problems.check(status.code() == Code::aborted, status.to_string());
      me.problems.check(status.message().find("enough") != std::string::npos, status.to_string());
    }
    me.stream.wait();
    // Nothing of it goes on: calls are refused, and the stream is the user's.
    me.problems.check(sum_in_place(me, memory).wait().code() == Code::aborted, "a later call");
    memory.set(me.stream, std::vector<int32_t>(kCount, 4));
    me.problems.check(memory.get<int32_t>(me.stream, 1)[0] == 4, "the stream goes on");
  });
  CHECK(problems == "");
}

TEST_CASE("an abort before the stream has come to the operation") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(30s), [](const CudaRank& me) {
    std::atomic<bool> release{false};
    const auto hold = [](void* data) {
      while (!*static_cast<std::atomic<bool>*>(data)) std::this_thread::sleep_for(100us);
    };
    const Memory memory(me.world, kCount * 4);
    if (cuda::call().cuLaunchHostFunc(me.stream.get(), hold, &release) != CUDA_SUCCESS)
      return me.problems.add("host function");
    Work work = sum_in_place(me, memory);
    me.comm.abort("before it began");
    me.problems.check(work.wait().code() == Code::aborted, "aborted");
    release = true;
    me.stream.wait();
  });
  CHECK(problems == "");
}

TEST_CASE("the deadline counts from when the stream comes to the operation") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(300ms), [](const CudaRank& me) {
    std::atomic<bool> release{false};
    const auto hold = [](void* data) {
      while (!*static_cast<std::atomic<bool>*>(data)) std::this_thread::sleep_for(100us);
    };
    const Memory memory(me.world, kCount * 4);
    (void)cuda::call().cuLaunchHostFunc(me.stream.get(), hold, &release);
    Work work = sum_in_place(me, memory);
    std::this_thread::sleep_for(500ms);  // longer than the time-out: nothing has begun
    release = true;
    me.problems.ok(work.wait(), "late, but in time");
    me.stream.wait();
    // And a rank that does not call is missed.
    me.problems.ok(me.comm.barrier().wait(), "barrier");
    if (me.rank() == 1) {
      std::this_thread::sleep_for(400ms);
      return;
    }
    const Status status = sum_in_place(me, memory).wait();
    me.problems.check(status.code() == Code::timeout, status.to_string());
    me.stream.wait();
  });
  CHECK(problems == "");
}

TEST_CASE("ranks that call different things on device memory hear of it") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(30s), [](const CudaRank& me) {
    const Memory memory(me.world, kCount * 4);
    const Status status = me.comm
                              .all_reduce(memory.get(), memory.get(), kCount - me.rank(),
                                          DType::i32, Op::sum, me.handle())
                              .wait();
    me.problems.check(status.code() == Code::mismatch, status.to_string());
    me.stream.wait();
  });
  CHECK(problems == "");
}

// The one goes through shared memory, the other by messages, and neither meets anything of the
// other: whoever waits asks.
TEST_CASE("host memory on some ranks and device memory on others is a mismatch, at any deadline") {
  const std::string transports = GENERATE("all", "loopback");
  const int odd = GENERATE(0, 1, 2);
  const bool on_device = GENERATE(true, false);  // the odd one
  INFO(transports << ", rank " << odd << (on_device ? " on the device" : " on the host"));
  const CudaWorld world(roomy());
  Options options = with(10min);
  options.transports = transports;
  const auto problems = run_cuda_ranks(world, 3, options, [&](const CudaRank& me) {
    const Memory memory(me.world, kCount * 4);
    memory.set(me.stream, std::vector<int32_t>(kCount, 1));
    std::vector<int32_t> host(kCount, 1);
    const auto sum_on_host = [&] {
      return me.comm.all_reduce(host.data(), host.data(), kCount, DType::i32, Op::sum);
    };
    // Both in turn, one ahead of the other, are no mistake.
    for (int i = 0; i < 3; ++i) {
      Work first = sum_in_place(me, memory);
      me.problems.ok(sum_on_host().wait(), "host");
      me.problems.ok(first.wait(), "device");
      me.problems.ok(sum_on_host().wait(), "host again");
    }
    const bool device = (me.comm.rank() == odd) == on_device;
    const Status status = (device ? sum_in_place(me, memory) : sum_on_host()).wait();
    const std::string name = "rank " + std::to_string(odd) + " called";
    me.problems.check(status.code() == Code::mismatch, status.to_string());
    me.problems.check(status.message().find(name) != std::string::npos, status.to_string());
    me.stream.wait();
  });
  CHECK(problems == "");
}

TEST_CASE("a rank that dies in the middle: the others hear of it, and their streams pass") {
  Processes processes(3, [](const Rendezvous& where) {
    // Each process has its own device.
    EmulatedOptions options;
    options.seed = static_cast<uint64_t>(where.rank) + 1;
    const CudaWorld world(options);
    Options with_time;
    with_time.timeout = 30s;
    auto comm = Communicator::create(where, with_time);
    rank_ok(comm.status());
    if (!comm.ok()) return 1;
    const CudaStream stream(world);
    const Memory memory(world, kCount * 4);
    memory.set(stream, std::vector<int32_t>(kCount, 1));
    RANK_CHECK(
        comm->all_reduce(memory.get(), memory.get(), kCount, DType::i32, Op::sum, {stream.get()})
            .wait()
            .ok());
    RANK_CHECK(memory.get<int32_t>(stream, 1)[0] == 3);
    if (where.rank == 2) raise(SIGKILL);
    Work work =
        comm->all_reduce(memory.get(), memory.get(), kCount, DType::i32, Op::sum, {stream.get()});
    RANK_CHECK(work.wait().code() == Code::peer_lost);
    stream.wait();
    return 0;
  });
  const auto outcomes = processes.wait(20s);
  CHECK(outcomes[0].to_string() == "ok");
  CHECK(outcomes[1].to_string() == "ok");
  CHECK(outcomes[2].signal == SIGKILL);
}

TEST_CASE(
    "CUDA_LAUNCH_BLOCKING: calls return when they are done; a group on several streams is "
    "refused") {
  if (real_driver()) return skip("of the emulated driver");
  Environment environment;
  environment.set("CUDA_LAUNCH_BLOCKING", "1");
  EmulatedOptions options = roomy();
  options.launch_blocking = true;
  const CudaWorld world(options);
  const auto problems = run_cuda_ranks(world, 2, with(20s), [](const CudaRank& me) {
    const Memory memory(me.world, kCount * 4), second(me.world, kCount * 4);
    memory.set(me.stream, std::vector<int32_t>(kCount, 1));
    me.problems.ok(sum_in_place(me, memory).wait(), "blocking");
    me.problems.check(memory.get<int32_t>(me.stream, 1)[0] == 2, "result");
    const CudaStream other(me.world);
    Group group;
    sum_in_place(me, memory);
    me.comm.all_reduce(second.get(), second.get(), kCount, DType::i32, Op::sum, {other.get()});
    const Status status = group.submit().wait();
    me.problems.check(status.code() == Code::unsupported, status.to_string());
    me.problems.check(status.message().find("CUDA_LAUNCH_BLOCKING") != std::string::npos,
                      status.to_string());
    me.problems.ok(sum_in_place(me, memory).wait(), "nothing of the group was started");
  });
  CHECK(problems == "");
}

TEST_CASE("a group that is dropped launches nothing") {
  const CudaWorld world(roomy());
  const auto problems = run_cuda_ranks(world, 2, with(20s), [](const CudaRank& me) {
    const Memory memory(me.world, kCount * 4);
    memory.set(me.stream, std::vector<int32_t>(kCount, 1));
    Work dropped;
    {
      const Group group;
      dropped = sum_in_place(me, memory);
    }
    me.problems.check(dropped.wait().code() == Code::aborted, "dropped");
    me.stream.wait();
    me.problems.ok(sum_in_place(me, memory).wait(), "the next call");
    me.problems.check(memory.get<int32_t>(me.stream, 1)[0] == 2, "result");
  });
  CHECK(problems == "");
  if (!real_driver()) CHECK(EmulatedDriver::launches() == 2);
}
