// The element bodies of a fold in plain loops.
#include <cstring>

#include "kernels/element.h"

namespace ringfold {
namespace {

template <Op op, class T>
void fold_as(const FoldCall& call) {
  auto* out = static_cast<T*>(call.out);
  const FoldConstants<T> constants(call);
  for (size_t i = 0; i < call.count; ++i) out[i] = fold<op>(call.sources, i, constants);
  if (call.mirror != nullptr && call.count > 0) {
    std::memcpy(call.mirror, call.out, call.count * sizeof(T));
  }
}

template <class T>
void fold_type(const FoldCall& call) {
  switch (call.op) {
    case Op::sum:
      return fold_as<Op::sum, T>(call);
    case Op::prod:
      return fold_as<Op::prod, T>(call);
    case Op::max:
      return fold_as<Op::max, T>(call);
    case Op::min:
      return fold_as<Op::min, T>(call);
    case Op::avg:
      return fold_as<Op::avg, T>(call);
    case Op::premul_sum:
      return fold_as<Op::premul_sum, T>(call);
  }
}

}  // namespace

void fold_reference(const FoldCall& call) {
  switch (call.dtype) {
    case DType::i8:
      return fold_type<int8_t>(call);
    case DType::u8:
      return fold_type<uint8_t>(call);
    case DType::i32:
      return fold_type<int32_t>(call);
    case DType::u32:
      return fold_type<uint32_t>(call);
    case DType::i64:
      return fold_type<int64_t>(call);
    case DType::u64:
      return fold_type<uint64_t>(call);
    case DType::f16:
      return fold_type<F16>(call);
    case DType::f32:
      return fold_type<float>(call);
    case DType::f64:
      return fold_type<double>(call);
    case DType::bf16:
      return fold_type<BF16>(call);
    case DType::f8e4m3:
      return fold_type<F8E4M3>(call);
    case DType::f8e5m2:
      return fold_type<F8E5M2>(call);
  }
}

}  // namespace ringfold
