#include <fmt/core.h>

#include "test/skip.h"
#include "test/transport_world.h"
#include "transports/transports.h"
#include "transports/ucx.h"

namespace ringfold::test {

std::vector<Kind> process_kinds() {
  const auto shm = [](Peer me) { return make_shm(me, real_clock); };
  std::vector<Kind> all = {
      {"shm", {}, false, false, shm},
      {"ucx", {}, false, true, [](Peer me) { return make_ucx(me, real_clock, "lo"); }},
  };
  for (Kind& kind : all)
    kind.make = [one = kind.make_one](int size) -> Result<Ends> {
      Ends ends;
      for (int rank = 0; rank < size; ++rank) {
        auto made = one(rank);
        if (!made.ok()) return made.status();
        ends.push_back(std::move(*made));
      }
      return ends;
    };
  return all;
}

std::vector<Kind> kinds() {
  const auto loopback = [](Faults faults) {
    return [faults](int size) -> Result<Ends> {
      const auto hub = std::make_shared<LoopbackHub>();
      Ends ends;
      for (int rank = 0; rank < size; ++rank)
        ends.push_back(make_loopback(hub, rank, real_clock, faults));
      return ends;
    };
  };
  std::vector<Kind> all = process_kinds();
  all.push_back({"loopback", loopback({}), true, false, {}});
  all.push_back({"loopback, late", loopback({1, 20us, false}), true, false, {}});
  all.push_back({"loopback, late and reordered", loopback({2, 20us, true}), true, false, {}});
  return all;
}

World::World(const Kind& kind, int size) {
  auto made = kind.make(size);
  if (!made.ok()) {
    skip(fmt::format("{}: {}", kind.name, made.status().to_string()));
    return;
  }
  ends = std::move(*made);
  mismatches.resize(ends.size());
  lost.resize(ends.size());
  for (int rank = 0; rank < size; ++rank) {
    for (int peer = 0; peer < size; ++peer)
      REQUIRE(ends[rank]->connect(peer, ends[peer]->address()).ok());
    ends[rank]->on_mismatch = [this, rank](Peer peer, const MessageId& theirs, uint32_t expected) {
      mismatches[rank].push_back({peer, theirs, expected});
    };
    ends[rank]->on_lost = [this, rank](Peer peer, const Status&) { lost[rank].push_back(peer); };
  }
}

Bytes pattern(size_t bytes, uint32_t salt) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<uint8_t>((static_cast<uint32_t>(i) + salt) * 2654435761u >> 24);
  return data;
}

}  // namespace ringfold::test
