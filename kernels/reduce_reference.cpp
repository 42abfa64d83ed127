// The element bodies in plain loops.
#include <cstring>

#include "kernels/element.h"

namespace ringfold {
namespace {

template <Op op, class T>
void reduce_as(const ReduceCall& call) {
  const auto* a = static_cast<const T*>(call.a);
  const auto* b = static_cast<const T*>(call.b);
  auto* out = static_cast<T*>(call.out);
  const Constants<T> constants(call);
  for (size_t i = 0; i < call.count; ++i) out[i] = combine<op>(a[i], b[i], constants);
  if (call.mirror != nullptr && call.count > 0) {
    std::memcpy(call.mirror, call.out, call.count * sizeof(T));
  }
}

template <class T>
void reduce_type(const ReduceCall& call) {
  switch (call.op) {
    case Op::sum:
      return reduce_as<Op::sum, T>(call);
    case Op::prod:
      return reduce_as<Op::prod, T>(call);
    case Op::max:
      return reduce_as<Op::max, T>(call);
    case Op::min:
      return reduce_as<Op::min, T>(call);
    case Op::avg:
      return reduce_as<Op::avg, T>(call);
    case Op::premul_sum:
      return reduce_as<Op::premul_sum, T>(call);
  }
}

template <class T>
void scale_type(const void* in, void* out, size_t count, double factor) {
  const auto* from = static_cast<const T*>(in);
  auto* to = static_cast<T*>(out);
  for (size_t i = 0; i < count; ++i) to[i] = scale(from[i], static_cast<Factor<T>>(factor));
}

}  // namespace

void reduce_reference(const ReduceCall& call) {
  switch (call.dtype) {
    case DType::i8:
      return reduce_type<int8_t>(call);
    case DType::u8:
      return reduce_type<uint8_t>(call);
    case DType::i32:
      return reduce_type<int32_t>(call);
    case DType::u32:
      return reduce_type<uint32_t>(call);
    case DType::i64:
      return reduce_type<int64_t>(call);
    case DType::u64:
      return reduce_type<uint64_t>(call);
    case DType::f16:
      return reduce_type<F16>(call);
    case DType::f32:
      return reduce_type<float>(call);
    case DType::f64:
      return reduce_type<double>(call);
    case DType::bf16:
      return reduce_type<BF16>(call);
    case DType::f8e4m3:
      return reduce_type<F8E4M3>(call);
    case DType::f8e5m2:
      return reduce_type<F8E5M2>(call);
  }
}

void scale_reference(DType dtype, const void* in, void* out, size_t count, double scale) {
  if (scale == 1.0) {
    if (out != in && count > 0) std::memcpy(out, in, count * size_of(dtype));
    return;
  }
  switch (dtype) {
    case DType::i8:
      return scale_type<int8_t>(in, out, count, scale);
    case DType::u8:
      return scale_type<uint8_t>(in, out, count, scale);
    case DType::i32:
      return scale_type<int32_t>(in, out, count, scale);
    case DType::u32:
      return scale_type<uint32_t>(in, out, count, scale);
    case DType::i64:
      return scale_type<int64_t>(in, out, count, scale);
    case DType::u64:
      return scale_type<uint64_t>(in, out, count, scale);
    case DType::f16:
      return scale_type<F16>(in, out, count, scale);
    case DType::f32:
      return scale_type<float>(in, out, count, scale);
    case DType::f64:
      return scale_type<double>(in, out, count, scale);
    case DType::bf16:
      return scale_type<BF16>(in, out, count, scale);
    case DType::f8e4m3:
      return scale_type<F8E4M3>(in, out, count, scale);
    case DType::f8e5m2:
      return scale_type<F8E5M2>(in, out, count, scale);
  }
}

}  // namespace ringfold
