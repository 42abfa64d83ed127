#include "lib/grad/remainders.h"

#include <algorithm>

#include "kernels/floats.h"

namespace ringfold::grad {
namespace {

template <class Small>
void widen_small(const void* from, double factor, std::span<float> out) {
  const auto* const values = static_cast<const Small*>(from);
  const auto f = static_cast<float>(factor);
  for (size_t i = 0; i < out.size(); ++i) out[i] = to_f32(values[i]) * f;
}

template <class Small>
void narrow_small(std::span<const float> values, void* to) {
  auto* const out = static_cast<Small*>(to);
  for (size_t i = 0; i < values.size(); ++i) out[i] = from_f32<Small>(values[i]);
}

template <class T>
void widen_native(const void* from, double factor, std::span<float> out) {
  const auto* const values = static_cast<const T*>(from);
  const auto f = static_cast<T>(factor);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(values[i] * f);
}

}  // namespace

void widen(const Bucket& bucket, double factor, std::span<float> out) {
  switch (bucket.type) {
    case DType::f16:
      return widen_small<F16>(bucket.data, factor, out);
    case DType::bf16:
      return widen_small<BF16>(bucket.data, factor, out);
    case DType::f8e4m3:
      return widen_small<F8E4M3>(bucket.data, factor, out);
    case DType::f8e5m2:
      return widen_small<F8E5M2>(bucket.data, factor, out);
    case DType::f32:
      return widen_native<float>(bucket.data, factor, out);
    case DType::f64:
      return widen_native<double>(bucket.data, factor, out);
    case DType::i8:
    case DType::u8:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64:
      return;  // no gradient is of these: GradientSync::create refuses them
  }
}

void narrow(std::span<const float> values, const Bucket& bucket) {
  switch (bucket.type) {
    case DType::f16:
      return narrow_small<F16>(values, bucket.data);
    case DType::bf16:
      return narrow_small<BF16>(values, bucket.data);
    case DType::f8e4m3:
      return narrow_small<F8E4M3>(values, bucket.data);
    case DType::f8e5m2:
      return narrow_small<F8E5M2>(values, bucket.data);
    case DType::f32:
      std::copy(values.begin(), values.end(), static_cast<float*>(bucket.data));
      return;
    case DType::f64:
      std::copy(values.begin(), values.end(), static_cast<double*>(bucket.data));
      return;
    case DType::i8:
    case DType::u8:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64:
      return;
  }
}

std::span<float> Remainders::of(const Bucket& bucket, size_t count) {
  if (layout_ != bucket.layout) buckets_.clear();
  layout_ = bucket.layout;
  if (buckets_.size() <= bucket.index) buckets_.resize(bucket.index + 1);
  buckets_[bucket.index].resize(count);
  return buckets_[bucket.index];
}

}  // namespace ringfold::grad
