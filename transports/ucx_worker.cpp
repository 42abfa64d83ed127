#include "transports/ucx_worker.h"

#include <fmt/core.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "transports/ucx_transports.h"

namespace ringfold {
namespace {

// The version whose functions and fields are used: the headers may be newer, and so may the
// library.
constexpr unsigned kApiMajor = 1, kApiMinor = 13;
// Eager bytes that are lent are read by the reductions, a cache line at a time.
constexpr size_t kAlignment = 64;

std::atomic<unsigned> forks{0};

unsigned watch_forks() {
  [[maybe_unused]] static const int kOnce =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  return forks.load(std::memory_order_relaxed);
}

}  // namespace

Result<std::unique_ptr<UcxWorker>> UcxWorker::create(const std::string& net_devices) {
  const Result<const UcxLibrary*> ucx = ucx_library();
  if (!ucx.ok()) return ucx.status();
  std::unique_ptr<UcxWorker> worker(new UcxWorker(**ucx));
  if (Status status = worker->open_context(net_devices); !status.ok()) return status;
  if (Status status = worker->open_worker(); !status.ok()) return status;
  return worker;
}

UcxWorker::UcxWorker(const UcxLibrary& ucx) : ucx_(ucx), forks_(watch_forks()) {}

UcxWorker::~UcxWorker() {
  if (forked()) return;
  if (worker_) ucx_.ucp_worker_destroy(worker_);
  if (context_) ucx_.ucp_cleanup(context_);
}

bool UcxWorker::forked() const {
  return forks.load(std::memory_order_relaxed) != forks_;
}

Status UcxWorker::failed(const char* what, ucs_status_t why) const {
  return {Code::system,
          fmt::format("UCX {} {}: {}. `ucx_info -d` lists its devices; look at the UCX_TLS and "
                      "UCX_NET_DEVICES variables, the limits of locked memory and of open files",
                      ucx_.ucp_get_version_string(), what, ucx_.ucs_status_string(why))};
}

Status UcxWorker::open_context(const std::string& net_devices) {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucx_.ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return failed("cannot read its UCX_* variables", status);
  if (!net_devices.empty())
    status = ucx_.ucp_config_modify(config, "NET_DEVICES", net_devices.c_str());
  if (status == UCS_OK)
    status = ucx_.ucp_config_modify(config, "TLS", ucx_transports_wanted().c_str());
  if (status == UCS_OK) {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    status = ucx_.ucp_init_version(kApiMajor, kApiMinor, &params, config, &context_);
  }
  ucx_.ucp_config_release(config);
  if (status != UCS_OK) {
    context_ = nullptr;
    if (const auto found = ucx_transports(ucx_transports_wanted()); !found.ok())
      return found.status();
    const std::string devices = net_devices.empty() ? "" : " with the devices " + net_devices;
    return failed(("cannot start" + devices).c_str(), status);
  }
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (ucx_.ucp_context_query(context_, &attributes) == UCS_OK)
    reaches_cuda_ = (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
  prefers_eager_ = std::getenv("UCX_RNDV_THRESH") == nullptr && only_tcp();
  return {};
}

// UCX 1.13 tells the transports of a context in words only: "resource 1 : md 1 ... -- tcp/eth0".
bool UcxWorker::only_tcp() const {
  char* text = nullptr;
  size_t length = 0;
  FILE* const stream = open_memstream(&text, &length);
  if (stream == nullptr) return false;
  ucx_.ucp_context_print_info(context_, stream);
  (void)std::fclose(stream);
  const std::unique_ptr<char, decltype(&std::free)> owner(text, &std::free);
  const std::string_view all(text, length);
  constexpr std::string_view kMark = " -- ";
  bool tcp = false;
  for (size_t at = all.find(kMark); at != all.npos; at = all.find(kMark, at)) {
    at += kMark.size();
    const std::string_view name = all.substr(at, all.find('/', at) - at);
    if (name != "tcp" && name != "self") return false;
    tcp |= name == "tcp";
  }
  return tcp;
}

Status UcxWorker::open_worker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  params.am_alignment = kAlignment;
  ucs_status_t status = ucx_.ucp_worker_create(context_, &params, &worker_);
  if (status != UCS_OK) {
    worker_ = nullptr;
    return failed("cannot create a worker", status);
  }
  ucp_address_t* address = nullptr;
  size_t length = 0;
  status = ucx_.ucp_worker_get_address(worker_, &address, &length);
  if (status != UCS_OK) return failed("does not tell its address", status);
  address_.assign(reinterpret_cast<const char*>(address), length);
  ucx_.ucp_worker_release_address(worker_, address);
  status = ucx_.ucp_worker_get_efd(worker_, &descriptor_);
  if (status != UCS_OK) return failed("offers no descriptor to sleep on", status);
  return {};
}

int UcxWorker::arm() {
  if (forked()) return descriptor_;
  return ucx_.ucp_worker_arm(worker_) == UCS_OK ? descriptor_ : -1;
}

}  // namespace ringfold
