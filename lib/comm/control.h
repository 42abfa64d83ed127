// How ranks meet, and the star of connections through rank 0 that stays afterwards to carry news of
// failures. Nothing here moves payload.
//
// Thread-safety: bootstrap() may run in several threads at once (several ranks of one process). A
// Control is used by one thread at a time.
// Errors: as Status; nothing blocks beyond the deadline of the rendezvous.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/base.h"
#include "ringfold/bootstrap.h"
#include "ringfold/status.h"

namespace ringfold {

// What every rank tells the others about itself.
struct Member {
  int rank = 0;
  std::string host;  // identity of the host as host_identity() gives it; equal: shares memory
  std::string host_name;
  int64_t pid = 0;
  int cores = 0;                                               // that this process may run on
  std::vector<std::pair<std::string, std::string>> addresses;  // transport name -> opaque bytes
};

// Equal in processes that share a kernel, /dev/shm and a network: boot id, device of /dev/shm and
// network namespace, hashed.
[[nodiscard]] std::string host_identity();
// This process: host, host_name, pid and cores; the caller adds rank and addresses.
[[nodiscard]] Member this_process();

// "0, 2-3"
[[nodiscard]] std::string rank_list(const std::vector<int>& sorted);

// News about a failure, a lost rank or an orderly goodbye.
struct Notice {
  enum class Kind : uint8_t {
    failed,  // a communicator failed on the origin; code and text say why
    lost,    // the origin's connection closed without goodbye, or it could not be understood
    left,    // the origin said goodbye
    asks,    // where do you stand? See standing.h for the texts of both
    stands   // the answer
  };
  Kind kind = Kind::failed;
  int origin = 0;  // world rank that the news is about; tell() sets it to this rank
  uint32_t comm = 0;
  Code code = Code::ok;
  std::string text;          // cut at kMaxNoticeText
  std::vector<int> members;  // world ranks concerned; empty: all
};
inline constexpr size_t kMaxNoticeText = 8192;

class Control {
 public:
  Control() = default;
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;
  virtual ~Control() = default;  // without leave(): the others see this rank as lost

  // Hands notices to the members concerned, through rank 0: `failed`, `asks` or `stands`; whatever
  // else becomes `failed`. Never blocks, and never calls
  // on_notice of this rank. Nothing happens for members that are gone, or once rank 0 is gone.
  // May be called from on_notice.
  virtual void tell(Notice notice) = 0;
  // Reads and writes what is possible now; calls on_notice. True if anything moved.
  virtual bool progress() = 0;
  // A descriptor that becomes readable when progress() has something to do; the same all its life.
  virtual int arm() = 0;
  // Says goodbye to everybody and waits, for at most kGoodbye and a little more for every rank that
  // rank 0 has to listen to, until it is known to have arrived.
  // To be called once, at the end; no notices come any more.
  virtual void leave() = 0;

  // What others told, and each rank's `lost` or `left` exactly once, this rank excepted. When rank
  // 0 is lost or has left, nothing is heard of the others any more.
  std::function<void(const Notice&)> on_notice;
};
inline constexpr Nanoseconds kGoodbye = std::chrono::seconds(1);
inline constexpr Nanoseconds kGoodbyePerRank = std::chrono::milliseconds(20);

struct Bootstrapped {
  std::vector<Member> members;       // by rank
  std::unique_ptr<Control> control;  // null when there is one rank only: nobody to talk to
};

// An address of a Member with this name is an IP address of its host, over which it has reached
// rank 0, or been reached by another rank.
inline constexpr std::string_view kReached = "reached";
// Start-up in two rounds: once everybody is known, each rank says more of itself.
struct SecondRound {
  // Whether there is one: the same answer on all ranks. Empty: there is none.
  std::function<bool(const std::vector<Member>& all)> wanted;
  // Called once, on every rank, when all have come; adds to `mine`, the rank's own.
  std::function<Status(const std::vector<Member>& all, Member* mine)> say;
};

// Meets the other ranks: checks who they are, compares what must agree, and exchanges the Members.
// `must_agree` are (setting, value) pairs that every rank must give alike; the library's version
// and the settings of lib/base/base.h that must agree are compared in any case.
// timeout: the message names the missing ranks, or, on a rank that never reached rank 0, the
// coordinator's address and the last error. mismatch: ranks differ; names what, who and the values.
// invalid_argument: a wrong rank, size or setting. system: the port is taken, and the like.
[[nodiscard]] Result<Bootstrapped> bootstrap(
    const Rendezvous& where, Member mine,
    std::vector<std::pair<std::string, std::string>> must_agree, const SecondRound& second = {});

}  // namespace ringfold
