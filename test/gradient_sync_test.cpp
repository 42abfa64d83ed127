// The synchroniser on ranks that are threads and processes: averages are exact, whatever the order
// of readiness, the layout in memory, the weights and the steps without synchronisation.
#include "ringfold/gradient_sync.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "kernels/floats.h"
#include "test/gradient_ranks.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr uint32_t kSeed = 20260930;

// A model's gradients in any of the types that training uses. Values are small integers, so that
// every average below is exact in each of them.
class Model {
 public:
  // `lives_in_buckets`: every so many-th parameter does; 0: none.
  Model(const std::vector<size_t>& counts, const std::vector<DType>& types,
        size_t lives_in_buckets) {
    for (size_t i = 0; i < counts.size(); ++i) {
      const DType type = types[i % types.size()];
      memory_.emplace_back(counts[i] * size_of(type) + 1);
      const bool in_bucket = lives_in_buckets != 0 && i % lives_in_buckets == 0;
      parameters_.push_back({fmt::format("layer{}", i), counts[i], type,
                             in_bucket ? nullptr : memory_.back().data()});
    }
  }
  [[nodiscard]] const std::vector<Parameter>& parameters() const { return parameters_; }
  [[nodiscard]] size_t size() const { return parameters_.size(); }

  static double base(size_t parameter, size_t element, int step) {
    return static_cast<double>((parameter * 7 + element * 3 + static_cast<size_t>(step)) % 40);
  }
  // The gradient of a rank: their mean is base().
  static double mine(size_t parameter, size_t element, int step, int rank, int size) {
    return base(parameter, element, step) + 2 * rank - (size - 1);
  }
  template <class F>
  void fill(const GradientSync& sync, size_t parameter, F value) const {
    for (size_t k = 0; k < parameters_[parameter].count; ++k) put(sync, parameter, k, value(k));
  }
  template <class F>
  [[nodiscard]] std::string wrong(const GradientSync& sync, size_t parameter, F value) const {
    for (size_t k = 0; k < parameters_[parameter].count; ++k) {
      const double got = get(sync, parameter, k);
      if (got != value(k))
        return fmt::format("parameter {} element {}: {}, expected {}", parameter, k, got, value(k));
    }
    return {};
  }

 private:
  void put(const GradientSync& sync, size_t parameter, size_t k, double value) const {
    void* const at = sync.gradient(parameter);
    const auto f = static_cast<float>(value);
    if (parameters_[parameter].type == DType::f32) static_cast<float*>(at)[k] = f;
    if (parameters_[parameter].type == DType::f64) static_cast<double*>(at)[k] = value;
    if (parameters_[parameter].type == DType::f16) static_cast<F16*>(at)[k] = from_f32<F16>(f);
    if (parameters_[parameter].type == DType::bf16) static_cast<BF16*>(at)[k] = from_f32<BF16>(f);
  }
  [[nodiscard]] double get(const GradientSync& sync, size_t parameter, size_t k) const {
    const void* const at = sync.gradient(parameter);
    if (parameters_[parameter].type == DType::f32) return static_cast<const float*>(at)[k];
    if (parameters_[parameter].type == DType::f64) return static_cast<const double*>(at)[k];
    if (parameters_[parameter].type == DType::f16) return to_f32(static_cast<const F16*>(at)[k]);
    return to_f32(static_cast<const BF16*>(at)[k]);
  }

  std::vector<std::vector<char>> memory_;
  std::vector<Parameter> parameters_;
};

const std::vector<size_t> kCounts = {33, 0, 1, 700, 128, 5000, 64, 3, 256, 1, 90};
const std::vector<DType> kTypes = {DType::f32, DType::f32, DType::bf16, DType::f16, DType::f64};

SyncOptions small_buckets() {
  SyncOptions options;
  options.first_bytes = 256;
  options.bucket_bytes = 2048;
  return options;
}

std::vector<size_t> shuffled(size_t n, uint32_t seed) {
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

// Two f32 parameters in two buckets, the second one's leaving first.
struct Two {
  std::vector<float> a = std::vector<float>(4), b = std::vector<float>(4);
  [[nodiscard]] std::vector<Parameter> parameters() {
    return {{"a", 4, DType::f32, a.data()}, {"b", 4, DType::f32, b.data()}};
  }
  static SyncOptions options() {
    SyncOptions options;
    options.first_bytes = options.bucket_bytes = 16;
    return options;
  }
};

bool all_are(const std::vector<float>& values, float expected) {
  return std::ranges::all_of(values, [&](float x) { return x == expected; });
}

}  // namespace

TEST_CASE("averages are exact in any order of readiness, on threads and processes") {
  for (const Way& way : ways()) {
    for (const int n : {1, 2, 3, 4}) {
      INFO(way.name() << ", " << n << " ranks, seed " << kSeed);
      CHECK(on_ranks(way, n, [](Communicator& comm, Verdict& verdict) {
              for (const size_t in_buckets : {0, 1, 3}) {
                const Model model(kCounts, kTypes, in_buckets);
                auto sync = GradientSync::create(comm, model.parameters(), small_buckets());
                if (!verdict.ok(sync.status())) return;
                verdict.expect(sync->plan().size() > 4, "too few buckets to say anything");
                for (int step = 0; step < 4; ++step) {
                  verdict.ok(sync->begin());
                  const auto seed = kSeed + static_cast<uint32_t>(step * 100 + comm.rank());
                  for (const size_t i : shuffled(model.size(), seed)) {
                    model.fill(*sync, i, [&](size_t k) {
                      return Model::mine(i, k, step, comm.rank(), comm.size());
                    });
                    verdict.ok(sync->ready(i));
                  }
                  if (!verdict.ok(sync->finish())) return;
                  for (size_t i = 0; i < model.size(); ++i) {
                    const std::string wrong =
                        model.wrong(*sync, i, [&](size_t k) { return Model::base(i, k, step); });
                    verdict.expect(wrong.empty(), fmt::format("step {}: {}", step, wrong));
                  }
                }
                verdict.expect(sync->report().divisor == comm.size(), "divisor");
                verdict.expect(sync->report().unused.empty(), "unused");
              }
            }) == "");
    }
  }
}

TEST_CASE("gradients become ready from several threads at once") {
  CHECK(on_ranks({true, "region"}, 2, [](Communicator& comm, Verdict& verdict) {
          const Model model(std::vector<size_t>(64, 50), {DType::f32}, 2);
          auto sync = GradientSync::create(comm, model.parameters(), small_buckets());
          if (!verdict.ok(sync.status())) return;
          for (int step = 0; step < 20; ++step) {
            verdict.ok(sync->begin());
            std::atomic<int> failures{0};
            std::vector<std::thread> threads;
            for (size_t t = 0; t < 3; ++t)
              threads.emplace_back([&, t] {
                for (size_t i = t; i < model.size(); i += 3) {
                  model.fill(*sync, i, [&](size_t k) {
                    return Model::mine(i, k, step, comm.rank(), comm.size());
                  });
                  if (!sync->ready(i).ok()) ++failures;
                }
              });
            for (std::thread& thread : threads) thread.join();
            verdict.expect(failures == 0, "ready() failed");
            verdict.ok(sync->finish());
            for (size_t i = 0; i < model.size(); ++i)
              verdict.expect(
                  model.wrong(*sync, i, [&](size_t k) { return Model::base(i, k, step); }).empty(),
                  "a wrong average");
          }
        }) == "");
}

TEST_CASE("a full bucket leaves at once, and none before those ahead of it") {
  CHECK(on_ranks({true, "region"}, 2, [](Communicator& comm, Verdict& verdict) {
          Two two;
          std::atomic<int> carried{0};
          std::vector<size_t> order;
          SyncOptions options = Two::options();
          options.hook = {"counting", [&](Communicator& c, const Bucket& bucket) {
                            order.push_back(bucket.index);
                            const Status status = average_bucket(c, bucket);
                            ++carried;
                            return status;
                          }};
          auto sync = GradientSync::create(comm, two.parameters(), options);
          if (!verdict.ok(sync.status())) return;
          const auto carried_within = [&](int number, Nanoseconds limit) {
            const auto end = std::chrono::steady_clock::now() + limit;
            while (carried < number && std::chrono::steady_clock::now() < end)
              std::this_thread::sleep_for(100us);
            return carried >= number;
          };
          std::ranges::fill(two.a, static_cast<float>(comm.rank()));
          std::ranges::fill(two.b, static_cast<float>(comm.rank()) + 1);

          verdict.ok(sync->begin());
          verdict.ok(sync->ready(1));
          verdict.expect(carried_within(1, 20s), "a full bucket waits for the others");
          verdict.ok(sync->ready(0));
          verdict.expect(carried_within(2, 20s), "full buckets wait for finish()");
          verdict.ok(sync->finish());
          verdict.expect(all_are(two.a, 0.5f) && all_are(two.b, 1.5f), "averages");

          verdict.ok(sync->begin());
          verdict.ok(sync->ready(0));
          verdict.expect(!carried_within(3, 30ms), "bucket 1 left before bucket 0 was full");
          verdict.ok(sync->ready(1));
          verdict.expect(carried_within(4, 20s), "full buckets wait for finish()");
          verdict.ok(sync->finish());
          verdict.expect(order == std::vector<size_t>{0, 1, 0, 1}, "order of the buckets");
        }) == "");
}

TEST_CASE("a slow rank holds nobody up in ready()") {
  CHECK(on_ranks({true, "region"}, 2, [](Communicator& comm, Verdict& verdict) {
          Two two;
          auto sync = GradientSync::create(comm, two.parameters(), Two::options());
          if (!verdict.ok(sync.status())) return;
          std::atomic<bool>* const others_ready = [] {
            static std::atomic<bool> flag{false};
            return &flag;
          }();
          verdict.ok(sync->begin());
          if (comm.rank() == 1)  // not before rank 0 is through with both
            while (!*others_ready) std::this_thread::sleep_for(100us);
          verdict.ok(sync->ready(1));
          verdict.ok(sync->ready(0));
          if (comm.rank() == 0) *others_ready = true;
          verdict.ok(sync->finish());
        }) == "");
}

TEST_CASE("gradients in bucket storage, and a flat buffer of the caller, are not copied") {
  CHECK(on_ranks({true, "region"}, 2, [](Communicator& comm, Verdict& verdict) {
          std::vector<float> flat(300), elsewhere(100);
          const std::vector<Parameter> in_a_row = {{"a", 100, DType::f32, flat.data()},
                                                   {"b", 50, DType::f32, flat.data() + 100},
                                                   {"c", 150, DType::f32, flat.data() + 150}};
          auto one = GradientSync::create(comm, in_a_row);
          auto several = GradientSync::create(comm, in_a_row, small_buckets());
          auto in_bucket = GradientSync::create(
              comm, {{"a", 100, DType::f32, nullptr}, {"b", 50, DType::f32, nullptr}});
          auto mixed = GradientSync::create(comm, {{"a", 100, DType::f32, elsewhere.data()},
                                                   {"b", 50, DType::f32, nullptr},
                                                   {"c", 10, DType::f64, nullptr}});
          auto reversed = GradientSync::create(comm, {in_a_row[2], in_a_row[0]});
          if (!verdict.ok(mixed.status()) || !verdict.ok(reversed.status())) return;
          verdict.expect(one->copied_bytes() == 0, "one flat bucket");
          verdict.expect(several->copied_bytes() == 0, "several flat buckets");
          verdict.expect(several->plan().size() > 1, "several buckets");
          verdict.expect(in_bucket->copied_bytes() == 0, "bucket storage");
          verdict.expect(mixed->copied_bytes() == 400, "mixed");
          verdict.expect(reversed->copied_bytes() == 1000, "gaps");
          verdict.expect(one->gradient(2) == flat.data() + 150, "the caller's own");
          verdict.expect(mixed->gradient(0) == elsewhere.data(), "the caller's own");

          // And the views are one behind the other.
          verdict.expect(static_cast<float*>(in_bucket->gradient(1)) ==
                             static_cast<float*>(in_bucket->gradient(0)) + 100,
                         "views");
          const auto* const fresh = static_cast<const float*>(in_bucket->gradient(0));
          verdict.expect(std::all_of(fresh, fresh + 150, [](float x) { return x == 0; }), "zeros");
        }) == "");
}

TEST_CASE("accumulation sends nothing; the first synchronised step sends what has piled up") {
  for (const Way& way : ways()) {
    INFO(way.name());
    CHECK(on_ranks(way, 2, [](Communicator& comm, Verdict& verdict) {
            Two two;
            auto sync = GradientSync::create(comm, two.parameters(), Two::options());
            if (!verdict.ok(sync.status())) return;
            for (int round = 0; round < 2; ++round) {
              std::ranges::fill(two.a, 0);
              std::ranges::fill(two.b, 0);
              sync->accumulate(true);
              const uint64_t before = comm.bytes_sent();
              for (int step = 0; step < 3; ++step) {
                verdict.ok(sync->begin());
                for (float& x : two.a) x += static_cast<float>(1 + comm.rank());
                verdict.ok(sync->ready(0));
                if (step == 0) {  // used in this step only
                  for (float& x : two.b) x += 10;
                  verdict.ok(sync->ready(1));
                }
                verdict.ok(sync->finish());
              }
              verdict.expect(comm.bytes_sent() == before, "something was sent");
              verdict.expect(all_are(two.a, static_cast<float>(3 * (1 + comm.rank()))), "left");
              sync->accumulate(false);
              verdict.ok(sync->begin());
              for (float& x : two.a) x += static_cast<float>(1 + comm.rank());
              verdict.ok(sync->ready(0));
              verdict.ok(sync->finish());
              verdict.expect(all_are(two.a, 6), "what was piled up");
              verdict.expect(all_are(two.b, 10), "what only an earlier step used");
              verdict.expect(sync->report().unused.empty(), "unused");
              verdict.expect(comm.bytes_sent() > before, "nothing was sent");
            }
            // What was sent does not count as ready any more.
            verdict.ok(sync->begin());
            verdict.ok(sync->ready(0));
            verdict.ok(sync->finish());
            verdict.expect(all_are(two.b, 0), "unused now");
          }) == "");
  }
}

TEST_CASE("weights give the gradient of the union batch, also with ranks without data") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  struct Case {
    std::vector<double> weights, gradients;
    double average;
  };
  const std::vector<Case> cases = {
      {{1, 3}, {4, 8}, 7},
      {{0, 2}, {nan, 5}, 5},  // what a rank without data has does not count
      {{100, 0, 300}, {4, nan, 8}, 7},
      {{0.25, 0.25, 0.5}, {4, 8, 2}, 4},
      {{5}, {3}, 3},
  };
  for (const Way& way : ways()) {
    for (const Case& one : cases) {
      INFO(way.name() << ", " << one.weights.size() << " ranks");
      CHECK(on_ranks(way, static_cast<int>(one.weights.size()),
                     [&](Communicator& comm, Verdict& verdict) {
                       const auto rank = static_cast<size_t>(comm.rank());
                       Two two;
                       auto sync = GradientSync::create(comm, two.parameters(), Two::options());
                       if (!verdict.ok(sync.status())) return;
                       for (int step = 0; step < 3; ++step) {
                         std::ranges::fill(two.a, static_cast<float>(one.gradients[rank]));
                         two.b = two.a;
                         verdict.ok(sync->begin(one.weights[rank]));
                         if (one.weights[rank] != 0 || step == 1) {
                           verdict.ok(sync->ready(1));
                           verdict.ok(sync->ready(0));
                         }
                         verdict.ok(sync->finish());
                         for (const auto& values : {two.a, two.b})
                           for (const float x : values)
                             verdict.expect(std::abs(x - one.average) < 1e-6 * one.average,
                                            fmt::format("{}, expected {}", x, one.average));
                       }
                       const double sum =
                           std::accumulate(one.weights.begin(), one.weights.end(), 0.0);
                       verdict.expect(sync->report().divisor == sum, "divisor");
                     }) == "");
    }
  }
}

TEST_CASE("weights that cannot be are refused on all ranks, and the next step is right") {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const std::vector<double>& weights :
       {std::vector<double>{0, 0}, {1, -1}, {infinity, 1}, {-2, 2}}) {
    INFO(weights[0] << ", " << weights[1]);
    CHECK(on_ranks({true, "region"}, 2, [&](Communicator& comm, Verdict& verdict) {
            Two two;
            auto sync = GradientSync::create(comm, two.parameters(), Two::options());
            if (!verdict.ok(sync.status())) return;
            std::ranges::fill(two.a, 5);
            verdict.ok(sync->begin(weights[static_cast<size_t>(comm.rank())]));
            verdict.ok(sync->ready(0));
            verdict.ok(sync->ready(1));
            verdict.is(sync->finish(), Code::invalid_argument, {"weight"});
            verdict.expect(all_are(two.a, 5), "gradients are left alone");
            verdict.ok(sync->begin(1));
            verdict.ok(sync->ready(0));
            verdict.ok(sync->ready(1));
            verdict.ok(sync->finish());
            verdict.expect(all_are(two.a, 5), "the next step");
          }) == "");
  }
}

TEST_CASE("parameters that were not ready count as zeros and receive the average") {
  CHECK(on_ranks({true, "region"}, 2, [](Communicator& comm, Verdict& verdict) {
          Two two;
          for (const bool in_buckets : {false, true}) {
            auto parameters = two.parameters();
            if (in_buckets)
              for (Parameter& p : parameters) p.gradient = nullptr;
            auto sync = GradientSync::create(comm, parameters, Two::options());
            if (!verdict.ok(sync.status())) return;
            float* const a = static_cast<float*>(sync->gradient(0));
            float* const b = static_cast<float*>(sync->gradient(1));
            for (int step = 0; step < 2; ++step) {
              std::fill_n(a, 4, 8.0f);
              std::fill_n(b, 4, 6.0f);
              verdict.ok(sync->begin());
              if (comm.rank() == 0) verdict.ok(sync->ready(1));  // b on rank 0 only, a nowhere
              verdict.ok(sync->finish());
              verdict.expect(std::all_of(a, a + 4, [](float x) { return x == 0; }), "a is zeros");
              verdict.expect(std::all_of(b, b + 4, [](float x) { return x == 3; }), "b is halved");
              const std::vector<size_t> unused = {0, 1};
              verdict.expect(std::ranges::equal(sync->report().unused,
                                                std::span(unused).first(comm.rank() == 0 ? 1 : 2)),
                             "the report names them");
            }
          }
        }) == "");
}

TEST_CASE("f16 averages neither overflow nor vanish (C57)") {
  for (const Way& way : ways()) {
    INFO(way.name());
    CHECK(on_ranks(way, 4, [](Communicator& comm, Verdict& verdict) {
            std::vector<F16> large(100, from_f32<F16>(40000)), tiny(100, F16{1});  // 2^-24
            auto sync = GradientSync::create(comm, {{"large", 100, DType::f16, large.data()},
                                                    {"tiny", 100, DType::f16, tiny.data()}});
            if (!verdict.ok(sync.status())) return;
            verdict.ok(sync->begin());
            verdict.ok(sync->ready(0));
            verdict.ok(sync->ready(1));
            verdict.ok(sync->finish());
            for (const F16 x : large) verdict.expect(to_f32(x) == 40000, "40000");
            for (const F16 x : tiny) verdict.expect(x.bits == 1, "2^-24");
          }) == "");
  }
}

TEST_CASE("buckets are laid out anew once, by the order of readiness, if all ranks gain") {
  struct Case {
    std::vector<bool> forwards;  // of each rank: as the parameters are given, not reversed
    bool in_buckets, rebuilt;
  };
  const std::vector<Case> cases = {{{true, true}, false, true},
                                   {{false, false}, false, false},
                                   {{true, false}, false, false},
                                   {{false, true}, false, false},
                                   {{true, true}, true, false}};
  for (const Case& one : cases) {
    INFO("case " << &one - cases.data());
    CHECK(
        on_ranks({true, "region"}, 2, [&](Communicator& comm, Verdict& verdict) {
          const Model model({40, 40, 40, 40}, {DType::f32}, one.in_buckets ? 1 : 0);
          SyncOptions options;
          options.first_bytes = options.bucket_bytes = 320;
          auto sync = GradientSync::create(comm, model.parameters(), options);
          if (!verdict.ok(sync.status())) return;
          const BucketPlan usual = {{2, 3}, {0, 1}}, other = {{0, 1}, {2, 3}};
          verdict.expect(sync->plan() == usual, "at first");
          for (int step = 0; step < 4; ++step) {
            verdict.ok(sync->begin());
            // In the third step all turn round, which moves nothing any more.
            const bool forwards = one.forwards[static_cast<size_t>(comm.rank())] != (step > 1);
            for (size_t k = 0; k < 4; ++k) {
              const size_t i = forwards ? k : 3 - k;
              model.fill(*sync, i, [&](size_t e) {
                return Model::mine(i, e, step, comm.rank(), comm.size());
              });
              verdict.ok(sync->ready(i));
            }
            verdict.ok(sync->finish());
            verdict.expect(sync->plan() == (one.rebuilt ? other : usual), "after a step");
            for (size_t i = 0; i < 4; ++i)
              verdict.expect(
                  model.wrong(*sync, i, [&](size_t k) { return Model::base(i, k, step); }).empty(),
                  "averages");
          }
        }) == "");
  }
}
