// The compressing hooks: what they send is counted, what rounding takes away comes back, all ranks
// get the same bits, and the digits are learnt as well as without them.
#include "ringfold/compression.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "kernels/floats.h"
#include "test/digits_ranks.h"
#include "test/gradient_ranks.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

using MakeHook = std::function<Result<BucketHook>()>;

struct Compression {
  const char* name;
  MakeHook make;
  // Of the bytes that the plain ring sends, on so many ranks.
  std::function<double(int ranks)> share;
  double late;  // most that can be owed of an element, in units of the largest gradient
};

constexpr double kSparse = 0.25;

std::vector<Compression> compressions() {
  const auto half = [](int) { return 0.5; };
  const auto blocks = [](int) { return 260.0 / 256 / 4; };
  return {
      {"bf16", [] { return cast_hook(DType::bf16); }, half, 1.0 / 256},
      {"f16", [] { return cast_hook(DType::f16); }, half, 1.0 / 2048},
      // Half a step where the gradient is computed, and half a step where the sum is.
      {"i8", [] { return quantise_hook(DType::i8); }, blocks, 1.05 / 127},
      {"f8e4m3", [] { return quantise_hook(DType::f8e4m3); }, blocks, 1.1 / 16},
      {"sparse", [] { return sparsify_hook(kSparse); }, [](int ranks) { return kSparse * ranks; },
       3 / kSparse},
  };
}

// One bucket of `count` elements of any type, seen as floats.
struct OneBucket {
  OneBucket(Communicator& comm, DType type, size_t count, const Result<BucketHook>& hook)
      : type(type), count(count) {
    SyncOptions options;
    options.first_bytes = size_t{1} << 30;
    if (hook.ok()) options.hook = *hook;
    auto made = GradientSync::create(comm, {{"w", count, type, nullptr}}, options);
    status = hook.ok() ? made.status() : hook.status();
    if (made.ok()) sync = std::make_unique<GradientSync>(std::move(*made));
  }
  // One step in which element i is value(i).
  template <class F>
  Status step(F value, double weight = 1) {
    void* const at = sync->gradient(0);
    for (size_t i = 0; i < count; ++i) {
      const auto x = static_cast<float>(value(i));
      if (type == DType::f32) static_cast<float*>(at)[i] = x;
      if (type == DType::f64) static_cast<double*>(at)[i] = x;
      if (type == DType::f16) static_cast<F16*>(at)[i] = from_f32<F16>(x);
      if (type == DType::bf16) static_cast<BF16*>(at)[i] = from_f32<BF16>(x);
    }
    if (Status begun = sync->begin(weight); !begun.ok()) return begun;
    if (Status given = sync->ready(0); !given.ok()) return given;
    return sync->finish();
  }
  [[nodiscard]] double operator[](size_t i) const {
    const void* const at = sync->gradient(0);
    if (type == DType::f32) return static_cast<const float*>(at)[i];
    if (type == DType::f64) return static_cast<const double*>(at)[i];
    if (type == DType::f16) return to_f32(static_cast<const F16*>(at)[i]);
    return to_f32(static_cast<const BF16*>(at)[i]);
  }
  // The same bits on all ranks?
  [[nodiscard]] bool identical(Communicator& comm) const {
    const size_t bytes = count * size_of(type);
    std::vector<char> all(bytes * static_cast<size_t>(comm.size()));
    if (!comm.all_gather(sync->gradient(0), all.data(), bytes, DType::u8).wait().ok()) return false;
    for (int r = 1; r < comm.size(); ++r)
      if (std::memcmp(all.data(), all.data() + static_cast<size_t>(r) * bytes, bytes) != 0)
        return false;
    return true;
  }

  DType type;
  size_t count;
  Status status;
  std::unique_ptr<GradientSync> sync;
};

// The gradient of a rank: constant, so that what is sent in many steps can be added up.
double gradient(size_t i, int rank) {
  return std::sin(static_cast<double>(i * 13 + static_cast<size_t>(rank) * 7 + 1));
}
double average(size_t i, int ranks) {
  double sum = 0;
  for (int r = 0; r < ranks; ++r) sum += gradient(i, r);
  return sum / ranks;
}

}  // namespace

TEST_CASE("compressed buckets send the bytes they promise, counted by the transports") {
  constexpr size_t kCount = 256 * 12 * 40;  // whole blocks for 2, 3 and 4 ranks
  for (const char* transport : {"loopback", "shm"}) {
    for (const int n : {2, 3, 4}) {
      const Way way = {std::string_view(transport) == "loopback", transport};
      INFO(way.name() << ", " << n << " ranks");
      CHECK(on_ranks(way, n, [](Communicator& comm, Verdict& verdict) {
              const auto zero = [](size_t) { return 1.0; };
              const double ring = 2.0 * (comm.size() - 1) / comm.size() * kCount * 4;
              for (const Compression& one : compressions()) {
                OneBucket bucket(comm, DType::f32, kCount, one.make());
                if (!verdict.ok(bucket.status)) return;
                verdict.ok(bucket.step(zero));
                const double weight_bytes = 64;  // of the weights themselves, at most
                const double expected = one.share(comm.size()) * ring;
                const auto sent = static_cast<double>(bucket.sync->report().bytes_sent);
                verdict.expect(
                    sent >= expected * 0.999 && sent <= expected * 1.001 + weight_bytes,
                    fmt::format("{}: {} bytes sent, expected {}", one.name, sent, expected));
                verdict.expect(bucket.sync->report().gradient_bytes == kCount * 4, "gradients");
              }
            }) == "");
    }
  }
}

TEST_CASE("what rounding takes away comes back: sums over many steps are right") {
  constexpr size_t kCount = 1000;  // no whole number of blocks
  constexpr int kSteps = 60;
  for (const Way& way : ways()) {
    for (const int n : {1, 2, 3}) {
      INFO(way.name() << ", " << n << " ranks");
      CHECK(on_ranks(way, n, [](Communicator& comm, Verdict& verdict) {
              for (const Compression& one : compressions()) {
                OneBucket bucket(comm, DType::f32, kCount, one.make());
                if (!verdict.ok(bucket.status)) return;
                std::vector<double> sums(kCount);
                for (int step = 0; step < kSteps; ++step) {
                  if (!verdict.ok(bucket.step([&](size_t i) { return gradient(i, comm.rank()); })))
                    return;
                  for (size_t i = 0; i < kCount; ++i) sums[i] += bucket[i];
                  if (step % 10 == 0)
                    verdict.expect(bucket.identical(comm), fmt::format("{}: bits", one.name));
                }
                double worst = 0;
                for (size_t i = 0; i < kCount; ++i)
                  worst = std::max(worst, std::abs(sums[i] - kSteps * average(i, comm.size())));
                // Casts: the all_reduce rounds in every step, and that is not remembered.
                const bool cast = std::string_view(one.name).ends_with("f16");
                const double bound = cast ? one.late * kSteps : one.late;
                verdict.expect(worst <= bound, fmt::format("{}: off by {}, at most {} expected",
                                                           one.name, worst, bound));
              }
            }) == "");
    }
  }
}

TEST_CASE("every type of gradient, and weights, can be compressed") {
  CHECK(on_ranks({true, "region"}, 2, [](Communicator& comm, Verdict& verdict) {
          for (const DType type : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
            for (const Compression& one : compressions()) {
              OneBucket bucket(comm, type, 300, one.make());
              if (!verdict.ok(bucket.status)) return;
              const bool sparse = std::string_view(one.name) == "sparse";
              // Of 3 parts and 1: 3/4 * 8 + 1/4 * 4 = 7; sparse ones need some steps.
              double sum = 0;
              const int steps = sparse ? 100 : 1;
              for (int step = 0; step < steps; ++step) {
                const double mine = comm.rank() == 0 ? 8 : 4;
                verdict.ok(bucket.step([&](size_t) { return mine; }, comm.rank() == 0 ? 3 : 1));
                sum += bucket[123];
              }
              const double off = std::abs(sum / steps - 7) / 7;
              verdict.expect(off < (sparse ? 0.2 : 0.04),
                             fmt::format("{} of {}: {}", one.name, name(type), sum / steps));
            }
          }
        }) == "");
}

TEST_CASE("what is not finite shows in the average, and is forgotten afterwards") {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {infinity, -infinity, nan}) {
    INFO(bad);
    CHECK(on_ranks({true, "region"}, 2, [&](Communicator& comm, Verdict& verdict) {
            for (const Compression& one : compressions()) {
              OneBucket bucket(comm, DType::f32, 600, one.make());
              if (!verdict.ok(bucket.status)) return;
              verdict.ok(bucket.step([&](size_t i) {
                return i == 300 && comm.rank() == 1 ? static_cast<double>(bad) : 1.0;
              }));
              verdict.expect(!std::isfinite(bucket[300]), fmt::format("{}: hidden", one.name));
              verdict.expect(std::isfinite(bucket[10]), fmt::format("{}: spread", one.name));
              for (int step = 0; step < 3; ++step) {
                verdict.ok(bucket.step([](size_t) { return 1.0; }));
                for (size_t i = 0; i < 600; ++i)
                  verdict.expect(std::isfinite(bucket[i]), fmt::format("{}: kept", one.name));
              }
            }
          }) == "");
  }
}

TEST_CASE("tiny gradients, and those too large for f16, arrive in time") {
  CHECK(on_ranks({true, "region"}, 2, [](Communicator& comm, Verdict& verdict) {
          // 2^-27 is a quarter of what f16 can tell from 0: after two steps it is more than half.
          OneBucket tiny(comm, DType::f32, 10, cast_hook(DType::f16));
          OneBucket large(comm, DType::f32, 10, cast_hook(DType::f16));
          if (!verdict.ok(tiny.status) || !verdict.ok(large.status)) return;
          double sum = 0;
          for (int step = 0; step < 80; ++step) {
            verdict.ok(tiny.step([](size_t) { return std::ldexp(1, -27); }));
            sum += tiny[3];
          }
          verdict.expect(std::abs(sum - std::ldexp(80, -27)) <= std::ldexp(1, -24), "tiny");
          // 100000 once: 65504 at once, the rest in the next step.
          verdict.ok(large.step([](size_t) { return 100000.0; }));
          verdict.expect(large[3] == 65504, "as much as f16 holds");
          verdict.ok(large.step([](size_t) { return 0.0; }));
          verdict.expect(std::abs(large[3] - (100000 - 65504)) <= 16, "the rest");
        }) == "");
}

TEST_CASE("when buckets are laid out anew, what hooks remembered of the old ones is void") {
  CHECK(on_ranks({true, "region"}, 2, [](Communicator& comm, Verdict& verdict) {
          for (const Compression& one : compressions()) {
            std::vector<std::vector<float>> memory;
            std::vector<Parameter> parameters;
            for (const size_t count : {100, 300, 500, 700}) {
              memory.emplace_back(count);
              parameters.push_back({"w", count, DType::f32, memory.back().data()});
            }
            SyncOptions options;
            options.first_bytes = options.bucket_bytes = 2400;
            options.hook = *one.make();
            auto sync = GradientSync::create(comm, parameters, options);
            if (!verdict.ok(sync.status())) return;
            const BucketPlan before = sync->plan();
            for (int step = 0; step < 3; ++step) {
              verdict.ok(sync->begin());
              for (size_t i = 0; i < 4; ++i) {
                for (size_t k = 0; k < memory[i].size(); ++k)
                  memory[i][k] = step == 0 ? 1000.3f + static_cast<float>(k) / 7 : 0;
                verdict.ok(sync->ready(i));
              }
              verdict.ok(sync->finish());
              if (step == 0) continue;
              for (const auto& values : memory)
                verdict.expect(std::ranges::all_of(values, [](float x) { return x == 0; }),
                               one.name);
            }
            verdict.expect(sync->plan() != before, "nothing was laid out anew");
          }
        }) == "");
}

TEST_CASE("hooks that cannot be are refused") {
  CHECK(cast_hook(DType::f32).status().code() == Code::invalid_argument);
  CHECK(quantise_hook(DType::u8).status().code() == Code::invalid_argument);
  for (const double share : {0.0, -0.1, 1.5, std::numeric_limits<double>::quiet_NaN()})
    CHECK(sparsify_hook(share).status().code() == Code::invalid_argument);
}

// ---- the digits -------------------------------------------------------------------------------

namespace {

constexpr int kDigitsSteps = 200;

AverageStep synchronised(Communicator& comm, DigitsNetwork& network, const MakeHook& hook) {
  std::vector<Parameter> parameters;
  for (int tensor = 0; tensor < DigitsNetwork::kTensors; ++tensor) {
    const std::span<float> values = network.gradient(tensor);
    parameters.push_back({"tensor", values.size(), DType::f32, values.data()});
  }
  SyncOptions options;
  if (hook) options.hook = *hook();
  auto made = GradientSync::create(comm, parameters, options);
  if (!made.ok()) return [why = made.status()](double) { return why; };
  auto sync = std::make_shared<GradientSync>(std::move(*made));
  return [sync](double samples) {
    if (Status status = sync->begin(samples); !status.ok()) return status;
    for (size_t i = DigitsNetwork::kTensors; i-- > 0;)
      if (Status status = sync->ready(i); !status.ok()) return status;
    return sync->finish();
  };
}

Curve learn(const std::vector<Digit>& digits, const std::vector<size_t>& shards,
            const MakeHook& hook) {
  const Shared<Curve> curve;
  Options options;
  options.transports = "shm";
  CHECK(run_ranks(static_cast<int>(shards.size()), 60s, [&](const Rendezvous& me) {
          return train(
              me, options, shard(digits, shards, me.rank), kDigitsSteps,
              [&](Communicator& comm, DigitsNetwork& network) {
                return synchronised(comm, network, hook);
              },
              &*curve);
        }) == "");
  return *curve;
}

}  // namespace

TEST_CASE("with compressed gradients the digits are learnt as well, and fewer bytes are sent") {
  const std::vector<Digit> digits = load_digits();
  const std::vector<size_t> shards = {1000, 797};
  const Curve plain = learn(digits, shards, nullptr);
  CHECK(plain.accuracy > 0.98);
  fmt::print("| hook     | final loss | against plain | accuracy | bytes sent | saved  |\n");
  const auto print = [&](const char* name, const Curve& curve) {
    fmt::print(
        "| {:8} | {:10.6f} | {:+12.3f}% | {:7.2f}% | {:10} | {:5.1f}% |\n", name, curve.final_loss,
        100 * (curve.final_loss / plain.final_loss - 1), 100 * curve.accuracy, curve.bytes_sent,
        100 * (1 - static_cast<double>(curve.bytes_sent) / static_cast<double>(plain.bytes_sent)));
  };
  print("none", plain);
  for (const Compression& one : compressions()) {
    INFO(one.name);
    const Curve curve = learn(digits, shards, one.make);
    print(one.name, curve);
    CHECK(std::abs(curve.final_loss - plain.final_loss) < 0.01 * plain.final_loss);
    CHECK(static_cast<double>(curve.bytes_sent) < 0.6 * static_cast<double>(plain.bytes_sent));
  }
}
