#include "lib/cuda/path.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/scalar.h"
#include "lib/base/base.h"
#include "lib/cuda/compute_slots.h"
#include "lib/cuda/pool.h"

namespace ringfold::cuda {
namespace {

CUdeviceptr address(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

// Whether kernels can use it, and the context it belongs to (null: any).
struct Where {
  bool reachable = false, device = false;
  CUcontext context = nullptr;
};

Where where_is(const void* pointer) {
  Where where;
  CUmemorytype type{};
  if (call().cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address(pointer)) !=
      CUDA_SUCCESS)
    return where;  // unknown to CUDA, or CUDA is not in use
  where.reachable = true;
  unsigned managed = 0;
  call().cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address(pointer));
  where.device = managed != 0 || type == CU_MEMORYTYPE_DEVICE;
  call().cuPointerGetAttribute(&where.context, CU_POINTER_ATTRIBUTE_CONTEXT, address(pointer));
  return where;
}

// What a graph keeps of one worker: made at capture, ended with the graph.
struct Captured {
  struct Operation {
    DeviceCall call;
    Schedule schedule;
    std::shared_ptr<Path> path;
    std::unique_ptr<Replayed> replayed;
  };
  std::shared_ptr<Worker> worker;
  std::vector<Operation> operations;
};

// Workers that this thread's calls have asked for and that are not launched.
struct Waiting {
  std::shared_ptr<Worker> worker;
  std::unique_ptr<Captured> captured;  // null: not for a graph
};
thread_local std::vector<Waiting> waiting_workers;

bool launches_block() {
  const char* const value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value != nullptr && std::strcmp(value, "0") != 0 && *value != '\0';
}

bool is_legacy(CUstream stream) {
  return stream == nullptr || stream == CU_STREAM_LEGACY;
}

// The device on which kernels reach both buffers.
Result<Device*> device_of(const void* one, const void* other) {
  CUcontext context = nullptr;
  for (const void* buffer : {one, other}) {
    if (buffer == nullptr) continue;
    const Where where = where_is(buffer);
    if (!where.reachable)
      return Status(Code::invalid_argument,
                    fmt::format("one buffer is on a device, but {} in host memory that is not "
                                "pinned: no kernel can use it",
                                buffer));
    if (where.device && where.context != nullptr) context = where.context;
  }
  if (context == nullptr) {
    if (Status status = check(call().cuCtxGetCurrent(&context), "the current CUDA context");
        !status.ok())
      return status;
    if (context == nullptr)
      return Status(Code::invalid_argument, "this thread has no current CUDA context");
  }
  return Device::of(context);
}

// What comes on `after` waits for what is on `before` now.
Status order(Stream before, Stream after) {
  if (before.handle == after.handle) return {};
  CUevent event = nullptr;
  CUresult result = call().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
  if (result != CUDA_SUCCESS) return check(result, "a CUDA event");
  result = call().cuEventRecord(event, static_cast<CUstream>(before.handle));
  if (result == CUDA_SUCCESS)
    result = call().cuStreamWaitEvent(static_cast<CUstream>(after.handle), event, 0);
  call().cuEventDestroy(event);  // what waits for it still does
  return check(result, "ordering two streams");
}

Waiting& worker_for(Device& device, const DeviceCall& call) {
  const auto stream = static_cast<CUstream>(call.stream.handle);
  const Frame frames = frame(*call.schedule, call.position);
  const size_t bytes = std::max(frames.input.count, frames.work.count) * size_of(call.type);
  const Collective collective = call.schedule->collective;
  const bool reduces = collective == Collective::all_reduce || collective == Collective::reduce ||
                       collective == Collective::reduce_scatter ||
                       call.reduction.op == Op::premul_sum;
  for (Waiting& waiting : waiting_workers) {
    Worker& worker = *waiting.worker;
    const bool same =
        worker.stream() == stream || (is_legacy(worker.stream()) && is_legacy(stream));
    if (same && &worker.device() == &device && worker.serve(reduces, call.type, bytes))
      return waiting;
  }
  waiting_workers.push_back({std::make_shared<Worker>(device, stream), nullptr});
  (void)waiting_workers.back().worker->serve(reduces, call.type, bytes);
  return waiting_workers.back();
}

}  // namespace

bool is_device_memory(const void* pointer) {
  return pointer != nullptr && driver().ok() && where_is(pointer).device;
}

Status usable() {
  return driver().status();
}

namespace {

CUcontext current_context() {
  CUcontext context = nullptr;
  if (!driver().ok() || call().cuCtxGetCurrent(&context) != CUDA_SUCCESS) return nullptr;
  return context;
}

}  // namespace

void prepare() {
  if (CUcontext context = current_context())
    if (const auto device = Device::of(context); !device.ok())
      log_line(LogLevel::warn, "CUDA: " + device.status().message());
}

Status has_device() {
  if (!driver().ok()) return driver().status();
  if (current_context() != nullptr) return {};
  return {Code::unsupported,
          "no CUDA context was current (cudaSetDevice()) when the communicator was made"};
}

Carried::Carried() : context_(current_context()) {}

void Carried::enter() const {
  if (context_ != nullptr) call().cuCtxPushCurrent(static_cast<CUcontext>(context_));
}

// ---- calls ------------------------------------------------------------------------------------

namespace {

// What a factor on the device needs of the worker that serves the call.
Status bring_factor(Worker& worker, DeviceCall* call) {
  const Reduction& reduction = call->reduction;
  if (reduction.op != Op::premul_sum || reduction.factor_on_stream == nullptr) return {};
  const auto factor = worker.bring(reduction.factor_on_stream, call->type);
  if (factor.ok()) call->factor = *factor;
  return factor.status();
}

}  // namespace

Result<std::unique_ptr<Compute>> make_compute(const DeviceCall& given,
                                              std::shared_ptr<Path>& path) {
  DeviceCall call = given;
  const auto device = device_of(call.input, call.work);
  if (!device.ok()) return device.status();
  const InContext in((*device)->context());
  if (path && path->kind() == MemoryKind::cuda && &path->device() != *device)
    return Status(Code::invalid_argument,
                  "the buffer is on another device than the one that was current when the "
                  "communicator was made (RINGFOLD_CUDA_PATH=staged allows it)");
  if (!path || &path->device() != *device) path = std::make_shared<Path>(**device, Path::kAtOnce);
  std::byte* slots = nullptr;
  if (call.point_to_point) {
    const auto taken = (*device)->take_pinned(SlotCompute::own_bytes(call));
    if (!taken.ok()) return taken.status();
    slots = *taken;
  } else if (Status status = path->reserve(call.piece * size_of(call.type)); !status.ok()) {
    return status;
  }
  const std::shared_ptr<Worker> worker = worker_for(**device, call).worker;
  const Status factor = bring_factor(*worker, &call);
  auto compute = std::make_unique<SlotCompute>(call, worker, path, slots);
  return factor.ok() ? Result<std::unique_ptr<Compute>>(std::move(compute)) : factor;
}

// ---- graphs -----------------------------------------------------------------------------------

bool is_captured(Stream stream) {
  CUstreamCaptureStatus status{};
  return call().cuStreamGetCaptureInfo(static_cast<CUstream>(stream.handle), &status, nullptr,
                                       nullptr, nullptr, nullptr, nullptr) == CUDA_SUCCESS &&
         status != CU_STREAM_CAPTURE_STATUS_NONE;
}

namespace {

// Elements of the longest message that any rank sends.
size_t longest_message(const Schedule& schedule, size_t piece) {
  size_t longest = 0;
  for (int position = 0; position < schedule.size && longest < piece; ++position)
    for (int i = 0; i < step_count(schedule) && longest < piece; ++i)
      longest = std::max(longest, step(schedule, position, i).send.count);
  return std::min(longest, piece);
}

}  // namespace

// Each has slots of its own: replays and other calls come in any order.
Result<std::shared_ptr<Path>> path_of_captured(const DeviceCall& call,
                                               const std::shared_ptr<Path>& direct) {
  const auto device = device_of(call.input, call.work);
  if (!device.ok()) return device.status();
  const InContext in((*device)->context());
  const size_t bytes = longest_message(*call.schedule, call.piece) * size_of(call.type);
  if (direct && &direct->device() == *device) {
    auto path = std::make_shared<Path>(direct->pool(), 1);
    if (path->reserve(bytes).ok()) return path;
  }
  auto path = std::make_shared<Path>(**device, 1);
  if (Status status = path->reserve(bytes); !status.ok()) return status;
  return path;
}

Status record(const DeviceCall& given, std::shared_ptr<Path> path,
              std::unique_ptr<Replayed> operation) {
  Device* const device = &path->device();
  const InContext in(device->context());
  DeviceCall call = given;
  call.piece = longest_message(*call.schedule, call.piece);
  Waiting& waiting = worker_for(*device, call);
  if (Status status = bring_factor(*waiting.worker, &call); !status.ok()) {
    waiting.worker->release();
    return status;
  }
  if (!waiting.captured) {
    waiting.captured = std::make_unique<Captured>();
    waiting.captured->worker = waiting.worker;
  }
  waiting.captured->operations.push_back(
      {call, *call.schedule, std::move(path), std::move(operation)});
  return {};
}

namespace {

// In the graph before the worker, on a thread of the driver: it must neither wait nor call it.
void CUDA_CB replay(void* data) {
  Captured& captured = *static_cast<Captured*>(data);
  if (!captured.worker->begin_replay(static_cast<int>(captured.operations.size()))) {
    const Status why(Code::invalid_argument,
                     "two replays of one captured graph run at once: they share its memory");
    for (auto& operation : captured.operations) operation.replayed->fail(why);
    return;
  }
  for (auto& operation : captured.operations) {
    DeviceCall call = operation.call;
    call.schedule = &operation.schedule;
    operation.replayed->start(
        std::make_unique<SlotCompute>(call, captured.worker, operation.path, nullptr));
  }
}

void CUDA_CB forget(void* data) {
  delete static_cast<Captured*>(data);
}

// Puts the worker into the graph of the stream, which owns what it needs.
Status capture(std::unique_ptr<Captured> captured, CUstream stream) {
  CUstreamCaptureStatus status{};
  CUgraph graph = nullptr;
  CUuserObject object = nullptr;
  CUresult result =
      call().cuStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr);
  if (result == CUDA_SUCCESS)
    result = call().cuUserObjectCreate(&object, captured.get(), forget, 1,
                                       CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
  if (result != CUDA_SUCCESS) return check(result, "capturing");
  Captured* const owned = captured.release();
  result = call().cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
  if (result == CUDA_SUCCESS) result = call().cuLaunchHostFunc(stream, replay, owned);
  if (result != CUDA_SUCCESS) return check(result, "capturing");
  return owned->worker->capture(stream);
}

}  // namespace

Status enqueue_copy(const void* from, void* to, size_t count, DType type, double factor,
                    Stream stream) {
  if (count == 0 || (from == to && factor == 1.0)) return {};
  const auto device = device_of(from, to);
  if (!device.ok()) return device.status();
  const bool plain = factor == 1.0;
  Command command;
  command.dtype = plain ? DType::u8 : type;
  command.a = from;
  command.out = to;
  command.count = plain ? count * size_of(type) : count;
  command.scale_a = factor;
  constexpr size_t kBytesPerBlock = size_t{64} << 10, kMostBlocks = 256;
  const size_t blocks = std::clamp(count * size_of(type) / kBytesPerBlock, size_t{1}, kMostBlocks);
  const InContext in((*device)->context());
  void* parameters[] = {&command};
  return check(call().cuLaunchKernel((*device)->reduce(type), static_cast<unsigned>(blocks), 1, 1,
                                     kWorkerThreads, 1, 1, 0, static_cast<CUstream>(stream.handle),
                                     parameters, nullptr),
               "launching the copy kernel");
}

Result<double> wait_for_factor(const void* factor, DType type, Stream stream) {
  const auto device = device_of(factor, nullptr);
  if (!device.ok()) return device.status();
  const InContext in((*device)->context());
  const auto pinned = (*device)->take_pinned(size_of(type));
  if (!pinned.ok()) return pinned.status();
  Status status = enqueue_copy(factor, *pinned, 1, type, 1.0, stream);
  if (status.ok())
    status = check(call().cuStreamSynchronize(static_cast<CUstream>(stream.handle)),
                   "waiting for a factor");
  const double value = status.ok() ? scalar_as_factor(type, *pinned) : 1.0;
  (*device)->give_pinned(*pinned);
  return status.ok() ? Result<double>(value) : status;
}

Status move(const void* from, Stream from_stream, void* to, Stream to_stream, size_t count,
            DType type) {
  const auto device = device_of(from, to);
  if (!device.ok()) return device.status();
  const InContext in((*device)->context());
  Status status = order(from_stream, to_stream);
  if (status.ok()) status = enqueue_copy(from, to, count, type, 1.0, to_stream);
  return status.ok() ? order(to_stream, from_stream) : status;
}

// ---- launches ---------------------------------------------------------------------------------

Status can_launch_workers() {
  std::erase_if(waiting_workers, [](const Waiting& waiting) { return waiting.worker->idle(); });
  if (waiting_workers.size() < 2 || !launches_block()) return {};
  waiting_workers.clear();
  return {Code::unsupported,
          "CUDA_LAUNCH_BLOCKING=1 makes every launch wait for its end, so the calls of one group "
          "cannot be on several streams, or of several types on one: they wait for each other"};
}

namespace {

// A worker on a stream of its own, between two points of the user's: so that it waits for none of
// those launched with it.
class Fork {
 public:
  explicit Fork(Waiting& waiting)
      : worker_(*waiting.worker),
        captured_(std::move(waiting.captured)),
        stream_(worker_.stream()) {}

  Status begin() {
    const auto stream = worker_.device().take_stream();
    if (!stream.ok()) return stream.status();
    stream_ = *stream;
    return order({worker_.stream()}, {stream_});
  }
  Status launch() {
    return captured_ ? capture(std::move(captured_), stream_) : worker_.launch(stream_);
  }
  Status join() {
    if (stream_ == worker_.stream()) return {};
    worker_.keep(stream_);
    return order({stream_}, {worker_.stream()});
  }
  [[nodiscard]] Worker& worker() const { return worker_; }

 private:
  Worker& worker_;
  std::unique_ptr<Captured> captured_;
  CUstream stream_;
};

// Runs in the worker's context.
template <class Step>
Status each(std::vector<Fork>& forks, Step step) {
  Status first;
  for (size_t i = 0; i < forks.size(); ++i) {
    const InContext in(forks[i].worker().device().context());
    Status status = step(forks[i], i);
    if (first.ok()) first = status;
  }
  return first;
}

}  // namespace

// Those that share a stream, or of which one is on the legacy stream, which waits for the others,
// must not wait for each other: all but the first of a stream fork from it, before any is launched.
Status launch_workers() {
  if (waiting_workers.empty()) return {};
  std::vector<Waiting> workers;
  workers.swap(waiting_workers);
  std::vector<Fork> forks;
  forks.reserve(workers.size());
  for (Waiting& waiting : workers) forks.emplace_back(waiting);
  const bool several = workers.size() > 1;
  Status first = each(forks, [&](Fork& fork, size_t i) {
    const CUstream stream = fork.worker().stream();
    const auto before = workers.begin() + static_cast<ptrdiff_t>(i);
    const bool shared = std::any_of(workers.begin(), before, [&](const auto& other) {
      return other.worker->stream() == stream;
    });
    return shared || (several && is_legacy(stream)) ? fork.begin() : Status();
  });
  if (first.ok()) first = each(forks, [](Fork& fork, size_t) { return fork.launch(); });
  const Status joined = each(forks, [](Fork& fork, size_t) { return fork.join(); });
  return first.ok() ? joined : first;
}

}  // namespace ringfold::cuda
