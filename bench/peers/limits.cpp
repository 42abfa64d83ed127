// What the hardware allows, under the common protocol. --what
//   memcpy      every rank copies its input to its output
//   cross_read  each of two ranks copies what the other has just written: the price of an exchange.
//               Only the copy is timed
//   direct2     an ideal all-reduce of two ranks whose buffers all lie in shared memory: each sums
//               its half of both inputs and writes it to both outputs. Optimistic: from call to
//               call every cache line stays with one core
#include <cstring>
#include <memory>

#include "bench/peers/harness.h"
#include "tools/line_latency.h"

namespace {

using peers::Role;
using peers::Team;

class OutOfPlace : public peers::Library {
 public:
  [[nodiscard]] bool offers(bool in_place) const override { return !in_place; }
  [[nodiscard]] bool sums() const override { return false; }
};

class Memcpy : public OutOfPlace {
 public:
  Call prepare(const float* in, float* out, size_t count) override {
    return [=] {
      std::memcpy(out, in, count * sizeof(float));
      asm volatile("" : : "r"(out) : "memory");  // somebody might look at it
    };
  }
};

// Two ranks with memory in common.
class Pair : public OutOfPlace {
 public:
  explicit Pair(Team& team) : team_(team) {
    if (team.size() != 2) peers::die("this limit is one of 2 ranks");
  }
  void release(float* buffer) override {
    const auto* const at = reinterpret_cast<const std::byte*>(buffer);
    if (at < memory_ || at >= memory_ + bytes_) OutOfPlace::release(buffer);  // else the team's
  }

 protected:
  // Part `part` of `parts` of what both see; a page in front has their flags.
  float* shared(size_t bytes, int part, int parts) {
    constexpr size_t kPage = 4096;
    const size_t each = (bytes + kPage - 1) / kPage * kPage;
    if (part_bytes_ == 0) {
      bytes_ = kPage + each * static_cast<size_t>(parts);
      memory_ = team_.common(bytes_);
      part_bytes_ = each;
      turn_ = 0;
    }
    return reinterpret_cast<float*>(memory_ + kPage + each * static_cast<size_t>(part));
  }
  void forget() { part_bytes_ = 0; }

  // Both are here.
  void meet() {
    ++turn_;
    flag(team_.rank()).store(turn_, std::memory_order_release);
    while (flag(1 - team_.rank()).load(std::memory_order_acquire) < turn_) {
      ringfold::tools::relax();
    }
  }
  Team& team_;

 private:
  std::atomic<uint64_t>& flag(int rank) {
    return *reinterpret_cast<std::atomic<uint64_t>*>(memory_ + size_t{1024} * rank);
  }
  std::byte* memory_ = nullptr;
  size_t bytes_ = 0, part_bytes_ = 0;
  uint64_t turn_ = 0;
};

class CrossRead : public Pair {
 public:
  using Pair::Pair;

  float* allocate(size_t bytes, Role role) override {
    if (role == Role::output) return peers::Library::allocate(bytes, role);
    forget();
    theirs_ = shared(bytes, 1 - team_.rank(), 2);
    return shared(bytes, team_.rank(), 2);
  }

  Call prepare(const float* in, float* out, size_t count) override {
    auto* const mine = const_cast<float*>(in);
    return [=, this] {
      const double start = peers::now_us();
      for (size_t i = 0; i < count; ++i) mine[i] += 1;
      meet();
      const double before = peers::now_us();
      std::memcpy(out, theirs_, count * sizeof(float));
      asm volatile("" : : "r"(out) : "memory");
      const double after = peers::now_us();
      meet();
      untimed_ += before - start + (peers::now_us() - after);
    };
  }
  double untimed_us() override {
    const double untimed = untimed_;
    untimed_ = 0;
    return untimed;
  }

 private:
  const float* theirs_ = nullptr;
  double untimed_ = 0;
};

class Direct2 : public Pair {
 public:
  using Pair::Pair;

  float* allocate(size_t bytes, Role role) override {
    if (role == Role::input) {
      forget();
      for (int rank = 0; rank < 2; ++rank) inputs_[rank] = shared(bytes, rank, 4);
      return inputs_[team_.rank()];
    }
    theirs_ = shared(bytes, 3 - team_.rank(), 4);
    return shared(bytes, 2 + team_.rank(), 4);
  }

  Call prepare(const float*, float* mine, size_t count) override {
    const size_t half = count / 2;
    const size_t first = team_.rank() == 0 ? 0 : half;
    const size_t last = team_.rank() == 0 ? half : count;
    return [=, this] {
      constexpr size_t kBlock = 4096;  // copied while it lies in the nearest cache
      meet();
      for (size_t at = first; at < last; at += kBlock) {
        const size_t n = std::min(kBlock, last - at);
        add(mine + at, inputs_[0] + at, inputs_[1] + at, n);
        std::memcpy(theirs_ + at, mine + at, n * sizeof(float));
      }
      meet();
    };
  }
  [[nodiscard]] bool sums() const override { return true; }

 private:
  static void add(float* __restrict out, const float* __restrict a, const float* __restrict b,
                  size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
  }
  float* inputs_[2] = {};
  float* theirs_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const peers::Arguments arguments(argc, argv);
  Team team(arguments, arguments.number("rank", 0), arguments.number("size", 1));
  const std::string what = arguments.get("what", "memcpy");
  std::unique_ptr<peers::Library> library;
  if (what == "memcpy") library = std::make_unique<Memcpy>();
  if (what == "cross_read") library = std::make_unique<CrossRead>(team);
  if (what == "direct2") library = std::make_unique<Direct2>(team);
  if (!library) peers::die("--what " + what + "; accepted: memcpy, cross_read, direct2");
  peers::serve(arguments, team, *library);
}
