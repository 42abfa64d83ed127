#include <algorithm>

#include "test/emulated_driver/state.h"

namespace ringfold::test::emulated {
namespace {

constexpr int kLongestDelay = 200;                    // microseconds before an item runs
constexpr auto kPatience = std::chrono::seconds(60);  // of a host thread with a device that stands

// Never destroyed: the streams of a driver that lives until the end are still there then.
std::unique_ptr<State>& the_state = *new std::unique_ptr<State>;
thread_local std::array<Stream*, kMostDevices> per_thread{};
thread_local uint64_t per_thread_of = 0;  // the driver it belongs to
uint64_t drivers = 0;

Stream& legacy_of(State& s, int device) {
  return *s.streams[static_cast<size_t>(device)];
}

// REQUIRES the lock.
std::shared_ptr<Item> enqueue(State& s, Stream& stream, std::function<void()> run,
                              std::vector<std::shared_ptr<Item>> after) {
  auto item = std::make_shared<Item>();
  item->run = std::move(run);
  item->after = std::move(after);
  Stream& legacy = legacy_of(s, stream.device);
  if (&stream == &legacy) {
    for (const auto& other : s.streams)
      if (other->device == stream.device && other->blocking && other->last)
        item->after.push_back(other->last);
  } else if (stream.blocking && legacy.last) {
    item->after.push_back(legacy.last);
  }
  item->queue = stream.queue;
  item->ticket = s.queues[stream.queue].given++;
  stream.items.push_back(item);
  stream.last = item;
  s.changed.notify_all();
  return item;
}

void wait_until_done(State& s, std::unique_lock<std::mutex>& guard,
                     const std::shared_ptr<Item>& item) {
  if (item && !s.changed.wait_for(guard, kPatience, [&] { return item->done; }))
    misuse("a call waits for device work that does not end");
}

void serve_stream(State& s, Stream& stream) {
  std::unique_lock guard(s.lock);
  for (;;) {
    s.changed.wait(guard, [&] { return stream.ending || !stream.items.empty(); });
    if (stream.items.empty()) return;
    const auto item = stream.items.front();
    Queue& queue = s.queues[item->queue];
    s.changed.wait(guard, [&] {
      return queue.started == item->ticket &&
             std::ranges::all_of(item->after, [](const auto& other) { return other->done; });
    });
    ++queue.started;
    const auto delay = std::chrono::microseconds(s.random() % kLongestDelay);
    s.changed.notify_all();
    guard.unlock();
    std::this_thread::sleep_for(delay);
    if (item->run) item->run();
    guard.lock();
    item->done = true;
    item->ended = std::chrono::steady_clock::now();
    item->after.clear();
    stream.items.pop_front();
    s.changed.notify_all();
  }
}

// Runs the nodes of a graph, each when those before it are done.
void run_graph(const Graph& graph) {
  std::mutex lock;
  std::condition_variable changed;
  std::vector<char> done(graph.nodes.size(), 0);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < graph.nodes.size(); ++i)
    threads.emplace_back([&, i] {
      const GraphNode& node = graph.nodes[i];
      std::unique_lock guard(lock);
      changed.wait(guard, [&] {
        return std::ranges::all_of(node.after, [&](size_t before) { return done[before] != 0; });
      });
      guard.unlock();
      if (node.run) node.run();
      guard.lock();
      done[i] = 1;
      changed.notify_all();
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

State::State(const EmulatedOptions& o) : options(o), random(o.seed) {
  const auto drawn = [&](int given, int most) {
    return given > 0 ? given : 1 + static_cast<int>(random() % static_cast<uint64_t>(most));
  };
  const auto devices = static_cast<size_t>(options.devices);
  queues.resize(static_cast<size_t>(drawn(options.hardware_queues, 8)) * devices);
  free_blocks.assign(devices, drawn(options.resident_blocks, 32));
}

State& state() {
  if (!the_state) misuse("called while none is installed");
  return *the_state;
}

bool installed() {
  return the_state != nullptr;
}

Stream& add_stream(bool blocking, int device) {
  State& s = state();
  const std::lock_guard guard(s.lock);
  auto stream = std::make_unique<Stream>();
  stream->blocking = blocking;
  stream->device = device;
  // In turn, as far as is known of devices.
  const size_t each = s.queues.size() / static_cast<size_t>(s.options.devices);
  stream->queue = static_cast<size_t>(device) * each + s.next_queue++ % each;
  Stream& added = *stream;
  s.streams.push_back(std::move(stream));
  added.thread = std::thread([&s, &added] { serve_stream(s, added); });
  return added;
}

void end_stream(Stream& stream) {
  State& s = state();
  {
    const std::lock_guard guard(s.lock);
    stream.ending = true;
    s.changed.notify_all();
  }
  stream.thread.join();
  const std::lock_guard guard(s.lock);
  std::erase_if(s.streams, [&](const auto& known) { return known.get() == &stream; });
}

Stream& stream_of(CUstream handle) {
  State& s = state();
  if (handle == CU_STREAM_PER_THREAD) {
    if (per_thread_of != drivers) per_thread = {};
    per_thread_of = drivers;
    Stream*& mine = per_thread[static_cast<size_t>(current_device())];
    if (mine == nullptr) mine = &add_stream(true, current_device());
    return *mine;
  }
  const std::lock_guard guard(s.lock);
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return legacy_of(s, current_device());
  for (const auto& stream : s.streams)
    if (stream.get() == reinterpret_cast<Stream*>(handle)) return *stream;
  misuse("unknown stream");
}

CUresult put(CUstream handle, std::function<void()> run, bool kernel, bool blocking_call) {
  Stream& stream = stream_of(handle);
  State& s = state();
  std::unique_lock guard(s.lock);
  if (stream.capture) {
    Graph& graph = *stream.capture->graph;
    graph.nodes.push_back({std::move(run), stream.capture_after, kernel});
    stream.capture_after = {graph.nodes.size() - 1};
    return CUDA_SUCCESS;
  }
  const bool captures =
      std::ranges::any_of(s.streams, [](const auto& other) { return other->capture != nullptr; });
  if (&stream == &legacy_of(s, stream.device) && captures)
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  if (kernel) ++s.launches;
  const auto item = enqueue(s, stream, std::move(run), {});
  if (blocking_call || (kernel && s.options.launch_blocking)) wait_until_done(s, guard, item);
  return CUDA_SUCCESS;
}

void wait_for(Stream& stream) {
  State& s = state();
  std::unique_lock guard(s.lock);
  wait_until_done(s, guard, stream.last);
}

void wait_for_all(int device) {
  State& s = state();
  std::unique_lock guard(s.lock);
  std::vector<std::shared_ptr<Item>> last;
  for (const auto& stream : s.streams)
    if (stream->device == device) last.push_back(stream->last);
  for (const auto& item : last) wait_until_done(s, guard, item);
}

void record(Event& event, CUstream handle) {
  Stream& stream = stream_of(handle);
  State& s = state();
  const std::lock_guard guard(s.lock);
  event.capture = stream.capture;
  event.capture_after = stream.capture_after;
  event.item = stream.capture ? nullptr : enqueue(s, stream, nullptr, {});
}

void wait_for(const Event& event) {
  State& s = state();
  std::unique_lock guard(s.lock);
  wait_until_done(s, guard, event.item);
}

float milliseconds_between(const Event& begin, const Event& end) {
  const std::lock_guard guard(state().lock);
  return std::chrono::duration<float, std::milli>(end.item->ended - begin.item->ended).count();
}

CUresult wait_event(CUstream handle, const Event& event) {
  Stream& stream = stream_of(handle);
  State& s = state();
  const std::lock_guard guard(s.lock);
  if (event.capture) {  // the stream joins the capture
    if (stream.capture && stream.capture != event.capture) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    stream.capture = event.capture;
    for (const size_t node : event.capture_after) stream.capture_after.push_back(node);
    return CUDA_SUCCESS;
  }
  if (stream.capture) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  if (event.item) enqueue(s, stream, nullptr, {event.item});
  return CUDA_SUCCESS;
}

// ---- graphs -----------------------------------------------------------------------------------

CUresult begin_capture(CUstream handle) {
  Stream& stream = stream_of(handle);
  State& s = state();
  const std::lock_guard guard(s.lock);
  if (&stream == &legacy_of(s, stream.device)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream.capture) return CUDA_ERROR_ILLEGAL_STATE;
  stream.capture = std::make_shared<Capture>(Capture{new Graph, &stream, ++s.captures});
  stream.capture_after.clear();
  return CUDA_SUCCESS;
}

CUresult end_capture(CUstream handle, Graph** graph) {
  Stream& stream = stream_of(handle);
  State& s = state();
  const std::lock_guard guard(s.lock);
  if (!stream.capture || stream.capture->origin != &stream) return CUDA_ERROR_ILLEGAL_STATE;
  const auto capture = stream.capture;
  *graph = capture->graph;
  for (const auto& other : s.streams) {
    if (other->capture != capture) continue;
    other->capture = nullptr;
    other->capture_after.clear();
  }
  return CUDA_SUCCESS;
}

CUresult launch_graph(const Graph& graph, CUstream handle) {
  const auto kernels = std::ranges::count_if(graph.nodes, &GraphNode::kernel);
  {
    State& s = state();
    const std::lock_guard guard(s.lock);
    s.launches += static_cast<int>(kernels);
  }
  return put(handle, [&graph] { run_graph(graph); });
}

void release(Graph* graph) {
  std::vector<UserObject*> ended;
  {
    State& s = state();
    const std::lock_guard guard(s.lock);
    if (--graph->references > 0) return;
    for (UserObject* object : graph->objects)
      if (--object->references == 0) ended.push_back(object);
    s.user_objects -= static_cast<int>(ended.size());
  }
  delete graph;
  for (UserObject* object : ended) {
    std::thread([object] {
      in_user_object = true;
      object->destroy(object->data);
    }).join();
    delete object;
  }
}

}  // namespace ringfold::test::emulated

namespace ringfold::test {

using namespace emulated;

EmulatedDriver::EmulatedDriver(const EmulatedOptions& options) {
  if (installed()) misuse("one is installed already");
  ++drivers;
  the_state = std::make_unique<State>(options);
  map_device();
  forget_loaded();
  for (int device = 0; device < options.devices; ++device) add_stream(true, device);
  cuda::replace_driver(emulated_function);
}

EmulatedDriver::~EmulatedDriver() {
  for (int device = 0; device < state().options.devices; ++device) wait_for_all(device);
  while (!state().streams.empty()) end_stream(*state().streams.back());
  cuda::replace_driver(nullptr);
  the_state.reset();
  unmap_device();
}

int EmulatedDriver::opened() {
  return open_blocks();
}

EmulatedDriver::Traffic EmulatedDriver::traffic() {
  return emulated::traffic();
}

size_t EmulatedDriver::device_bytes() {
  return bytes_in_use(Kind::device);
}

size_t EmulatedDriver::pinned_bytes() {
  return bytes_in_use(Kind::pinned);
}

int EmulatedDriver::user_objects() {
  const std::lock_guard guard(state().lock);
  return state().user_objects;
}

int EmulatedDriver::launches() {
  const std::lock_guard guard(state().lock);
  return state().launches;
}

}  // namespace ringfold::test
