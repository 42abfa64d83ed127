#include "lib/record/record.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <span>
#include <vector>

#include "lib/base/net.h"
#include "lib/record/picture.h"
#include "ringfold_config.h"

namespace ringfold::record {

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The memory of a board; private where the system has no unnamed files. Null if there is none.
void* map_board(Descriptor* fd) {
  *fd = Descriptor(memfd_create(kFileName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (*fd && (ftruncate(fd->get(), kBoardBytes) != 0 || fcntl(fd->get(), F_ADD_SEALS, kSeals) != 0))
    *fd = Descriptor();
  const int flags = *fd ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const memory = mmap(nullptr, kBoardBytes, PROT_READ | PROT_WRITE, flags, fd->get(), 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

constexpr std::array kTotals = {&Totals::communicators, &Totals::operations, &Totals::finished,
                                &Totals::sent,          &Totals::received,   &Totals::waits,
                                &Totals::waited,        &Totals::failures};

void reset(Lane& lane) {
  lane.called = lane.over = lane.next = 0;
  for (Word* word : {&lane.finished, &lane.sent, &lane.received, &lane.awaited}) put(*word, 0);
  for (Entry& entry : lane.entries) put(entry.what, 0);
}

void reset(Slot& slot, const Record::Who& who) {
  slot.id = who.id;
  slot.rank = static_cast<uint32_t>(who.rank);
  slot.size = static_cast<uint32_t>(who.size);
  slot.world = who.world;
  slot.whole = who.part_of ? 1 + *who.part_of : 0;
  slot.opened = static_cast<uint64_t>(steady_clock().now().count());
  put(slot.waits, 0);
  put(slot.waited, 0);
  slot.code = 0;
  slot.transport[0] = slot.failure[0] = '\0';
  reset(slot.messages);
  reset(slot.region);
}

}  // namespace

// All slots of this process. A forked child has a board of its own, made when it needs one. The
// file is made for the first communicator that others may look at: one of one rank costs none.
class Board {
 public:
  static std::shared_ptr<Board> current() {
    const std::lock_guard guard(current_lock());
    auto& board = the_current();
    if (!board || !board->mine()) board.reset(new Board);
    return board;
  }
  // The same, if there is one already.
  static std::shared_ptr<Board> existing() {
    const std::lock_guard guard(current_lock());
    return the_current() && the_current()->mine() ? the_current() : nullptr;
  }
  ~Board() {
    if (page_ != plain_.get()) munmap(page_, kBoardBytes);
  }
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  [[nodiscard]] bool mine() const { return generation_ == fork_generation(); }

  // A slot that others see, or the private one given. Null: there is no memory, or no slot.
  Slot* take(const Record::Who& who, Slot* own) {
    const std::lock_guard guard(lock_);
    Slot* const free = own != nullptr ? own : map() ? free_slot() : nullptr;
    if (free == nullptr) return nullptr;
    reset(*free, who);
    free->used.store(++opened_, std::memory_order_release);
    if (own != nullptr) private_.push_back(own);
    return free;
  }

  void give_back(Slot* slot) {
    const std::lock_guard guard(lock_);
    Totals& gone = page_->gone;
    for (const Lane* lane : {&slot->messages, &slot->region}) {
      add(gone.sent, get(lane->sent));
      add(gone.received, get(lane->received));
    }
    if (slot->whole == 0) count_gone(*slot);
    slot->used.store(0, std::memory_order_release);
    std::erase(private_, slot);
  }

  const Page* visit(const std::function<void(const Slot&)>& f) {
    const std::lock_guard guard(lock_);
    for (const Slot& slot : std::span(slots(), page_->touched.load()))
      if (slot.used.load() != 0) f(slot);
    for (const Slot* slot : private_) f(*slot);
    return page_;
  }

 private:
  // What is not counted of parts, besides bytes.
  void count_gone(const Slot& slot) {
    Totals& gone = page_->gone;
    const Counters counted = decode(slot).counters;
    add(gone.communicators, 1);
    add(gone.operations, counted.operations);
    add(gone.finished, counted.finished);
    add(gone.waits, get(slot.waits));
    add(gone.waited, get(slot.waited));
    add(gone.failures, counted.failures);
  }
  [[nodiscard]] Slot* slots() const { return reinterpret_cast<Slot*>(page_ + 1); }
  [[nodiscard]] Slot* free_slot() {
    const uint32_t touched = page_->touched.load();
    for (Slot& slot : std::span(slots(), touched))
      if (slot.used.load() == 0) return &slot;
    if (touched == kSlots) return nullptr;
    page_->touched.store(touched + 1);
    return slots() + touched;
  }
  Board() : generation_(fork_generation()), plain_(new Page()), page_(plain_.get()) {}

  // Whether there is memory that others see.
  bool map() {
    if (page_ != plain_.get()) return true;
    void* const memory = map_board(&fd_);
    if (memory == nullptr) return false;
    auto* const page = static_cast<Page*>(memory);
    page->slots = kSlots;
    page->pid = getpid();
    const std::string_view library = RINGFOLD_VERSION;
    library.copy(page->library.data(), page->library.size() - 1);
    const Totals& so_far = plain_->gone;
    for (const auto word : kTotals) put(page->gone.*word, get(so_far.*word));
    page->version = kVersion;
    page->magic = kMagic;
    page_ = page;
    return true;
  }
  static std::mutex& current_lock() {
    static auto& lock = *new std::mutex;  // never destroyed: other threads may still run at exit
    return lock;
  }
  static std::shared_ptr<Board>& the_current() {
    static auto& board = *new std::shared_ptr<Board>;
    return board;
  }

  const uint32_t generation_;
  const std::unique_ptr<Page> plain_;  // until there is a file
  std::mutex lock_;                    // guards what follows, and which slots are in use
  Descriptor fd_;                      // for whoever looks from outside
  Page* page_;
  std::vector<Slot*> private_;
  uint32_t opened_ = 0;
};

const Page* visit(const std::function<void(const Slot&)>& f) {
  const auto board = Board::existing();
  return board ? board->visit(f) : nullptr;
}

// ---- operations -------------------------------------------------------------------------------

namespace {

uint64_t packed(const What& what, State state) {
  return static_cast<uint64_t>(what.collective) | static_cast<uint64_t>(what.type) << 8 |
         static_cast<uint64_t>(what.op) << 16 | static_cast<uint64_t>(what.algorithm) << 24 |
         static_cast<uint64_t>(what.kind) << 32 | static_cast<uint64_t>(state) << 40;
}

void set_state(Entry& entry, State state) {
  const uint64_t what = get(entry.what) & ~(uint64_t{0xff} << 40);
  put(entry.what, what | static_cast<uint64_t>(state) << 40);
}

}  // namespace

Entry& begin(Lane& lane, const What& what, uint32_t seq, State state, Nanoseconds now) {
  const uint32_t next = lane.next.load(std::memory_order_relaxed);
  Entry& entry = lane.entries[next % kEntries];
  lane.next.store(next + 1, std::memory_order_relaxed);
  // A reader that sees `what` before and after the rest has seen one entry; see decode().
  entry.what.store(0, std::memory_order_release);
  put(entry.numbers, both(seq, seq));
  put(entry.whom, both(static_cast<uint32_t>(what.whom), what.fingerprint));
  put(entry.count, what.count);
  put(entry.began, static_cast<uint64_t>(now.count()));
  put(entry.ended, 0);
  put(entry.progress, both(0, static_cast<uint32_t>(what.steps)));
  put(entry.awaited, 0);
  entry.what.store(packed(what, state), std::memory_order_release);
  return entry;
}

void end(Lane& lane, Entry& entry, bool well, Nanoseconds now) {
  put(entry.ended, static_cast<uint64_t>(now.count()));
  put(entry.awaited, 0);
  if (well) {
    const uint64_t steps = get(entry.progress) >> 32;
    put(entry.progress, steps | steps << 32);
    add(lane.finished, 1);
  }
  set_state(entry, well ? State::done : State::failed);
}

// The row keeps what is over; the one that takes longer gets an entry of its own.
Entry& slow(Lane& lane, Entry& entry, uint32_t seq, int steps, Nanoseconds now) {
  const uint64_t numbers = get(entry.numbers);
  const auto first = static_cast<uint32_t>(numbers);
  const uint64_t packed_what = get(entry.what), whom = get(entry.whom), count = get(entry.count);
  Entry* own = &entry;
  if (first != seq) {
    put(entry.numbers, both(first, seq - 1));
    own = &begin(lane, What(), seq, State::running, now);
    put(own->whom, whom);
    put(own->count, count);
    put(own->what, packed_what);
  }
  put(own->began, static_cast<uint64_t>(now.count()));
  progress(*own, 0, steps);
  set_state(*own, State::running);
  return *own;
}

// ---- a communicator ---------------------------------------------------------------------------

std::shared_ptr<Record> Record::open(const Who& who) {
  std::shared_ptr<Record> record(new Record);
  record->board_ = Board::current();
  if (who.world != 0) record->slot_ = record->board_->take(who, nullptr);
  if (record->slot_ != nullptr) return record;
  record->own_ = std::make_unique<Slot>();
  record->slot_ = record->board_->take(who, record->own_.get());
  return record;
}

Record::~Record() {
  if (board_->mine()) board_->give_back(slot_);
}

void Record::name_transport(const std::string& name) {
  const size_t length = name.copy(slot_->transport.data(), slot_->transport.size() - 1);
  slot_->transport[length] = '\0';
}

void Record::waited(Nanoseconds time) {
  slot_->waits.fetch_add(1, std::memory_order_relaxed);
  slot_->waited.fetch_add(static_cast<uint64_t>(time.count()), std::memory_order_relaxed);
}

void Record::fail(const Status& why) {
  if (slot_->code.load() != 0) return;
  const size_t length = why.message().copy(slot_->failure.data(), slot_->failure.size() - 1);
  slot_->failure[length] = '\0';
  slot_->code.store(static_cast<uint32_t>(why.code()), std::memory_order_release);
  log_line(LogLevel::error, fmt::format("communicator {} failed: {}", slot_->id, why.to_string()));
  leave_file();
}

// Whoever set the folder wants to know why there is no file, but nothing else suffers.
void Record::leave_file() const {
  const auto folder = setting("RINGFOLD_RECORD");
  if (!folder) return;
  std::array<char, 256> host{};
  (void)gethostname(host.data(), host.size() - 1);
  const std::string name = fmt::format("{}/ringfold-{}-{}-rank{}-comm{}.json", *folder, host.data(),
                                       getpid(), slot_->rank, slot_->id);
  const std::string text = to_json(decode(*slot_), steady_clock().now()) + "\n";
  const Descriptor file(::open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file && write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()))
    return;
  log_line(LogLevel::error, fmt::format("cannot write {}: {}", name, reason(errno)));
}

}  // namespace ringfold::record
