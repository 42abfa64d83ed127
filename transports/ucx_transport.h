// Ranks of different hosts, over UCX active messages.
//
//   Messages    One active message each, with a header of 20 bytes: the MessageId and who sends.
//               UCX decides whether the bytes travel with the header (eagerly) or are fetched into
//               the posted buffer once it is known (rendezvous); above kAlwaysRendezvous they are
//               always fetched, so that a message nobody asked for costs the receiver its header.
//               Over TCP all others are eager: fetching saves no copy there, and its question and
//               answer wait in the queues of both directions behind the data before them.
//   Early ones  are kept as UCX's own descriptors where it hands them out, else as a copy.
//   Endpoints   are made by the first send to a peer or receive from it. They are made with peer
//               error handling, without which UCX 1.13 may wait for a dead peer for ever; on one
//               host it then uses TCP over loopback, for its shared memory lacks it.
//   Lost peers  UCX tells through the endpoint's error handler. We close the endpoint by force,
//               which ends its requests, and complete what we hold ourselves. A peer that destroys
//               its transport is lost to us as well, after all it had sent has arrived.
//   Cancelling  A transfer that UCX has begun cannot be called back. It gets kGrace to end by
//               itself, as it does when the peer is alive and cancels or goes on; then the endpoint
//               is closed by force, and the peer is lost to the other communicators too. The
//               socket may stay open (UCX keeps it for the other direction), so the peer is told
//               in words; what it still sends for the ended request is dropped by UCX.
//   Leaving     TCP may throw away what was sent when a socket is closed while bytes from the peer
//               are unread. So before we leave we ask each peer whether everything has arrived
//               (flushed(), and the destructor, for kFarewell at most).
//   Rails       Several interfaces, when the user names them, are a UCX worker each. A message goes
//   by
//               the one with the fewest bytes that the peer has not seen yet (it reports them), so
//               that the bytes are split by the rails' speeds as they are at the time. The k-th of
//               a rank leads to the k-th of another. Losing one is losing the peer.
//   fork()      UCX does not survive it: in the child every call is answered by invalid_argument.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "lib/base/base.h"
#include "lib/engine/credits.h"
#include "lib/engine/matcher.h"
#include "transports/outcome.h"
#include "transports/ucx_worker.h"

namespace ringfold::ucx {

inline constexpr Nanoseconds kGrace = std::chrono::milliseconds(250);
inline constexpr Nanoseconds kFarewell = std::chrono::seconds(1);
inline constexpr size_t kAlwaysRendezvous = 256 << 10;
inline constexpr size_t kMostRails = 4;
inline constexpr uint64_t kSeenBytes = 64 << 10;  // are reported at once

enum ActiveMessage : unsigned { kData, kControl };

struct DataHeader {
  MessageId id;
  int32_t from;
};
static_assert(sizeof(DataHeader) == 20);

enum class Control : uint32_t { credit, ask, answer, leave, seen };
struct ControlHeader {
  int32_t from;
  Control what;
  uint32_t comm, messages;  // credit; comm: of `seen`, the rail
  uint64_t number;          // credit, seen: bytes; ask, answer: messages sent so far
};
static_assert(sizeof(ControlHeader) == 24);

class UcxTransport;

// One of this rank's interfaces, or all of them if UCX is to choose.
struct Rail {
  UcxTransport* owner;
  size_t index;
  std::unique_ptr<UcxWorker> worker;
};

// To one peer by one rail.
struct Way {
  std::string address;
  ucp_ep_h endpoint = nullptr;
  uint64_t sent = 0, seen = 0;         // bytes; of them the peer has reported
  uint64_t arrived = 0, reported = 0;  // bytes from the peer; reported to it
};

// What is known of one peer.
struct Link {
  UcxTransport* owner;
  Peer peer;
  std::string host;
  std::array<Way, kMostRails> ways;
  size_t rails = 0;           // of the ways; 0: it was never connected
  Status lost;                // ok while there is hope
  uint32_t flights = 0;       // requests under way
  uint64_t sent = 0;          // messages
  uint64_t asked = 0;         // the last number we asked about
  uint64_t confirmed = 0;     // of these the peer has said that they arrived
  uint64_t received = 0;      // messages
  uint64_t must_confirm = 0;  // the peer wants to know when `received` reaches this; 0: it does not
};

// What a message is charged, on both sides: the bytes that its receiver may have to keep. As many
// rails may have so many times the bytes under way, or they would wait for credit.
inline uint64_t charge_of(const Link& link, size_t bytes) {
  return bytes > kAlwaysRendezvous ? 0 : bytes / std::max<size_t>(link.rails, 1);
}

// A request that UCX has begun and not ended: it may touch the buffer.
struct Flight {
  Link* link;
  Completion* completion;  // null: a control message
  uint32_t comm;
  size_t at;             // where in flights_
  bool cancelled;        // completes with `why` whatever UCX says
  Nanoseconds deadline;  // of a cancelled one
  Status why;
  DataHeader data;  // UCX reads the headers until the request has ended
  ControlHeader control;
};

// A message that arrived before it was asked for.
struct Kept {
  enum class How : uint8_t { descriptor, rendezvous, copy };
  How how;
  size_t rail;  // by which it came
  void* data;   // UCX's, or own
  std::unique_ptr<std::byte[]> own;
};

// A message that is to be delivered now.
struct Arrival {
  Kept::How how;
  size_t rail;
  void* data;
  size_t bytes;
};

// A send that waits for credit.
struct Waiting {
  Completion* completion;
  MessageId id;
  Buffer buffer;
};

class UcxTransport final : public Transport {
 public:
  // REQUIRES 1 to kMostRails workers.
  UcxTransport(std::vector<std::unique_ptr<UcxWorker>> workers, Peer me, Clock& clock);
  ~UcxTransport() override;
  Status listen();

  [[nodiscard]] const char* name() const override { return "ucx"; }
  [[nodiscard]] bool reaches(MemoryKind kind) const override {
    return kind == MemoryKind::host || first().reaches_cuda();
  }
  [[nodiscard]] std::string address() const override;
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
  struct Contradiction {
    Peer peer;
    MessageId theirs;
    uint32_t expected;
  };

  // What is alike for all rails.
  [[nodiscard]] const UcxWorker& first() const { return *rails_.front().worker; }
  [[nodiscard]] ucp_worker_h worker(size_t rail) const { return rails_[rail].worker->handle(); }
  Status listen(Rail& rail);
  Link& link_to(Peer peer);
  Status usable(Link& link);
  ucs_status_t open_way(Link& link, size_t rail);
  Status refusal(Link& link, uint32_t comm);
  static Status forked_child();
  static std::string describe(const Link& link);

  bool turn();
  bool tell_owner();
  void fail(Link& link, ucs_status_t why);
  void lose(Link& link, const Status& why);
  void give_up_cancelled();
  void ask_for_confirmation();
  int sleep_on();
  void wait_until(Nanoseconds deadline, bool (UcxTransport::*done)());
  bool everything_arrived() { return flushed(); }
  bool nothing_under_way() { return flights_.empty(); }
  void close_by_force(Link& link);

  Flight* take_off(Link& link, Completion* completion, uint32_t comm);
  static ucp_request_param_t parameters(Flight* flight, MemoryKind kind);
  void launched(Flight* flight, ucs_status_ptr_t request);
  void land(Flight* flight, ucs_status_t status);
  void start_send(Link& link, const Waiting& message);
  void send_control(Link& link, const ControlHeader& header, size_t rail = 0);
  size_t choose_rail(Link& link, size_t bytes) const;
  void count_arrival(Link& link, const Arrival& arrival);
  void release(size_t rail, void* descriptor);
  static void on_sent(void* request, ucs_status_t status, void* user_data);
  static void on_received(void* request, ucs_status_t status, size_t bytes, void* user_data);

  bool deliver(Link& link, const MessageId& id, const Matcher::Posted& posted,
               const Arrival& arrival);
  void release(Kept* kept);
  void drop(Peer peer, const MessageId& id, const Matcher::Early& early);
  void credit_back(Link& link, uint32_t comm, size_t bytes);
  static ucs_status_t on_data(void* arg, const void* header, size_t header_bytes, void* data,
                              size_t bytes, const ucp_am_recv_param_t* how);
  bool arrived(const DataHeader& message, const Arrival& arrival);
  bool keep(const DataHeader& message, const Arrival& arrival);
  static ucs_status_t on_control(void* arg, const void* header, size_t header_bytes, void*, size_t,
                                 const ucp_am_recv_param_t*);
  void heard(const ControlHeader& message);
  void confirm_if_wanted(Link& link);

  std::vector<Rail> rails_;
  // Readable on news of any rail; -1: there is only one.
  struct News {
    int epoll = -1;
    ~News() {
      if (epoll >= 0) close(epoll);
    }
  } news_;
  std::unordered_map<void*, size_t> lent_;  // descriptors, and the rails they came by, if several
  const UcxLibrary& ucx_;
  const Peer me_;
  Clock& clock_;
  Matcher matcher_;
  CreditAccounts<Waiting> credits_;
  CreditReturns returns_;
  Deferred deferred_;
  std::unordered_map<Peer, Link> links_;
  std::vector<std::unique_ptr<Flight>> flights_, spare_;
  size_t cancelled_ = 0;  // of flights_
  std::unordered_map<uint32_t, Status> cancelled_comms_;
  std::vector<std::pair<Link*, Status>> failed_;  // seen inside UCX's callbacks, handled after them
  std::vector<Contradiction> contradictions_;
  std::vector<Link*> lost_;
  mutable bool confirmation_wanted_ = false;  // flushed() was asked for
};

}  // namespace ringfold::ucx
