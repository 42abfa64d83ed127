// Ranks that call different things: whatever the two calls are, all ranks hear of a mismatch, at
// once and not when their time is over, in words that name both sides; on every way, also in
// sub-communicators. Afterwards they go on together.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "test/cases.h"
#include "test/hosts.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// So long that whatever is told at all was not told because time was over.
constexpr Nanoseconds kTimeout = 10min;
constexpr Nanoseconds kLimit = 5min;  // for a whole test, however busy the machine is

struct OneCall {
  Collective collective;
  size_t count;  // as the call takes it
  int root = 0;
  DType type = DType::f32;
  Op op = Op::sum;
};

// The roots are ranks 0 and 1.
std::vector<OneCall> calls() {
  std::vector<OneCall> all;
  for (const size_t count : {0, 1, 3000}) {
    for (const Collective collective :
         {Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather,
          Collective::all_to_all, Collective::broadcast, Collective::reduce, Collective::gather,
          Collective::scatter}) {
      all.push_back({collective, count});
      if (has_root(collective)) all.push_back({collective, count, 1});
    }
    all.push_back({Collective::all_reduce, count, 0, DType::i32});
    all.push_back({Collective::all_reduce, count, 0, DType::f32, Op::max});
  }
  return all;
}

Work start(Communicator& comm, const OneCall& call, std::vector<std::byte>& in,
           std::vector<std::byte>& out) {
  const size_t bytes = call.count * 4 * static_cast<size_t>(comm.size());
  in.resize(bytes + 64);
  out.resize(bytes + 64);
  std::byte *const send = in.data(), *const recv = out.data();
  const auto [collective, count, root, type, op] = call;
  switch (collective) {
    case Collective::all_reduce:
      return comm.all_reduce(send, recv, count, type, op);
    case Collective::reduce_scatter:
      return comm.reduce_scatter(send, recv, count, type, op);
    case Collective::all_gather:
      return comm.all_gather(send, recv, count, type);
    case Collective::all_to_all:
      return comm.all_to_all(send, recv, count, type);
    case Collective::broadcast:
      return comm.broadcast(recv, count, type, root);
    case Collective::reduce:
      return comm.reduce(send, recv, count, type, op, root);
    case Collective::gather:
      return comm.gather(send, recv, count, type, root);
    case Collective::scatter:
      return comm.scatter(send, recv, count, type, root);
  }
  return {};
}

std::string words(const OneCall& c) {
  return fmt::format("{} {} {} of {}, root {}", name(c.collective), name(c.type), name(c.op),
                     c.count, c.root);
}

double milliseconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun)
      .count();
}

// How long it took on each rank, each time.
struct Tally {
  std::atomic<size_t> count{0};
  std::array<double, 1 << 14> milliseconds{};

  void add(double time) { milliseconds[count.fetch_add(1) % milliseconds.size()] = time; }
  // Prints them and gives the median, in which it does not show if all stood still for a while.
  double median(const std::string& what) {
    const auto end = milliseconds.begin() + static_cast<ptrdiff_t>(count.load());
    std::sort(milliseconds.begin(), end);
    const double middle = milliseconds[count / 2];
    fmt::print("mismatch: {}: {} times on a rank; known after {:.1f} ms, {:.1f} ms at worst\n",
               what, count.load(), middle, end[-1]);
    return middle;
  }
};

// Rank `odd` makes the second call, the others the first. A rank whose own call was through before
// anybody could know hears of it in the next ones.
void differ(Communicator& comm, const OneCall& first, const OneCall& second, int odd,
            Tally& tally) {
  std::vector<std::byte> in, out;
  const bool mine = comm.rank() == odd;
  const auto begun = std::chrono::steady_clock::now();
  Status status = start(comm, mine ? second : first, in, out).wait();
  for (int more = 0; status.ok() && more < 1000; ++more) {
    status = comm.barrier().wait();
    if (more > 10) std::this_thread::sleep_for(1ms);
  }
  tally.add(milliseconds_since(begun));
  const bool named = status.message().find(fmt::format("rank {} called", odd)) != std::string::npos;
  if (status.code() != Code::mismatch || !named)
    rank_fail(fmt::format("rank {} of {}: {} | rank {}: {}: {}", comm.rank(), comm.size(),
                          words(first), odd, words(second), status.to_string()));
  const Result<Communicator> next = comm.shrink({});
  if (rank_ok(next.status())) comm = *next;
}

// Each pair of calls with one rank that is odd; who calls what takes turns. All pairs in the slow
// suite, every `stride`th otherwise.
void differ_in_everything(Communicator& comm, size_t stride, Tally& tally) {
  const std::vector<OneCall> all = calls();
  const bool slow = std::getenv("RINGFOLD_TEST_SLOW") != nullptr;
  size_t n = 0;
  for (size_t a = 0; a < all.size(); ++a)
    for (size_t b = a + 1; b < all.size() && detail::failures < 10; ++b)
      if (++n % stride == 0 || slow)
        differ(comm, all[a], all[b], static_cast<int>(n / stride) % comm.size(), tally);
}

Options patient() {
  Options options;
  options.timeout = kTimeout;
  return options;
}

}  // namespace

TEST_CASE("any two calls that differ are a mismatch on all ranks, at once") {
  const std::string way = GENERATE(from_range(transports()));
  const int ranks = GENERATE(2, 3);
  INFO(way << ", " << ranks << " ranks");
  Shared<Tally> tally;
  CHECK(on_transport(
            ranks, way, patient(),
            [&](Communicator& comm) { differ_in_everything(comm, 11, *tally); }, kLimit) == "");
  CHECK(tally->median(fmt::format("{}, {} ranks", way, ranks)) < 1000);
}

// No message of theirs can tell: each waits for another.
TEST_CASE("ranks that all only receive hear of their mismatch as soon") {
  const std::string way = GENERATE(from_range(transports()));
  const int ranks = GENERATE(2, 3);
  INFO(way << ", " << ranks << " ranks");
  Shared<Tally> tally;
  CHECK(on_transport(
            ranks, way, patient(),
            [&](Communicator& comm) {
              for (const size_t count : {0, 1, 3000})
                for (const Collective collective : {Collective::gather, Collective::reduce})
                  for (int i = 0; i < 3; ++i)
                    differ(comm, {collective, count, 0}, {Collective::gather, count, 1}, 1, *tally);
            },
            kLimit) == "");
  CHECK(tally->median(fmt::format("only receiving, {}, {} ranks", way, ranks)) < 500);
}

TEST_CASE("the same among the ranks of a part, while another part goes on") {
  const std::string way = GENERATE(from_range(transports()));
  INFO(way);
  Shared<Tally> tally;
  CHECK(on_transport(
            4, way, patient(),
            [&](Communicator& comm) {
              // Ranks 3, 2, 1 in this order, and beside them all in another communicator.
              auto part = comm.split(comm.rank() == 0 ? 1 : 0, -comm.rank());
              auto beside = comm.split(0, 0);
              if (!rank_ok(part.status()) || !rank_ok(beside.status())) return;
              if (comm.rank() != 0) differ_in_everything(*part, 67, *tally);
              int64_t sum = 1;
              rank_ok(beside->all_reduce(&sum, &sum, 1, DType::i64, Op::sum).wait());
              RANK_CHECK(sum == 4);
            },
            kLimit) == "");
  CHECK(tally->median(way + ", a part") < 1000);
}

TEST_CASE("who called something else and gave the communicator up is still told of") {
  const std::string way = GENERATE(from_range(transports()));
  const bool leaves = GENERATE(false, true);
  INFO(way << (leaves ? ", and left" : ""));
  Shared<std::atomic<bool>> gave_up;
  CHECK(on_transport(
            3, way, patient(),
            [&](Communicator& comm) {
              int32_t x = 1;
              auto other = comm.split(0, 0);
              if (!rank_ok(other.status())) return;
              if (comm.rank() == 2) {
                // A root's broadcast of little is over before anybody has taken it.
                rank_ok(other->broadcast(&x, 1, DType::i32, 2).wait());
                *other = Communicator();
                if (leaves) comm = Communicator();
                *gave_up = true;
              } else {
                while (!*gave_up) std::this_thread::sleep_for(1ms);
                const Status status = other->all_reduce(&x, &x, 1, DType::i32, Op::sum).wait();
                if (status.code() != Code::mismatch) rank_fail(status.to_string());
              }
              if (!leaves) rank_ok(comm.barrier().wait());
            },
            kLimit) == "");
}

#ifdef RINGFOLD_TEST_UCX

TEST_CASE("the same where an all-reduce goes host by host") {
  const Hosts hosts;
  if (!hosts.here() || !hosts.with_ipv4()) return skip("namespaces need root, ip and nsenter");
  const std::vector<OneCall> all = {
      {Collective::all_reduce, 50'000},
      {Collective::all_reduce, 50'001},
      {Collective::all_reduce, 50'000, 0, DType::i32},
      {Collective::all_reduce, 50'000, 0, DType::f32, Op::max},
      {Collective::all_reduce, 1},  // as messages of all ranks
      {Collective::reduce, 50'000, 1},
      {Collective::broadcast, 50'000},
  };
  Shared<Tally> tally;
  CHECK(run_ranks(4, kLimit, [&](Rendezvous where) {
          if (!RANK_CHECK(hosts.enter(where.rank < 2 ? 0 : 1))) return 1;
          where.coordinator = "10.77.0.1:29610";
          auto comm = Communicator::create(where, patient());
          if (!rank_ok(comm.status())) return 1;
          RANK_CHECK(comm->transport().find("ucx") != std::string::npos);
          int odd = 0;
          for (size_t a = 0; a < all.size(); ++a)
            for (size_t b = a + 1; b < all.size() && detail::failures < 10; ++b)
              differ(*comm, all[a], all[b], odd++ % 4, *tally);
          return 0;
        }) == "");
  CHECK(tally->median("host by host, 2 + 2 ranks") < 1000);
}

#endif
