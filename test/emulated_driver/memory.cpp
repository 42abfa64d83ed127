#include <sys/mman.h>

#include "test/emulated_driver/state.h"

namespace ringfold::test::emulated {
namespace {

constexpr size_t kDeviceBytes = size_t{1} << 30;  // of addresses; memory only where it is touched
constexpr size_t kUnit = 512;                     // allocations are aligned to it, as on a device

struct Block {
  Kind kind;
  size_t bytes;
};

std::mutex lock;  // guards what follows
std::map<uintptr_t, Block> blocks;
std::map<uintptr_t, size_t> holes;  // of device memory
std::byte* device = nullptr;        // never accessible
std::byte* alias = nullptr;         // the same memory for kernels

uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
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

}  // namespace

void map_device() {
  const std::lock_guard guard(lock);
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const hidden = mmap(nullptr, kDeviceBytes, PROT_NONE, kFlags, -1, 0);
  void* const open = mmap(nullptr, kDeviceBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (hidden == MAP_FAILED || open == MAP_FAILED) misuse("no address space for device memory");
  device = static_cast<std::byte*>(hidden);
  alias = static_cast<std::byte*>(open);
  holes = {{address_of(device), kDeviceBytes}};
}

void unmap_device() {
  const std::lock_guard guard(lock);
  for (const auto& [begin, block] : blocks)
    if (block.kind != Kind::device) std::free(reinterpret_cast<void*>(begin));
  blocks.clear();
  munmap(device, kDeviceBytes);
  munmap(alias, kDeviceBytes);
}

void* reach(const void* address) {
  const uintptr_t offset = address_of(address) - address_of(device);
  return offset < kDeviceBytes ? alias + offset : const_cast<void*>(address);
}

void* allocate(Kind kind, size_t bytes) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + kUnit - 1) / kUnit * kUnit;
  const std::lock_guard guard(lock);
  void* const begin =
      kind == Kind::device ? take_device(rounded) : std::aligned_alloc(kUnit, rounded);
  if (begin != nullptr) blocks[address_of(begin)] = {kind, rounded};
  return begin;
}

bool release(CUdeviceptr begin, Kind kind) {
  const std::lock_guard guard(lock);
  const auto found = blocks.find(begin);
  if (found == blocks.end()) return false;
  const bool matches =
      found->second.kind == kind || (kind == Kind::device && found->second.kind == Kind::managed);
  if (!matches) return false;
  if (found->second.kind == Kind::device)
    give_device(begin, found->second.bytes);
  else
    std::free(reinterpret_cast<void*>(begin));
  blocks.erase(found);
  return true;
}

Found find(CUdeviceptr address) {
  const std::lock_guard guard(lock);
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return {};
  const auto& [begin, block] = *std::prev(next);
  if (address >= begin + block.bytes) return {};
  return {block.kind, begin, block.bytes};
}

size_t bytes_in_use(Kind kind) {
  const std::lock_guard guard(lock);
  size_t sum = 0;
  for (const auto& [begin, block] : blocks) sum += block.kind == kind ? block.bytes : 0;
  return sum;
}

}  // namespace ringfold::test::emulated
