// Inside the emulated driver: what its parts share.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/worker.h"
#include "test/emulated_driver/emulated_driver.h"

namespace ringfold::test::emulated {

[[noreturn]] inline void misuse(const std::string& what) {
  std::fprintf(stderr, "emulated CUDA driver: %s\n", what.c_str());
  std::abort();
}

// ---- memory -----------------------------------------------------------------------------------

enum class Kind { none, device, pooled, pinned, managed };  // pooled: by cuMemAllocAsync
struct Found {
  Kind kind = Kind::none;
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  int device = 0;
};
Found find(CUdeviceptr address);
void* allocate(Kind kind, size_t bytes, int of_device);
bool release(CUdeviceptr begin, Kind kind);
size_t bytes_in_use(Kind kind);
// The address by which kernels and copies reach device memory; other addresses as they are. Kernels
// reach only what their device has access to.
void* reach(const void* address);
void count_traffic(const Command& command);
EmulatedDriver::Traffic traffic();
void map_device();
void unmap_device();

// What an IPC handle holds.
struct Exported {
  uint32_t magic = 0x43504931;
  int32_t process = 0, file = -1, device = 0;
  uint64_t offset = 0, bytes = 0;
  friend bool operator==(const Exported&, const Exported&) = default;
};
Exported export_block(const Found& block);
bool is_open(const Exported& exported, int on);
// Null if the memory is not there any more.
void* open_block(const Exported& exported, int on);
bool close_block(CUdeviceptr begin);
int open_blocks();

// ---- the driver's functions that are not in functions.cpp -------------------------------------

CUresult mem_get_address_range(CUdeviceptr* begin, size_t* bytes, CUdeviceptr pointer);
CUresult ipc_get(CUipcMemHandle* handle, CUdeviceptr pointer);
CUresult ipc_open(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags);
CUresult ipc_close(CUdeviceptr pointer);

// ---- devices ----------------------------------------------------------------------------------

CUcontext context_of(int device);
int current_device();  // of this thread; -1: no context is current
CUresult need_context();
CUresult before_allocation();
// Whose kernel this thread runs; -1: none.
inline thread_local int running_device = -1;

// ---- work -------------------------------------------------------------------------------------

// One thing on a stream. Guarded by State::lock.
struct Item {
  std::function<void()> run;
  std::vector<std::shared_ptr<Item>> after;
  size_t queue = 0;
  uint64_t ticket = 0;  // its place in the hardware queue
  bool done = false;
  std::chrono::steady_clock::time_point ended;
};

struct Stream;
struct GraphNode {
  std::function<void()> run;  // null: joins what is before it
  std::vector<size_t> after;
  bool kernel = false;
};
struct UserObject {
  CUhostFn destroy;
  void* data;
  int references;
};
struct Graph {
  std::vector<GraphNode> nodes;
  std::vector<UserObject*> objects;
  int references = 1;  // itself and what was instantiated from it
};
struct Capture {
  Graph* graph = nullptr;
  Stream* origin = nullptr;
  uint64_t id = 0;
};

struct Stream {
  int device = 0;
  bool blocking = true;  // synchronises with the legacy stream
  size_t queue = 0;
  std::deque<std::shared_ptr<Item>> items;
  std::shared_ptr<Item> last;  // put on it; null: nothing yet
  bool ending = false;
  std::thread thread;
  // While it is captured.
  std::shared_ptr<Capture> capture;
  std::vector<size_t> capture_after;
};

struct Event {
  std::shared_ptr<Item> item;  // as of the last record
  std::shared_ptr<Capture> capture;
  std::vector<size_t> capture_after;
};

struct Queue {
  uint64_t given = 0, started = 0;  // tickets
};

struct State {
  explicit State(const EmulatedOptions& o);

  EmulatedOptions options;
  std::mutex lock;
  std::condition_variable changed;
  std::mt19937_64 random;
  std::vector<Queue> queues;                     // as many of each device
  std::vector<std::unique_ptr<Stream>> streams;  // the first are the devices' legacy streams
  size_t next_queue = 0;
  std::vector<int> free_blocks;                                       // by device
  std::array<std::array<bool, kMostDevices>, kMostDevices> access{};  // [of][to]
  int launches = 0;
  int user_objects = 0;
  uint64_t captures = 0;
};
State& state();
// Whether this thread runs the destructor of a user object: it must not call the driver.
inline thread_local bool in_user_object = false;
bool installed();

// The stream behind a handle; the legacy one behind null.
Stream& stream_of(CUstream handle);
// Puts `run` on the stream, or into its graph while it is captured. `kernel`: it counts as a
// launch.
CUresult put(CUstream handle, std::function<void()> run, bool kernel = false,
             bool blocking_call = false);
void wait_for_all(int device);
void wait_for(Stream& stream);
void record(Event& event, CUstream handle);
void wait_for(const Event& event);
float milliseconds_between(const Event& begin, const Event& end);
CUresult wait_event(CUstream handle, const Event& event);
CUresult begin_capture(CUstream handle);
CUresult end_capture(CUstream handle, Graph** graph);
CUresult launch_graph(const Graph& graph, CUstream handle);
Stream& add_stream(bool blocking, int device);
void end_stream(Stream& stream);
void release(Graph* graph);

// ---- kernels ----------------------------------------------------------------------------------

struct Kernel;
Kernel* find_kernel(const std::string& name);
size_t parameter_bytes(const Kernel& kernel);
bool& loaded(Kernel& kernel);
void forget_loaded();
// All blocks of a launch; they wait for room on the device.
void run_kernel(const Kernel& kernel, const std::vector<std::byte>& parameters, unsigned blocks,
                unsigned threads, int device);

}  // namespace ringfold::test::emulated
