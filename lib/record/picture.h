// What the records say, as plain values and as text; also those of other processes.
//
// Threads: pure functions, but for the reading of memory that its writers go on to write.
#pragma once

#include <string>
#include <vector>

#include "lib/record/record.h"

namespace ringfold::record {

struct OperationView {
  What what;
  State state = State::none;  // never `quick`
  bool region = false;
  uint32_t first = 0, last = 0;            // sequence numbers: a row of like operations
  Nanoseconds began{}, ended{};            // 0: not taken
  int through = 0;                         // of what.steps
  int awaited = -1;                        // rank, while running
  bool to_take = false;                    // it waits for that rank to take what it sends
  [[nodiscard]] std::string text() const;  // "all_reduce f32 sum of 1024 elements (ring)"
};

struct LaneView {
  uint32_t called = 0;
  uint64_t finished = 0, sent = 0, received = 0;
};

struct CommunicatorView {
  uint64_t world = 0;
  uint32_t id = 0;
  int rank = 0, size = 0;
  std::optional<uint32_t> part_of;  // id of the communicator that it does a part of the work of
  std::string transport;
  Nanoseconds opened{};
  Counters counters;
  Code code = Code::ok;
  std::string failure;
  LaneView messages, region;
  std::vector<OperationView> operations;  // oldest first, as far as that can be told
};

// Bytes of other processes are not trusted: whatever is no operation is left out.
[[nodiscard]] CommunicatorView decode(const Slot& slot);
// What a part has counted, as the user of the whole sees it: bytes.
inline void add_part(Counters* whole, const Counters& part) {
  whole->bytes_sent += part.bytes_sent;
  whole->bytes_received += part.bytes_received;
}
// The operations under way, or the latest that is over, for people: one line; `now` 0: without
// times.
[[nodiscard]] std::string standing(const CommunicatorView& view, Nanoseconds now);

[[nodiscard]] std::string to_json(const CommunicatorView& view, Nanoseconds now);
[[nodiscard]] std::string quoted(std::string_view text);  // as a JSON string

// "running", "sleeping", "stopped", "dead".
[[nodiscard]] std::string_view in_words(char kernel_state);

// How a process stands in general.
struct ProcessView {
  int pid = 0;
  std::string library;
  char kernel_state = '?';  // as in /proc/PID/stat: T is stopped, Z dead
  std::vector<CommunicatorView> communicators;
};
// Of any process of this user, in whatever state it is; of this one, too. unsupported: it has no
// communicators, or another version of the library. system: the reason why it cannot be read.
[[nodiscard]] Result<ProcessView> look_at(int pid);

}  // namespace ringfold::record
