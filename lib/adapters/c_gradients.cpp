// The C interface of the gradient synchroniser.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/adapters/c_common.h"
#include "ringfold/c.h"
#include "ringfold/compression.h"
#include "ringfold/gradient_sync.h"

namespace ringfold::c {
namespace {

using Sync = std::shared_ptr<GradientSync>;

Registry<ringfold_gradient_sync_t, Sync>& syncs() {
  static auto& registry = *new Registry<ringfold_gradient_sync_t, Sync>("gradient synchroniser");
  return registry;
}

template <class Call>
ringfold_status with_sync(ringfold_gradient_sync_t sync, Call call) {
  Result<Sync> found = syncs().find(sync);
  return answer(found.ok() ? call(**found) : found.status());
}

// The handle by which a hook in C uses the synchroniser's own communicator.
class HookHandle {
 public:
  HookHandle() = default;
  HookHandle(const HookHandle&) = delete;
  HookHandle& operator=(const HookHandle&) = delete;
  ~HookHandle() {
    if (handle_ != nullptr) (void)communicators().remove(handle_);
  }
  ringfold_comm_t of(Communicator& comm) {
    if (handle_ == nullptr) handle_ = communicators().add(comm);
    return handle_;
  }

 private:
  ringfold_comm_t handle_ = nullptr;
};

Status call_hook(const ringfold_sync_options& options, ringfold_comm_t comm, const Bucket& bucket) {
  const ringfold_bucket seen = {bucket.index, static_cast<ringfold_dtype>(bucket.type),
                                bucket.data,  bucket.count,
                                bucket.share, bucket.equal ? 1 : 0,
                                bucket.layout};
  last_error.clear();
  const int code = options.hook(comm, &seen, options.hook_context);
  if (code == RINGFOLD_OK) return {};
  const bool known = code > 0 && code <= RINGFOLD_INTERNAL;
  return {known ? static_cast<Code>(code) : Code::internal,
          last_error.empty() ? fmt::format("the hook returned {}", code) : last_error};
}

Result<BucketHook> to_hook(const ringfold_sync_options& given) {
  if (given.hook != nullptr) {
    auto handle = std::make_shared<HookHandle>();
    return BucketHook{given.hook_name != nullptr ? given.hook_name : "",
                      [given, handle](Communicator& comm, const Bucket& bucket) {
                        return call_hook(given, handle->of(comm), bucket);
                      }};
  }
  switch (given.compression) {
    case RINGFOLD_COMPRESSION_NONE:
      return BucketHook();
    case RINGFOLD_COMPRESSION_F16:
      return cast_hook(DType::f16);
    case RINGFOLD_COMPRESSION_BF16:
      return cast_hook(DType::bf16);
    case RINGFOLD_COMPRESSION_I8:
      return quantise_hook(DType::i8);
    case RINGFOLD_COMPRESSION_F8E4M3:
      return quantise_hook(DType::f8e4m3);
    case RINGFOLD_COMPRESSION_SPARSE:
      return sparsify_hook(given.sparse_share);
    default:  // a number of the caller
      return invalid(fmt::format("options.compression is {}, accepted are 0 (none) to {}",
                                 given.compression, RINGFOLD_COMPRESSION_SPARSE));
  }
}

Result<SyncOptions> to_sync_options(const ringfold_sync_options& given) {
  SyncOptions options;
  if (given.first_bytes != 0) options.first_bytes = given.first_bytes;
  if (given.bucket_bytes != 0) options.bucket_bytes = given.bucket_bytes;
  options.require_all = given.require_all != 0;
  Result<BucketHook> hook = to_hook(given);
  if (!hook.ok()) return hook.status();
  options.hook = std::move(*hook);
  return options;
}

Result<std::vector<Parameter>> to_parameters(const ringfold_parameter* given, size_t number) {
  if (given == nullptr && number > 0) return null_pointer("parameters");
  std::vector<Parameter> parameters;
  for (size_t i = 0; i < number; ++i) {
    const Result<DType> type = to_dtype(given[i].type);
    if (!type.ok()) return invalid(fmt::format("parameters[{}]: {}", i, type.status().message()));
    parameters.push_back(
        {given[i].name != nullptr ? given[i].name : "", given[i].count, *type, given[i].gradient});
  }
  return parameters;
}

Status create(ringfold_gradient_sync_t* out, ringfold_comm_t comm, const ringfold_parameter* given,
              size_t number, const ringfold_sync_options* chosen) {
  if (out == nullptr) return null_pointer("sync");
  if (Status may = may_block(); !may.ok()) return may;
  Result<std::vector<Parameter>> parameters = to_parameters(given, number);
  if (!parameters.ok()) return parameters.status();
  Result<SyncOptions> options =
      to_sync_options(chosen != nullptr ? *chosen : ringfold_sync_options{});
  if (!options.ok()) return options.status();
  return with(comm, [&](Communicator& found) {
    Result<GradientSync> made =
        GradientSync::create(found, std::move(*parameters), std::move(*options));
    if (made.ok()) *out = syncs().add(std::make_shared<GradientSync>(std::move(*made)));
    return made.status();
  });
}

ringfold_sync_report to_report(const GradientSync& sync) {
  const SyncReport& from = sync.report();
  ringfold_sync_report report{};
  report.divisor = from.divisor;
  report.buckets = sync.plan().size();
  report.unused = from.unused.size();
  report.copied_bytes = sync.copied_bytes();
  report.gradient_bytes = from.gradient_bytes;
  report.bytes_sent = from.bytes_sent;
  report.busy_seconds = from.busy_seconds;
  report.exposed_seconds = from.exposed_seconds;
  return report;
}

}  // namespace
}  // namespace ringfold::c

using namespace ringfold;
using namespace ringfold::c;

extern "C" {

ringfold_status ringfold_gradient_sync_create(ringfold_gradient_sync_t* sync, ringfold_comm_t comm,
                                              const ringfold_parameter* parameters, size_t number,
                                              const ringfold_sync_options* options) {
  return answer(create(sync, comm, parameters, number, options));
}

ringfold_status ringfold_gradient_sync_destroy(ringfold_gradient_sync_t sync) {
  return answer(syncs().remove(sync));
}

ringfold_status ringfold_gradient_sync_begin(ringfold_gradient_sync_t sync) {
  return with_sync(sync, [](GradientSync& found) { return found.begin(); });
}

ringfold_status ringfold_gradient_sync_begin_weighted(ringfold_gradient_sync_t sync,
                                                      double weight) {
  return with_sync(sync, [&](GradientSync& found) { return found.begin(weight); });
}

ringfold_status ringfold_gradient_sync_ready(ringfold_gradient_sync_t sync, size_t parameter) {
  return with_sync(sync, [&](GradientSync& found) { return found.ready(parameter); });
}

ringfold_status ringfold_gradient_sync_finish(ringfold_gradient_sync_t sync) {
  if (Status may = may_block(); !may.ok()) return answer(may);
  return with_sync(sync, [](GradientSync& found) { return found.finish(); });
}

ringfold_status ringfold_gradient_sync_accumulate(ringfold_gradient_sync_t sync, int on) {
  return with_sync(sync, [&](GradientSync& found) {
    found.accumulate(on != 0);
    return Status();
  });
}

ringfold_status ringfold_gradient_sync_gradient(ringfold_gradient_sync_t sync, size_t parameter,
                                                void** gradient) {
  if (gradient == nullptr) return answer(null_pointer("gradient"));
  return with_sync(sync, [&](GradientSync& found) {
    if (parameter >= found.parameters())
      return invalid(
          fmt::format("parameter {}: there are {} parameters", parameter, found.parameters()));
    *gradient = found.gradient(parameter);
    return Status();
  });
}

ringfold_status ringfold_gradient_sync_report(ringfold_gradient_sync_t sync,
                                              ringfold_sync_report* report) {
  if (report == nullptr) return answer(null_pointer("report"));
  return with_sync(sync, [&](GradientSync& found) {
    *report = to_report(found);
    return Status();
  });
}

ringfold_status ringfold_gradient_sync_unused(ringfold_gradient_sync_t sync, size_t* parameters,
                                              size_t room) {
  if (parameters == nullptr && room > 0) return answer(null_pointer("parameters"));
  return with_sync(sync, [&](GradientSync& found) {
    const std::vector<size_t>& unused = found.report().unused;
    std::copy_n(unused.begin(), std::min(room, unused.size()), parameters);
    return Status();
  });
}

ringfold_status ringfold_gradient_sync_abort(ringfold_gradient_sync_t sync, const char* why) {
  return with_sync(sync, [&](GradientSync& found) {
    if (why != nullptr) {
      found.abort(why);
    } else {
      found.abort();
    }
    return Status();
  });
}

}  // extern "C"
