#include "lib/adapters/python/gradients.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>

#include "lib/adapters/python/work.h"
#include "ringfold/types.h"

namespace ringfold::python {
namespace {

constexpr std::array<const char*, 6> kCompressions = {"none", "f16",    "bf16",
                                                      "i8",   "f8e4m3", "sparse"};

Buffer buffer_of(nb::handle gradient, const std::string& name) {
  if (nb::isinstance<nb::tuple>(gradient))
    return Buffer::described(nb::cast<std::string>(gradient[0]), nb::cast<size_t>(gradient[1]));
  if (nb::hasattr(gradient, "__cuda_array_interface__"))
    raise("unsupported", name + " is device memory: the synchroniser takes host memory");
  return Buffer::of(gradient, name.c_str(), Buffer::Use::write, nb::none());
}

}  // namespace

Gradients::Gradients(ringfold_comm_t comm, const std::vector<std::string>& names,
                     const std::vector<nb::object>& gradients, const Options& options) {
  std::vector<ringfold_parameter> parameters;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const Buffer& buffer = gradients_.emplace_back(buffer_of(gradients[i], names[i]));
    parameters.push_back({names[i].c_str(), buffer.count(), buffer.type(), buffer.data()});
  }
  ringfold_sync_options given{};
  given.first_bytes = options.first_bytes;
  given.bucket_bytes = options.bucket_bytes;
  given.require_all = options.require_all ? 1 : 0;
  given.compression = find("compression", options.compression, kCompressions);
  given.sparse_share = options.sparse_share;
  ringfold_status status = RINGFOLD_OK;
  {
    const nb::gil_scoped_release others;
    status =
        ringfold_gradient_sync_create(&handle_, comm, parameters.data(), parameters.size(), &given);
  }
  check(status);
}

Gradients::~Gradients() {
  const nb::gil_scoped_release others;
  ringfold_gradient_sync_destroy(handle_);
}

void Gradients::begin(std::optional<double> weight) {
  check(weight ? ringfold_gradient_sync_begin_weighted(handle_, *weight)
               : ringfold_gradient_sync_begin(handle_));
}

void Gradients::ready(size_t parameter) const {
  check(ringfold_gradient_sync_ready(handle_, parameter));
}

void Gradients::finish() {
  ringfold_status status = RINGFOLD_OK;
  {
    const nb::gil_scoped_release others;
    status = ringfold_gradient_sync_finish(handle_);
  }
  check(status);
}

void Gradients::accumulate(bool on) const {
  check(ringfold_gradient_sync_accumulate(handle_, on ? 1 : 0));
}

nb::object Gradients::memory(nb::handle self, size_t parameter) const {
  void* data = nullptr;
  check(ringfold_gradient_sync_gradient(handle_, parameter, &data));
  const Buffer& buffer = gradients_[parameter];
  const size_t bytes = buffer.count() * size_of(static_cast<DType>(buffer.type()));
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes}, self));
}

nb::dict Gradients::report() const {
  ringfold_sync_report from;
  check(ringfold_gradient_sync_report(handle_, &from));
  std::vector<size_t> unused(from.unused);
  check(ringfold_gradient_sync_unused(handle_, unused.data(), unused.size()));
  nb::list names;
  for (const size_t parameter : unused) names.append(parameter);
  nb::dict to;
  to["divisor"] = from.divisor;
  to["unused"] = names;
  to["buckets"] = from.buckets;
  to["copied_bytes"] = from.copied_bytes;
  to["gradient_bytes"] = from.gradient_bytes;
  to["bytes_sent"] = from.bytes_sent;
  to["busy_seconds"] = from.busy_seconds;
  to["exposed_seconds"] = from.exposed_seconds;
  return to;
}

void Gradients::abort(const std::string& why) const {
  check(ringfold_gradient_sync_abort(handle_, why.c_str()));
}

}  // namespace ringfold::python
