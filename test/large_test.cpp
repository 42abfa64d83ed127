// Messages beyond 2^31 bytes and elements (C10, C11): offsets that a 32-bit number cannot hold, and
// system calls that move less than they were asked to.
#include <catch2/catch.hpp>
#include <vector>

#include "test/cases.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// One in-place sum; `value(rank, i)` is what a rank contributes. Checked at both ends and around
// every border near 2^31 bytes and 2^31 elements, and at a stride through the rest.
template <class T, class Value>
void sum_in_place(Communicator& comm, size_t count, DType type, Value value) {
  std::vector<T> x(count);
  for (size_t i = 0; i < count; ++i) x[i] = value(comm.rank(), i);
  if (!rank_ok(comm.all_reduce(x.data(), x.data(), count, type, Op::sum).wait())) return;
  const auto right = [&](size_t i) {
    T sum = 0;
    for (int r = 0; r < comm.size(); ++r) sum = static_cast<T>(sum + value(r, i));
    return i >= count || x[i] == sum;
  };
  size_t wrong = 0;
  for (size_t i = 0; i < count; i += 997) wrong += right(i) ? 0 : 1;
  for (const size_t border : {size_t{0}, count - 1, (size_t{1} << 31) / sizeof(T), count / 2}) {
    for (size_t i = border < 64 ? 0 : border - 64; i < border + 64; ++i) wrong += right(i) ? 0 : 1;
  }
  RANK_CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("C10, C11: more than 2^31 elements, more than 2^31 bytes") {
  const std::string transport = GENERATE(from_range(transports()));
  Options options;
  options.piece_bytes = 1 << 20;
  CHECK(on_transport(
            2, transport, options,
            [](Communicator& comm) {
              sum_in_place<int8_t>(comm, (size_t{1} << 31) + 13, DType::i8, [](int rank, size_t i) {
                return static_cast<int8_t>((i * 31 + static_cast<size_t>(rank)) % 5);
              });
            },
            170s) == "");
  CHECK(on_transport(
            2, transport, options,
            [](Communicator& comm) {
              sum_in_place<double>(comm, (size_t{1} << 28) + 3, DType::f64, [](int rank, size_t i) {
                return static_cast<double>(i * 3 + static_cast<size_t>(rank));
              });
            },
            170s) == "");
}
