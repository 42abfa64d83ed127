#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/floats.h"
#include "lib/grad/remainders.h"
#include "ringfold/compression.h"

namespace ringfold {
namespace {

// The largest finite number of the type.
template <class Small>
float largest() {
  return to_f32(Small{static_cast<typename Small::Bits>(Small::kTop - 1)});
}

template <class Small>
class Cast {
 public:
  explicit Cast(DType type) : type_(type) {}

  Status average(Communicator& comm, const Bucket& bucket) {
    if (size_of(bucket.type) <= sizeof(Small)) return average_bucket(comm, bucket);
    // Op::avg divides by the number of ranks; what is sent is as large as a gradient.
    values_.resize(bucket.count);
    grad::widen(bucket, bucket.share * comm.size(), values_);
    round_all(remainders_.of(bucket, bucket.count));
    if (Status status =
            comm.all_reduce(sent_.data(), sent_.data(), bucket.count, type_, Op::avg).wait();
        !status.ok())
      return status;
    for (size_t i = 0; i < bucket.count; ++i) values_[i] = to_f32(sent_[i]);
    grad::narrow(values_, bucket);
    return {};
  }

 private:
  void round_all(std::span<float> remainders) {
    const float limit = largest<Small>();
    sent_.resize(values_.size());
    for (size_t i = 0; i < values_.size(); ++i) {
      const float wanted = values_[i] + remainders[i];
      const float finite = std::isfinite(wanted) ? std::clamp(wanted, -limit, limit) : wanted;
      sent_[i] = from_f32<Small>(finite);
      remainders[i] = grad::remainder_of(wanted, to_f32(sent_[i]));
    }
  }

  const DType type_;
  grad::Remainders remainders_;
  std::vector<float> values_;
  std::vector<Small> sent_;
};

template <class Small>
BucketHook make(DType type) {
  auto cast = std::make_shared<Cast<Small>>(type);
  return {fmt::format("cast to {}", name(type)),
          [cast](Communicator& comm, const Bucket& bucket) { return cast->average(comm, bucket); }};
}

}  // namespace

Result<BucketHook> cast_hook(DType type) {
  if (type == DType::f16) return make<F16>(type);
  if (type == DType::bf16) return make<BF16>(type);
  return Status(Code::invalid_argument, "cast_hook: accepted types are f16 and bf16");
}

}  // namespace ringfold
