// One direction between two processes of a host: a shared segment with a ring of records and a pool
// of slots.
//
//   ring    Small messages with their bytes, and the headers of large ones. Records are consumed
//           and freed in order; a record never wraps, a `skip` fills the end of the ring.
//   slots   The bytes of large messages, 64 KiB at a time. Freed in any order, so that a slot that
//           the receiver's user still reads (a loan) holds up nobody else.
//
// Memory order. Each index has one writer. The sender writes a record and its slot, then stores
// `tail`; the receiver loads `tail` and then reads: a release/acquire pair. The receiver reads,
// then stores `head` or sets the slot's bit in `returned`; the sender loads these before it writes
// over that memory: the same pair in the other direction. Nothing else orders data, on any
// processor.
//
// Sleeping needs more: "I set my flag, then look at the index again" against "you move the index,
// then look at my flag" is store-then-load on both sides, where release and acquire allow both to
// miss the other. These four accesses are seq_cst: in their single total order one of the two
// stores comes first, so the other side's load sees it.
//
// The peer may be hostile or broken: every field is copied out and checked before it is used, and
// nothing written by the peer is taken for an address or a length without a bound.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include "lib/engine/transport.h"

namespace ringfold::shm {

inline constexpr uint32_t kRingBytes = 64 << 10;
inline constexpr uint32_t kSlots = 32;
inline constexpr uint32_t kSlotBytes = 64 << 10;
// Up to here the bytes lie in the ring itself.
inline constexpr uint32_t kInlineBytes = 4 << 10;
inline constexpr uint16_t kNoSlot = 0xffff;
inline constexpr size_t kLine = 64;

enum class Kind : uint16_t {
  skip = 1,  // nothing up to the end of the ring
  message,   // the first bytes of a message
  part,      // its next bytes
  give_up,   // its sender will not send the rest
  announce,  // a message too long to be sent unasked, as `number`
  ask,       // the receiver of the announced `number` is ready
  decline,   // nobody will ever ask for the announced `number`
  answer,    // the first bytes of the announced `number`
  credit,    // `number` messages and `total` bytes of id.comm were asked for
};

struct Record {
  Kind kind = Kind::skip;
  uint16_t slot = kNoSlot;  // where the bytes are; kNoSlot: right behind the record
  uint32_t here = 0;        // bytes that come with this record
  uint64_t total = 0;       // bytes of the whole message
  MessageId id;
  uint32_t number = 0;
  uint32_t unused = 0;
};
static_assert(sizeof(Record) == 40 && std::is_trivially_copyable_v<Record>);

constexpr uint32_t record_bytes(const Record& record) {
  const uint32_t inlined = record.slot == kNoSlot ? record.here : 0;
  return (sizeof(Record) + inlined + kLine - 1) / kLine * kLine;
}

inline constexpr uint64_t kMagic = 0x31646c6f66676e72;  // "rngfold1"
inline constexpr uint32_t kVersion = 1;

// What the first bytes of a segment say; written once, before it is handed over.
struct Geometry {
  uint64_t magic = kMagic;
  uint32_t version = kVersion, ring_bytes = kRingBytes, slots = kSlots, slot_bytes = kSlotBytes;
  friend bool operator==(const Geometry&, const Geometry&) = default;
};

// Words with different writers lie 128 bytes apart: processors fetch lines in pairs.
struct Segment {
  Geometry geometry;
  alignas(128) std::atomic<uint64_t> tail;      // sender: bytes ever written to the ring
  alignas(128) std::atomic<uint64_t> head;      // receiver: bytes ever consumed
  alignas(128) std::atomic<uint32_t> returned;  // receiver sets a slot's bit, sender takes them
  alignas(128) std::atomic<uint32_t> receiver_asleep;
  alignas(128) std::atomic<uint32_t> sender_asleep;  // for want of space
  alignas(4096) uint8_t ring[kRingBytes];
  uint8_t slot[kSlots][kSlotBytes];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(kSlots <= 32 && 4 * (kInlineBytes + sizeof(Record)) <= kRingBytes);

// The sending end. One thread.
class RingWriter {
 public:
  void attach(Segment* segment) { segment_ = segment; }

  // Room for a record that carries `inlined` bytes?
  [[nodiscard]] bool room(uint32_t inlined) {
    const uint64_t bytes = (sizeof(Record) + inlined + kLine - 1) / kLine * kLine;
    const uint64_t needed = bytes <= to_end() ? bytes : to_end() + bytes;
    if (kRingBytes - (tail_ - head_) >= needed) return true;
    const uint64_t head = segment_->head.load(std::memory_order_acquire);
    if (tail_ - head <= kRingBytes) head_ = head;  // else nonsense, and the ring looks full
    return kRingBytes - (tail_ - head_) >= needed;
  }

  // REQUIRES room(). Not visible before publish().
  void write(const Record& record) { write(record, &record, 0); }
  void write(const Record& record, const void* bytes) {
    write(record, bytes, record.slot == kNoSlot ? record.here : 0);
  }

  // True if the receiver sleeps and must be woken.
  [[nodiscard]] bool publish() {
    if (tail_ == published_) return false;
    published_ = tail_;
    segment_->tail.store(tail_, std::memory_order_seq_cst);
    return segment_->receiver_asleep.load(std::memory_order_seq_cst) != 0 &&
           segment_->receiver_asleep.exchange(0, std::memory_order_seq_cst) != 0;
  }

  // A slot to write to, or kNoSlot. Round robin: a line that has left the receiver's cache is
  // cheaper to write than one that lies there.
  [[nodiscard]] uint16_t take_slot() {
    if (free_ == 0) collect();
    if (free_ == 0) return kNoSlot;
    const uint32_t ahead = free_ & ~((1u << next_) - 1);
    const auto slot = static_cast<uint16_t>(__builtin_ctz(ahead != 0 ? ahead : free_));
    free_ &= ~(1u << slot);
    used_ |= 1u << slot;
    next_ = (slot + 1) % kSlots;
    return slot;
  }
  [[nodiscard]] void* slot(uint16_t slot) { return segment_->slot[slot]; }

  // Before sleeping for want of space: false if there has come some. Woken by the receiver.
  [[nodiscard]] bool sleep() {
    segment_->sender_asleep.store(1, std::memory_order_seq_cst);
    const bool slots = collect();
    return segment_->head.load(std::memory_order_seq_cst) == head_ && !slots;
  }
  void wake() { segment_->sender_asleep.store(0, std::memory_order_relaxed); }

 private:
  void write(const Record& record, const void* bytes, size_t inlined) {
    const uint32_t size = record_bytes(record);
    if (size > to_end()) {
      const Record skip;
      std::memcpy(at(tail_), &skip, sizeof(skip));
      tail_ += to_end();
    }
    std::memcpy(at(tail_), &record, sizeof(record));
    if (inlined != 0) std::memcpy(at(tail_) + sizeof(record), bytes, inlined);
    tail_ += size;
  }
  // Takes back the slots that were returned; only what was given out, whatever the peer says.
  bool collect() {
    const uint32_t back = segment_->returned.exchange(0, std::memory_order_seq_cst) & used_;
    used_ &= ~back;
    free_ |= back;
    return back != 0;
  }
  [[nodiscard]] uint64_t to_end() const { return kRingBytes - tail_ % kRingBytes; }
  [[nodiscard]] uint8_t* at(uint64_t position) { return segment_->ring + position % kRingBytes; }

  Segment* segment_ = nullptr;
  uint64_t tail_ = 0, published_ = 0;
  uint64_t head_ = 0;  // as last seen
  uint32_t free_ = ~0u >> (32 - kSlots), used_ = 0, next_ = 0;
};

// The receiving end. One thread.
class RingReader {
 public:
  enum class Look : uint8_t { nothing, record, broken };

  void attach(Segment* segment) { segment_ = segment; }

  // The next record, and where its bytes lie; they stay until advance() (a slot: until
  // return_slot()).
  [[nodiscard]] Look look(Record* record, const uint8_t** bytes) {
    for (;;) {
      if (head_ == tail_) tail_ = segment_->tail.load(std::memory_order_acquire);
      if (head_ == tail_) return Look::nothing;
      const uint64_t there = tail_ - head_, to_end = kRingBytes - head_ % kRingBytes;
      if (there > kRingBytes || there % kLine != 0) return Look::broken;
      const uint8_t* at = segment_->ring + head_ % kRingBytes;
      std::memcpy(record, at, sizeof(*record));
      if (record->kind == Kind::skip) {
        if (to_end >= there) return Look::broken;  // something follows a skip, at the ring's start
        head_ += to_end;
        continue;
      }
      const bool slot = record->slot != kNoSlot;
      if (slot ? record->slot >= kSlots || record->here > kSlotBytes : record->here > kInlineBytes)
        return Look::broken;
      size_ = record_bytes(*record);
      if (size_ > std::min(there, to_end)) return Look::broken;
      *bytes = slot ? segment_->slot[record->slot] : at + sizeof(*record);
      return Look::record;
    }
  }
  void advance() { head_ += size_; }

  // Lets the sender write over what was advanced over. Both: true if the sender sleeps for want of
  // space and must be woken.
  [[nodiscard]] bool release() {
    if (released_ == head_) return false;
    released_ = head_;
    segment_->head.store(head_, std::memory_order_seq_cst);
    return sender_sleeps();
  }
  [[nodiscard]] bool return_slot(uint32_t slot) {
    segment_->returned.fetch_or(1u << slot, std::memory_order_seq_cst);
    return sender_sleeps();
  }

  // Before sleeping: false if something has come. Woken by the sender.
  [[nodiscard]] bool sleep() {
    segment_->receiver_asleep.store(1, std::memory_order_seq_cst);
    return segment_->tail.load(std::memory_order_seq_cst) == head_;
  }
  void wake() { segment_->receiver_asleep.store(0, std::memory_order_relaxed); }

 private:
  bool sender_sleeps() {
    return segment_->sender_asleep.load(std::memory_order_seq_cst) != 0 &&
           segment_->sender_asleep.exchange(0, std::memory_order_seq_cst) != 0;
  }

  Segment* segment_ = nullptr;
  uint64_t head_ = 0, released_ = 0;
  uint64_t tail_ = 0;  // as last seen
  uint32_t size_ = 0;  // of the record looked at
};

}  // namespace ringfold::shm
