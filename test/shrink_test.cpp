// The survivors of a communicator go on by themselves.
#include <array>
#include <catch2/catch.hpp>
#include <thread>
#include <vector>

#include "test/cases.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// The sum of world ranks over a communicator of them.
int64_t sum_of(Communicator& comm, int world_rank) {
  const int64_t mine = world_rank;
  int64_t sum = -1;
  rank_ok(comm.all_reduce(&mine, &sum, 1, DType::i64, Op::sum).wait());
  return sum;
}

Options patient(Nanoseconds timeout = 15s) {
  Options options;
  options.timeout = timeout;
  return options;
}

}  // namespace

TEST_CASE("some are left out, again and again, and the rest goes on in order") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(5, transport, patient(), [](Communicator& comm) {
          const int me = comm.rank();
          if (me == 2) return;
          auto four = comm.shrink(std::array{2});
          if (!rank_ok(four.status())) return;
          RANK_CHECK(four->size() == 4);
          RANK_CHECK(four->rank() == (me < 2 ? me : me - 1));
          RANK_CHECK(sum_of(*four, me) == 8);
          if (me == 0) return;
          auto three = four->shrink(std::array{0});
          if (!rank_ok(three.status())) return;
          RANK_CHECK(sum_of(*three, me) == 8);
          std::vector<float> large(100'000, 1);
          rank_ok(three->all_reduce(large.data(), large.data(), large.size(), DType::f32, Op::sum)
                      .wait());
          RANK_CHECK(large.front() == 3);
          RANK_CHECK(large.back() == 3);
          if (me == 1) return;
          auto two = three->shrink(std::array{0});
          if (rank_ok(two.status())) RANK_CHECK(sum_of(*two, me) == 7);
        }) == "");
}

TEST_CASE("whoever dies, rank 0 included, the others shrink and go on") {
  const std::string transport = GENERATE(from_range(transports()));
  const int dead = GENERATE(0, 1, 3);
  INFO(transport << ", rank " << dead << " dies");
  CHECK(on_transport(4, transport, patient(), [dead](Communicator& comm) {
          const int me = comm.rank();
          RANK_CHECK(sum_of(comm, me) == 6);
          if (me == dead) _exit(0);
          const int64_t one = 1;
          int64_t out = 0;
          const Status lost = comm.all_reduce(&one, &out, 1, DType::i64, Op::sum).wait();
          RANK_CHECK(lost.code() == Code::peer_lost);
          auto rest = comm.shrink(std::array{dead});
          if (!rank_ok(rest.status())) return;
          for (int i = 0; i < 3; ++i) RANK_CHECK(sum_of(*rest, me) == 6 - dead);
          RANK_CHECK(comm.health().code() == Code::peer_lost);
          auto part = rest->split(rest->rank() % 2, 0);  // and it is a communicator like any other
          if (rank_ok(part.status())) RANK_CHECK(part->size() == (rest->rank() % 2 == 0 ? 2 : 1));
        }) == "");
}

TEST_CASE("lists that differ are an error, not a wrong communicator") {
  CHECK(on_transport(4, "shm", patient(5s), [](Communicator& comm) {
          if (comm.rank() == 3) {
            std::this_thread::sleep_for(300ms);  // it is there, but does not call
            return;
          }
          const std::vector<int> gone =
              comm.rank() == 2 ? std::vector<int>{3} : std::vector<int>{3, 3};
          RANK_CHECK(comm.shrink(gone).ok());  // named twice is named
          const std::vector<int> other = comm.rank() == 2 ? std::vector{0, 3} : std::vector{3};
          const auto made = comm.shrink(other);
          RANK_CHECK(
              (made.status().code() == Code::mismatch || made.status().code() == Code::timeout ||
               made.status().code() == Code::aborted || made.status().code() == Code::peer_lost));
        }) == "");
}

TEST_CASE("wrong lists; one that is left alone; a communicator of one") {
  CHECK(on_transport(2, "shm", patient(), [](Communicator& comm) {
          const int me = comm.rank();
          RANK_CHECK(comm.shrink(std::array{2}).status().code() == Code::invalid_argument);
          RANK_CHECK(comm.shrink(std::array{-1}).status().code() == Code::invalid_argument);
          RANK_CHECK(comm.shrink(std::array{me}).status().code() == Code::invalid_argument);
          auto alone = comm.shrink(std::array{1 - me});
          if (!rank_ok(alone.status())) return;
          RANK_CHECK(alone->size() == 1);
          RANK_CHECK(sum_of(*alone, me) == me);
          auto again = alone->shrink({});
          if (rank_ok(again.status())) RANK_CHECK(sum_of(*again, me) == me);
        }) == "");
  CHECK(Communicator().shrink({}).status().code() == Code::invalid_argument);
}
