#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <shared_mutex>

#include "test/emulated_driver/state.h"

namespace ringfold::test::emulated {
namespace {

constexpr size_t kDeviceBytes = size_t{8} << 30;  // of addresses; memory only where it is touched
constexpr size_t kUnit = 512;                     // allocations are aligned to it, as on a device
constexpr size_t kPage = 4096;
// In the file behind the memory: how many other processes have the block that begins there.
using Users = std::atomic<int>;
constexpr size_t kUsersBytes = kDeviceBytes / kUnit * sizeof(Users);

struct Block {
  Kind kind;
  size_t bytes;
  int device;
};

// Another process's block, or the addresses where one was.
struct Import {
  Exported exported;
  int device = 0;              // that opened it
  std::byte* begin = nullptr;  // of the whole pages, inaccessible
  std::byte* alias = nullptr;  // null once it is closed
  size_t bytes = 0;            // of the whole pages
  size_t phase = 0;            // of the block in them
  Users* users = nullptr;
};

std::shared_mutex lock;  // guards what follows
std::map<uintptr_t, Block> blocks;
std::map<uintptr_t, size_t> holes;  // of device memory
std::vector<Import> imports;
std::byte* device = nullptr;  // never accessible
std::byte* alias = nullptr;   // the same memory for kernels
Users* users = nullptr;
int file = -1;

std::array<std::atomic<uint64_t>, 5> counted;  // as in Traffic

uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

// `of` < 0: memory of its own.
void* map(size_t bytes, int protection, int of, size_t offset) {
  const int flags = of < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* const mapped = mmap(nullptr, bytes, protection, flags, of, static_cast<off_t>(offset));
  return mapped == MAP_FAILED ? nullptr : mapped;
}

// The first hole that is large enough.
void* take_device(size_t bytes) {
  for (const auto& [begin, size] : holes) {
    if (size < bytes) continue;
    const uintptr_t found = begin;
    const size_t rest = size - bytes;
    holes.erase(found);
    if (rest > 0) holes[found + bytes] = rest;
    return reinterpret_cast<void*>(found);
  }
  return nullptr;
}

void give_device(uintptr_t begin, size_t bytes) {
  const auto next = holes.lower_bound(begin);
  if (next != holes.end() && begin + bytes == next->first) {
    bytes += next->second;
    holes.erase(next);
  }
  const auto after = holes.lower_bound(begin);
  if (after != holes.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  holes[begin] = bytes;
}

bool on_device(Kind kind) {
  return kind == Kind::device || kind == Kind::pooled;
}

// REQUIRES the lock, shared.
const Import* import_at(uintptr_t address) {
  const auto found = std::ranges::find_if(imports, [&](const Import& import) {
    return address - address_of(import.begin) < import.bytes;
  });
  return found == imports.end() ? nullptr : &*found;
}

// REQUIRES the lock, shared.
void check_access(uintptr_t address) {
  const auto next = blocks.upper_bound(address);
  if (next == blocks.begin() || address >= std::prev(next)->first + std::prev(next)->second.bytes)
    misuse("device memory is used that is not allocated");
  const auto owner = static_cast<size_t>(std::prev(next)->second.device);
  const auto here = static_cast<size_t>(running_device);
  if (running_device >= 0 && here != owner && !state().access[here][owner])
    misuse("a kernel uses the memory of another device without access to it");
}

void end_use(const Import& import) {
  munmap(import.alias, import.bytes);
  --*import.users;
  munmap(reinterpret_cast<void*>(address_of(import.users) / kPage * kPage), kPage);
}

}  // namespace

void map_device() {
  const std::lock_guard guard(lock);
  file = memfd_create("emulated CUDA device", MFD_CLOEXEC);
  constexpr auto kAll = static_cast<off_t>(kDeviceBytes + kUsersBytes);
  if (file < 0 || ftruncate(file, kAll) != 0) misuse("no file for device memory");
  device = static_cast<std::byte*>(map(kDeviceBytes, PROT_NONE, -1, 0));
  alias = static_cast<std::byte*>(map(kDeviceBytes, PROT_READ | PROT_WRITE, file, 0));
  users = static_cast<Users*>(map(kUsersBytes, PROT_READ | PROT_WRITE, file, kDeviceBytes));
  if (device == nullptr || alias == nullptr || users == nullptr)
    misuse("no address space for device memory");
  holes = {{address_of(device), kDeviceBytes}};
  for (auto& count : counted) count = 0;
}

void unmap_device() {
  const std::lock_guard guard(lock);
  for (const auto& [begin, block] : blocks)
    if (!on_device(block.kind)) std::free(reinterpret_cast<void*>(begin));
  blocks.clear();
  for (const Import& import : imports) {
    munmap(import.begin, import.bytes);
    if (import.alias != nullptr) end_use(import);
  }
  imports.clear();
  munmap(device, kDeviceBytes);
  munmap(alias, kDeviceBytes);
  munmap(users, kUsersBytes);
  close(file);
}

void* reach(const void* address) {
  const std::shared_lock guard(lock);
  const uintptr_t offset = address_of(address) - address_of(device);
  if (offset < kDeviceBytes) {
    check_access(address_of(address));
    return alias + offset;
  }
  const Import* const import = import_at(address_of(address));
  if (import == nullptr) return const_cast<void*>(address);
  if (import->alias == nullptr) misuse("memory is used whose IPC handle was closed");
  if (running_device >= 0 && running_device != import->device)
    misuse("a kernel uses memory that was opened on another device");
  return import->alias + (address_of(address) - address_of(import->begin));
}

void count_traffic(const Command& command) {
  const uint64_t bytes = command.count * size_of(command.dtype);
  const std::shared_lock guard(lock);
  const auto count = [&](const void* address, bool written) {
    if (address == nullptr) return;
    const bool others = import_at(address_of(address)) != nullptr;
    const bool here = address_of(address) - address_of(device) < kDeviceBytes;
    counted[others ? 4 : (here ? 2 : 0) + (written ? 1 : 0)] += bytes;
  };
  count(command.a, false);
  count(command.b, false);
  count(command.out, true);
  count(command.mirror, true);
}

void* allocate(Kind kind, size_t bytes, int of_device) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + kUnit - 1) / kUnit * kUnit;
  const std::lock_guard guard(lock);
  void* const begin = on_device(kind) ? take_device(rounded) : std::aligned_alloc(kUnit, rounded);
  if (begin != nullptr) blocks[address_of(begin)] = {kind, rounded, of_device};
  return begin;
}

bool release(CUdeviceptr begin, Kind kind) {
  const std::lock_guard guard(lock);
  const auto found = blocks.find(begin);
  if (found == blocks.end()) return false;
  const Kind known = found->second.kind;
  if (known != kind && (kind != Kind::device || known == Kind::pinned)) return false;
  if (!on_device(known)) {
    std::free(reinterpret_cast<void*>(begin));
  } else {
    if (users[(begin - address_of(device)) / kUnit] != 0)
      misuse("device memory is freed that another process has open");
    give_device(begin, found->second.bytes);
  }
  blocks.erase(found);
  return true;
}

Found find(CUdeviceptr address) {
  const std::shared_lock guard(lock);
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return {};
  const auto& [begin, block] = *std::prev(next);
  if (address >= begin + block.bytes) return {};
  return {block.kind, begin, block.bytes, block.device};
}

size_t bytes_in_use(Kind kind) {
  const std::shared_lock guard(lock);
  size_t sum = 0;
  for (const auto& [begin, block] : blocks) sum += block.kind == kind ? block.bytes : 0;
  return sum;
}

// ---- between processes ------------------------------------------------------------------------

Exported export_block(const Found& block) {
  Exported exported;
  exported.process = getpid();
  exported.file = file;
  exported.device = block.device;
  exported.offset = block.begin - address_of(device);
  exported.bytes = block.bytes;
  return exported;
}

bool is_open(const Exported& exported, int on) {
  const std::shared_lock guard(lock);
  return std::ranges::any_of(imports, [&](const Import& import) {
    return import.alias != nullptr && import.device == on && import.exported == exported;
  });
}

void* open_block(const Exported& exported, int on) {
  const std::string path =
      "/proc/" + std::to_string(exported.process) + "/fd/" + std::to_string(exported.file);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) return nullptr;
  Import import;
  import.exported = exported;
  import.device = on;
  import.phase = exported.offset % kPage;
  import.bytes = (import.phase + exported.bytes + kPage - 1) / kPage * kPage;
  import.begin = static_cast<std::byte*>(map(import.bytes, PROT_NONE, -1, 0));
  import.alias = static_cast<std::byte*>(
      map(import.bytes, PROT_READ | PROT_WRITE, opened, exported.offset - import.phase));
  const size_t counter = kDeviceBytes + exported.offset / kUnit * sizeof(Users);
  auto* const page =
      static_cast<std::byte*>(map(kPage, PROT_READ | PROT_WRITE, opened, counter / kPage * kPage));
  close(opened);
  if (import.begin == nullptr || import.alias == nullptr || page == nullptr) return nullptr;
  import.users = reinterpret_cast<Users*>(page + counter % kPage);
  ++*import.users;
  const std::lock_guard guard(lock);
  imports.push_back(import);
  return import.begin + import.phase;
}

// The addresses stay taken, so that a late use is found out.
bool close_block(CUdeviceptr begin) {
  const std::lock_guard guard(lock);
  const auto found = std::ranges::find_if(imports, [&](const Import& import) {
    return import.alias != nullptr && address_of(import.begin) + import.phase == begin;
  });
  if (found == imports.end()) return false;
  end_use(*found);
  found->alias = nullptr;
  return true;
}

int open_blocks() {
  const std::shared_lock guard(lock);
  return static_cast<int>(
      std::ranges::count_if(imports, [](const Import& import) { return import.alias != nullptr; }));
}

EmulatedDriver::Traffic traffic() {
  return {counted[0], counted[1], counted[2], counted[3], counted[4]};
}

}  // namespace ringfold::test::emulated
