// What a communicator must take from a careless caller: handles given up at awkward moments, calls
// that cannot be, ranks that do not fit together.
#include <fmt/core.h>

#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <thread>
#include <vector>

#include "ringfold/average.h"
#include "ringfold/communicator.h"
#include "test/processes.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

TEST_CASE("the last handle of a communicator may live in a callback") {
  CHECK(run_ranks(2, 10s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          std::vector<float> x(1000, 1);
          Work work = comm->all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::sum);
          work.then([last = *comm](const Status& status) { rank_ok(status); });
          *comm = Communicator();
          rank_ok(work.wait(5s));
          return 0;
        }) == "");
}

TEST_CASE("a communicator ends although another one still has something open") {
  CHECK(run_ranks(2, 20s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          auto part = comm->split(0, 0);
          if (!rank_ok(part.status())) return 1;
          int sent = 7, got = 0;
          if (where.rank == 1) {  // answers only after rank 0 has given `part` up
            rank_ok(comm->recv(&got, 1, DType::i32, 0).wait(10s));
            rank_ok(comm->send(&got, 1, DType::i32, 0).wait(10s));
            return 0;
          }
          Work answer = comm->recv(&got, 1, DType::i32, 1);
          *part = Communicator();
          rank_ok(comm->send(&sent, 1, DType::i32, 1).wait(10s));
          rank_ok(answer.wait(10s));
          RANK_CHECK(got == 7);
          return 0;
        }) == "");
}

TEST_CASE("a communicator may be given up before the group that holds its calls is submitted") {
  const int n = GENERATE(1, 2);
  Shared<std::atomic<int>> created, called;  // giving up fails whoever is not as far as this yet
  CHECK(run_ranks(n, 10s, [&](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          for (created->fetch_add(1); *created < where.size;) std::this_thread::yield();
          std::vector<float> x(1000, 1), y(1000), mine(10, 5), copy(10);
          Group group;
          Work sum = comm->all_reduce(x.data(), y.data(), x.size(), DType::f32, Op::sum);
          comm->send(mine.data(), mine.size(), DType::f32, where.rank);
          Work self = comm->recv(copy.data(), copy.size(), DType::f32, where.rank);
          for (called->fetch_add(1); *called < where.size;) std::this_thread::yield();
          *comm = Communicator();
          Work all = group.submit();
          RANK_CHECK(all.done());
          // Between ranks it ends as any communicator that is given up too early.
          // Or it is over already, where the others showed what they had to.
          const auto may_end = [&](Code code) {
            return code == Code::ok || (where.size > 1 && code == Code::aborted);
          };
          const Code ended = sum.wait().code(), own = self.wait().code();
          RANK_CHECK(may_end(ended));
          if (ended == Code::ok) RANK_CHECK(y == std::vector<float>(1000, where.size));
          RANK_CHECK(may_end(own));
          if (own == Code::ok) RANK_CHECK(copy == mine);
          return 0;
        }) == "");
}

TEST_CASE(
    "an inner group that is dropped starts nothing, one that is submitted is done at the end") {
  CHECK(run_ranks(2, 10s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          std::vector<int> a(100, 1), b(100, 1), c(100, 1);
          const auto sum = [&](std::vector<int>& x) {
            return comm->all_reduce(x.data(), x.data(), x.size(), DType::i32, Op::sum);
          };
          Group outer;
          Work first = sum(a), dropped, last, inner_done;
          {
            Group inner;
            dropped = sum(b);
          }
          {
            Group inner;
            last = sum(c);
            inner_done = inner.submit();
          }
          RANK_CHECK(dropped.wait(0s).code() == Code::aborted);
          RANK_CHECK(!inner_done.done());
          rank_ok(outer.submit().wait(5s));
          rank_ok(first.wait(5s));
          rank_ok(last.wait(5s));
          rank_ok(inner_done.wait(5s));
          RANK_CHECK(a == std::vector<int>(100, 2));
          RANK_CHECK(b == std::vector<int>(100, 1));
          RANK_CHECK(c == std::vector<int>(100, 2));
          return 0;
        }) == "");
}

TEST_CASE("messages and gradients that cannot be are refused") {
  CHECK(run_ranks(2, 10s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          std::array<double, 8> x{};
          for (const int partner : {0, 1}) {
            for (const int type : {12, 77, 255}) {
              const auto unknown = static_cast<DType>(type);
              RANK_CHECK(comm->send(x.data(), 8, unknown, partner).wait(1s).code() ==
                         Code::invalid_argument);
              RANK_CHECK(comm->recv(x.data(), 8, unknown, partner).wait(1s).code() ==
                         Code::invalid_argument);
            }
            for (const size_t count : {SIZE_MAX, SIZE_MAX / 8 + 1, SIZE_MAX / 2}) {
              RANK_CHECK(comm->send(x.data(), count, DType::f64, partner).wait(1s).code() ==
                         Code::invalid_argument);
              RANK_CHECK(comm->recv(x.data(), count, DType::f64, partner).wait(1s).code() ==
                         Code::invalid_argument);
            }
          }
          const Gradient null{nullptr, 100, DType::f32}, odd{x.data(), 8, static_cast<DType>(77)};
          for (const Gradient& gradient : {null, odd}) {
            RANK_CHECK(average_gradients(*comm, std::span(&gradient, 1)).code() ==
                       Code::invalid_argument);
            RANK_CHECK(average_gradients(*comm, std::span(&gradient, 1), where.rank).code() ==
                       Code::invalid_argument);
          }
          rank_ok(comm->barrier().wait(5s));
          return 0;
        }) == "");
}

TEST_CASE("threads may split different communicators at once") {
  CHECK(run_ranks(3, 30s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          std::array<Communicator, 4> parents, parts;
          for (Communicator& parent : parents) parent = *comm->split(0, 0);
          for (int round = 0; round < 5; ++round) {
            std::vector<std::thread> threads;
            for (size_t i = 0; i < parents.size(); ++i)
              threads.emplace_back([&, i] {
                auto part = parents[i].split(0, 0);
                if (rank_ok(part.status())) parts[i] = *part;
              });
            for (std::thread& thread : threads) thread.join();
            std::array<std::vector<int>, 4> x;
            std::array<Work, 4> works;
            for (size_t i = 0; i < parts.size(); ++i) {
              x[i].assign(1000 * (i + 1), static_cast<int>(i));
              works[i] =
                  parts[i].all_reduce(x[i].data(), x[i].data(), x[i].size(), DType::i32, Op::sum);
            }
            for (size_t i = 0; i < parts.size(); ++i) {
              if (!rank_ok(works[i].wait(10s))) return 1;
              RANK_CHECK(x[i] == std::vector<int>(x[i].size(), 3 * static_cast<int>(i)));
            }
          }
          return 0;
        }) == "");
}

TEST_CASE(
    "whoever gives a communicator up in the middle of a call does not leave the others waiting") {
  CHECK(run_ranks(3, 20s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          auto part = comm->split(0, 0);
          if (!rank_ok(part.status())) return 1;
          float x = 1;
          if (where.rank == 0) {  // rank 2 never calls
            const Status status = part->all_reduce(&x, &x, 1, DType::f32, Op::sum).wait(5s);
            RANK_CHECK(status.code() == Code::aborted);
            RANK_CHECK(status.message().find("rank 1") != std::string::npos);
          } else if (where.rank == 1) {
            Work work = part->all_reduce(&x, &x, 1, DType::f32, Op::sum);
            *part = Communicator();
            RANK_CHECK(work.wait().code() == Code::aborted);
          }
          rank_ok(comm->barrier().wait(10s));
          return 0;
        }) == "");
}

TEST_CASE("half a message to oneself ends at its deadline") {
  const int n = GENERATE(1, 2);
  CHECK(run_ranks(n, 10s, [](const Rendezvous& where) {
          Options options;
          options.timeout = 300ms;
          auto comm = Communicator::create(where, options);
          if (!rank_ok(comm.status())) return 1;
          std::array<char, 10> x{};
          const Status status = comm->send(x.data(), x.size(), DType::u8, where.rank).wait(5s);
          RANK_CHECK(status.code() == Code::timeout);
          RANK_CHECK(status.message().find("itself") != std::string::npos);
          RANK_CHECK(comm->health().code() == Code::timeout);
          return 0;
        }) == "");
}

TEST_CASE("a message to oneself that a group starts after abort() ends") {
  const int n = GENERATE(1, 2);
  Shared<std::atomic<int>> called;  // the first abort() ends everybody's calls
  CHECK(run_ranks(n, 10s, [&](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          std::array<char, 10> x{};
          Group group;
          Work half = comm->send(x.data(), x.size(), DType::u8, where.rank);
          for (called->fetch_add(1); *called < where.size;) std::this_thread::yield();
          comm->abort("enough");
          RANK_CHECK(group.submit().wait(2s).code() == Code::aborted);
          RANK_CHECK(half.done());
          return 0;
        }) == "");
}

TEST_CASE("groups that end in another order than they should do no harm") {
  auto comm = Communicator::create(Rendezvous());
  REQUIRE(comm.ok());
  std::array<float, 4> x{1, 2, 3, 4};
  auto outer = std::make_unique<Group>();
  Work first = comm->all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::sum);
  auto inner = std::make_unique<Group>();
  Work second = comm->all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::sum);
  outer.reset();
  CHECK(inner->submit().wait(1s).ok());
  CHECK(first.wait(1s).code() == Code::aborted);
  CHECK(second.wait(1s).code() == Code::aborted);
}
