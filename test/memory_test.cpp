// Memory of the library's own: operations on it go without copies, give the same bits as on any
// other, and its owner gets it back whatever happens.
#include <fmt/core.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "lib/region/direct.h"
#include "ringfold/c.h"
#include "ringfold/communicator.h"
#include "test/cases.h"
#include "test/exact.h"
#include "test/processes.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr uint64_t kSeed = 20261130;

// `bytes` of the library's memory.
class Owned {
 public:
  explicit Owned(size_t bytes) {
    auto made = allocate_memory(bytes);
    if (rank_ok(made.status())) memory_ = *made;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { rank_ok(free_memory(memory_)); }
  template <class T = std::byte>
  [[nodiscard]] T* as(size_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_) + offset);
  }

 private:
  void* memory_ = nullptr;
};

std::string on_region(int ranks, const std::function<void(Communicator&)>& body,
                      Options options = {}) {
  return on_transport(ranks, "region", options, body);
}

// Operations on this memory until one goes without copies: the others map it meanwhile.
bool becomes_direct(Communicator& comm, const Owned& memory, size_t bytes) {
  rank_ok(comm.register_memory(memory.as(), bytes));
  const size_t count = bytes / sizeof(int32_t);
  for (int i = 0; i < 2000; ++i) {
    Work work = comm.all_reduce(memory.as(), memory.as(), count, DType::i32, Op::max);
    if (!rank_ok(work.wait())) return false;
    if (work.report().transport == "direct") return true;
    std::this_thread::sleep_for(1ms);
  }
  rank_fail("no operation went without copies within 2 s");
  return false;
}

struct Spans {
  size_t send, recv;  // elements
};
Spans spans_of(Collective collective, size_t count, int ranks) {
  const size_t all = count * static_cast<size_t>(ranks);
  if (collective == Collective::reduce_scatter) return {all, count};
  if (collective == Collective::all_gather) return {count, all};
  return {count, count};
}

Work call(Communicator& comm, Collective collective, const void* send, void* recv, size_t count,
          DType type, Reduction reduction) {
  switch (collective) {
    case Collective::reduce_scatter:
      return comm.reduce_scatter(send, recv, count, type, reduction);
    case Collective::all_gather:
      return comm.all_gather(send, recv, count, type);
    case Collective::broadcast:
      return comm.broadcast(recv, count, type, comm.size() - 1);
    default:
      return comm.all_reduce(send, recv, count, type, reduction);
  }
}

// The same call on ordinary memory and on the library's: the same bits, and the second without
// copies. `memory` is known to all; the buffers begin `skip` elements into it.
void same_bits(Communicator& comm, const Owned& memory, Collective collective, size_t count,
               DType type, Op op, bool in_place, size_t skip) {
  const size_t element = size_of(type);
  const auto [send_count, recv_count] = spans_of(collective, count, comm.size());
  const auto me = static_cast<size_t>(comm.rank());
  std::vector<std::byte> input(send_count * element), plain(recv_count * element);
  if (collective == Collective::all_reduce || collective == Collective::reduce_scatter)
    Exact(kSeed, comm.size(), type, op)
        .fill(reinterpret_cast<unsigned char*>(input.data()), comm.rank(), 0, send_count);
  else
    std::generate(input.begin(), input.end(), [x = kSeed + me]() mutable {
      return static_cast<std::byte>((x = x * 6364136223846793005U + 1) >> 56);
    });
  if (collective == Collective::broadcast) plain = input;
  rank_ok(call(comm, collective, input.data(), plain.data(), count, type, op).wait());

  std::byte* const send = memory.as(skip * element);
  std::byte* recv = memory.as(skip * element + (send_count * element + 4095) / 4096 * 4096);
  if (in_place) {
    recv = collective == Collective::reduce_scatter ? send + me * count * element : send;
  }
  std::byte* const from =
      in_place && collective == Collective::all_gather ? recv + me * count * element : send;
  std::memcpy(collective == Collective::broadcast ? recv : from, input.data(), input.size());
  Work work = call(comm, collective, from, recv, count, type, op);
  rank_ok(work.wait());
  const std::string what = fmt::format("{} {} {} of {} on {} ranks{}", name(collective), name(type),
                                       name(op), count, comm.size(), in_place ? ", in place" : "");
  if (std::memcmp(recv, plain.data(), plain.size()) != 0) rank_fail(what + ": other bits");
  if (work.report().transport != "direct") rank_fail(what + ": not direct");
  if (work.report().bytes_sent != work.report().bytes_model) rank_fail(what + ": bytes");
  if (!in_place && collective != Collective::broadcast &&
      std::memcmp(send, input.data(), input.size()) != 0)
    rank_fail(what + ": the input has changed");
}

}  // namespace

TEST_CASE("memory: every collective that may go without copies gives the same bits") {
  const int ranks = GENERATE(2, 3, 4);
  CHECK(on_region(ranks, [](Communicator& comm) {
          const size_t bytes = size_t{12} << 20;
          const Owned memory(bytes);
          if (!becomes_direct(comm, memory, 64 << 10)) return;
          std::mt19937 random(static_cast<unsigned>(kSeed));
          for (int t = 0; t < static_cast<int>(kDTypes); ++t) {
            const auto type = static_cast<DType>(t);
            const auto op = static_cast<Op>(t % 5);  // all but premul_sum
            const size_t element = size_of(type);
            for (const auto collective : {Collective::all_reduce, Collective::reduce_scatter,
                                          Collective::all_gather, Collective::broadcast})
              for (const bool in_place : {true, false}) {
                const size_t least = (comm.size() == 2 ? 8u << 10 : 96u << 10) / element;
                same_bits(comm, memory, collective, least + random() % 5000, type, op, in_place,
                          random() % 100);
              }
          }
        }) == "");
}

TEST_CASE("memory: large buffers apart, written past the caches") {
  CHECK(on_region(2, [](Communicator& comm) {
          const Owned memory(size_t{40} << 20);
          if (!becomes_direct(comm, memory, 64 << 10)) return;
          for (const auto collective :
               {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather})
            same_bits(comm, memory, collective, 2'300'017, DType::f32, Op::sum, false, 3);
        }) == "");
}

TEST_CASE("memory: whoever has none, or only some, spoils nothing") {
  CHECK(on_region(3, [](Communicator& comm) {
          constexpr size_t kCount = 100'003;
          const Owned memory(2 * (kCount * 4 + 4096));
          if (!becomes_direct(comm, memory, 64 << 10)) return;
          std::vector<int32_t> a(kCount), b(kCount);
          for (int i = 0; i < 400; ++i) {
            // Each rank draws for itself which of its buffers are where.
            const uint64_t draw =
                exact_hash(kSeed, static_cast<uint64_t>(comm.rank()), static_cast<uint64_t>(i));
            const bool all = i % 3 == 0;
            int32_t* const send = all || draw % 3 != 0 ? memory.as<int32_t>() : a.data();
            int32_t* const apart = all || draw % 5 != 0
                                       ? memory.as<int32_t>((kCount * 4 + 4095) / 4096 * 4096)
                                       : b.data();
            int32_t* const recv = draw % 2 == 0 ? send : apart;
            std::fill_n(send, kCount, i + comm.rank());
            rank_ok(comm.all_reduce(send, recv, kCount, DType::i32, Op::sum).wait());
            const bool right =
                std::all_of(recv, recv + kCount, [&](int32_t x) { return x == 3 * i + 3; });
            if (!right) return rank_fail(fmt::format("operation {} is wrong", i));
          }
        }) == "");
}

TEST_CASE("memory: a rank's own factor is applied before others read it") {
  CHECK(on_region(2, [](Communicator& comm) {
          constexpr size_t kCount = 50'000;
          const Owned memory(kCount * 4);
          if (!becomes_direct(comm, memory, kCount * 4)) return;
          auto* const x = memory.as<float>();
          for (const double first : {1.0, 3.0}) {
            std::fill_n(x, kCount, 1.0F);
            const double factor = comm.rank() == 0 ? first : 1.0;
            rank_ok(comm.all_reduce(x, x, kCount, DType::f32, {Op::premul_sum, factor}).wait());
            RANK_CHECK(std::all_of(x, x + kCount, [&](float y) { return y == first + 1; }));
          }
        }) == "");
}

TEST_CASE("memory: asynchronous operations on many allocations and communicators") {
  CHECK(on_region(2, [](Communicator& comm) {
          auto second = comm.split(0, -comm.rank());
          if (!rank_ok(second.status())) return;
          constexpr size_t kCount = 30'000;
          std::vector<std::unique_ptr<Owned>> memory;
          for (int i = 0; i < 12; ++i) memory.push_back(std::make_unique<Owned>(kCount * 4));
          for (int round = 0; round < 40; ++round) {
            std::vector<Work> works;
            for (size_t i = 0; i < memory.size(); ++i) {
              auto* const x = memory[i]->as<int32_t>();
              std::fill_n(x, kCount, round + static_cast<int32_t>(i));
              works.push_back(
                  (i % 2 == 0 ? comm : *second).all_reduce(x, x, kCount, DType::i32, Op::sum));
            }
            for (size_t i = works.size(); i-- > 0;) {
              rank_ok(works[i].wait());
              const auto* const x = memory[i]->as<int32_t>();
              RANK_CHECK(std::all_of(x, x + kCount, [&](int32_t y) {
                return y == 2 * (round + static_cast<int32_t>(i));
              }));
            }
            if (round % 10 == 9) memory[3] = std::make_unique<Owned>(kCount * 4);
          }
        }) == "");
}

// ---- lifetime ---------------------------------------------------------------------------------

namespace {

// Mappings of the library's memory in this process.
size_t mappings() {
  size_t count = 0;
  std::string line;
  for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);)
    count += line.find("memfd:ringfold-memory") != std::string::npos ? 1 : 0;
  return count;
}

bool soon(const std::function<bool()>& is) {
  for (int i = 0; i < 5000 && !is(); ++i) std::this_thread::sleep_for(1ms);
  return is();
}

}  // namespace

TEST_CASE("memory: freed by one rank it is gone from all, and a communicator may end before it") {
  CHECK(run_ranks(2, 30s, [](const Rendezvous& where) {
          Options options;
          options.transports = "region";
          auto memory = std::make_unique<Owned>(1 << 20);
          {
            auto comm = Communicator::create(where, options);
            if (!rank_ok(comm.status())) return 1;
            for (int i = 0; i < 3; ++i) {
              if (!becomes_direct(*comm, *memory, 1 << 20)) return 1;
              RANK_CHECK(mappings() == 2);
              rank_ok(comm->barrier().wait());
              memory.reset();
              RANK_CHECK(soon([] { return mappings() == 0; }));
              rank_ok(comm->barrier().wait());
              memory = std::make_unique<Owned>(1 << 20);
            }
            if (!becomes_direct(*comm, *memory, 1 << 20)) return 1;
          }
          RANK_CHECK(soon([] { return mappings() == 1; }));
          std::memset(memory->as(), 1, 1 << 20);
          memory.reset();
          RANK_CHECK(mappings() == 0);
          return 0;
        }) == "");
}

TEST_CASE("memory: a buffer of an operation that is not done cannot be freed") {
  CHECK(on_region(2, [](Communicator& comm) {
          constexpr size_t kCount = 100'000;
          auto made = allocate_memory(kCount * 4);
          if (!rank_ok(made.status())) return;
          if (comm.rank() == 1) std::this_thread::sleep_for(300ms);
          Work work = comm.all_reduce(*made, *made, kCount, DType::f32, Op::sum);
          if (comm.rank() == 0) {
            const Status refused = free_memory(*made);
            RANK_CHECK(refused.code() == Code::invalid_argument);
            RANK_CHECK(refused.message().find("not done") != std::string::npos);
          }
          rank_ok(work.wait());
          rank_ok(free_memory(*made));
          RANK_CHECK(free_memory(*made).code() == Code::invalid_argument);
        }) == "");
}

TEST_CASE("memory: what cannot be had is an error, and so is what was never given") {
  CHECK(allocate_memory(0).status().code() == Code::invalid_argument);
  CHECK(allocate_memory(SIZE_MAX).status().code() == Code::invalid_argument);
  const auto huge = allocate_memory(size_t{1} << 50);
  CHECK(huge.status().code() == Code::system);
  int x = 0;
  CHECK(free_memory(&x).code() == Code::invalid_argument);
  CHECK(free_memory(nullptr).ok());
  const auto some = allocate_memory(5000);
  REQUIRE(some.ok());
  CHECK(reinterpret_cast<uintptr_t>(*some) % 4096 == 0);
  auto* const bytes = static_cast<char*>(*some);
  CHECK(region::find_memory(bytes + 8191, 1) != nullptr);
  CHECK(region::find_memory(bytes + 8191, 2) == nullptr);
  CHECK(region::find_memory(bytes - 1, 1) == nullptr);
  CHECK(free_memory(bytes + 1).code() == Code::invalid_argument);
  CHECK(free_memory(*some).ok());
  CHECK(region::find_memory(bytes, 1) == nullptr);
}

TEST_CASE("memory: the C interface gives, registers and takes it") {
  CHECK(run_ranks(2, 30s, [](const Rendezvous& where) {
          ringfold_comm_t comm = nullptr;
          const auto ok = [](ringfold_status status) {
            if (status != RINGFOLD_OK) rank_fail(ringfold_last_error());
            return status == RINGFOLD_OK;
          };
          if (!ok(ringfold_init_coordinator(&comm, where.coordinator.c_str(), where.secret.c_str(),
                                            where.rank, where.size, nullptr)))
            return 1;
          void* memory = nullptr;
          constexpr size_t kCount = 64 << 10;
          RANK_CHECK(ringfold_mem_alloc(nullptr, 1) == RINGFOLD_INVALID_ARGUMENT);
          ok(ringfold_mem_alloc(&memory, kCount * sizeof(float)));
          ok(ringfold_register(comm, memory, kCount * sizeof(float)));
          RANK_CHECK(ringfold_register(nullptr, memory, 1) == RINGFOLD_INVALID_ARGUMENT);
          auto* const x = static_cast<float*>(memory);
          std::string transport;
          for (int i = 0; i < 2000 && transport != "direct"; ++i) {
            std::fill_n(x, kCount, 1.0F);
            ringfold_work_t work = nullptr;
            ok(ringfold_all_reduce_async(comm, x, x, kCount, RINGFOLD_F32, RINGFOLD_SUM, 1, nullptr,
                                         &work));
            ok(ringfold_work_wait(work, -1));
            ringfold_report report{};
            ok(ringfold_work_report(work, &report));
            ok(ringfold_work_free(work));
            transport = report.transport;
            RANK_CHECK(x[kCount - 1] == 2);
          }
          RANK_CHECK(transport == "direct");
          ok(ringfold_destroy(comm));
          ok(ringfold_mem_free(memory));
          RANK_CHECK(ringfold_mem_free(memory) == RINGFOLD_INVALID_ARGUMENT);
          return 0;
        }) == "");
}

// ---- failures ---------------------------------------------------------------------------------

TEST_CASE("memory: after a failure nobody writes into a buffer any more") {
  constexpr size_t kCount = size_t{4} << 20;
  // Rank 1 is late, or stopped for good somewhere in the middle.
  const bool late = GENERATE(true, false);
  Shared<std::atomic<int>> ready;
  Processes ranks(2, [&](const Rendezvous& where) {
    Options options;
    options.transports = "region";
    options.timeout = 700ms;
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    const Owned memory(kCount * 4);
    if (!becomes_direct(*comm, memory, kCount * 4)) return 1;
    auto* const x = memory.as<int32_t>();
    if (where.rank == 1 && late) {
      std::this_thread::sleep_for(1500ms);
      RANK_CHECK(!comm->all_reduce(x, x, kCount, DType::i32, Op::sum).wait().ok());
      return 0;
    }
    ++*ready;
    const auto end = std::chrono::steady_clock::now() + 10s;
    Status status;
    while (status.ok() && std::chrono::steady_clock::now() < end)
      status = comm->all_reduce(x, x, kCount, DType::i32, Op::max).wait();
    if (where.rank == 1) return 0;
    RANK_CHECK(status.code() == Code::timeout);
    // From here it is ours: whatever the other rank still does is not seen.
    std::fill_n(x, kCount, 77);
    ++*ready;
    while (*ready < 4) std::this_thread::sleep_for(1ms);
    RANK_CHECK(std::all_of(x, x + kCount, [](int32_t y) { return y == 77; }));
    return 0;
  });
  if (late) {
    CHECK(soon([&] { return *ready == 2; }));
    std::this_thread::sleep_for(1500ms);
  } else {
    CHECK(soon([&] { return *ready == 2; }));
    std::this_thread::sleep_for(37ms);
    ranks.stop(1);
    CHECK(soon([&] { return *ready == 3; }));
    ranks.resume(1);
    std::this_thread::sleep_for(200ms);
  }
  *ready = 4;
  const auto outcomes = ranks.wait(20s);
  CHECK(outcomes[0].to_string() == "ok");
  CHECK(outcomes[1].to_string() == "ok");
}

TEST_CASE("memory: a killed rank is lost to the others as ever") {
  Processes ranks(3, [&](const Rendezvous& where) {
    Options options;
    options.transports = "region";
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    const Owned memory(1 << 20);
    if (!becomes_direct(*comm, memory, 1 << 20)) return 1;
    for (int i = 0;; ++i) {
      if (where.rank == 1 && i == 50) raise(SIGKILL);
      const Status status =
          comm->all_reduce(memory.as(), memory.as(), 1 << 18, DType::f32, Op::sum).wait();
      if (status.ok() && i < 1000) continue;
      RANK_CHECK(status.code() == Code::peer_lost);
      return 0;
    }
  });
  const auto outcomes = ranks.wait(30s);
  CHECK(outcomes[0].to_string() == "ok");
  CHECK(outcomes[1].signal == SIGKILL);
  CHECK(outcomes[2].to_string() == "ok");
}
