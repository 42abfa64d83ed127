// The executor and the engine, N ranks in one thread and virtual time. Every failing case prints
// the seed that reproduces it.
#include <fmt/core.h>

#include <catch2/catch.hpp>
#include <random>

#include "test/world.h"

using namespace ringfold;
using namespace ringfold::test;

namespace {

// A contribution that no other rank and no other place shares; sums wrap, so every order is exact.
int64_t value(int rank, size_t i) {
  return static_cast<int64_t>((static_cast<uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15u +
                              i * 0xc2b2ae3d27d4eb4fu);
}

constexpr int64_t kGuard = 0x7a7a7a7a7a7a7a7a;
constexpr size_t kGuards = 8;

// The buffers of one rank for one schedule, with guards around what it may touch.
class Buffers {
 public:
  Buffers(const Schedule& schedule, int rank, bool in_place)
      : schedule_(schedule), rank_(rank), frame_(frame(schedule, rank)), in_place_(in_place) {
    const size_t all = schedule.count;
    input_.assign(all + 2 * kGuards, kGuard);
    work_.assign(all + 2 * kGuards, kGuard);
    for (size_t i = frame_.input.begin; i < frame_.input.end(); ++i)
      input_[kGuards + i] = value(rank, i);
    if (in_place) work_ = input_;
  }
  [[nodiscard]] const void* input() const {
    if (frame_.input.empty() && schedule_.count != 0) return nullptr;
    return (in_place_ ? work_ : input_).data() + kGuards + frame_.input.begin;
  }
  void* work() {
    if (frame_.work.empty() && schedule_.count != 0) return nullptr;
    return work_.data() + kGuards + frame_.work.begin;
  }

  // Index of the first wrong element, guards and untouched input included; -1 if all is right.
  [[nodiscard]] int64_t first_wrong() const {
    for (size_t i = 0; i < work_.size(); ++i) {
      const bool inside =
          i >= kGuards && i - kGuards >= frame_.work.begin && i - kGuards < frame_.work.end();
      const bool mine =
          i >= kGuards && i - kGuards >= frame_.input.begin && i - kGuards < frame_.input.end();
      if (!inside && in_place_ && mine) continue;  // input that the collective may leave or not
      if (work_[i] != (inside ? expected(i - kGuards) : kGuard)) return static_cast<int64_t>(i);
    }
    for (size_t i = 0; !in_place_ && i < schedule_.count; ++i) {
      const bool mine = i >= frame_.input.begin && i < frame_.input.end();
      if (input_[kGuards + i] != (mine ? value(rank_, i) : kGuard)) return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  [[nodiscard]] int64_t expected(size_t i) const {
    const auto n = static_cast<size_t>(schedule_.size);
    switch (schedule_.collective) {
      case Collective::all_reduce:
      case Collective::reduce_scatter:
      case Collective::reduce: {
        uint64_t sum = 0;
        for (int r = 0; r < schedule_.size; ++r) sum += static_cast<uint64_t>(value(r, i));
        return static_cast<int64_t>(sum);
      }
      case Collective::all_gather:
      case Collective::gather:
        return value(static_cast<int>(i / (schedule_.count / n)), i);
      case Collective::broadcast:
      case Collective::scatter:
        return value(schedule_.root, i);
      case Collective::all_to_all: {
        const size_t each = schedule_.count / n;
        const auto from = i / each;
        return value(static_cast<int>(from), static_cast<size_t>(rank_) * each + i % each);
      }
    }
    return 0;
  }

  const Schedule schedule_;
  const int rank_;
  const Frame frame_;
  const bool in_place_;
  std::vector<int64_t> input_, work_;
};

struct Shape {
  Collective collective;
  Algorithm algorithm;
};
constexpr Shape kShapes[] = {
    {Collective::all_reduce, Algorithm::ring},
    {Collective::all_reduce, Algorithm::halving_doubling},
    {Collective::all_reduce, Algorithm::recursive_doubling},
    {Collective::all_reduce, Algorithm::two_level},
    {Collective::reduce_scatter, Algorithm::ring},
    {Collective::all_gather, Algorithm::ring},
    {Collective::broadcast, Algorithm::chain},
    {Collective::broadcast, Algorithm::tree},
    {Collective::reduce, Algorithm::chain},
    {Collective::reduce, Algorithm::tree},
    {Collective::all_to_all, Algorithm::direct},
    {Collective::gather, Algorithm::direct},
    {Collective::scatter, Algorithm::direct},
};

bool part_wise(Collective collective) {
  return collective == Collective::reduce_scatter || collective == Collective::all_gather ||
         collective == Collective::all_to_all || collective == Collective::gather ||
         collective == Collective::scatter;
}

// Pieces a chunk may have: transit holds at most half the slots.
bool fits(const Schedule& s, size_t piece) {
  const bool transit =
      s.collective == Collective::reduce_scatter || s.collective == Collective::reduce;
  if (!transit) return true;
  const size_t unit = s.segment != 0 ? std::min(s.segment, s.count) : s.count;
  const size_t chunk = s.collective == Collective::reduce
                           ? unit
                           : (unit + static_cast<size_t>(s.size) - 1) / static_cast<size_t>(s.size);
  return (chunk + piece - 1) / piece <= Execution::kSlots / 2;
}

}  // namespace

TEST_CASE("every collective is exact, whatever the shape, the pieces and the network's mood") {
  const size_t counts[] = {0, 1, 3, 7, 24, 97, 480};
  uint64_t seed = 1;
  int cases = 0;
  for (const Shape& shape : kShapes) {
    for (int n = 1; n <= 9; ++n) {
      for (const size_t base : counts) {
        for (const bool in_place : {false, true}) {
          Schedule s;
          s.collective = shape.collective;
          s.algorithm = shape.algorithm;
          s.size = n;
          s.count = part_wise(s.collective) ? base / 4 * static_cast<size_t>(n) : base;
          s.root = static_cast<int>(seed % static_cast<uint64_t>(n));
          s.grain = part_wise(s.collective) ? 1 : 1 + seed % 3;
          s.per_host = n % 3 == 0 ? 3 : (n % 2 == 0 ? 2 : n);
          s.segment = seed % 2 == 0 ? 0 : static_cast<size_t>(n) * 8;
          if (in_place && s.collective == Collective::all_to_all) continue;
          const size_t piece = std::array<size_t, 4>{1, 3, 16, 1000}[seed % 4];
          if (!legal(s) || !fits(s, piece)) continue;
          ++seed;
          ++cases;
          Faults faults;
          faults.max_delay = std::chrono::microseconds(seed % 3 * 200);
          faults.reorder = seed % 2 == 0;
          World world(n, seed, faults);
          const size_t comm = world.open_all();
          std::vector<std::unique_ptr<Buffers>> buffers;
          std::vector<std::shared_ptr<Outcome>> outcomes;
          for (int r = 0; r < n; ++r) {
            const bool same = in_place || s.collective == Collective::broadcast;
            buffers.push_back(std::make_unique<Buffers>(s, r, same));
            World::Call call;
            call.schedule = s;
            call.piece = piece;
            call.input = buffers.back()->input();
            call.work = s.collective == Collective::broadcast && r == s.root
                            ? const_cast<void*>(call.input)
                            : buffers.back()->work();
            outcomes.push_back(world.submit(comm, r, call));
          }
          const bool done =
              world.run([&] { return World::all_done(outcomes); }, std::chrono::seconds(5));
          INFO(
              fmt::format("{} {} n={} count={} root={} grain={} per_host={} segment={} piece={} "
                          "in place={} seed={}",
                          name(s.collective), name(s.algorithm), n, s.count, s.root, s.grain,
                          s.per_host, s.segment, piece, in_place, seed));
          REQUIRE(done);
          for (int r = 0; r < n; ++r) {
            REQUIRE(outcomes[static_cast<size_t>(r)]->status.ok());
            if (s.collective == Collective::broadcast && r == s.root) continue;
            REQUIRE(buffers[static_cast<size_t>(r)]->first_wrong() == -1);
          }
        }
      }
    }
  }
  fmt::print("executor: {} cases exact\n", cases);
  CHECK(cases > 1000);
}
