// Inside the emulated driver: what its parts share.
#pragma once

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

#include "test/emulated_driver/emulated_driver.h"

namespace ringfold::test::emulated {

[[noreturn]] inline void misuse(const std::string& what) {
  std::fprintf(stderr, "emulated CUDA driver: %s\n", what.c_str());
  std::abort();
}

// ---- memory -----------------------------------------------------------------------------------

enum class Kind { none, device, pinned, managed };
struct Found {
  Kind kind = Kind::none;
  CUdeviceptr begin = 0;
  size_t bytes = 0;
};
Found find(CUdeviceptr address);
void* allocate(Kind kind, size_t bytes);
bool release(CUdeviceptr begin, Kind kind);
size_t bytes_in_use(Kind kind);
// The address by which kernels reach device memory; other addresses as they are.
void* reach(const void* address);
void map_device();
void unmap_device();

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
  std::vector<Queue> queues;
  std::vector<std::unique_ptr<Stream>> streams;  // the first is the legacy stream
  size_t next_queue = 0;
  int free_blocks = 0;
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
void wait_for_all();
void wait_for(Stream& stream);
void record(Event& event, CUstream handle);
void wait_for(const Event& event);
float milliseconds_between(const Event& begin, const Event& end);
CUresult wait_event(CUstream handle, const Event& event);
CUresult begin_capture(CUstream handle);
CUresult end_capture(CUstream handle, Graph** graph);
CUresult launch_graph(const Graph& graph, CUstream handle);
Stream& add_stream(bool blocking);
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
                unsigned threads);

}  // namespace ringfold::test::emulated
