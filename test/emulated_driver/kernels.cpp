#include <array>
#include <cstring>

#include "kernels/entries.h"
#include "kernels/serve.h"
#include "test/emulated_driver/state.h"

namespace ringfold::test::emulated {
namespace {

Command reachable(Command command) {
  command.a = reach(command.a);
  if (command.b != nullptr) command.b = reach(command.b);
  command.out = reach(command.out);
  if (command.mirror != nullptr) command.mirror = reach(command.mirror);
  return command;
}

// A block is one thread here.
struct HostBlock {
  [[nodiscard]] unsigned thread() const { return 0; }
  [[nodiscard]] unsigned threads() const { return 1; }
  void sync() const {}
  [[nodiscard]] Command reach(const Command& command) const {
    count_traffic(command);
    return reachable(command);
  }
  void pause() const { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
};

template <class Value>
Value parameter(const std::vector<std::byte>& bytes) {
  Value value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

template <class T>
void worker_block(const std::vector<std::byte>& parameters, unsigned block, unsigned, unsigned) {
  ServeShared shared;
  serve<T>(HostBlock(), parameter<Lane*>(parameters)[block], shared);
}

template <class T>
void reduce_block(const std::vector<std::byte>& parameters, unsigned block, unsigned blocks,
                  unsigned threads) {
  const Command command = reachable(parameter<Command>(parameters));
  for (unsigned thread = 0; thread < threads; ++thread)
    carry_out<T>(command, Share{size_t{block} * threads + thread, size_t{blocks} * threads});
}

}  // namespace

struct Kernel {
  const char* name;
  size_t parameter_bytes;
  void (*block)(const std::vector<std::byte>& parameters, unsigned block, unsigned blocks,
                unsigned threads);
  bool loaded = false;
};

namespace {

std::array kernels = {
#define RINGFOLD_EMULATED(name, Type)                                         \
  Kernel{"ringfold_worker_" #name, sizeof(Lane*), worker_block<Type>, false}, \
      Kernel{"ringfold_reduce_" #name, sizeof(Command), reduce_block<Type>, false},
    RINGFOLD_KERNEL_TYPES(RINGFOLD_EMULATED)
#undef RINGFOLD_EMULATED
};

void take_block(size_t device) {
  State& s = state();
  std::unique_lock guard(s.lock);
  s.changed.wait(guard, [&] { return s.free_blocks[device] > 0; });
  --s.free_blocks[device];
}

void give_block(size_t device) {
  State& s = state();
  const std::lock_guard guard(s.lock);
  ++s.free_blocks[device];
  s.changed.notify_all();
}

}  // namespace

Kernel* find_kernel(const std::string& name) {
  for (Kernel& kernel : kernels)
    if (name == kernel.name) return &kernel;
  return nullptr;
}

size_t parameter_bytes(const Kernel& kernel) {
  return kernel.parameter_bytes;
}

bool& loaded(Kernel& kernel) {
  return kernel.loaded;
}

void forget_loaded() {
  for (Kernel& kernel : kernels) kernel.loaded = false;
}

void run_kernel(const Kernel& kernel, const std::vector<std::byte>& parameters, unsigned blocks,
                unsigned threads, int device) {
  std::vector<std::thread> running;
  for (unsigned block = 0; block < blocks; ++block)
    running.emplace_back([&, block] {
      running_device = device;
      take_block(static_cast<size_t>(device));
      kernel.block(parameters, block, blocks, threads);
      give_block(static_cast<size_t>(device));
    });
  for (std::thread& thread : running) thread.join();
}

}  // namespace ringfold::test::emulated
