// Scenarios of nccl_device: memory, what is refused, failures, and how communicators begin and end.
#include <array>

#include "test/nccl_device.h"

namespace ringfold::test {
namespace {

constexpr size_t kCount = 2000;

ncclResult_t sum_in_place(const Rank& me, int32_t* buffer, size_t count = kCount) {
  return ncclAllReduce(buffer, buffer, count, ncclInt32, ncclSum, me.comm, me.on());
}

// A buffer of ones for each rank, already there.
std::vector<int32_t*> ones(const Ranks& ranks, Kind kind = Kind::device) {
  std::vector<int32_t*> buffers;
  for (Rank* me : ranks) {
    buffers.push_back(static_cast<int32_t*>(me->take(kCount * 4, kind)));
    me->fill<int32_t>(buffers.back(), kCount, 1);
    me->wait();
  }
  return buffers;
}

// Does the collective once more, after something else.
void still_works(const Ranks& ranks) {
  const auto buffers = ones(ranks);
  size_t at = 0;
  together(ranks, [&](Rank& me) { OK(sum_in_place(me, buffers[at++])); });
  at = 0;
  for (Rank* me : ranks) EXPECT(me->holds<int32_t>(buffers[at++], kCount, me->size));
}

void memory(const Ranks& ranks) {
  for (Rank* me : ranks) {
    int device = -1;
    OK(ncclCommCuDevice(me->comm, &device));
    EXPECT(device == 0);
    void* block = nullptr;
    void* handles[2] = {nullptr, nullptr};
    OK(ncclMemAlloc(&block, 10000));
    auto* const bytes = static_cast<char*>(block);
    me->fill<int32_t>(block, 2500, 5);  // device memory: the host could not touch it
    EXPECT(me->holds<int32_t>(block, 2500, 5));
    OK(ncclCommRegister(me->comm, bytes, 10000, &handles[0]));
    OK(ncclCommRegister(me->comm, bytes + 100, 5000, &handles[1]));
    OK(ncclCommDeregister(me->comm, handles[0]));
    OK(ncclCommDeregister(me->comm, handles[1]));
    OK(ncclMemFree(block));
    REFUSED(ncclMemFree(block), ncclInvalidArgument, "free already");
    REFUSED(ncclMemAlloc(&block, size_t{1} << 50), ncclUnhandledCudaError, "CUDA error 2");
    ncclRedOp_t op{};
    REFUSED(ncclRedOpCreatePreMulSum(&op, nullptr, ncclFloat32, ncclScalarDevice, me->comm),
            ncclInvalidArgument, "null");
  }
  int devices[2] = {0, 99};
  ncclComm_t comms[2];
  REFUSED(ncclCommInitAll(comms, 2, devices), ncclInvalidArgument, "device 99: this machine has");
  meet(ranks);  // allocations are over: they wait for what runs
  still_works(ranks);
}

// What cannot be used on a stream is told, and host memory alone still works.
void refusals(const Ranks& ranks) {
  for (Rank* me : ranks) {
    int32_t on_host[4] = {1, 2, 3, 4};
    auto* const device = static_cast<int32_t*>(me->take(64));
    auto* const pinned = static_cast<int32_t*>(me->take(64, Kind::pinned));
    REFUSED(ncclAllReduce(on_host, device, 4, ncclInt32, ncclSum, me->comm, me->on()),
            ncclInvalidArgument, "cannot be used together");
    REFUSED(ncclAllReduce(pinned, on_host, 4, ncclInt32, ncclSum, me->comm, me->on()),
            ncclInvalidArgument, "cannot be used together");
    REFUSED(ncclAllReduce(on_host, on_host, 4, ncclInt32, ncclSum, me->comm, me->on_other()),
            ncclInvalidArgument, "no stream can use it");
    REFUSED(ncclAllReduce(nullptr, device, 4, ncclInt32, ncclSum, me->comm, me->on()),
            ncclInvalidArgument, "null");
    REFUSED(ncclAllReduce(device, device + 1, 4, ncclInt32, ncclSum, me->comm, me->on()),
            ncclInvalidArgument, "overlap");
    ncclRedOp_t op{};
    OK(ncclRedOpCreatePreMulSum(&op, device, ncclInt32, ncclScalarDevice, me->comm));
    REFUSED(ncclAllReduce(on_host, on_host, 4, ncclInt32, op, me->comm, nullptr),
            ncclInvalidArgument, "is on a device, but the data is in host memory");
    OK(ncclRedOpDestroy(op, me->comm));
  }
  std::vector<std::array<double, 8>> data(ranks.size());  // on the host, and done on return
  size_t at = 0;
  for (Rank* me : ranks) data[at++].fill(me->rank + 1);
  at = 0;
  together(ranks, [&](Rank& me) {
    OK(ncclAllReduce(data[at].data(), data[at].data(), 8, ncclFloat64, ncclSum, me.comm, nullptr));
    ++at;
  });
  const int n = ranks.front()->size;
  for (const auto& one : data) EXPECT(one[7] == n * (n + 1) / 2);
  still_works(ranks);
}

// Ranks call different counts: no call fails, the communicators do, and streams pass.
void mismatch(const Ranks& ranks) {
  const auto buffers = ones(ranks);
  size_t at = 0;
  together(ranks, [&](Rank& me) {
    (void)sum_in_place(me, buffers[at++], kCount - static_cast<size_t>(me.rank));
  });
  for (Rank* me : ranks) {
    EXPECT(failure_of(me->comm) == ncclInvalidUsage);
    const std::string text = ncclGetLastError(me->comm);
    expect(text.find("2000 elements") != std::string::npos, SPOT(the words of both), ": " + text);
    me->wait();
    OK(ncclCommAbort(me->comm));
    me->comm = nullptr;
  }
}

// With CUDA_LAUNCH_BLOCKING=1 the launches of a group on several streams would wait for each other.
void blocked_group(const Ranks& ranks) {
  const auto buffers = ones(ranks);
  size_t at = 0;
  OK(ncclGroupStart());
  for (Rank* me : ranks) OK(sum_in_place(*me, buffers[at++]));
  REFUSED(ncclGroupEnd(), ncclInvalidUsage, "CUDA_LAUNCH_BLOCKING=1");
  at = 0;
  for (Rank* me : ranks) EXPECT(me->holds<int32_t>(buffers[at++], kCount, 1));
}

// The last rank never calls. Another thread aborts in mid-flight: streams pass.
void abort(const Ranks& ranks) {
  Rank& me = *ranks.front();
  const auto buffers = ones({&me});
  if (me.rank == me.size - 1) {
    EXPECT(failure_of(me.comm) == ncclRemoteError);
  } else {
    std::thread watchdog([comm = me.comm] {
      enter_device();
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      ncclResult_t state = ncclInternalError;
      OK(ncclCommGetAsyncError(comm, &state));
      OK(ncclCommAbort(comm));
    });
    (void)sum_in_place(me, buffers[0]);  // with blocking launches it waits here
    watchdog.join();
  }
  me.wait();
  me.fill<int32_t>(buffers[0], kCount, 9);  // the stream is the user's again
  EXPECT(me.holds<int32_t>(buffers[0], kCount, 9));
  if (me.rank == me.size - 1) OK(ncclCommAbort(me.comm));
  me.comm = nullptr;
}

// An abort while the stream has not come to the operation.
void abort_before(const Ranks& ranks) {
  const auto buffers = ones(ranks);
  {
    std::vector<std::unique_ptr<Hold>> holds;
    for (Rank* me : ranks) holds.push_back(std::make_unique<Hold>(me->stream));
    size_t at = 0;
    together(ranks, [&](Rank& me) {
      const ncclResult_t result = sum_in_place(me, buffers[at++]);
      EXPECT(result == ncclSuccess || result == ncclRemoteError);  // another one was faster
    });
    for (Rank* me : ranks) OK(ncclCommAbort(me->comm));
  }
  for (Rank* me : ranks) {
    me->comm = nullptr;
    me->wait();
  }
}

void revoke(const Ranks& ranks) {
  still_works(ranks);
  const auto buffers = ones(ranks);
  for (Rank* me : ranks) {
    ncclResult_t state = ncclInternalError;
    OK(ncclCommRevoke(me->comm, 0));
    REFUSED(sum_in_place(*me, buffers[0]), ncclInvalidUsage, "revoked");
    OK(ncclCommGetAsyncError(me->comm, &state));
    EXPECT(state == ncclSuccess);
  }
}

// Finalizing waits for what is on the streams; destroying does so by itself.
void ends(const Ranks& ranks) {
  const auto buffers = ones(ranks, Kind::pinned);  // the host sees what is there
  std::vector<ncclComm_t> second(ranks.size());
  size_t at = 0;
  together(ranks, [&](Rank& me) { OK(ncclCommSplit(me.comm, 0, 0, &second[at++], nullptr)); });
  std::vector<std::unique_ptr<Hold>> holds;
  if (!launches_block())
    for (Rank* me : ranks) holds.push_back(std::make_unique<Hold>(me->stream));
  int32_t power = 1;
  for (int round = 0; round < 5; ++round) {
    power *= ranks.front()->size;
    at = 0;
    together(ranks, [&](Rank& me) {
      OK(ncclAllReduce(buffers[at], buffers[at], kCount, ncclInt32, ncclMax, second[at], me.on()));
      ++at;
    });
    at = 0;
    together(ranks, [&](Rank& me) { OK(sum_in_place(me, buffers[at++])); });
  }
  std::thread later([&holds] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    holds.clear();
  });
  at = 0;
  for (Rank* me : ranks) {
    OK(ncclCommFinalize(me->comm));
    EXPECT(buffers[at][0] == power && buffers[at][kCount - 1] == power);
    ++at;
    REFUSED(sum_in_place(*me, buffers[0]), ncclInvalidUsage, "finalized");
  }
  later.join();
  for (const ncclComm_t comm : second) OK(ncclCommDestroy(comm));
  for (Rank* me : ranks) {
    OK(ncclCommDestroy(me->comm));
    me->comm = nullptr;
    me->wait();
  }
}

// Calls on communicators that do not block are over when they are on the stream.
void non_blocking(const Ranks& ranks) {
  const auto buffers = ones(ranks);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  std::vector<ncclComm_t> made(ranks.size());
  size_t at = 0;
  if (ranks.size() > 1) OK(ncclGroupStart());
  for (Rank* me : ranks) {
    const ncclResult_t result = ncclCommSplit(me->comm, 0, 0, &made[at++], &config);
    EXPECT(result == ncclInProgress || result == ncclSuccess);
  }
  if (ranks.size() > 1) EXPECT(ncclGroupEnd() == ncclInProgress);
  for (const ncclComm_t comm : made) EXPECT(settled(comm) == ncclSuccess);
  {
    std::vector<std::unique_ptr<Hold>> holds;
    if (!launches_block())
      for (Rank* me : ranks) holds.push_back(std::make_unique<Hold>(me->stream));
    for (int round = 0; round < 3; ++round) {
      at = 0;
      together(ranks, [&](Rank& me) {
        OK(ncclAllReduce(buffers[at], buffers[at], kCount, ncclInt32, ncclSum, made[at], me.on()));
        ++at;
      });
      for (const ncclComm_t comm : made) EXPECT(settled(comm) == ncclSuccess);
    }
  }
  at = 0;
  for (Rank* me : ranks)
    EXPECT(me->holds<int32_t>(buffers[at++], kCount, me->size * me->size * me->size));
  for (const ncclComm_t comm : made) {
    EXPECT(ncclCommFinalize(comm) == ncclInProgress);
    EXPECT(settled(comm) == ncclSuccess);
    OK(ncclCommDestroy(comm));
  }
}

// Parts of a communicator work on the device, also after the whole was aborted.
void split_and_shrink(const Ranks& ranks) {
  const auto buffers = ones(ranks);
  std::vector<ncclComm_t> parts(ranks.size());
  size_t at = 0;
  together(ranks, [&](Rank& me) {
    OK(ncclCommSplit(me.comm, me.rank == 0 ? NCCL_SPLIT_NOCOLOR : 0, -me.rank, &parts[at++],
                     nullptr));
  });
  at = 0;
  together(ranks, [&](Rank& me) {
    const size_t mine = at++;
    int device = -1;
    if (me.rank == 0) return;
    OK(ncclCommCuDevice(parts[mine], &device));
    EXPECT(device == 0);
    OK(ncclAllReduce(buffers[mine], buffers[mine], kCount, ncclInt32, ncclSum, parts[mine],
                     me.on()));
  });
  at = 0;
  for (Rank* me : ranks) {
    EXPECT(me->holds<int32_t>(buffers[at], kCount, me->rank == 0 ? 1 : me->size - 1));
    if (parts[at] != nullptr) OK(ncclCommDestroy(parts[at]));
    ++at;
  }
  int gone[1] = {ranks.front()->size - 1};
  std::vector<ncclComm_t> smaller(ranks.size());
  const auto stays = [&](const Rank& me) { return me.rank != gone[0]; };
  at = 0;
  together(ranks, [&](Rank& me) {
    ncclComm_t* const out = &smaller[at++];
    if (stays(me)) OK(ncclCommShrink(me.comm, gone, 1, out, nullptr, NCCL_SHRINK_ABORT));
  });
  at = 0;
  together(ranks, [&](Rank& me) {
    const size_t mine = at++;
    if (stays(me))
      OK(ncclAllReduce(buffers[mine], buffers[mine], kCount, ncclInt32, ncclMax, smaller[mine],
                       me.on()));
  });
  at = 0;
  for (Rank* me : ranks) {
    if (stays(*me)) {
      EXPECT(me->holds<int32_t>(buffers[at], kCount, me->size > 2 ? me->size - 1 : 1));
      OK(ncclCommDestroy(smaller[at]));
    }
    ++at;
  }
}

// One rank alone: everything is a copy, in the order of the stream.
void alone(const Ranks& ranks) {
  Rank& me = *ranks.front();
  auto* const in = static_cast<float*>(me.take(400));
  auto* const out = static_cast<float*>(me.take(400, Kind::pinned));
  auto* const factor = static_cast<float*>(me.take(4));
  ncclRedOp_t op{};
  OK(ncclRedOpCreatePreMulSum(&op, factor, ncclFloat32, ncclScalarDevice, me.comm));
  me.fill<float>(in, 100, 3);
  me.fill<float>(factor, 1, 0.5F);
  OK(ncclAllReduce(in, out, 100, ncclFloat32, ncclAvg, me.comm, me.on()));
  EXPECT(me.holds<float>(out, 100, 3));
  OK(ncclAllReduce(in, out, 100, ncclFloat32, op, me.comm, me.on()));
  EXPECT(me.holds<float>(out, 100, 1.5F));
  OK(ncclAllReduce(in, in, 100, ncclFloat32, op, me.comm, me.on()));
  OK(ncclBroadcast(in, out, 100, ncclFloat32, 0, me.comm, me.on()));
  EXPECT(me.holds<float>(out, 100, 1.5F));
  OK(ncclRedOpDestroy(op, me.comm));
}

}  // namespace

const std::vector<Scenario> kLifeScenarios = {
    {"memory", memory},
    {"refusals", refusals},
    {"mismatch", mismatch},
    {"blocked_group", blocked_group},
    {"abort", abort},
    {"abort_before", abort_before},
    {"revoke", revoke},
    {"ends", ends},
    {"non_blocking", non_blocking},
    {"split_and_shrink", split_and_shrink},
    {"alone", alone},
};

}  // namespace ringfold::test
