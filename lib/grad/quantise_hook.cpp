// The pattern is a reduce-scatter and an all-gather, as in the ring, but with numbers that cannot
// be added: so everybody sends each rank that rank's part of its gradients, quantised; the rank
// adds them up in f32, quantises the sum and hands it round. Both roundings have remainders of
// their own: the first with whoever computed the gradient, the second with whoever added them up.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/floats.h"
#include "lib/grad/remainders.h"
#include "ringfold/compression.h"

namespace ringfold {
namespace {

// As it travels: values are code * scale.
struct Block {
  static constexpr size_t kCount = 256;
  float scale;
  std::array<uint8_t, kCount> codes;
};
static_assert(sizeof(Block) == 260);

struct Int8 {
  static constexpr float kLargest = 127;
  static uint8_t encode(float x) {
    const float clamped = std::clamp(std::nearbyint(x), -kLargest, kLargest);
    return static_cast<uint8_t>(static_cast<int8_t>(clamped));
  }
  static float decode(uint8_t code) { return static_cast<int8_t>(code); }
};
struct Fp8 {
  static constexpr float kLargest = 448;
  static uint8_t encode(float x) { return from_f32<F8E4M3>(x).bits; }
  static float decode(uint8_t code) { return to_f32(F8E4M3{code}); }
};

template <class Coding>
void decode(const Block& block, std::span<float> out) {
  for (size_t i = 0; i < out.size(); ++i) out[i] = Coding::decode(block.codes[i]) * block.scale;
}

// Encodes value + remainder of up to a block, and leaves what that has taken away.
template <class Coding>
void encode(std::span<const float> values, std::span<float> remainders, Block* block) {
  float largest = 0;
  bool finite = true;
  for (size_t i = 0; i < values.size(); ++i) {
    remainders[i] += values[i];
    largest = std::max(largest, std::abs(remainders[i]));
    finite = finite && std::isfinite(remainders[i]);
  }
  *block = {};
  // 0 for zeros, and for numbers so small that they wait until they have added up.
  block->scale = finite ? largest / Coding::kLargest : std::numeric_limits<float>::quiet_NaN();
  if (finite && block->scale > 0) {
    for (size_t i = 0; i < values.size(); ++i)
      block->codes[i] = Coding::encode(remainders[i] / block->scale);
  }
  for (size_t i = 0; i < values.size(); ++i)
    remainders[i] =
        grad::remainder_of(remainders[i], Coding::decode(block->codes[i]) * block->scale);
}

template <class Coding>
class Quantise {
 public:
  Status average(Communicator& comm, const Bucket& bucket) {
    const auto ranks = static_cast<size_t>(comm.size());
    const size_t blocks = (bucket.count + Block::kCount - 1) / Block::kCount;
    part_blocks_ = (blocks + ranks - 1) / ranks;
    values_.assign(ranks * part_blocks_ * Block::kCount, 0);
    grad::widen(bucket, bucket.share, std::span(values_).first(bucket.count));
    sent_.resize(ranks * part_blocks_);
    received_.resize(sent_.size());
    encode_all(values_, gradients_.of(bucket, values_.size()), sent_);
    const size_t part_bytes = part_blocks_ * sizeof(Block);
    if (Status status =
            comm.all_to_all(sent_.data(), received_.data(), part_bytes, DType::u8).wait();
        !status.ok())
      return status;
    add_up(ranks);
    sent_.resize(part_blocks_);
    encode_all(sum_, sums_.of(bucket, sum_.size()), sent_);
    if (Status status =
            comm.all_gather(sent_.data(), received_.data(), part_bytes, DType::u8).wait();
        !status.ok())
      return status;
    decode_all(received_, values_);
    grad::narrow(std::span(values_).first(bucket.count), bucket);
    return {};
  }

 private:
  static std::span<float> block_of(std::span<float> all, size_t index) {
    return all.subspan(index * Block::kCount, Block::kCount);
  }
  static void encode_all(std::span<float> values, std::span<float> remainders,
                         std::span<Block> out) {
    for (size_t b = 0; b < out.size(); ++b)
      encode<Coding>(block_of(values, b), block_of(remainders, b), &out[b]);
  }
  static void decode_all(std::span<const Block> blocks, std::span<float> out) {
    for (size_t b = 0; b < blocks.size(); ++b) decode<Coding>(blocks[b], block_of(out, b));
  }
  // What all ranks have sent for this rank's part.
  void add_up(size_t ranks) {
    sum_.assign(part_blocks_ * Block::kCount, 0);
    std::array<float, Block::kCount> one;
    for (size_t r = 0; r < ranks; ++r) {
      for (size_t b = 0; b < part_blocks_; ++b) {
        decode<Coding>(received_[r * part_blocks_ + b], one);
        const std::span<float> sum = block_of(sum_, b);
        for (size_t i = 0; i < one.size(); ++i) sum[i] += one[i];
      }
    }
  }

  grad::Remainders gradients_, sums_;
  size_t part_blocks_ = 0;  // of each rank
  std::vector<float> values_, sum_;
  std::vector<Block> sent_, received_;
};

template <class Coding>
BucketHook make(DType type) {
  auto quantise = std::make_shared<Quantise<Coding>>();
  return {fmt::format("quantise to {}", name(type)),
          [quantise](Communicator& comm, const Bucket& bucket) {
            return quantise->average(comm, bucket);
          }};
}

}  // namespace

Result<BucketHook> quantise_hook(DType type) {
  if (type == DType::i8) return make<Int8>(type);
  if (type == DType::f8e4m3) return make<Fp8>(type);
  return Status(Code::invalid_argument, "quantise_hook: accepted types are i8 and f8e4m3");
}

}  // namespace ringfold
