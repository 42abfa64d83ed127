#include "lib/record/picture.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <span>

#include "lib/base/net.h"

namespace ringfold::record {
namespace {

// An entry as it was at one moment; false if there is none, or it changes too fast.
bool read_entry(const Entry& entry, std::array<uint64_t, 8>* out) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const uint64_t before = entry.what.load(std::memory_order_acquire);
    if (before == 0) return false;
    *out = {entry.numbers.load(std::memory_order_acquire),
            before,
            entry.whom.load(std::memory_order_acquire),
            entry.count.load(std::memory_order_acquire),
            entry.began.load(std::memory_order_acquire),
            entry.ended.load(std::memory_order_acquire),
            entry.progress.load(std::memory_order_acquire),
            entry.awaited.load(std::memory_order_acquire)};
    const bool same = entry.what.load() == before &&
                      static_cast<uint32_t>(get(entry.numbers)) == static_cast<uint32_t>((*out)[0]);
    if (same) return true;
  }
  return false;
}

int byte_of(uint64_t word, int shift) {
  return static_cast<int>(word >> shift & 0xff);
}

bool decode(const std::array<uint64_t, 8>& w, OperationView* o) {
  if (byte_of(w[1], 0) >= kCollectives || byte_of(w[1], 8) >= static_cast<int>(kDTypes) ||
      byte_of(w[1], 16) >= static_cast<int>(kOps) || byte_of(w[1], 24) > kAlgorithms ||
      byte_of(w[1], 32) > static_cast<int>(Kind::captured) ||
      byte_of(w[1], 40) > static_cast<int>(State::failed))
    return false;
  o->what.collective = static_cast<Collective>(byte_of(w[1], 0));
  o->what.type = static_cast<DType>(byte_of(w[1], 8));
  o->what.op = static_cast<Op>(byte_of(w[1], 16));
  o->what.algorithm = static_cast<Algorithm>(byte_of(w[1], 24));
  o->what.kind = static_cast<Kind>(byte_of(w[1], 32));
  o->state = static_cast<State>(byte_of(w[1], 40));
  o->first = static_cast<uint32_t>(w[0]);
  o->last = static_cast<uint32_t>(w[0] >> 32);
  o->what.whom = static_cast<int>(w[2] & 0xffffffff);
  o->what.fingerprint = static_cast<uint32_t>(w[2] >> 32);
  o->what.count = w[3];
  o->began = Nanoseconds(static_cast<int64_t>(w[4]));
  o->ended = Nanoseconds(static_cast<int64_t>(w[5]));
  o->through = static_cast<int>(w[6] & 0xffffffff);
  o->what.steps = static_cast<int>(w[6] >> 32);
  const auto whom = static_cast<uint32_t>(w[7]);
  o->awaited = static_cast<int>(whom & 0x7fffffff) - 1;
  o->to_take = (whom & 0x80000000) != 0;
  return true;
}

void decode(const Lane& lane, bool region, bool failed, LaneView* view,
            std::vector<OperationView>* operations) {
  *view = {lane.called.load(), get(lane.finished), get(lane.sent), get(lane.received)};
  const uint32_t over = lane.over.load(), next = lane.next.load();
  for (uint32_t n = next > kEntries ? next - kEntries : 0; n != next; ++n) {
    std::array<uint64_t, 8> words;
    OperationView o;
    if (!read_entry(lane.entries[n % kEntries], &words) || !decode(words, &o)) continue;
    o.region = region;
    if (o.state == State::quick && static_cast<int32_t>(o.last - over) >= 0) {
      o.state = failed ? State::failed : State::running;
    } else if (o.state == State::quick) {
      o.state = State::done;
      o.through = o.what.steps;
    }
    if (region && o.state == State::running) {
      o.awaited = static_cast<int>(get(lane.awaited) >> 32);
      o.to_take = false;
    }
    if (region) view->called = o.last + 1;  // they begin and end in order
    operations->push_back(o);
  }
  if (region) view->finished = over;
}

template <size_t n>
std::string text_in(const std::array<char, n>& chars) {
  return {chars.data(), strnlen(chars.data(), n)};
}

double seconds(Nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

bool reduces(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce ||
         collective == Collective::reduce_scatter;
}

}  // namespace

std::string OperationView::text() const {
  std::string text;
  switch (what.kind) {
    case Kind::collective:
    case Kind::captured:
      text = name(what.collective);
      break;
    case Kind::send:
      text = fmt::format("send to rank {}", what.whom);
      break;
    case Kind::receive:
      text = fmt::format("receive from rank {}", what.whom);
      break;
  }
  const bool collective = what.kind == Kind::collective || what.kind == Kind::captured;
  text += fmt::format(" {}", name(what.type));
  if (collective && reduces(what.collective)) text += fmt::format(" {}", name(what.op));
  text += fmt::format(" of {} elements", what.count);
  if (collective && has_root(what.collective)) text += fmt::format(", root {}", what.whom);
  if (collective) text += fmt::format(" ({})", name(what.algorithm));
  return text;
}

CommunicatorView decode(const Slot& slot) {
  CommunicatorView view;
  view.world = slot.world;
  view.id = slot.id;
  view.rank = static_cast<int>(slot.rank);
  view.size = static_cast<int>(slot.size);
  if (slot.whole != 0) view.part_of = slot.whole - 1;
  view.transport = text_in(slot.transport);
  view.opened = Nanoseconds(static_cast<int64_t>(slot.opened));
  const uint32_t code = slot.code.load(std::memory_order_acquire);
  if (code != 0 && code <= static_cast<uint32_t>(Code::internal)) {
    view.code = static_cast<Code>(code);
    view.failure = text_in(slot.failure);
  }
  decode(slot.messages, false, code != 0, &view.messages, &view.operations);
  decode(slot.region, true, code != 0, &view.region, &view.operations);
  // Rows of quick operations have no time of their own; they stay where they are in their lane.
  if (view.region.called == 0)
    std::ranges::stable_sort(view.operations, {}, [](const auto& o) { return o.began; });
  view.counters = {view.messages.called + uint64_t{view.region.called},
                   view.messages.finished + view.region.finished,
                   view.messages.sent + view.region.sent,
                   view.messages.received + view.region.received,
                   get(slot.waits),
                   static_cast<double>(get(slot.waited)) * 1e-9,
                   code != 0 ? 1u : 0u};
  return view;
}

// ---- as text ----------------------------------------------------------------------------------

namespace {

// Of operations that are over. Those of the region are over in their order; some of them nobody
// timed, but the region does whatever it can.
bool is_later(const OperationView& o, const OperationView& other) {
  if (o.region && other.region) return static_cast<int32_t>(o.last - other.last) >= 0;
  if (o.region != other.region && (o.region ? o : other).ended == Nanoseconds(0)) return o.region;
  return o.ended >= other.ended;
}

}  // namespace

std::string standing(const CommunicatorView& view, Nanoseconds now) {
  std::string text;
  const OperationView* latest = nullptr;
  for (const OperationView& o : view.operations) {
    if (o.state != State::running) {
      if (latest == nullptr || is_later(o, *latest)) latest = &o;
      continue;
    }
    text += fmt::format("{}in operation {}: {}", text.empty() ? "" : "; ", o.last, o.text());
    if (o.what.steps > 0) text += fmt::format(", {} of {} steps through", o.through, o.what.steps);
    if (o.awaited >= 0 && o.awaited < view.size && o.awaited != view.rank)
      text += fmt::format(", waits for rank {}{}", o.awaited, o.to_take ? " to take it" : "");
    if (o.began != Nanoseconds(0) && now != Nanoseconds(0))
      text += fmt::format(", since {:.3f} s", seconds(now - o.began));
  }
  if (!text.empty()) return text;
  if (latest == nullptr) return "has called nothing";
  text = fmt::format("in no operation; the last was {}: {}", latest->last, latest->text());
  if (latest->state == State::failed) text += ", which failed";
  if (latest->ended != Nanoseconds(0) && now != Nanoseconds(0))
    text += fmt::format(", over for {:.3f} s", seconds(now - latest->ended));
  return text;
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out += fmt::format("\\{}", c);
    else if (static_cast<unsigned char>(c) < 0x20)
      out += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      out += c;
  }
  return out + '"';
}

namespace {

constexpr std::array<std::string_view, 5> kStateNames = {"none", "running", "running", "done",
                                                         "failed"};

std::string to_json(const OperationView& o) {
  std::string text = fmt::format("{{\"seq\": {}", o.first);
  if (o.last != o.first) text += fmt::format(", \"last_seq\": {}", o.last);
  if (o.what.kind == Kind::captured) text += ", \"captured\": true";
  if (o.what.kind == Kind::collective || o.what.kind == Kind::captured) {
    text += fmt::format(", \"collective\": \"{}\"", name(o.what.collective));
    if (reduces(o.what.collective)) text += fmt::format(", \"op\": \"{}\"", name(o.what.op));
    if (has_root(o.what.collective)) text += fmt::format(", \"root\": {}", o.what.whom);
    text += fmt::format(", \"algorithm\": \"{}\"", name(o.what.algorithm));
  } else {
    text += fmt::format(", \"message\": \"{}\", \"partner\": {}",
                        o.what.kind == Kind::send ? "send" : "receive", o.what.whom);
  }
  text += fmt::format(", \"dtype\": \"{}\", \"count\": {}, \"way\": \"{}\", \"state\": \"{}\"",
                      name(o.what.type), o.what.count, o.region ? "region" : "messages",
                      kStateNames[static_cast<size_t>(o.state)]);
  text += fmt::format(", \"step\": {}, \"steps\": {}", o.through, o.what.steps);
  if (o.state == State::running && o.awaited >= 0)
    text += fmt::format(", \"waits_for\": {}, \"to_take\": {}", o.awaited, o.to_take);
  if (o.began != Nanoseconds(0)) text += fmt::format(", \"began_ns\": {}", o.began.count());
  if (o.ended != Nanoseconds(0)) text += fmt::format(", \"ended_ns\": {}", o.ended.count());
  return text + "}";
}

}  // namespace

std::string to_json(const CommunicatorView& view, Nanoseconds now) {
  const Counters& c = view.counters;
  std::string text = fmt::format(
      "{{\"schema\": 1, \"communicator\": {}, {}\"rank\": {}, \"size\": {}, \"transport\": {}, "
      "\"opened_ns\": {}, \"now_ns\": {},\n \"code\": {}, \"failure\": {},\n \"counters\": "
      "{{\"operations\": {}, \"finished\": {}, \"bytes_sent\": {}, \"bytes_received\": {}, "
      "\"waits\": {}, \"wait_seconds\": {:.9f}, \"failures\": {}}},\n \"operations\": [",
      view.id, view.part_of ? fmt::format("\"part_of\": {}, ", *view.part_of) : "", view.rank,
      view.size, quoted(view.transport), view.opened.count(), now.count(),
      quoted(to_string(view.code)), quoted(view.failure), c.operations, c.finished, c.bytes_sent,
      c.bytes_received, c.waits, c.wait_seconds, c.failures);
  const char* separator = "\n  ";
  for (const OperationView& o : view.operations) {
    text += separator + to_json(o);
    separator = ",\n  ";
  }
  return text + "]}";
}

std::string_view in_words(char kernel_state) {
  switch (kernel_state) {
    case 'R':
      return "running";
    case 'S':
    case 'D':
    case 'I':
      return "sleeping";
    case 'T':
    case 't':
      return "stopped";
    case 'Z':
    case 'X':
      return "dead";
    default:
      return "unknown";
  }
}

// ---- other processes --------------------------------------------------------------------------

namespace {

char kernel_state_of(int pid) {
  const Descriptor file(open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 512> text{};
  if (!file || read(file.get(), text.data(), text.size() - 1) <= 0) return '?';
  // The name, in brackets, may hold anything.
  const char* const bracket = strrchr(text.data(), ')');
  return bracket != nullptr && bracket[1] == ' ' ? bracket[2] : '?';
}

// The process's own record among its files, which may include an inherited one.
Descriptor find_file(int pid, int* error) {
  const std::string folder = fmt::format("/proc/{}/fd", pid);
  const std::unique_ptr<DIR, int (*)(DIR*)> files(opendir(folder.c_str()), closedir);
  *error = files ? 0 : errno;
  const std::string wanted = fmt::format("/memfd:{}", kFileName);
  while (const dirent* one = files ? readdir(files.get()) : nullptr) {
    std::array<char, 64> target{};
    const std::string path = folder + "/" + one->d_name;
    if (readlink(path.c_str(), target.data(), target.size() - 1) <= 0) continue;
    if (!std::string_view(target.data()).starts_with(wanted)) continue;
    Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    *error = file ? 0 : errno;
    int32_t owner = 0;
    if (file && pread(file.get(), &owner, sizeof owner, offsetof(Page, pid)) == sizeof owner &&
        owner == pid)
      return file;
  }
  return {};
}

struct Unmap {
  void operator()(const std::byte* memory) const {
    munmap(const_cast<std::byte*>(memory), kBoardBytes);
  }
};

}  // namespace

Result<ProcessView> look_at(int pid) {
  ProcessView view;
  view.pid = pid;
  view.kernel_state = kernel_state_of(pid);
  int error = 0;
  const Descriptor file = find_file(pid, &error);
  if (error != 0)
    return Status(Code::system, fmt::format("cannot look at process {}: {}", pid, reason(error)));
  if (!file)
    return Status(Code::unsupported,
                  fmt::format("process {} has made no communicator of several ranks", pid));
  struct stat info {};
  const int seals = fcntl(file.get(), F_GET_SEALS);
  if (fstat(file.get(), &info) != 0 || info.st_size != static_cast<off_t>(kBoardBytes) ||
      (seals & F_SEAL_SHRINK) == 0)
    return Status(Code::unsupported,
                  fmt::format("process {} has a record of another version of ringfold", pid));
  void* const mapped = mmap(nullptr, kBoardBytes, PROT_READ, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED)
    return Status(Code::system,
                  fmt::format("cannot map the record of process {}: {}", pid, reason(errno)));
  const std::unique_ptr<const std::byte, Unmap> memory(static_cast<const std::byte*>(mapped));
  const auto& page = *reinterpret_cast<const Page*>(memory.get());
  if (page.magic != kMagic || page.version != kVersion)
    return Status(Code::unsupported,
                  fmt::format("process {} has a record of another version of ringfold", pid));
  view.library = text_in(page.library);
  const auto* const slots = reinterpret_cast<const Slot*>(&page + 1);
  const auto touched = std::min<size_t>(page.touched.load(), kSlots);
  for (const Slot& slot : std::span(slots, touched)) {
    const uint32_t used = slot.used.load(std::memory_order_acquire);
    if (used == 0) continue;
    CommunicatorView one = decode(slot);
    if (slot.used.load(std::memory_order_acquire) == used)
      view.communicators.push_back(std::move(one));
  }
  return view;
}

}  // namespace ringfold::record
