// Our ring in the nccl numerics, against a model of NCCL's: bit for bit.
#include <array>
#include <catch2/catch.hpp>

#include "test/cases.h"
#include "test/elements.h"
#include "test/nccl_inputs.h"
#include "test/nccl_model.h"

using namespace ringfold;
using namespace ringfold::test;

namespace {

Options as_nccl(size_t piece_bytes = 0) {
  Options options = forced(Algorithm::ring, piece_bytes);
  options.numerics = Numerics::nccl;
  return options;
}

// Elements of our all-reduce of `count` that differ from the model's.
size_t differing(Communicator& comm, DType type, Op op, size_t count, uint64_t seed) {
  const auto inputs = nccl_inputs(type, op, comm.size(), count, seed);
  const auto factors = nccl_factors(type, comm.size());
  const auto mine = static_cast<size_t>(comm.rank());
  std::vector<unsigned char> out(count * size_of(type));
  rank_ok(
      comm.all_reduce(inputs[mine].data(), out.data(), count, type, Reduction(op, factors[mine]))
          .wait());
  const size_t stride = count > 100'000 ? 53 : 1;  // the model is slow
  const auto want = NcclModel(type, op, comm.size()).all_reduce(inputs, factors, count, stride);
  size_t wrong = 0;
  for (size_t i = 0; i < count; i += stride)
    wrong +=
        std::memcmp(&out[i * size_of(type)], &want[i / stride * size_of(type)], size_of(type)) != 0;
  return wrong;
}

void same_as_model(Communicator& comm, DType type, Op op, size_t count) {
  const size_t wrong = differing(comm, type, op, count, 1);
  if (wrong != 0)
    rank_fail(fmt::format("{} {} of {} on {} ranks: {} elements differ from NCCL's", name(op),
                          name(type), count, comm.size(), wrong));
}

}  // namespace

TEST_CASE("the model rounds as the formats do") {
  const auto all_codes = [](const SmallFormat& format) {
    size_t wrong = 0;
    for (uint32_t code = 0; code < 1u << format.bits; ++code) {
      const double value = format.decode(code);
      if (!(std::abs(value) <= format.largest)) continue;  // infinity, NaN
      wrong += format.encode(value) != code || format.round(value) != value;
    }
    return wrong;
  };
  CHECK(all_codes(kModelF16) == 0);
  CHECK(all_codes(kModelBF16) == 0);
  CHECK(all_codes(kModelE4M3) == 0);
  CHECK(all_codes(kModelE5M2) == 0);
  CHECK(kModelF16.round(2049) == 2048);  // ties to even
  CHECK(kModelF16.round(2051) == 2052);
  CHECK(std::isinf(kModelF16.round(65520)));
  CHECK(kModelF16.round(0x1p-25) == 0);
  CHECK(kModelF16.round(0x1.8p-25) == 0x1p-24);
  CHECK(kModelE4M3.round(1000) == 448);
  CHECK(kModelE5M2.round(HUGE_VAL) == 57344);
}

TEST_CASE("chunks are cut where NCCL cuts them") {
  // 5 grains of 4 f32 on 4 ranks: 2, 2, 1 and 0, where a balanced cut gives 2, 1, 1 and 1.
  const NcclModel model(DType::f32, Op::sum, 4);
  CHECK(model.last_rank(0, 20) == 0);
  CHECK(model.last_rank(8, 20) == 1);
  CHECK(model.last_rank(19, 20) == 2);
  const size_t loop = 4 * (size_t{2} << 20) / 4;
  CHECK(model.last_rank(loop - 1, loop + 7) == 3);
  CHECK(model.last_rank(loop + 6, loop + 7) == 1);  // a new loop, with chunks of one grain
  Schedule ours{Collective::all_reduce, Algorithm::ring, 4, 1, 0, loop + 7, 4, loop};
  ours.cut = Cut::rounded_up;
  for (int i = 0; i < step_count(ours); ++i)
    for (int r = 0; r < 4; ++r) {
      const Step s = step(ours, r, i);
      if (s.then != Then::reduce || s.theirs != 3 || s.recv.empty()) continue;
      CHECK(model.last_rank(s.recv.begin, loop + 7) == r);
      CHECK(model.last_rank(s.recv.end() - 1, loop + 7) == r);
    }
}

TEST_CASE("every type and operation, bit for bit") {
  const int n = GENERATE(2, 3, 4, 5, 8);
  INFO(n << " ranks");
  CHECK(on_transport(n, "shm", as_nccl(), [](Communicator& comm) {
          for (int type = 0; type < kDTypes; ++type)
            for (int op = 0; op < kOps; ++op)
              for (const size_t count : {1, 5, 20, 1000, 4099})
                same_as_model(comm, static_cast<DType>(type), static_cast<Op>(op), count);
        }) == "");
}

TEST_CASE("several loops, and pieces that cut chunks") {
  const size_t piece = GENERATE(0, 4096, 65536);
  CHECK(on_transport(3, "shm", as_nccl(piece), [](Communicator& comm) {
          const size_t loop = 3 * (size_t{2} << 20);
          same_as_model(comm, DType::bf16, Op::sum, loop / 2 + 12'345);
          same_as_model(comm, DType::f32, Op::avg, loop / 4);
          same_as_model(comm, DType::f8e4m3, Op::sum, loop + 1);
          same_as_model(comm, DType::f64, Op::sum, loop / 8 + loop / 16);
        }) == "");
}

TEST_CASE("reduce and reduce-scatter end at the rank that keeps the result") {
  const int n = GENERATE(2, 3, 5);
  Options options;  // no algorithm forced: NCCL has one only
  options.numerics = Numerics::nccl;
  CHECK(on_transport(n, "shm", options, [](Communicator& comm) {
          const size_t each = 777, all = each * static_cast<size_t>(comm.size());
          for (const DType type : {DType::f16, DType::bf16, DType::f32, DType::f8e5m2})
            for (const Op op : {Op::sum, Op::avg, Op::prod}) {
              const auto inputs = nccl_inputs(type, op, comm.size(), all, 4);
              const auto factors = nccl_factors(type, comm.size());
              const auto mine = static_cast<size_t>(comm.rank());
              const NcclModel model(type, op, comm.size());
              std::vector<unsigned char> out(each * size_of(type));
              rank_ok(comm.reduce_scatter(inputs[mine].data(), out.data(), each, type, op).wait());
              RANK_CHECK(out == model.reduce(inputs, factors, mine * each, each, comm.rank()));
              for (int root = 0; root < comm.size(); ++root) {
                rank_ok(comm.reduce(inputs[mine].data(), out.data(), each, type, op, root).wait());
                if (comm.rank() == root)
                  RANK_CHECK(out == model.reduce(inputs, factors, 0, each, root));
              }
            }
        }) == "");
}

TEST_CASE("the model tells numerics apart") {
  Options exact = forced(Algorithm::ring);
  exact.numerics = Numerics::exact;
  CHECK(on_transport(4, "shm", exact, [](Communicator& comm) {
          // Balanced chunks begin elsewhere; averages are divided at the end.
          RANK_CHECK(differing(comm, DType::f32, Op::sum, 1004, 1) > 0);
          RANK_CHECK(differing(comm, DType::bf16, Op::avg, 1000, 1) > 0);
          RANK_CHECK(differing(comm, DType::i32, Op::sum, 1000, 1) == 0);
        }) == "");
}

TEST_CASE("the numerics must be alike on all ranks") {
  CHECK(run_ranks(2, std::chrono::seconds(20), [](const Rendezvous& me) {
          Options options;
          options.numerics = me.rank == 0 ? Numerics::nccl : Numerics::exact;
          const auto comm = Communicator::create(me, options);
          RANK_CHECK(comm.status().code() == Code::mismatch);
          RANK_CHECK(comm.status().message().find("numerics") != std::string::npos);
          return 0;
        }) == "");
}

TEST_CASE("C57: averages of f16, in both numerics") {
  for (const Numerics numerics : {Numerics::exact, Numerics::nccl}) {
    Options options;
    options.numerics = numerics;
    CHECK(on_transport(4, "shm", options, [numerics](Communicator& comm) {
            const std::array<uint16_t, 2> mine = {0x78e2, 0x0001};  // 40000 and 2^-24
            std::array<uint16_t, 2> out{};
            rank_ok(comm.all_reduce(mine.data(), out.data(), 2, DType::f16, Op::avg).wait());
            RANK_CHECK(out[0] == 0x78e2);
            RANK_CHECK(out[1] == (numerics == Numerics::exact ? 1 : 0));  // NCCL's loses it
          }) == "");
  }
}
