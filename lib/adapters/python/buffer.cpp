#include "lib/adapters/python/buffer.h"

#include <fmt/core.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string_view>

#include "lib/adapters/python/dlpack.h"
#include "ringfold/c.h"

namespace ringfold::python {
namespace {

struct Known {
  std::string_view name;  // as numpy and ml_dtypes call it
  int type;
  size_t numbers;  // of that type in one element
  Reduces reduces;
};
constexpr std::array<Known, 15> kKnown = {{
    {"int8", RINGFOLD_I8, 1, Reduces::all},
    {"uint8", RINGFOLD_U8, 1, Reduces::all},
    {"int32", RINGFOLD_I32, 1, Reduces::all},
    {"uint32", RINGFOLD_U32, 1, Reduces::all},
    {"int64", RINGFOLD_I64, 1, Reduces::all},
    {"uint64", RINGFOLD_U64, 1, Reduces::all},
    {"float16", RINGFOLD_F16, 1, Reduces::all},
    {"float32", RINGFOLD_F32, 1, Reduces::all},
    {"float64", RINGFOLD_F64, 1, Reduces::all},
    {"bfloat16", RINGFOLD_BF16, 1, Reduces::all},
    {"float8_e4m3fn", RINGFOLD_F8E4M3, 1, Reduces::all},
    {"float8_e5m2", RINGFOLD_F8E5M2, 1, Reduces::all},
    {"complex64", RINGFOLD_F32, 2, Reduces::sums},
    {"complex128", RINGFOLD_F64, 2, Reduces::sums},
    {"bool", RINGFOLD_U8, 1, Reduces::order},
}};

// numpy's name of a format of the struct module, or the format itself; empty: wrong byte order.
std::string name_of_format(std::string_view format, size_t bytes) {
  if (!format.empty() && (format[0] == '<' || format[0] == '=' || format[0] == '@'))
    format.remove_prefix(1);
  if (!format.empty() && (format[0] == '>' || format[0] == '!')) {
    if (bytes > 1) return "";
    format.remove_prefix(1);
  }
  if (format == "?") return "bool";
  if (format == "e" || format == "f" || format == "d") return fmt::format("float{}", bytes * 8);
  if (format == "Zf" || format == "Zd") return fmt::format("complex{}", bytes * 8);
  if (format.size() == 1 && std::string_view("bhilqn").find(format) != std::string_view::npos)
    return fmt::format("int{}", bytes * 8);
  if (format.size() == 1 && std::string_view("BHILQN").find(format) != std::string_view::npos)
    return fmt::format("uint{}", bytes * 8);
  return std::string(format);
}

std::string name_of_dlpack(const DlTensor& tensor) {
  switch (static_cast<TypeCode>(tensor.type_code)) {
    case kInt:
      return fmt::format("int{}", tensor.bits);
    case kUInt:
      return fmt::format("uint{}", tensor.bits);
    case kFloat:
      return fmt::format("float{}", tensor.bits);
    case kBfloat:
      return fmt::format("bfloat{}", tensor.bits);
    case kComplex:
      return fmt::format("complex{}", tensor.bits);
    case kBool:
      return "bool";
    case kFloat8E4M3FN:
      return "float8_e4m3fn";
    case kFloat8E5M2:
      return "float8_e5m2";
  }
  return fmt::format("DLPack type {}", tensor.type_code);
}

// In the order of C, without gaps. Strides in any one unit; `unit` is one element in it.
bool contiguous(std::span<const int64_t> shape, std::span<const int64_t> strides, int64_t unit) {
  if (std::ranges::find(shape, 0) != shape.end()) return true;
  int64_t expected = unit;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::string joined(std::span<const int64_t> numbers, const char* between) {
  std::string all;
  for (const int64_t number : numbers) all += (all.empty() ? "" : between) + std::to_string(number);
  return all;
}

size_t product(std::span<const int64_t> shape) {
  size_t all = 1;
  for (const int64_t extent : shape) all *= static_cast<size_t>(extent);
  return all;
}

[[noreturn]] void raise_not_contiguous(const char* name, std::span<const int64_t> shape,
                                       std::span<const int64_t> strides) {
  raise("invalid_argument",
        fmt::format("{} is not contiguous (shape {}, strides {}): pass a contiguous copy, as "
                    "numpy.ascontiguousarray makes it",
                    name, joined(shape, "x"), joined(strides, ", ")));
}

[[noreturn]] void raise_read_only(const char* name) {
  raise("invalid_argument", fmt::format("{} is read-only, but is written to", name));
}

// The exception that is set becomes a ringfold.Error with its text.
[[noreturn]] void raise_from_python(const char* name) {
  const nb::python_error why;
  raise("invalid_argument", fmt::format("{}: {}", name, nb::str(why.value()).c_str()));
}

std::vector<int64_t> integers(nb::handle tuple) {
  std::vector<int64_t> all;
  for (const nb::handle item : tuple) all.push_back(nb::cast<int64_t>(item));
  return all;
}

void* address(nb::handle number) {
  return reinterpret_cast<void*>(nb::cast<uintptr_t>(number));  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

void raise(const char* code, const std::string& text) {
  const nb::object error = nb::module_::import_("ringfold._error").attr("Error")(code, text);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

// REQUIRES that count_ is the number of elements; makes it the count of numbers.
int find(const char* what, const std::string& name, std::span<const char* const> names) {
  std::string accepted;
  for (size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) return static_cast<int>(i);
    accepted += (i == 0 ? "" : ", ") + std::string(names[i]);
  }
  raise("invalid_argument", fmt::format("{} is \"{}\", accepted are {}", what, name, accepted));
}

Buffer Buffer::described(const std::string& type, size_t count) {
  Buffer buffer;
  buffer.count_ = count;
  buffer.set_type(type, 1);
  return buffer;
}

void Buffer::set_type(const std::string& name, size_t bytes) {
  type_name_ = name;
  const auto* const known = std::ranges::find(kKnown, name, &Known::name);
  if (known != kKnown.end()) {
    type_ = known->type;
    count_ *= known->numbers;
    reduces_ = known->reduces;
  } else {  // moved as what it is: bytes
    type_ = RINGFOLD_U8;
    count_ *= bytes;
    reduces_ = Reduces::none;
  }
}

Buffer Buffer::of(nb::handle array, const char* name, Use use, nb::handle stream) {
  Buffer buffer;
  if (array.is_none()) return buffer;
  if (PyObject_CheckBuffer(array.ptr())) {
    if (!buffer.from_protocol(array, name, use) && !buffer.from_extension_type(array, name, use))
      raise_from_python(name);
  } else if (nb::hasattr(array, "__cuda_array_interface__")) {
    buffer.from_cuda(array.attr("__cuda_array_interface__"), name, use);
    buffer.hold_ = std::make_shared<nb::object>(nb::borrow(array));
  } else if (nb::hasattr(array, "__dlpack__")) {
    buffer.from_dlpack(array, name, use, stream);
  } else {
    raise("invalid_argument",
          fmt::format("{} is a {}; accepted are arrays with the buffer protocol (numpy), "
                      "__dlpack__ or __cuda_array_interface__",
                      name, nb::type_name(array.type()).c_str()));
  }
  if (!stream.is_none()) buffer.stream_ = address(stream);
  return buffer;
}

// False: it has elements that the protocol cannot tell; the exception is still set.
bool Buffer::from_protocol(nb::handle array, const char* name, Use use) {
  auto view = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(array.ptr(), view.get(), PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0)
    return false;
  std::shared_ptr<Py_buffer> held(view.release(), [](Py_buffer* released) {
    PyBuffer_Release(released);
    delete released;
  });
  const std::vector<int64_t> shape(held->shape, held->shape + held->ndim);
  const std::vector<int64_t> strides(held->strides, held->strides + held->ndim);
  if (!contiguous(shape, strides, held->itemsize)) raise_not_contiguous(name, shape, strides);
  if (use == Use::write && held->readonly != 0) raise_read_only(name);
  const auto bytes = static_cast<size_t>(held->itemsize);
  const std::string type = name_of_format(held->format != nullptr ? held->format : "B", bytes);
  if (type.empty())
    raise("invalid_argument", fmt::format("{} has numbers of the other byte order", name));
  data_ = held->buf;
  count_ = product(shape);
  set_type(type, bytes);
  hold_ = std::move(held);
  return true;
}

// bfloat16 and float8 of ml_dtypes: numpy cannot tell them by the protocol, but can view them.
bool Buffer::from_extension_type(nb::handle array, const char* name, Use use) {
  const nb::python_error why;  // clears it meanwhile
  if (nb::hasattr(array, "dtype") && nb::hasattr(array, "view")) {
    const auto type = nb::cast<std::string>(array.attr("dtype").attr("name"));
    const auto bytes = nb::cast<size_t>(array.attr("dtype").attr("itemsize"));
    const bool known = std::ranges::find(kKnown, type, &Known::name) != kKnown.end();
    if (known && bytes <= 2) {
      const nb::object raw = array.attr("view")(bytes == 1 ? "u1" : "u2");
      if (!from_protocol(raw, name, use)) return false;
      count_ /= bytes;  // u2 was taken for bytes
      set_type(type, bytes);
      return true;
    }
  }
  raise("invalid_argument", fmt::format("{}: {}", name, nb::str(why.value()).c_str()));
}

void Buffer::from_cuda(nb::handle interface, const char* name, Use use) {
  const std::vector<int64_t> shape = integers(interface["shape"]);
  const auto text = nb::cast<std::string>(interface["typestr"]);
  const size_t bytes = text.size() > 2 ? std::stoul(text.substr(2)) : 1;
  const nb::object strides = interface.attr("get")("strides");
  if (!strides.is_none()) {
    const std::vector<int64_t> given = integers(strides);
    if (!contiguous(shape, given, static_cast<int64_t>(bytes)))
      raise_not_contiguous(name, shape, given);
  }
  if (use == Use::write && nb::cast<bool>(interface["data"][1])) raise_read_only(name);
  data_ = address(interface["data"][0]);
  count_ = product(shape);
  constexpr std::array<std::pair<char, const char*>, 4> kKinds = {
      {{'i', "int"}, {'u', "uint"}, {'f', "float"}, {'c', "complex"}}};
  const auto* const kind = std::ranges::find(kKinds, text.size() > 1 ? text[1] : '?',
                                             &std::pair<char, const char*>::first);
  const bool truth = text.size() > 1 && text[1] == 'b';
  set_type(truth                  ? "bool"
           : kind == kKinds.end() ? text
                                  : fmt::format("{}{}", kind->second, bytes * 8),
           bytes);
  const nb::object stream = interface.attr("get")("stream");
  if (!stream.is_none()) stream_ = address(stream);
}

void Buffer::from_dlpack(nb::handle array, const char* name, Use use, nb::handle stream) {
  nb::object capsule;
  try {
    const auto device = nb::cast<int32_t>(array.attr("__dlpack_device__")()[0]);
    nb::dict options;
    // The producer makes this stream wait for its own: 1 is the default one.
    const bool cuda = device == kCuda || device == kCudaManaged;
    if (cuda) options["stream"] = stream.is_none() ? nb::int_(1) : nb::borrow(stream);
    const nb::object make = array.attr("__dlpack__");
    try {
      nb::dict versioned(nb::borrow<nb::dict>(options.attr("copy")()));
      versioned["max_version"] = nb::make_tuple(1, 0);
      capsule = make(**versioned);
    } catch (const nb::python_error& error) {  // from before versions were asked for
      if (!error.matches(PyExc_TypeError)) throw;
      capsule = make(**options);
    }
  } catch (const nb::python_error& error) {
    raise("invalid_argument", fmt::format("{}: {}", name, nb::str(error.value()).c_str()));
  }
  const bool versioned = PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0;
  void* const content =
      PyCapsule_GetPointer(capsule.ptr(), versioned ? "dltensor_versioned" : "dltensor");
  if (content == nullptr) raise_from_python(name);
  // Whoever renames the capsule has taken its content over.
  PyCapsule_SetName(capsule.ptr(), versioned ? "used_dltensor_versioned" : "used_dltensor");
  const DlTensor* tensor = nullptr;
  bool read_only = false;
  if (versioned) {
    auto* const managed = static_cast<DlManagedVersioned*>(content);
    hold_ = std::shared_ptr<void>(managed, [managed](void*) {
      if (managed->deleter != nullptr) managed->deleter(managed);
    });
    if (managed->major != 1)
      raise("unsupported", fmt::format("{}: DLPack version {}", name, managed->major));
    tensor = &managed->tensor;
    read_only = (managed->flags & kReadOnly) != 0;
  } else {
    auto* const managed = static_cast<DlManaged*>(content);
    hold_ = std::shared_ptr<void>(managed, [managed](void*) {
      if (managed->deleter != nullptr) managed->deleter(managed);
    });
    tensor = &managed->tensor;
  }
  const int32_t device = tensor->device_type;
  if (device != kCpu && device != kCuda && device != kCudaHost && device != kCudaManaged)
    raise("unsupported", fmt::format("{} is on a device of DLPack's type {}; accepted are host "
                                     "memory and CUDA",
                                     name, device));
  const auto dimensions = static_cast<size_t>(tensor->dimensions);
  const std::span shape(tensor->shape, dimensions);
  if (tensor->strides != nullptr && !contiguous(shape, {tensor->strides, dimensions}, 1))
    raise_not_contiguous(name, shape, {tensor->strides, dimensions});
  if (use == Use::write && read_only) raise_read_only(name);
  data_ = static_cast<std::byte*>(tensor->data) + tensor->byte_offset;
  count_ = product(shape);
  const size_t bytes = (tensor->bits * tensor->lanes + 7U) / 8;
  set_type(tensor->lanes == 1 ? name_of_dlpack(*tensor) : "vectors", bytes);
}

}  // namespace ringfold::python
