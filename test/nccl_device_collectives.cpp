// Scenarios of nccl_device: what the collectives compute, and in which order.
#include <array>

#include "test/nccl_device.h"

namespace ringfold::test {
namespace {

constexpr uint64_t kSeed = 7;

struct Shape {
  DType type;
  Op op;
  size_t count;
  int root;
  [[nodiscard]] ncclDataType_t nccl_type() const { return static_cast<ncclDataType_t>(type); }
  [[nodiscard]] ncclRedOp_t nccl_op() const { return static_cast<ncclRedOp_t>(op); }
};

enum class Check : uint8_t { reduced, moved };

// A collective: its call, how many elements a rank sends and gets, and what comes out of it.
struct Collective {
  const char* name;
  ncclResult_t (*call)(const Rank& me, const void* send, void* recv, const Shape& shape);
  size_t (*sends)(const Rank& me, const Shape& shape);
  size_t (*receives)(const Rank& me, const Shape& shape);
  // Elements of the output that are wrong.
  size_t (*wrong)(const Rank& me, const char* got, const Shape& shape);
  Check input;
};

size_t one(const Rank&, const Shape& s) {
  return s.count;
}
size_t all(const Rank& me, const Shape& s) {
  return s.count * static_cast<size_t>(me.size);
}
size_t one_at_root(const Rank& me, const Shape& s) {
  return me.rank == s.root ? s.count : 0;
}
size_t all_at_root(const Rank& me, const Shape& s) {
  return me.rank == s.root ? all(me, s) : 0;
}

size_t wrong_sums(const Rank& me, const char* got, const Shape& s, size_t first) {
  return Exact(kSeed, me.size, s.type, s.op).wrong(got, first, s.count);
}
// Part r of the output is the part of rank r's input that begins at `first`.
size_t wrong_parts(const Rank& me, const char* got, const Shape& s, size_t first) {
  size_t wrong = 0;
  for (int r = 0; r < me.size; ++r)
    wrong += wrong_bits(got + static_cast<size_t>(r) * s.count * size_of(s.type), s.type, kSeed, r,
                        first, s.count);
  return wrong;
}
size_t part(const Rank& me, const Shape& s) {
  return static_cast<size_t>(me.rank) * s.count;
}

const std::vector<Collective> kCollectives = {
    {"AllReduce",
     [](const Rank& me, const void* send, void* recv, const Shape& s) {
       return ncclAllReduce(send, recv, s.count, s.nccl_type(), s.nccl_op(), me.comm, me.on());
     },
     one, one,
     [](const Rank& me, const char* got, const Shape& s) { return wrong_sums(me, got, s, 0); },
     Check::reduced},
    {"ReduceScatter",
     [](const Rank& me, const void* send, void* recv, const Shape& s) {
       return ncclReduceScatter(send, recv, s.count, s.nccl_type(), s.nccl_op(), me.comm, me.on());
     },
     all, one,
     [](const Rank& me, const char* got, const Shape& s) {
       return wrong_sums(me, got, s, part(me, s));
     },
     Check::reduced},
    {"Reduce",
     [](const Rank& me, const void* send, void* recv, const Shape& s) {
       return ncclReduce(send, recv, s.count, s.nccl_type(), s.nccl_op(), s.root, me.comm, me.on());
     },
     one, one_at_root,
     [](const Rank& me, const char* got, const Shape& s) {
       return me.rank == s.root ? wrong_sums(me, got, s, 0) : 0;
     },
     Check::reduced},
    {"Broadcast",
     [](const Rank& me, const void* send, void* recv, const Shape& s) {
       return ncclBroadcast(send, recv, s.count, s.nccl_type(), s.root, me.comm, me.on());
     },
     one_at_root, one,
     [](const Rank&, const char* got, const Shape& s) {
       return wrong_bits(got, s.type, kSeed, s.root, 0, s.count);
     },
     Check::moved},
    {"AllGather",
     [](const Rank& me, const void* send, void* recv, const Shape& s) {
       return ncclAllGather(send, recv, s.count, s.nccl_type(), me.comm, me.on());
     },
     one, all,
     [](const Rank& me, const char* got, const Shape& s) { return wrong_parts(me, got, s, 0); },
     Check::moved},
    {"AlltoAll",
     [](const Rank& me, const void* send, void* recv, const Shape& s) {
       return ncclAlltoAll(send, recv, s.count, s.nccl_type(), me.comm, me.on());
     },
     all, all,
     [](const Rank& me, const char* got, const Shape& s) {
       return wrong_parts(me, got, s, part(me, s));
     },
     Check::moved},
    {"Gather",
     [](const Rank& me, const void* send, void* recv, const Shape& s) {
       return ncclGather(send, recv, s.count, s.nccl_type(), s.root, me.comm, me.on());
     },
     one, all_at_root,
     [](const Rank& me, const char* got, const Shape& s) {
       return me.rank == s.root ? wrong_parts(me, got, s, 0) : 0;
     },
     Check::moved},
    {"Scatter",
     [](const Rank& me, const void* send, void* recv, const Shape& s) {
       return ncclScatter(send, recv, s.count, s.nccl_type(), s.root, me.comm, me.on());
     },
     all_at_root, one,
     [](const Rank& me, const char* got, const Shape& s) {
       return wrong_bits(got, s.type, kSeed, s.root, part(me, s), s.count);
     },
     Check::moved},
};

std::vector<char> input_of(const Rank& me, const Collective& collective, const Shape& s) {
  const size_t count = collective.sends(me, s);
  std::vector<char> input(count * size_of(s.type));
  if (collective.input == Check::reduced)
    Exact(kSeed, me.size, s.type, s.op).fill(input.data(), me.rank, 0, count);
  else
    fill_bits(input.data(), s.type, kSeed, me.rank, 0, count);
  return input;
}

// One collective on all ranks of this thread: out of place, from the first copy to the last on the
// stream alone, the host waiting for nothing in between.
void run(const Ranks& ranks, const Collective& collective, const Shape& s,
         Kind kind = Kind::device) {
  std::vector<std::pair<void*, void*>> buffers;
  for (Rank* me : ranks) {
    const auto input = input_of(*me, collective, s);
    const size_t bytes = collective.receives(*me, s) * size_of(s.type);
    void* const send = input.empty() ? nullptr : me->take(input.size(), kind);
    void* const recv = bytes == 0 ? nullptr : me->take(bytes, kind);
    me->put(send, input.data(), input.size());
    me->put(recv, std::vector<char>(bytes, 0x55).data(), bytes);
    buffers.emplace_back(send, recv);
  }
  auto at = buffers.begin();
  together(ranks, [&](Rank& me) {
    OK(collective.call(me, at->first, at->second, s));
    ++at;
  });
  at = buffers.begin();
  for (Rank* me : ranks) {
    std::vector<char> got(collective.receives(*me, s) * size_of(s.type));
    me->get(got.data(), at++->second, got.size());
    expect(collective.wrong(*me, got.data(), s) == 0, SPOT(the result),
           ": " + std::string(collective.name) + " of " + std::to_string(s.count) + " " +
               std::string(name(s.type)) + " " + std::string(name(s.op)) + " on rank " +
               std::to_string(me->rank));
    me->clear();
  }
}

// ---- scenarios --------------------------------------------------------------------------------

void collectives(const Ranks& ranks) {
  const int last = ranks.front()->size - 1;
  for (const Collective& collective : kCollectives) {
    run(ranks, collective, {DType::f32, Op::sum, 0, 0});
    run(ranks, collective, {DType::f32, Op::sum, 1, last});
    run(ranks, collective, {DType::bf16, Op::max, 777, 0});
    run(ranks, collective, {DType::i64, Op::sum, 10'000, last});
    run(ranks, collective, {DType::u8, Op::avg, 501, 0});
    run(ranks, collective, {DType::f16, Op::sum, 1000, 0}, Kind::managed);
    run(ranks, collective, {DType::f64, Op::min, 1000, 0}, Kind::pinned);
    run(ranks, collective, {DType::f8e5m2, Op::sum, 600, 0});
  }
}

void few_collectives(const Ranks& ranks) {
  for (const Collective& collective : kCollectives) {
    run(ranks, collective, {DType::f32, Op::sum, 3000, 0});
    run(ranks, collective, {DType::bf16, Op::sum, 77, 0}, Kind::pinned);
  }
}

// In place, where every collective has its own place for it.
void in_place(const Ranks& ranks) {
  const Shape s{DType::i32, Op::sum, 500, 0};
  const Collective& reduce_scatter = kCollectives[1];
  const Collective& all_gather = kCollectives[4];
  std::vector<char*> sums, parts;
  for (Rank* me : ranks) {
    const auto input = input_of(*me, reduce_scatter, s);
    sums.push_back(static_cast<char*>(me->take(input.size())));
    me->put(sums.back(), input.data(), input.size());
    const auto mine = input_of(*me, all_gather, s);
    parts.push_back(static_cast<char*>(me->take(mine.size() * static_cast<size_t>(me->size))));
    me->put(parts.back() + part(*me, s) * 4, mine.data(), mine.size());
  }
  size_t at = 0;
  together(ranks, [&](Rank& me) {
    OK(reduce_scatter.call(me, sums[at], sums[at] + part(me, s) * 4, s));
    OK(all_gather.call(me, parts[at] + part(me, s) * 4, parts[at], s));
    ++at;
  });
  at = 0;
  for (Rank* me : ranks) {
    std::vector<char> got(s.count * 4);
    me->get(got.data(), sums[at] + part(*me, s) * 4, got.size());
    EXPECT(reduce_scatter.wrong(*me, got.data(), s) == 0);
    got.resize(s.count * 4 * static_cast<size_t>(me->size));
    me->get(got.data(), parts[at++], got.size());
    EXPECT(all_gather.wrong(*me, got.data(), s) == 0);
    me->clear();
  }
}

// Calls return while their streams are held; nothing is touched before, everything is there after.
void asynchronous(const Ranks& ranks) {
  constexpr size_t kCount = 4000;
  std::vector<int32_t*> buffers;
  for (Rank* me : ranks) {
    buffers.push_back(static_cast<int32_t*>(me->take(kCount * 4, Kind::pinned)));
    me->fill<int32_t>(buffers.back(), kCount, 1);
    me->wait();
  }
  {
    std::vector<std::unique_ptr<Hold>> holds;
    for (Rank* me : ranks) holds.push_back(std::make_unique<Hold>(me->stream));
    for (int round = 0; round < 5; ++round) {
      size_t at = 0;
      together(ranks, [&](Rank& me) {
        OK(ncclAllReduce(buffers[at], buffers[at], kCount, ncclInt32, ncclSum, me.comm, me.on()));
        ++at;
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (const int32_t* buffer : buffers) EXPECT(buffer[0] == 1 && buffer[kCount - 1] == 1);
    for (Rank* me : ranks) {
      ncclResult_t state = ncclInternalError;
      OK(ncclCommGetAsyncError(me->comm, &state));
      EXPECT(state == ncclSuccess);
    }
  }
  size_t at = 0;
  for (Rank* me : ranks) {
    int32_t power = 1;
    for (int round = 0; round < 5; ++round) power *= me->size;
    EXPECT(me->holds<int32_t>(buffers[at++], kCount, power));
  }
}

// Averages, and factors that are read when the stream has come to the call.
void operations(const Ranks& ranks) {
  constexpr size_t kCount = 900;
  std::vector<float*> data, factors;
  std::vector<ncclRedOp_t> ops(ranks.size());
  for (Rank* me : ranks) {
    data.push_back(static_cast<float*>(me->take(kCount * 4)));
    factors.push_back(static_cast<float*>(me->take(4)));
    OK(ncclRedOpCreatePreMulSum(&ops[data.size() - 1], factors.back(), ncclFloat32,
                                ncclScalarDevice, me->comm));
  }
  for (const float factor : {0.5F, 3.0F, 1.0F}) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      ranks[i]->fill<float>(data[i], kCount, static_cast<float>(ranks[i]->rank + 1));
      ranks[i]->fill<float>(factors[i], 1, factor);  // on the stream, as the call
    }
    size_t at = 0;
    together(ranks, [&](Rank& me) {
      OK(ncclAllReduce(data[at], data[at], kCount, ncclFloat32, ops[at], me.comm, me.on()));
      ++at;
    });
    const int n = ranks.front()->size;
    for (size_t i = 0; i < ranks.size(); ++i)
      EXPECT(ranks[i]->holds<float>(data[i], kCount, factor * static_cast<float>(n * (n + 1) / 2)));
  }
  size_t at = 0;
  together(ranks, [&](Rank& me) {
    OK(ncclAllReduce(data[at], data[at], kCount / 3, ncclInt32, ncclAvg, me.comm, me.on()));
    ++at;
  });
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int n = ranks[i]->size;
    const auto sum = static_cast<float>(n * (n + 1) / 2);
    int32_t bits = 0, wrapped = 0;
    std::memcpy(&bits, &sum, 4);
    for (int r = 0; r < n; ++r)
      wrapped = static_cast<int32_t>(static_cast<uint32_t>(wrapped) + static_cast<uint32_t>(bits));
    EXPECT(ranks[i]->holds<int32_t>(data[i], kCount / 3, wrapped / n));
    EXPECT(ranks[i]->holds<float>(data[i] + kCount / 3, kCount - kCount / 3, sum));
    OK(ncclRedOpDestroy(ops[i], ranks[i]->comm));
  }
}

// Rings of messages, several in one group, to oneself, and of no bytes.
void messages(const Ranks& ranks) {
  constexpr size_t kCount = 3000;
  std::vector<std::array<int32_t*, 3>> buffers;
  for (Rank* me : ranks) {
    buffers.emplace_back();
    for (int32_t*& buffer : buffers.back()) {
      buffer = static_cast<int32_t*>(me->take(kCount * 4));
      me->fill<int32_t>(buffer, kCount, 100 + me->rank);
    }
  }
  size_t at = 0;
  OK(ncclGroupStart());
  for (Rank* me : ranks) {
    const auto& [out, in, mine] = buffers[at++];
    OK(ncclSend(out, kCount, ncclInt32, me->next(), me->comm, me->on()));
    OK(ncclRecv(in, kCount, ncclInt32, me->before(), me->comm, me->on()));
    OK(ncclSend(out, kCount, ncclInt32, me->rank, me->comm, me->on()));
    OK(ncclRecv(mine, kCount, ncclInt32, me->rank, me->comm, me->on()));
    OK(ncclSend(nullptr, 0, ncclInt8, me->next(), me->comm, me->on()));
    OK(ncclRecv(nullptr, 0, ncclInt8, me->before(), me->comm, me->on()));
  }
  OK(ncclGroupEnd());
  for (size_t i = 0; i < ranks.size(); ++i) {
    EXPECT(ranks[i]->holds<int32_t>(buffers[i][1], kCount, 100 + ranks[i]->before()));
    EXPECT(ranks[i]->holds<int32_t>(buffers[i][2], kCount, 100 + ranks[i]->rank));
  }
}

// Two communicators, each on a stream of its own, called in opposite order by odd and even ranks.
void several_communicators(const Ranks& ranks) {
  constexpr size_t kCount = 2000;
  std::vector<ncclComm_t> second(ranks.size());
  std::vector<std::array<int32_t*, 2>> buffers;
  size_t at = 0;
  together(ranks, [&](Rank& me) { OK(ncclCommSplit(me.comm, 0, 0, &second[at++], nullptr)); });
  for (Rank* me : ranks) {
    buffers.emplace_back();
    for (int32_t*& buffer : buffers.back()) {
      buffer = static_cast<int32_t*>(me->take(kCount * 4));
      me->fill<int32_t>(buffer, kCount, 1);
    }
    me->wait();
  }
  for (int round = 0; round < 4; ++round) {
    at = 0;
    together(ranks, [&](Rank& me) {
      const auto on_first = [&] {
        OK(ncclAllReduce(buffers[at][0], buffers[at][0], kCount, ncclInt32, ncclSum, me.comm,
                         me.on()));
      };
      if (me.rank % 2 == 0) on_first();
      OK(ncclAllReduce(buffers[at][1], buffers[at][1], kCount, ncclInt32, ncclSum, second[at],
                       me.on_other()));
      if (me.rank % 2 != 0) on_first();
      ++at;
    });
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    int32_t power = 1;
    for (int round = 0; round < 4; ++round) power *= ranks[i]->size;
    CUDA(cuStreamSynchronize(ranks[i]->other));
    EXPECT(ranks[i]->holds<int32_t>(buffers[i][0], kCount, power));
    EXPECT(ranks[i]->holds<int32_t>(buffers[i][1], kCount, power));
  }
  for (const ncclComm_t comm : second) OK(ncclCommDestroy(comm));
}

// What one rank captures, and replays.
struct Captured {
  float *x, *y, *factor;
  ncclRedOp_t op;
  CUgraphExec exec = nullptr;
};

Captured prepare_capture(Rank& me, size_t count) {
  Captured made{static_cast<float*>(me.take(count * 4)), static_cast<float*>(me.take(count * 4)),
                static_cast<float*>(me.take(4)), ncclSum};
  OK(ncclRedOpCreatePreMulSum(&made.op, made.factor, ncclFloat32, ncclScalarDevice, me.comm));
  me.fill<float>(made.x, count, 1);
  me.fill<float>(made.y, count, 0);
  me.wait();
  return made;
}

// Each replay of a captured graph runs its collectives anew, a factor on the device included.
void graphs(const Ranks& ranks) {
  constexpr size_t kCount = 1000;
  std::vector<Captured> all;
  for (Rank* me : ranks) all.push_back(prepare_capture(*me, kCount));
  for (Rank* me : ranks)
    CUDA(cuStreamBeginCapture(me->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  auto at = all.begin();
  together(ranks, [&](Rank& me) {
    OK(ncclAllReduce(at->x, at->x, kCount, ncclFloat32, at->op, me.comm, me.on()));
    ++at;
  });
  at = all.begin();
  together(ranks, [&](Rank& me) {
    OK(ncclBroadcast(at->x, at->y, kCount, ncclFloat32, 0, me.comm, me.on()));
    ++at;
  });
  for (size_t i = 0; i < ranks.size(); ++i) {
    Rank& me = *ranks[i];
    REFUSED(ncclSend(all[i].x, kCount, ncclFloat32, me.next(), me.comm, me.on()), ncclInvalidUsage,
            "cannot be captured");
    CUgraph graph = nullptr;
    CUDA(cuStreamEndCapture(me.stream, &graph));
    CUDA(cuGraphInstantiate(&all[i].exec, graph, 0));
    CUDA(cuGraphDestroy(graph));
  }
  for (size_t i = 0; i < ranks.size(); ++i) EXPECT(ranks[i]->holds<float>(all[i].x, kCount, 1));
  float expected = 1;
  for (int replay = 1; replay <= 5; ++replay) {
    const float by = replay % 2 == 0 ? 0.5F : 2;
    expected *= by * static_cast<float>(ranks.front()->size);
    for (size_t i = 0; i < ranks.size(); ++i) {
      ranks[i]->fill<float>(all[i].factor, 1, by);
      CUDA(cuGraphLaunch(all[i].exec, ranks[i]->stream));
    }
    for (size_t i = 0; i < ranks.size(); ++i)
      EXPECT(ranks[i]->holds<float>(all[i].y, kCount, expected));
    at = all.begin();
    together(ranks, [&](Rank& me) {  // in between
      OK(ncclAllReduce(at->y, at->y, kCount, ncclFloat32, ncclMax, me.comm, me.on()));
      ++at;
    });
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    EXPECT(ranks[i]->holds<float>(all[i].x, kCount, expected));
    ranks[i]->wait();
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    CUDA(cuGraphExecDestroy(all[i].exec));
    OK(ncclRedOpDestroy(all[i].op, ranks[i]->comm));
  }
}

}  // namespace

const std::vector<Scenario> kCollectiveScenarios = {
    {"collectives", collectives},
    {"few_collectives", few_collectives},
    {"in_place", in_place},
    {"asynchronous", asynchronous},
    {"operations", operations},
    {"messages", messages},
    {"several_communicators", several_communicators},
    {"graphs", graphs},
};

}  // namespace ringfold::test
