#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "lib/grad/remainders.h"
#include "ringfold/compression.h"

namespace ringfold {
namespace {

// As it travels.
struct Element {
  uint32_t place;
  float value;
};

class Sparsify {
 public:
  explicit Sparsify(double share) : share_(share) {}

  Status average(Communicator& comm, const Bucket& bucket) {
    if (bucket.count > std::numeric_limits<uint32_t>::max())
      return {Code::unsupported,
              fmt::format("{} elements: sparse buckets have 32-bit places", bucket.count)};
    const auto ranks = static_cast<size_t>(comm.size());
    values_.resize(bucket.count);
    grad::widen(bucket, bucket.share, values_);
    take_largest(remainders_.of(bucket, bucket.count));
    received_.resize(sent_.size() * ranks);
    if (Status status = comm.all_gather(sent_.data(), received_.data(),
                                        sent_.size() * sizeof(Element), DType::u8)
                            .wait();
        !status.ok())
      return status;
    std::ranges::fill(values_, 0);
    // In the order of the ranks, so that all add up alike.
    for (const Element& element : received_) values_[element.place] += element.value;
    grad::narrow(values_, bucket);
    return {};
  }

 private:
  // Moves the largest elements of values + remainders to sent_; the others remain.
  void take_largest(std::span<float> remainders) {
    const size_t count = values_.size();
    const auto wanted = static_cast<size_t>(std::ceil(share_ * static_cast<double>(count)));
    sent_.resize(std::clamp<size_t>(wanted, std::min<size_t>(count, 1), count));
    for (size_t i = 0; i < count; ++i) remainders[i] += values_[i];
    places_.resize(count);
    std::iota(places_.begin(), places_.end(), uint32_t{0});
    // What is not finite is sent before anything else.
    const auto magnitude = [&](uint32_t place) {
      const float x = std::abs(remainders[place]);
      return std::isnan(x) ? std::numeric_limits<float>::infinity() : x;
    };
    const auto end = places_.begin() + static_cast<ptrdiff_t>(sent_.size());
    std::nth_element(places_.begin(), end, places_.end(),
                     [&](uint32_t a, uint32_t b) { return magnitude(a) > magnitude(b); });
    for (size_t k = 0; k < sent_.size(); ++k) {
      sent_[k] = {places_[k], remainders[places_[k]]};
      remainders[places_[k]] = 0;
    }
    for (float& left : remainders)
      if (!std::isfinite(left)) left = 0;
  }

  const double share_;
  grad::Remainders remainders_;
  std::vector<float> values_;
  std::vector<uint32_t> places_;
  std::vector<Element> sent_, received_;
};

}  // namespace

Result<BucketHook> sparsify_hook(double share) {
  if (!(share > 0 && share <= 1))
    return Status(Code::invalid_argument,
                  fmt::format("sparsify_hook: share {}, accepted are 0 < share <= 1", share));
  auto sparsify = std::make_shared<Sparsify>(share);
  return BucketHook{fmt::format("sparsify to {:g}", share),
                    [sparsify](Communicator& comm, const Bucket& bucket) {
                      return sparsify->average(comm, bucket);
                    }};
}

}  // namespace ringfold
