// The shared-memory transport's own state. shm.cpp: the contract's functions, and what happens when
// something ends; shm_stream.cpp: how messages travel through the rings.
//
//   to 1 MiB   sent at once, in one record or in parts of a slot each. A receiver that did not ask
//              copies it to the heap, so that nothing behind it waits; credits bound that.
//   above      announced; sent when the receiver asks.
//
// A receive that may be lent memory gets the slot, if the message lies in one and less than half of
// the slots are on loan already, or the heap copy of a message that came early.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "lib/base/base.h"
#include "lib/engine/credits.h"
#include "lib/engine/matcher.h"
#include "transports/outcome.h"
#include "transports/shm_host.h"

namespace ringfold::shm {

struct Neighbour;

// What a completion's lender points to.
struct Loan {
  Neighbour* owner = nullptr;  // of a slot; null: this is an Unasked
  uint32_t slot = 0;
};

// A message that came, or was announced, before anybody asked.
struct Unasked : Loan {
  Peer peer = -1;
  MessageId id;
  size_t bytes = 0;
  std::unique_ptr<uint8_t[]> data;  // null if it was announced
  uint32_t number = 0;              // of the announcement
  [[nodiscard]] bool announced() const { return bytes > kCreditBytes; }
};

struct Outgoing {
  MessageId id;
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  Completion* completion = nullptr;
  Kind kind = Kind::message;  // of its first record
  uint32_t number = 0;
  size_t written = 0;
  bool begun = false;
};

// The message whose parts are coming in.
struct Incoming {
  enum class To : uint8_t { nobody, buffer, heap, waste } to = To::nobody;
  MessageId id;
  uint64_t total = 0, received = 0;
  Matcher::Posted posted;
  std::unique_ptr<Unasked> unasked;
};

struct Asked {  // a receive of an announced message
  MessageId id;
  Matcher::Posted posted;  // without completion once cancelled
};

struct Neighbour {
  Peer peer = -1;
  Address address;
  Post::Watch watch;
  bool left = false;    // it said goodbye
  Status fault;         // it ends as soon as what it sent has been received
  bool broken = false;  // nothing it sent can be trusted
  Status lost;          // it has ended

  Mapping out;
  Fd handing_over;  // until it could be sent
  RingWriter writer;
  std::deque<Record> control;  // goes before data
  std::deque<Outgoing> data;
  std::unordered_map<uint32_t, Outgoing> announced;
  uint32_t next_number = 0;

  Mapping in;
  RingReader reader;
  Incoming current;
  bool waited = false;  // the next message has had its chance to be asked for
  std::unordered_map<uint32_t, Asked> asked;
  std::array<Loan, kSlots> loans;
  uint32_t loaned = 0;
};

class Shm final : public Transport {
 public:
  Shm(Post post, Peer me, Clock& clock) : post_(std::move(post)), me_(me), clock_(clock) {}
  ~Shm() override;

  [[nodiscard]] const char* name() const override { return "shm"; }
  [[nodiscard]] bool reaches(MemoryKind kind) const override { return kind == MemoryKind::host; }
  [[nodiscard]] std::string address() const override { return post_.address().encode(); }
  [[nodiscard]] Status connect(Peer peer, std::string_view address) override;
  void send(Peer peer, const MessageId& id, Buffer buffer, Completion* completion) override;
  void recv(Peer peer, const MessageId& id, Buffer buffer, bool may_lend,
            Completion* completion) override;
  void give_back(Completion* completion) override;
  void open(uint32_t comm, uint32_t seq, uint32_t fingerprint) override;
  void finish(uint32_t comm, uint32_t seq) override;
  void cancel(uint32_t comm, const Status& why) override;
  bool progress() override;
  int arm() override;
  [[nodiscard]] bool flushed() const override;

 private:
  enum class Fate : uint8_t { deliver, keep, waste };
  struct Met {  // a receive that found its message waiting
    std::unique_ptr<Unasked> unasked;
    Matcher::Posted posted;
  };

  // shm.cpp
  Neighbour* find(Peer peer);
  [[nodiscard]] Status refusal(const Neighbour* n, Peer peer, uint32_t comm) const;
  void withdraw(Neighbour& n, uint32_t comm, std::vector<Completion*>* gone);
  void lose(Neighbour& n);
  bool wake_up();
  bool glance();
  void look_for_deaths();
  void read(Post::News news);
  void settle(Met met);
  void adopt(Neighbour& n, const Fd& segment);

  // shm_stream.cpp: out
  void pump(Neighbour& n);
  bool prepare(Neighbour& n);
  bool write(Neighbour& n, Outgoing& out);
  bool write_bytes(Neighbour& n, Outgoing& out);
  void say(Neighbour& n, const Record& record);
  void ring(Neighbour& n);
  // in
  bool take(Neighbour& n);
  bool waits(Neighbour& n, const Record& record);
  void handle(Neighbour& n, const Record& record, const uint8_t* bytes);
  void begin(Neighbour& n, const Record& record);
  void begin_answer(Neighbour& n, const Record& record);
  void take_bytes(Neighbour& n, const Record& record, const uint8_t* bytes);
  bool lend(Neighbour& n, const Record& record, const uint8_t* bytes);
  void complete(Neighbour& n);
  void gave_up(Neighbour& n);
  void announced(Neighbour& n, const Record& record);
  void asked(Neighbour& n, uint32_t number, bool declined);
  Fate meet(Neighbour& n, const MessageId& id, uint64_t bytes, Matcher::Posted* posted);
  void deliver(std::unique_ptr<Unasked> unasked, const Matcher::Posted& posted);
  void discard(std::unique_ptr<Unasked> unasked);
  void owe(Neighbour& n, uint32_t comm, uint64_t bytes);
  void distrust(Neighbour& n, std::string_view why);

  Post post_;
  const Peer me_;
  Clock& clock_;
  std::vector<std::unique_ptr<Neighbour>> neighbours_;  // by peer
  std::vector<Neighbour*> active_;                      // those with a segment
  std::vector<Post::News> strangers_;                   // from peers not connected yet
  std::map<uint32_t, Status> cancelled_;
  Matcher matcher_;
  CreditAccounts<Outgoing> accounts_;
  CreditReturns returns_;
  Deferred deferred_;
  std::vector<std::pair<Peer, MessageId>> contradictions_;  // found by open()
  std::deque<Met> met_;
  bool armed_ = false;
  bool silent_peers_ = false;  // whose death no descriptor tells
  uint32_t turn_ = 0;
  Nanoseconds glanced_{0}, looked_{0};
};

}  // namespace ringfold::shm
