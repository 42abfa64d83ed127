// Reported bugs of other libraries as tests of ours: wrong numbers. The numbers C01 ... are those
// of the list of cases; each says what went wrong elsewhere.
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <numeric>

#include "test/cases.h"
#include "test/exact.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr std::array kTypes = {DType::i8,  DType::u8,   DType::i32,    DType::u32,
                               DType::i64, DType::u64,  DType::f16,    DType::f32,
                               DType::f64, DType::bf16, DType::f8e4m3, DType::f8e5m2};
constexpr std::array kReductions = {Op::sum, Op::prod, Op::max, Op::min, Op::avg, Op::premul_sum};

// One all-reduce of constructed inputs, in or out of place; guards, result and input are checked.
void exact_all_reduce(Communicator& comm, size_t count, DType type, Op op, bool in_place,
                      size_t offset = 0, uint64_t seed = 1) {
  const Exact exact(seed, comm.size(), type, op);
  Guarded in(count, type, offset), out(count, type, offset);
  exact.fill(in.data(), comm.rank(), 0, count);
  unsigned char* const recv = in_place ? in.data() : out.data();
  const Status status =
      comm.all_reduce(in.data(), recv, count, type, Reduction(op, premul_factor(comm.rank())))
          .wait();
  const size_t wrong = status.ok() ? exact.wrong(recv, 0, count) : count + 1;
  std::vector<unsigned char> original(count * size_of(type));
  exact.fill(original.data(), comm.rank(), 0, count);
  const bool input_kept = in_place || std::memcmp(original.data(), in.data(), original.size()) == 0;
  if (wrong != 0 || !input_kept || !in.guards_intact() || !out.guards_intact())
    rank_fail(fmt::format("{} {} of {} elements, {}, offset {}: {} wrong, input kept {}, {}",
                          name(op), name(type), count, in_place ? "in place" : "out of place",
                          offset, wrong, input_kept, status.to_string()));
}

}  // namespace

TEST_CASE("C01: counts that no number of ranks divides") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(8, transport, forced(Algorithm::ring), [](Communicator& comm) {
          for (const size_t count : {1, 2, 3, 5, 7, 11, 13, 17, 1009, 65'537, 1'055'687}) {
            std::vector<float> x(count);
            for (size_t i = 0; i < count; ++i)
              x[i] = static_cast<float>((static_cast<size_t>(comm.rank()) + 1) * (i % 7));
            rank_ok(comm.all_reduce(x.data(), x.data(), count, DType::f32, Op::sum).wait());
            size_t wrong = 0;
            for (size_t i = 0; i < count; ++i) wrong += x[i] != static_cast<float>(36 * (i % 7));
            RANK_CHECK(wrong == 0);
          }
        }) == "");
}

TEST_CASE("C02: one rank, every count: the whole output is written") {
  auto comm = Communicator::create(Rendezvous{});
  REQUIRE(comm.ok());
  for (const DType type : {DType::bf16, DType::f16, DType::f32, DType::i8})
    for (const Op op : {Op::avg, Op::sum})
      for (size_t count = 1; count <= 4100; ++count) {
        Guarded in(count, type), out(count, type);
        fill_bits(in.data(), type, 3, 0, 0, count);
        REQUIRE(comm->all_reduce(in.data(), out.data(), count, type, op).wait().ok());
        if (std::memcmp(in.data(), out.data(), count * size_of(type)) != 0 || !out.guards_intact())
          FAIL(name(op) << " " << name(type) << " of " << count);
      }
}

TEST_CASE("C03, C15: any number of ranks, any count, in place and out of place alike") {
  const std::string transport = GENERATE(from_range(transports()));
  const int n = GENERATE(2, 3, 4, 5, 6, 7, 9);
  INFO(transport << ", " << n << " ranks");
  CHECK(on_transport(n, transport, {}, [](Communicator& comm) {
          for (const bool in_place : {false, true}) {
            for (size_t count = 1; count <= 100; ++count)
              exact_all_reduce(comm, count, DType::f32, Op::sum, in_place);
            exact_all_reduce(comm, 100'003, DType::i64, Op::sum, in_place);
            exact_all_reduce(comm, 300'007, DType::f32, Op::sum, in_place);
          }
        }) == "");
}

TEST_CASE("C04: fewer elements than ranks, every type, the ring forced") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(6, transport, forced(Algorithm::ring), [](Communicator& comm) {
          for (const DType type : kTypes)
            for (size_t count = 0; count <= 13; ++count) {
              exact_all_reduce(comm, count, type, Op::sum, count % 2 == 0);
              const Exact exact(5, comm.size(), type, Op::sum);
              Guarded in(count * 6, type), out(count, type);
              exact.fill(in.data(), comm.rank(), 0, count * 6);
              rank_ok(comm.reduce_scatter(in.data(), out.data(), count, type, Op::sum).wait());
              RANK_CHECK(exact.wrong(out.data(), static_cast<size_t>(comm.rank()) * count, count) ==
                         0);
              RANK_CHECK(out.guards_intact());
            }
        }) == "");
}

TEST_CASE("C05: sizes around every internal threshold") {
  const std::string transport = GENERATE(from_range(transports()));
  const int n = GENERATE(2, 4);
  CHECK(on_transport(n, transport, {}, [](Communicator& comm) {
          for (size_t bytes = 91'300; bytes <= 91'340; ++bytes)
            exact_all_reduce(comm, bytes, DType::i8, Op::sum, false);
          // Pieces, slots, credits, segments and the borders of UCX's protocols are powers of two.
          for (size_t border = 4096; border <= size_t{2} << 20; border *= 2)
            for (int off = -3; off <= 3; ++off)
              exact_all_reduce(comm, border + static_cast<size_t>(off), DType::i8, Op::sum,
                               off % 2 == 0);
        }) == "");
}

TEST_CASE("C06: minimum and maximum with negative numbers") {
  CHECK(
      on_transport(2, "shm", {}, [](Communicator& comm) {
        const auto check = [&](auto zero, DType type) {
          using T = decltype(zero);
          const std::array<T, 2> mine = {static_cast<T>(comm.rank()), static_cast<T>(-comm.rank())};
          std::array<T, 2> low{}, high{};
          rank_ok(comm.all_reduce(mine.data(), low.data(), 2, type, Op::min).wait());
          rank_ok(comm.all_reduce(mine.data(), high.data(), 2, type, Op::max).wait());
          RANK_CHECK((low[0] == 0 && low[1] == -1));
          RANK_CHECK((high[0] == 1 && high[1] == 0));
        };
        check(int8_t{0}, DType::i8);
        check(int32_t{0}, DType::i32);
        check(int64_t{0}, DType::i64);
        check(0.0F, DType::f32);
        check(0.0, DType::f64);
        for (const DType type : {DType::f16, DType::bf16}) {
          const uint16_t one = type == DType::f16 ? 0x3c00 : 0x3f80;
          const std::array<uint16_t, 2> mine = {
              comm.rank() == 0 ? uint16_t{0} : one,
              static_cast<uint16_t>(comm.rank() == 0 ? 0 : one | 0x8000)};
          std::array<uint16_t, 2> low{}, high{};
          rank_ok(comm.all_reduce(mine.data(), low.data(), 2, type, Op::min).wait());
          rank_ok(comm.all_reduce(mine.data(), high.data(), 2, type, Op::max).wait());
          RANK_CHECK((low[0] == 0 && low[1] == (one | 0x8000)));
          RANK_CHECK((high[0] == one && high[1] == 0));
        }
      }) == "");
}

TEST_CASE("C07, C09: every type with every operation, at every element") {
  const std::string transport = GENERATE(from_range(transports()));
  const int n = GENERATE(2, 3);
  CHECK(on_transport(n, transport, {}, [](Communicator& comm) {
          for (const DType type : kTypes)
            for (const Op op : kReductions)
              for (const size_t count : {33, 64, 4097})
                exact_all_reduce(comm, count, type, op, count == 64, 0, count);
        }) == "");
}

TEST_CASE("C08: integers wrap") {
  CHECK(on_transport(2, "shm", {}, [](Communicator& comm) {
          const bool first = comm.rank() == 0;
          int8_t a = first ? 120 : 100;
          uint8_t b = first ? 200 : 100;
          int32_t c = first ? std::numeric_limits<int32_t>::max() : 1;
          rank_ok(comm.all_reduce(&a, &a, 1, DType::i8, Op::sum).wait());
          rank_ok(comm.all_reduce(&b, &b, 1, DType::u8, Op::sum).wait());
          rank_ok(comm.all_reduce(&c, &c, 1, DType::i32, Op::sum).wait());
          RANK_CHECK(a == -36);
          RANK_CHECK(b == 44);
          RANK_CHECK(c == std::numeric_limits<int32_t>::min());
        }) == "");
}

TEST_CASE("C12: no elements, also without pointers, and the next operation is in step") {
  const std::string transport = GENERATE(from_range(transports()));
  const int n = GENERATE(1, 2, 3, 4);
  CHECK(on_transport(n, n == 1 ? "" : transport, {}, [](Communicator& comm) {
          rank_ok(comm.all_reduce(nullptr, nullptr, 0, DType::f32, Op::sum).wait());
          rank_ok(comm.all_gather(nullptr, nullptr, 0, DType::f32).wait());
          rank_ok(comm.broadcast(nullptr, 0, DType::f32, 0).wait());
          exact_all_reduce(comm, 5, DType::f32, Op::sum, true);
        }) == "");
}

TEST_CASE("C13: nothing on one side only is a mismatch on all ranks") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(4, transport, {}, [](Communicator& comm) {
          std::vector<float> x(8, 1.0F);
          const size_t count = comm.rank() == 0 ? 0 : 8;
          const Status status =
              comm.all_reduce(x.data(), x.data(), count, DType::f32, Op::sum).wait();
          RANK_CHECK(status.code() == Code::mismatch);
          RANK_CHECK(status.message().find(" of 0 elements") != std::string::npos);
          RANK_CHECK(status.message().find(" of 8 elements") != std::string::npos);
          RANK_CHECK(status.message().find("rank 0") != std::string::npos);
          RANK_CHECK(comm.health().code() == Code::mismatch);
        }) == "");
}

TEST_CASE("C14: buffers aligned to their elements only, differently on every rank") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(3, transport, {}, [](Communicator& comm) {
          for (const DType type : {DType::f16, DType::bf16, DType::i8, DType::f32, DType::f64})
            for (size_t offset = 0; offset < 16; ++offset) {
              const size_t mine = (offset + static_cast<size_t>(comm.rank()) * 5) % 16;
              for (size_t count = 1 + offset % 3; count <= 40; count += 3)
                exact_all_reduce(comm, count, type, Op::sum, offset % 2 == 0, mine);
              exact_all_reduce(comm, 4099, type, Op::sum, offset % 2 == 1, mine);
            }
          // Not even that: refused, nothing touched.
          std::vector<unsigned char> bytes(64, 7);
          const Status status =
              comm.all_reduce(bytes.data() + 1, bytes.data() + 1, 4, DType::f32, Op::sum).wait();
          RANK_CHECK(status.code() == Code::invalid_argument);
          RANK_CHECK(status.message().find("aligned") != std::string::npos);
          RANK_CHECK(bytes == std::vector<unsigned char>(64, 7));
        }) == "");
}

TEST_CASE("C16: equal pointers mean in place, any other overlap is refused") {
  CHECK(on_transport(3, "shm", {}, [](Communicator& comm) {
          std::vector<int32_t> x(200);
          std::iota(x.begin(), x.end(), 0);
          const std::vector<int32_t> before = x;
          const auto refused = [&](Work work) {
            RANK_CHECK(work.wait().code() == Code::invalid_argument);
            RANK_CHECK(x == before);
          };
          int32_t* const p = x.data();
          refused(comm.all_reduce(p, p + 50, 100, DType::i32, Op::sum));
          refused(comm.all_reduce(p + 50, p, 100, DType::i32, Op::sum));
          refused(comm.all_gather(p + 1, p, 30, DType::i32));
          refused(comm.reduce_scatter(p, p + 1, 30, DType::i32, Op::sum));
          refused(comm.all_to_all(p, p, 30, DType::i32));
          rank_ok(comm.all_reduce(p, p, 100, DType::i32, Op::sum).wait());
          size_t wrong = 0;
          for (size_t i = 0; i < 200; ++i)
            wrong += x[i] != static_cast<int32_t>(i < 100 ? 3 * i : i) ? 1 : 0;
          RANK_CHECK(wrong == 0);
        }) == "");
}

TEST_CASE("C57, C58: averages divide by the ranks, and neither overflow nor vanish") {
  const Algorithm algorithm =
      GENERATE(Algorithm::ring, Algorithm::recursive_doubling, Algorithm::halving_doubling);
  CHECK(on_transport(4, "shm", forced(algorithm), [](Communicator& comm) {
          for (const uint16_t half : {uint16_t{0x78e2}, uint16_t{0x0001}}) {  // 40000, 2^-24
            std::vector<uint16_t> x(100, half);
            rank_ok(comm.all_reduce(x.data(), x.data(), x.size(), DType::f16, Op::avg).wait());
            RANK_CHECK(x == std::vector<uint16_t>(100, half));
          }
        }) == "");
  CHECK(on_transport(2, "shm", {}, [](Communicator& comm) {
          for (const size_t count : {1, 2, 5}) {
            for (const int sign : {1, -1}) {
              std::vector<int32_t> x(count, sign * (3 + comm.rank()));
              rank_ok(comm.all_reduce(x.data(), x.data(), count, DType::i32, Op::avg).wait());
              RANK_CHECK(x == std::vector<int32_t>(count, sign * 3));
              std::vector<float> y(count, static_cast<float>(sign * (3 + comm.rank())));
              rank_ok(comm.all_reduce(y.data(), y.data(), count, DType::f32, Op::avg).wait());
              RANK_CHECK(y == std::vector<float>(count, static_cast<float>(sign) * 3.5F));
            }
          }
        }) == "");
}

TEST_CASE("C59: one answer for NaN and signed zero, whichever rank and place has it") {
  const Algorithm algorithm =
      GENERATE(Algorithm::ring, Algorithm::recursive_doubling, Algorithm::halving_doubling);
  CHECK(on_transport(4, "shm", forced(algorithm), [](Communicator& comm) {
          const auto check = [&](auto one, auto nan, auto minus_zero, DType type) {
            using T = decltype(one);
            for (int holder = 0; holder < 5; ++holder) {  // 4: every rank
              for (const Op op : {Op::min, Op::max, Op::sum}) {
                std::vector<T> x(40, one);
                if (holder == comm.rank() || holder == 4) x.assign(40, nan);
                rank_ok(comm.all_reduce(x.data(), x.data(), x.size(), type, op).wait());
                RANK_CHECK(x == std::vector<T>(40, nan));
              }
              std::vector<T> zero(40, holder == comm.rank() ? minus_zero : T{0});
              std::vector<T> low(40), high(40);
              rank_ok(comm.all_reduce(zero.data(), low.data(), 40, type, Op::min).wait());
              rank_ok(comm.all_reduce(zero.data(), high.data(), 40, type, Op::max).wait());
              RANK_CHECK(low == std::vector<T>(40, holder == 4 ? T{0} : minus_zero));
              RANK_CHECK(high == std::vector<T>(40, T{0}));
            }
          };
          // As bits: the canonical NaN of the type (all ones, as CUDA has it), and -0.
          check(uint16_t{0x3c00}, uint16_t{0x7fff}, uint16_t{0x8000}, DType::f16);
          check(uint16_t{0x3f80}, uint16_t{0x7fff}, uint16_t{0x8000}, DType::bf16);
          check(uint32_t{0x3f800000}, uint32_t{0x7fffffff}, uint32_t{0x80000000}, DType::f32);
          check(uint64_t{0x3ff0000000000000}, uint64_t{0x7fffffffffffffff},
                uint64_t{0x8000000000000000}, DType::f64);
        }) == "");
}
