// An array of Python as the library takes it: address, element type and count of memory that stays
// where it is for as long as the Buffer lives.
//
// Thread-safety: only with the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace ringfold::python {

namespace nb = nanobind;

// Which reductions make sense on the elements. `sums`: sum, avg and premul_sum, as complex numbers
// have them; `order`: min and max, as truth values have them; none: they are only moved.
enum class Reduces : uint8_t { all, sums, order, none };

class Buffer {
 public:
  enum class Use : uint8_t { read, write };

  // Takes what has the buffer protocol (numpy), `__cuda_array_interface__` or `__dlpack__` (torch,
  // cupy, jax). `stream`: of the caller, for device memory; None: that of the array, if it says
  // one. Raises ringfold.Error for what is not contiguous, not writable though it must be, or
  // unknown. `name` is the argument's, for the text. None: no memory, no elements.
  static Buffer of(nb::handle array, const char* name, Use use, nb::handle stream);

  // So many elements of a type of numpy or ml_dtypes, without memory.
  static Buffer described(const std::string& type, size_t count);

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] size_t count() const { return count_; }  // of numbers of type()
  [[nodiscard]] int type() const { return type_; }       // ringfold_dtype
  [[nodiscard]] const std::string& type_name() const { return type_name_; }
  [[nodiscard]] Reduces reduces() const { return reduces_; }
  [[nodiscard]] void* stream() const { return stream_; }

 private:
  void set_type(const std::string& name, size_t bytes);
  bool from_protocol(nb::handle array, const char* name, Use use);
  bool from_extension_type(nb::handle array, const char* name, Use use);
  void from_cuda(nb::handle interface, const char* name, Use use);
  void from_dlpack(nb::handle array, const char* name, Use use, nb::handle stream);

  void* data_ = nullptr;
  size_t count_ = 0;
  int type_ = 1;  // bytes
  std::string type_name_ = "nothing";
  Reduces reduces_ = Reduces::all;
  void* stream_ = nullptr;
  std::shared_ptr<void> hold_;  // keeps the memory
};

// The place of a name in a list of them. Raises ringfold.Error if it is not among them.
int find(const char* what, const std::string& name, std::span<const char* const> names);

// Raises ringfold.Error.
[[noreturn]] void raise(const char* code, const std::string& text);

}  // namespace ringfold::python
