// The driver's functions, as thin as they can be over memory, streams and kernels.
#include <cstring>

#include "test/emulated_driver/state.h"

namespace ringfold::test::emulated {
namespace {

// ---- contexts ---------------------------------------------------------------------------------

bool initialized = false;
std::array<char, kMostDevices> the_contexts;
thread_local std::vector<CUcontext> contexts;  // of this thread, the current one last
thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUcontext current() {
  return contexts.empty() ? nullptr : contexts.back();
}

// -1: it is no context.
int device_of(CUcontext c) {
  const auto number = reinterpret_cast<uintptr_t>(c) - reinterpret_cast<uintptr_t>(&the_contexts);
  return number < static_cast<size_t>(state().options.devices) ? static_cast<int>(number) : -1;
}

}  // namespace

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(&the_contexts[static_cast<size_t>(device)]);
}

int current_device() {
  return device_of(current());
}

CUresult need_context() {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  return current() == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

// Allocations and releases may wait for the device; here they always do. A capture forbids them.
CUresult before_allocation() {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  if (in_user_object) misuse("a driver call from the destructor of a user object");
  State& s = state();
  {
    const std::lock_guard guard(s.lock);
    for (const auto& stream : s.streams)
      if (stream->capture && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  wait_for_all(current_device());
  return CUDA_SUCCESS;
}

namespace {

CUresult init(unsigned) {
  initialized = true;
  return CUDA_SUCCESS;
}

CUresult driver_get_version(int* version) {
  *version = state().options.version;
  return CUDA_SUCCESS;
}

CUresult get_error_string(CUresult error, const char** text) {
  switch (error) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      *text = "out of memory";
      return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_INITIALIZED:
      *text = "initialization error";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_CONTEXT:
      *text = "invalid device context";
      return CUDA_SUCCESS;
    default:
      *text = "emulated error";
      return CUDA_SUCCESS;
  }
}

CUresult device_get(CUdevice* device, int ordinal) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= state().options.devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult device_get_count(int* devices) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  *devices = state().options.devices;
  return CUDA_SUCCESS;
}

// A device of compute capability 9.0: with all types.
CUresult device_get_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return CUDA_SUCCESS;
}

CUresult device_get_name(char* name, int length, CUdevice) {
  std::snprintf(name, static_cast<size_t>(length), "emulated");
  return CUDA_SUCCESS;
}

CUresult primary_ctx_retain(CUcontext* c, CUdevice device) {
  *c = context_of(device);
  return CUDA_SUCCESS;
}

CUresult primary_ctx_release(CUdevice) {
  return CUDA_SUCCESS;
}

CUresult ctx_set_current(CUcontext c) {
  if (!contexts.empty()) contexts.pop_back();
  if (c != nullptr) contexts.push_back(c);
  return CUDA_SUCCESS;
}

CUresult ctx_push_current(CUcontext c) {
  if (device_of(c) < 0) return CUDA_ERROR_INVALID_CONTEXT;
  contexts.push_back(c);
  return CUDA_SUCCESS;
}

CUresult ctx_pop_current(CUcontext* c) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (c != nullptr) *c = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult ctx_get_current(CUcontext* c) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  *c = current();
  return CUDA_SUCCESS;
}

CUresult ctx_get_device(CUdevice* device) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  *device = current_device();
  return CUDA_SUCCESS;
}

CUresult device_can_access_peer(int* can, CUdevice device, CUdevice peer) {
  *can = device != peer && state().options.peer_access ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult ctx_enable_peer_access(CUcontext peer, unsigned flags) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  const int other = device_of(peer);
  if (other < 0 || other == current_device() || flags != 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (!state().options.peer_access) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const std::lock_guard guard(state().lock);
  bool& access = state().access[static_cast<size_t>(current_device())][static_cast<size_t>(other)];
  return std::exchange(access, true) ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

// ---- memory -----------------------------------------------------------------------------------

CUresult mem_alloc(CUdeviceptr* pointer, size_t bytes) {
  if (const CUresult r = before_allocation(); r != CUDA_SUCCESS) return r;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  *pointer = reinterpret_cast<CUdeviceptr>(allocate(Kind::device, bytes, current_device()));
  return *pointer == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

// Waits for nothing; the memory is there at once rather than when the stream comes to it.
CUresult mem_alloc_async(CUdeviceptr* pointer, size_t bytes, CUstream) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  *pointer = reinterpret_cast<CUdeviceptr>(allocate(Kind::pooled, bytes, current_device()));
  return *pointer == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult mem_alloc_managed(CUdeviceptr* pointer, size_t bytes, unsigned) {
  if (const CUresult r = before_allocation(); r != CUDA_SUCCESS) return r;
  *pointer = reinterpret_cast<CUdeviceptr>(allocate(Kind::managed, bytes, current_device()));
  return CUDA_SUCCESS;
}

CUresult mem_free(CUdeviceptr pointer) {
  if (const CUresult r = before_allocation(); r != CUDA_SUCCESS) return r;
  return release(pointer, Kind::device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult mem_host_alloc(void** pointer, size_t bytes, unsigned) {
  if (const CUresult r = before_allocation(); r != CUDA_SUCCESS) return r;
  *pointer = allocate(Kind::pinned, bytes, current_device());
  return *pointer == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult mem_free_host(void* pointer) {
  if (const CUresult r = before_allocation(); r != CUDA_SUCCESS) return r;
  return release(reinterpret_cast<CUdeviceptr>(pointer), Kind::pinned) ? CUDA_SUCCESS
                                                                       : CUDA_ERROR_INVALID_VALUE;
}

CUresult pointer_get_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
  const Found found = find(pointer);
  if (found.kind == Kind::none) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
    *static_cast<CUmemorytype*>(data) =
        found.kind == Kind::pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  } else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) {
    *static_cast<CUcontext*>(data) = context_of(found.device);
  } else if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED) {
    *static_cast<unsigned*>(data) = found.kind == Kind::managed ? 1 : 0;
  } else {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult copy(void* to, const void* from, size_t bytes, CUstream stream) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  return put(stream, [=] { std::memcpy(reach(to), reach(from), bytes); });
}

// What is not pinned has been read when the call returns.
CUresult copy_to_device(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (find(reinterpret_cast<CUdeviceptr>(from)).kind != Kind::none)
    return copy(reinterpret_cast<void*>(to), from, bytes, stream);
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  const auto* const begin = static_cast<const std::byte*>(from);
  return put(stream, [to, read = std::vector<std::byte>(begin, begin + bytes)] {
    std::memcpy(reach(reinterpret_cast<void*>(to)), read.data(), read.size());
  });
}

CUresult copy_to_host(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(to, reinterpret_cast<const void*>(from), bytes, stream);
}

CUresult copy_on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, stream);
}

CUresult copy_and_wait(void* to, const void* from, size_t bytes) {
  const CUresult result = copy(to, from, bytes, nullptr);
  if (result == CUDA_SUCCESS) wait_for(stream_of(nullptr));
  return result;
}

CUresult copy_to_device_and_wait(CUdeviceptr to, const void* from, size_t bytes) {
  return copy_and_wait(reinterpret_cast<void*>(to), from, bytes);
}

CUresult copy_to_host_and_wait(void* to, CUdeviceptr from, size_t bytes) {
  return copy_and_wait(to, reinterpret_cast<const void*>(from), bytes);
}

CUresult set_bytes(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  return put(stream, [=] { std::memset(reach(reinterpret_cast<void*>(to)), value, bytes); });
}

// ---- modules and launches ---------------------------------------------------------------------

CUresult module_load_data(CUmodule* module, const void* image) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  constexpr uint32_t kFatBinary = 0xba55ed50;
  if (*static_cast<const uint32_t*>(image) != kFatBinary) return CUDA_ERROR_INVALID_IMAGE;
  *module = reinterpret_cast<CUmodule>(context_of(current_device()));
  return CUDA_SUCCESS;
}

CUresult module_get_function(CUfunction* function, CUmodule, const char* name) {
  Kernel* const kernel = find_kernel(name);
  *function = reinterpret_cast<CUfunction>(kernel);
  return kernel == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult func_load(CUfunction function) {
  wait_for_all(current_device());
  const std::lock_guard guard(state().lock);
  loaded(*reinterpret_cast<Kernel*>(function)) = true;
  return CUDA_SUCCESS;
}

CUresult launch_kernel(CUfunction function, unsigned blocks, unsigned, unsigned, unsigned threads,
                       unsigned, unsigned, unsigned, CUstream stream, void** parameters, void**) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  if (blocks == 0 || threads == 0 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
  Kernel& kernel = *reinterpret_cast<Kernel*>(function);
  bool first = false;
  {
    const std::lock_guard guard(state().lock);
    first = !loaded(kernel);
    loaded(kernel) = true;
  }
  if (first) wait_for_all(current_device());
  const auto* const bytes = static_cast<const std::byte*>(parameters[0]);
  std::vector<std::byte> values(bytes, bytes + parameter_bytes(kernel));
  const int device = current_device();
  if (stream_of(stream).device != device) return CUDA_ERROR_INVALID_HANDLE;
  const auto run = [&kernel, values, blocks, threads, device] {
    run_kernel(kernel, values, blocks, threads, device);
  };
  return put(stream, run, true);
}

CUresult launch_host_func(CUstream stream, CUhostFn f, void* data) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  return put(stream, [=] { f(data); });
}

// ---- streams and events -----------------------------------------------------------------------

CUresult stream_create(CUstream* stream, unsigned flags) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  const bool blocking = (flags & CU_STREAM_NON_BLOCKING) == 0;
  *stream = reinterpret_cast<CUstream>(&add_stream(blocking, current_device()));
  return CUDA_SUCCESS;
}

CUresult stream_destroy(CUstream stream) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  wait_for(stream_of(stream));
  end_stream(stream_of(stream));
  return CUDA_SUCCESS;
}

CUresult stream_synchronize(CUstream stream) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  if (stream_of(stream).capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  wait_for(stream_of(stream));
  return CUDA_SUCCESS;
}

CUresult ctx_synchronize() {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  wait_for_all(current_device());
  return CUDA_SUCCESS;
}

CUresult event_create(CUevent* event, unsigned) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  *event = reinterpret_cast<CUevent>(new Event);
  return CUDA_SUCCESS;
}

CUresult event_destroy(CUevent event) {
  delete reinterpret_cast<Event*>(event);
  return CUDA_SUCCESS;
}

CUresult event_record(CUevent event, CUstream stream) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  record(*reinterpret_cast<Event*>(event), stream);
  return CUDA_SUCCESS;
}

CUresult event_synchronize(CUevent event) {
  wait_for(*reinterpret_cast<Event*>(event));
  return CUDA_SUCCESS;
}

CUresult event_elapsed_time(float* milliseconds, CUevent begin, CUevent end) {
  *milliseconds =
      milliseconds_between(*reinterpret_cast<Event*>(begin), *reinterpret_cast<Event*>(end));
  return CUDA_SUCCESS;
}

CUresult stream_wait_event(CUstream stream, CUevent event, unsigned) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  return wait_event(stream, *reinterpret_cast<Event*>(event));
}

// ---- capture and graphs -----------------------------------------------------------------------

CUresult stream_begin_capture(CUstream stream, CUstreamCaptureMode) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  return begin_capture(stream);
}

CUresult stream_end_capture(CUstream stream, CUgraph* graph) {
  return end_capture(stream, reinterpret_cast<Graph**>(graph));
}

CUresult stream_get_capture_info(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                 CUgraph* graph, const CUgraphNode** dependencies,
                                 const CUgraphEdgeData** edges, size_t* count) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  if (dependencies != nullptr || edges != nullptr || count != nullptr)
    return CUDA_ERROR_NOT_SUPPORTED;
  const auto capture = stream_of(stream).capture;
  *status = capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  if (capture && id != nullptr) *id = capture->id;
  if (capture && graph != nullptr) *graph = reinterpret_cast<CUgraph>(capture->graph);
  return CUDA_SUCCESS;
}

CUresult exchange_capture_mode(CUstreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return CUDA_SUCCESS;
}

// An instantiated graph is the graph itself, with one reference more.
CUresult graph_instantiate(CUgraphExec* exec, CUgraph graph, unsigned long long) {
  const std::lock_guard guard(state().lock);
  ++reinterpret_cast<Graph*>(graph)->references;
  *exec = reinterpret_cast<CUgraphExec>(graph);
  return CUDA_SUCCESS;
}

CUresult graph_launch(CUgraphExec exec, CUstream stream) {
  if (const CUresult r = need_context(); r != CUDA_SUCCESS) return r;
  return launch_graph(*reinterpret_cast<Graph*>(exec), stream);
}

CUresult graph_destroy(CUgraph graph) {
  release(reinterpret_cast<Graph*>(graph));
  return CUDA_SUCCESS;
}

CUresult graph_exec_destroy(CUgraphExec exec) {
  wait_for_all(current_device());
  release(reinterpret_cast<Graph*>(exec));
  return CUDA_SUCCESS;
}

CUresult user_object_create(CUuserObject* object, void* data, CUhostFn destroy, unsigned references,
                            unsigned) {
  const std::lock_guard guard(state().lock);
  *object =
      reinterpret_cast<CUuserObject>(new UserObject{destroy, data, static_cast<int>(references)});
  ++state().user_objects;
  return CUDA_SUCCESS;
}

CUresult graph_retain_user_object(CUgraph graph, CUuserObject object, unsigned count,
                                  unsigned flags) {
  const std::lock_guard guard(state().lock);
  auto* const known = reinterpret_cast<UserObject*>(object);
  if (count != 1 || flags != CU_GRAPH_USER_OBJECT_MOVE) return CUDA_ERROR_NOT_SUPPORTED;
  reinterpret_cast<Graph*>(graph)->objects.push_back(known);  // takes over the caller's reference
  return CUDA_SUCCESS;
}

// ---- by name ----------------------------------------------------------------------------------

#define RINGFOLD_TEXT(name) #name
#define RINGFOLD_ENTRY(name, function) \
  { RINGFOLD_TEXT(name), reinterpret_cast<void*>(static_cast<decltype(&::name)>(function)) }

const std::map<std::string, void*>& functions() {
  static const std::map<std::string, void*> kFunctions = {
      RINGFOLD_ENTRY(cuCtxEnablePeerAccess, ctx_enable_peer_access),
      RINGFOLD_ENTRY(cuCtxGetCurrent, ctx_get_current),
      RINGFOLD_ENTRY(cuCtxGetDevice, ctx_get_device),
      RINGFOLD_ENTRY(cuCtxPopCurrent, ctx_pop_current),
      RINGFOLD_ENTRY(cuCtxPushCurrent, ctx_push_current),
      RINGFOLD_ENTRY(cuCtxSetCurrent, ctx_set_current),
      RINGFOLD_ENTRY(cuCtxSynchronize, ctx_synchronize),
      RINGFOLD_ENTRY(cuDeviceCanAccessPeer, device_can_access_peer),
      RINGFOLD_ENTRY(cuDeviceGet, device_get),
      RINGFOLD_ENTRY(cuDeviceGetAttribute, device_get_attribute),
      RINGFOLD_ENTRY(cuDeviceGetCount, device_get_count),
      RINGFOLD_ENTRY(cuDeviceGetName, device_get_name),
      RINGFOLD_ENTRY(cuDevicePrimaryCtxRelease, primary_ctx_release),
      RINGFOLD_ENTRY(cuDevicePrimaryCtxRetain, primary_ctx_retain),
      RINGFOLD_ENTRY(cuDriverGetVersion, driver_get_version),
      RINGFOLD_ENTRY(cuEventCreate, event_create),
      RINGFOLD_ENTRY(cuEventDestroy, event_destroy),
      RINGFOLD_ENTRY(cuEventElapsedTime, event_elapsed_time),
      RINGFOLD_ENTRY(cuEventRecord, event_record),
      RINGFOLD_ENTRY(cuEventSynchronize, event_synchronize),
      RINGFOLD_ENTRY(cuFuncLoad, func_load),
      RINGFOLD_ENTRY(cuGetErrorString, get_error_string),
      RINGFOLD_ENTRY(cuGraphDestroy, graph_destroy),
      RINGFOLD_ENTRY(cuGraphExecDestroy, graph_exec_destroy),
      RINGFOLD_ENTRY(cuGraphInstantiate, graph_instantiate),
      RINGFOLD_ENTRY(cuGraphLaunch, graph_launch),
      RINGFOLD_ENTRY(cuGraphRetainUserObject, graph_retain_user_object),
      RINGFOLD_ENTRY(cuInit, init),
      RINGFOLD_ENTRY(cuLaunchHostFunc, launch_host_func),
      RINGFOLD_ENTRY(cuLaunchKernel, launch_kernel),
      RINGFOLD_ENTRY(cuIpcCloseMemHandle, ipc_close),
      RINGFOLD_ENTRY(cuIpcGetMemHandle, ipc_get),
      RINGFOLD_ENTRY(cuIpcOpenMemHandle, ipc_open),
      RINGFOLD_ENTRY(cuMemAlloc, mem_alloc),
      RINGFOLD_ENTRY(cuMemAllocAsync, mem_alloc_async),
      RINGFOLD_ENTRY(cuMemAllocManaged, mem_alloc_managed),
      RINGFOLD_ENTRY(cuMemFree, mem_free),
      RINGFOLD_ENTRY(cuMemFreeHost, mem_free_host),
      RINGFOLD_ENTRY(cuMemGetAddressRange, mem_get_address_range),
      RINGFOLD_ENTRY(cuMemHostAlloc, mem_host_alloc),
      RINGFOLD_ENTRY(cuMemcpyDtoH, copy_to_host_and_wait),
      RINGFOLD_ENTRY(cuMemcpyHtoD, copy_to_device_and_wait),
      RINGFOLD_ENTRY(cuMemcpyDtoDAsync, copy_on_device),
      RINGFOLD_ENTRY(cuMemcpyDtoHAsync, copy_to_host),
      RINGFOLD_ENTRY(cuMemcpyHtoDAsync, copy_to_device),
      RINGFOLD_ENTRY(cuMemsetD8Async, set_bytes),
      RINGFOLD_ENTRY(cuModuleGetFunction, module_get_function),
      RINGFOLD_ENTRY(cuModuleLoadData, module_load_data),
      RINGFOLD_ENTRY(cuPointerGetAttribute, pointer_get_attribute),
      RINGFOLD_ENTRY(cuStreamBeginCapture, stream_begin_capture),
      RINGFOLD_ENTRY(cuStreamCreate, stream_create),
      RINGFOLD_ENTRY(cuStreamDestroy, stream_destroy),
      RINGFOLD_ENTRY(cuStreamEndCapture, stream_end_capture),
      RINGFOLD_ENTRY(cuStreamGetCaptureInfo, stream_get_capture_info),
      RINGFOLD_ENTRY(cuStreamSynchronize, stream_synchronize),
      RINGFOLD_ENTRY(cuStreamWaitEvent, stream_wait_event),
      RINGFOLD_ENTRY(cuThreadExchangeStreamCaptureMode, exchange_capture_mode),
      RINGFOLD_ENTRY(cuUserObjectCreate, user_object_create),
  };
  return kFunctions;
}

}  // namespace
}  // namespace ringfold::test::emulated

namespace ringfold::test {

void* emulated_function(const char* name) {
  const auto& known = emulated::functions();
  const auto found = known.find(name);
  return found == known.end() ? nullptr : found->second;
}

}  // namespace ringfold::test
