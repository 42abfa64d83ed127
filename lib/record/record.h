// The flight recorder: what a communicator did last, how far it has come and what it has counted.
// Always on, so it costs a few plain stores an operation and never a lock, a system call or an
// allocation; layout.h says where it lies.
//
// Threads: as said for each function. Writers of one lane are the holders of one turn.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lib/base/base.h"
#include "lib/record/layout.h"
#include "ringfold/record.h"
#include "ringfold/schedule.h"
#include "ringfold/status.h"
#include "ringfold/types.h"

namespace ringfold::record {

class Board;

// An operation, as it is written down when it begins.
struct What {
  Collective collective = Collective::all_reduce;
  Algorithm algorithm = Algorithm::ring;
  DType type = DType::f32;
  Op op = Op::sum;
  Kind kind = Kind::collective;
  int whom = 0;  // root or partner
  size_t count = 0;
  uint32_t fingerprint = 0;
  int steps = 0;
};

inline uint64_t both(uint32_t low, uint32_t high) {
  return low | static_cast<uint64_t>(high) << 32;
}
inline void put(Word& word, uint64_t value) {
  word.store(value, std::memory_order_relaxed);
}
inline uint64_t get(const Word& word) {
  return word.load(std::memory_order_relaxed);
}
// For words with a single writer: no locked instruction.
inline void add(Word& word, uint64_t value) {
  put(word, get(word) + value);
}

// Writes down that an operation begins. The entry is the caller's until it ends.
Entry& begin(Lane& lane, const What& what, uint32_t seq, State state, Nanoseconds now);
void end(Lane& lane, Entry& entry, bool well, Nanoseconds now);
// One more of a row of quick operations.
inline void again(Entry& entry, uint32_t seq) {
  const auto first = static_cast<uint32_t>(get(entry.numbers));
  put(entry.numbers, both(first, seq));
}
inline void over(Lane& lane, uint32_t seq) {
  lane.over.store(seq + 1, std::memory_order_relaxed);
}
// A quick operation that takes longer after all.
Entry& slow(Lane& lane, Entry& entry, uint32_t seq, int steps, Nanoseconds now);
inline void progress(Entry& entry, int through, int steps) {
  put(entry.progress, both(static_cast<uint32_t>(through), static_cast<uint32_t>(steps)));
}

// The record of one communicator, as long as that lives.
class Record {
 public:
  struct Who {
    uint64_t world = 0;  // 0: of one rank, which nobody else need see
    uint32_t id = 0;
    int rank = 0, size = 1;
    std::optional<uint32_t> part_of;  // the communicator that this one does a part of the work of
  };
  // Any thread.
  static std::shared_ptr<Record> open(const Who& who);
  ~Record();
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  [[nodiscard]] Slot& slot() const { return *slot_; }
  [[nodiscard]] Lane& messages() const { return slot_->messages; }
  [[nodiscard]] Lane& region() const { return slot_->region; }
  void name_transport(const std::string& name);
  // Any thread: one thread waited that long.
  void waited(Nanoseconds time);
  // The first failure stays. Leaves the record in the folder RINGFOLD_RECORD, if that is set.
  void fail(const Status& why);

 private:
  Record() = default;
  void leave_file() const;

  std::shared_ptr<Board> board_;
  std::unique_ptr<Slot> own_;  // null: the slot is one of the board's
  Slot* slot_ = nullptr;
};

// Calls `f` with each slot in use of this process, private ones excepted, and gives the page; null
// if there is none yet. Nothing is opened or closed meanwhile.
const Page* visit(const std::function<void(const Slot&)>& f);

}  // namespace ringfold::record
