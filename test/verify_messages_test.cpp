// RINGFOLD_VERIFY of messages: three ranks in one thread, and a transport that changes a bit.
#include <array>
#include <catch2/catch.hpp>
#include <optional>
#include <vector>

#include "test/world.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// Changes one bit of the n-th message that is sent through it.
class Damaging final : public Transport {
 public:
  Damaging(std::unique_ptr<Transport> inner, int which) : inner_(std::move(inner)), left_(which) {
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
    if (buffer.bytes != 0 && left_-- == 0) {
      const auto* const bytes = static_cast<const unsigned char*>(buffer.data);
      damaged_.assign(bytes, bytes + buffer.bytes);
      damaged_[buffer.bytes / 2] ^= 0x10;
      buffer.data = damaged_.data();
    }
    inner_->send(peer, id, buffer, completion);
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
  bool progress() override { return inner_->progress(); }
  int arm() override { return inner_->arm(); }
  [[nodiscard]] bool flushed() const override { return inner_->flushed(); }
  [[nodiscard]] bool done() const { return left_ < 0; }

 private:
  const std::unique_ptr<Transport> inner_;
  int left_;
  std::vector<unsigned char> damaged_;
};

class Ended final : public Operation {
 public:
  explicit Ended(std::optional<Status>* status) : status_(status) {}
  void completed(const Status& status) noexcept override { *status_ = status; }

 private:
  std::optional<Status>* status_;
};

// A ring all-reduce of 3 ranks in one thread, one message of rank 1 damaged; how each rank ended,
// and whether all results are right.
struct Run {
  std::array<std::optional<Status>, 3> status;
  bool right = true, damaged = false;

  Run(int which, bool verify) {
    constexpr int kRanks = 3;
    constexpr size_t kCount = 1000, kPiece = 64;
    VirtualClock clock;
    SlotPool slots;
    auto hub = std::make_shared<LoopbackHub>();
    std::array<std::vector<int64_t>, kRanks> data;
    std::vector<std::unique_ptr<Transport>> transports;
    std::vector<std::unique_ptr<Engine>> engines;
    std::vector<std::shared_ptr<Channel>> channels;
    for (int r = 0; r < kRanks; ++r) {
      auto loopback = make_loopback(hub, r, clock, {});
      if (r == 1) loopback = std::make_unique<Damaging>(std::move(loopback), which);
      transports.push_back(std::move(loopback));
      engines.push_back(std::make_unique<Engine>(clock));
    }
    for (int r = 0; r < kRanks; ++r) {
      auto& engine = *engines[static_cast<size_t>(r)];
      auto& transport = *transports[static_cast<size_t>(r)];
      engine.add(transport);
      engine.on_failed = [&engines, r](const Channel& channel, const Status& why) {
        for (int other = 0; other < kRanks; ++other)
          if (other != r) engines[static_cast<size_t>(other)]->fail(channel.id, why, false);
      };
      auto channel = std::make_shared<Channel>();
      channel->rank = r;
      channel->verify = verify;
      for (int p = 0; p < kRanks; ++p) {
        REQUIRE(transport.connect(p, "loopback " + std::to_string(p)).ok());
        channel->peers.push_back(p);
        channel->transports.push_back(&transport);
      }
      engine.open(channel);
      channels.push_back(channel);
      data[static_cast<size_t>(r)].assign(kCount, r + 1);
    }
    for (size_t r = 0; r < kRanks; ++r) {
      auto operation = std::make_unique<Ended>(&status[r]);
      operation->channel = channels[r];
      operation->what.schedule = {Collective::all_reduce, Algorithm::ring, kRanks, 1, 0, kCount};
      operation->what.type = DType::i64;
      operation->what.piece = kPiece;
      operation->position = static_cast<int>(r);
      operation->compute = std::make_unique<HostCompute>(
          operation->what.schedule, operation->position, data[r].data(), data[r].data(), DType::i64,
          Reduction(), kPiece, slots);
      operation->deadline = clock.now() + 1000s;
      engines[r]->submit(std::move(operation));
    }
    for (int turns = 0; turns < 100'000; ++turns) {
      for (auto& engine : engines) (void)engine->poll();
      if (std::ranges::all_of(status, [](const auto& s) { return s.has_value(); })) break;
      clock.pass(10us);
    }
    for (const auto& mine : data)
      for (const int64_t x : mine) right &= x == 6;
    damaged = dynamic_cast<Damaging&>(*transports[1]).done();
    for (size_t r = 0; r < kRanks; ++r) engines[r]->close(channels[r]);
    for (int turns = 0; turns < 1000; ++turns)
      for (auto& engine : engines) (void)engine->poll();
  }
};

}  // namespace

TEST_CASE("verify: a bit that changes in any message is an error on all ranks, naming both") {
  int damaged = 0, unnoticed = 0;
  // 4 steps of 6 pieces: with checksums 48 messages, without them 24.
  for (int which = 0; which < 48; ++which) {
    const Run run(which, true);
    INFO("message " << which);
    REQUIRE(run.damaged);
    ++damaged;
    for (const auto& status : run.status) {
      REQUIRE(status.has_value());
      CHECK(status->code() == Code::system);
      CHECK(status->message().find("checksum differs") != std::string::npos);
      CHECK(status->message().find("rank 2, operation 0") != std::string::npos);
      CHECK(status->message().find("from rank 1") != std::string::npos);
    }
  }
  CHECK(damaged == 48);
  for (int which = 0; which < 24; ++which) {
    const Run run(which, false);
    REQUIRE(run.damaged);
    unnoticed += run.status[2]->ok() && !run.right ? 1 : 0;
  }
  CHECK(unnoticed == 24);  // the test does damage what matters
}

TEST_CASE("verify: what is right stays right") {
  for (const int which : {100, 1000}) {
    const Run run(which, true);
    CHECK_FALSE(run.damaged);
    CHECK(run.right);
    for (const auto& status : run.status) CHECK(status->ok());
  }
}
