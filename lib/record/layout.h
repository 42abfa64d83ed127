// What a process remembers of its communicators, as it lies in memory: one page of its own and a
// slot for each communicator, in an unnamed file that is called "ringfold-record". It is read by
// the process itself and, through /proc/PID/fd, by others of the same user, who need nothing from
// it: it may be stopped, hung or about to die.
//
// Every word has one writer at a time (the holder of the engine's or of the region's turn) and is
// read whenever somebody likes, so all are atomic and nothing is ever locked. A reader may catch an
// entry while it changes; it then reads it again.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ringfold::record {

inline constexpr uint32_t kMagic = 0x52464244, kVersion = 1;
inline constexpr const char* kFileName = "ringfold-record";
// Communicators that others can see; more are recorded, too, but in private memory.
inline constexpr size_t kSlots = 1023;
// Operations that are remembered of each way of a communicator.
inline constexpr uint32_t kEntries = 32;

using Word = std::atomic<uint64_t>;

// How an entry's operation stands.
enum class State : uint8_t {
  none,     // nothing was written here yet
  running,  // the way's next() has begun it
  quick,    // a row of like operations: all before Lane::over are over
  done,
  failed,
};
// `captured`: a collective of a graph, which has numbers of its own.
enum class Kind : uint8_t { collective, send, receive, captured };

// One operation, or a row of like ones that were each over before their call returned.
struct Entry {
  Word numbers;   // first | last << 32: sequence numbers
  Word what;      // collective | type << 8 | op << 16 | algorithm << 24 | kind << 32 | state << 40
  Word whom;      // root or partner | fingerprint << 32
  Word count;     // elements
  Word began;     // monotonic nanoseconds; 0: not taken
  Word ended;     // the same
  Word progress;  // steps that are through | steps of the schedule << 32
  Word awaited;   // rank + 1 | 1 << 31 if it is to take, not to give; 0: nobody
};
static_assert(sizeof(Entry) == 64);

// The operations that go one way: by messages, or through the region.
struct Lane {
  std::atomic<uint32_t> called;  // collectives called so far
  std::atomic<uint32_t> over;    // of the region: all before this number are over
  std::atomic<uint32_t> next;    // entries begun so far
  uint32_t unused;
  Word finished;        // operations that ended well
  Word sent, received;  // payload bytes
  Word awaited;         // of the region: phase | rank << 32
  std::array<uint64_t, 2> also_unused;
  std::array<Entry, kEntries> entries;
};
static_assert(sizeof(Lane) == 64 + 64 * kEntries);

inline constexpr size_t kFailureText = 3840;

struct Slot {
  std::atomic<uint32_t> used;  // 0: free; else grows with each communicator that lies here
  uint32_t id, rank, size;
  uint64_t world;              // the same on all ranks that were bootstrapped together
  uint64_t opened;             // monotonic nanoseconds
  Word waits, waited;          // times a thread waited, and nanoseconds it took
  std::atomic<uint32_t> code;  // of the failure; 0: none. Set after the text
  std::array<char, 32> transport;
  uint32_t whole;  // 1 + id of the communicator that this one is a part of; 0: of none
  std::array<char, 40> unused;
  std::array<char, kFailureText> failure;  // ends with 0
  Lane messages, region;
};
static_assert(sizeof(Slot) == 8192);

// What the communicators that are gone have counted.
struct Totals {
  Word communicators, operations, finished, sent, received, waits, waited, failures;
};

struct alignas(4096) Page {
  uint32_t magic, version;
  uint32_t slots;
  int32_t pid;
  std::array<char, 16> library;   // version of ringfold
  std::atomic<uint32_t> touched;  // slots from here on were never used: reading would allocate them
  Totals gone;
};

inline constexpr size_t kBoardBytes = sizeof(Page) + kSlots * sizeof(Slot);

}  // namespace ringfold::record
