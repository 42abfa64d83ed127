// The binary interface of DLPack (versions 0.8 and 1.x), as far as arrays are taken in by it: what
// `__dlpack__` returns is a capsule with one of the two structures at the end.
#pragma once

#include <cstdint>

namespace ringfold::python {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12,
};

struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t dimensions;
  uint8_t type_code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

struct DlManaged {  // a capsule named "dltensor"
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManaged*);
};

struct DlManagedVersioned {  // a capsule named "dltensor_versioned"
  uint32_t major, minor;
  void* context;
  void (*deleter)(DlManagedVersioned*);
  uint64_t flags;
  DlTensor tensor;
};

constexpr uint64_t kReadOnly = 1;

}  // namespace ringfold::python
