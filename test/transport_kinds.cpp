#include <fmt/core.h>

#include "test/skip.h"
#include "test/transport_world.h"
#include "transports/sim.h"
#include "transports/transports.h"
#include "transports/ucx.h"

namespace ringfold::test {
namespace {

// An endpoint of a simulated network that lets time pass whenever it has nothing else to do.
class Simulated final : public Transport {
 public:
  Simulated(std::shared_ptr<SimNetwork> network, Peer me)
      : network_(std::move(network)), inner_(network_->endpoint(me)) {
    inner_->on_lost = [this](Peer peer, const Status& why) { on_lost(peer, why); };
    inner_->on_mismatch = [this](Peer peer, const MessageId& theirs, uint32_t expected) {
      on_mismatch(peer, theirs, expected);
    };
  }
  [[nodiscard]] const char* name() const override { return inner_->name(); }
  [[nodiscard]] bool reaches(MemoryKind kind) const override { return inner_->reaches(kind); }
  [[nodiscard]] std::string address() const override { return inner_->address(); }
  [[nodiscard]] Status connect(Peer peer, std::string_view address) override {
    return inner_->connect(peer, address);
  }
  void send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) override {
    inner_->send(peer, id, buffer, completion);
    count_sent(inner_->bytes_sent() - bytes_sent());
  }
  void recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
            Completion* completion) override {
    inner_->recv(peer, id, buffer, may_lend, completion);
  }
  void give_back(Completion* completion) override { inner_->give_back(completion); }
  void open(uint32_t comm, uint32_t seq, uint32_t fingerprint) override {
    inner_->open(comm, seq, fingerprint);
  }
  void finish(uint32_t comm, uint32_t seq) override { inner_->finish(comm, seq); }
  void cancel(uint32_t comm, const Status& why) override { inner_->cancel(comm, why); }
  bool progress() override { return inner_->progress() || network_->next(); }
  int arm() override { return inner_->arm(); }
  [[nodiscard]] bool flushed() const override { return inner_->flushed(); }

 private:
  const std::shared_ptr<SimNetwork> network_;
  const std::unique_ptr<Transport> inner_;
};

Result<Ends> make_simulated(int size, Nanoseconds jitter) {
  SimOptions options;
  options.machine = {kShmLink, kShmLink, 0, 1};
  options.faults.jitter = jitter;
  options.faults.notice = 50us;  // after the last words, before a large message has left
  const auto network = std::make_shared<SimNetwork>(size, options);
  Ends ends;
  for (int rank = 0; rank < size; ++rank)
    ends.push_back(std::make_unique<Simulated>(network, rank));
  return ends;
}

}  // namespace

std::vector<Kind> process_kinds() {
  const auto shm = [](Peer me) { return make_shm(me, real_clock); };
  std::vector<Kind> all = {
      {"shm", {}, false, false, shm},
      {"ucx", {}, false, true, [](Peer me) { return make_ucx(me, real_clock, {"lo"}); }},
      {"ucx by two rails",
       {},
       false,
       true,
       [](Peer me) {
         return make_ucx(me, real_clock, {"lo", "lo"});
       },
       2},
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

std::vector<Kind> sleeping_kinds() {
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

std::vector<Kind> kinds() {
  std::vector<Kind> all = sleeping_kinds();
  all.push_back({"sim", [](int size) { return make_simulated(size, 0us); }, false, false, {}});
  all.push_back(
      {"sim, late", [](int size) { return make_simulated(size, 20us); }, false, false, {}});
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
