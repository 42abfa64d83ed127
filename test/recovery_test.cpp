// After a rank has died the others shrink, and grow again by a new process: over and over, without
// a descriptor, thread, mapping or byte left behind.
#include <dirent.h>
#include <fmt/format.h>

#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "lib/record/record.h"
#include "test/cases.h"
#include "test/processes.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

int64_t sum(Communicator& comm, int64_t mine, Status* status) {
  int64_t all = -1;
  *status = comm.all_reduce(&mine, &all, 1, DType::i64, Op::sum).wait();
  return all;
}

int entries_of(const char* folder) {
  DIR* const open = opendir(folder);
  int count = 0;
  while (readdir(open) != nullptr) ++count;
  closedir(open);
  return count;
}

// What must not grow.
struct Held {
  int descriptors = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
  int mappings = 0;
  long kilobytes = 0;  // resident
  uint32_t slots = 0;

  Held() {
    std::ifstream maps("/proc/self/maps"), status("/proc/self/status");
    for (std::string line; std::getline(maps, line);) ++mappings;
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("VmRSS:")) kilobytes = std::atol(line.c_str() + 6);
    if (const auto* page = record::visit([](const record::Slot&) {})) slots = page->touched;
  }
};

// How the newcomer of each round gets in.
struct Door {
  std::atomic<int> round{-1};  // whose id is there
  std::atomic<bool> over{false};
  UniqueId id;
};

// A newcomer joins two survivors, works once, and dies.
int newcomer(const Rendezvous& id_of, const std::string& transport, Nanoseconds timeout) {
  Options options;
  options.transports = transport;
  options.timeout = timeout;
  auto comm = Communicator::create(id_of, options);
  if (!rank_ok(comm.status())) return 1;
  Status status;
  RANK_CHECK(sum(*comm, 100, &status) == 111);
  rank_ok(status);
  _exit(detail::failures == 0 ? 0 : 1);
}

// Rank 0 and 1 of every round.
int survivor(Communicator comm, Door& door, int rounds, int warm) {
  const int me = comm.rank();
  std::optional<Held> before;
  for (int round = 0; round < rounds; ++round) {
    UniqueId id;
    if (me == 0) {
      auto made = Rendezvous::unique_id();
      if (!rank_ok(made.status())) return 1;
      door.id = id = *made;
      door.round = round;
    }
    auto grown = comm.grow(id, 1);
    if (!rank_ok(grown.status())) return 1;
    RANK_CHECK(grown->size() == 3);
    RANK_CHECK(grown->rank() == me);
    Status status;
    RANK_CHECK(sum(*grown, me == 0 ? 1 : 10, &status) == 111);
    rank_ok(status);
    (void)sum(*grown, 1, &status);
    RANK_CHECK(status.code() == Code::peer_lost);
    RANK_CHECK(status.message().find("rank 2") != std::string::npos);
    auto rest = grown->shrink(std::array{2});
    if (!rank_ok(rest.status())) return 1;
    RANK_CHECK(sum(*rest, me == 0 ? 1 : 10, &status) == 11);
    rank_ok(status);
    comm = std::move(*rest);
    if (round == warm) before.emplace();
    if (detail::failures > 0) return 1;
    if (round != rounds - 1) continue;
    const Held after;
    RANK_CHECK(after.descriptors <= before->descriptors);
    RANK_CHECK(after.threads == before->threads);
    RANK_CHECK(after.mappings <= before->mappings + 2);  // the allocator may split one
    RANK_CHECK(after.slots == before->slots);
    RANK_CHECK(after.kilobytes <= before->kilobytes + 1024);
  }
  return 0;
}

}  // namespace

TEST_CASE("a rank dies, the others shrink, a new process takes its place: nothing is left behind") {
  const bool slow = std::getenv("RINGFOLD_TEST_SLOW") != nullptr;
  const int rounds = slow ? 1000 : 8;
  const std::string transport = slow ? "region" : GENERATE(as<std::string>(), "region", "shm");
  Shared<Door> door;
  Processes survivors(2, [&](const Rendezvous& where) {
    Options options;
    options.transports = transport;
    options.timeout = 20s;
    auto comm = Communicator::create(where, options);
    const int code = comm.ok() ? survivor(std::move(*comm), *door, rounds, slow ? 20 : 3) : 1;
    door->over = true;
    return code;
  });
  for (int round = 0; round < rounds && !door->over; ++round) {
    Processes one(1, [&](const Rendezvous&) {
      while (door->round < round && !door->over) std::this_thread::sleep_for(100us);
      if (door->over) return 0;
      const auto where = Rendezvous::from_id(door->id, 2, 3);
      return rank_ok(where.status()) ? newcomer(*where, transport, 20s) : 1;
    });
    for (const Outcome& outcome : one.wait(30s)) CHECK(outcome.to_string() == "ok");
  }
  for (const Outcome& outcome : survivors.wait(30s)) CHECK(outcome.to_string() == "ok");
}

TEST_CASE("grow: wrong calls are answered, also where ranks differ") {
  CHECK(Communicator().grow({}, 1).status().code() == Code::invalid_argument);
  CHECK(on_transport(2, "shm", {}, [](Communicator& comm) {
          UniqueId id{};
          RANK_CHECK(comm.grow(id, 0).status().code() == Code::invalid_argument);
          const auto grown = comm.grow(id, 1 + comm.rank());
          rank_ok(comm.barrier().wait());
          RANK_CHECK(grown.status().code() == Code::mismatch);
          RANK_CHECK(grown.status().message().find("newcomers") != std::string::npos);
          comm.abort("over");
          RANK_CHECK(!comm.grow(id, 1).ok());
        }) == "");
}
