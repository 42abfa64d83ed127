// Reported bugs of other libraries as tests of ours: resources, start and end, waiting. The numbers
// C27 ... are those of the list of cases.
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <random>
#include <thread>

#include "test/cases.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

size_t entries(const char* directory) {
  size_t count = 0;
  if (DIR* dir = opendir(directory)) {
    while (readdir(dir) != nullptr) ++count;
    closedir(dir);
  }
  return count;
}

struct Resources {
  size_t descriptors = entries("/proc/self/fd");
  size_t threads = entries("/proc/self/task");
  size_t mappings = 0;
  size_t resident_kib = 0;
  Resources() {
    std::string line;
    for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);) ++mappings;
    for (std::ifstream status("/proc/self/status"); std::getline(status, line);)
      if (line.starts_with("VmRSS:")) resident_kib = std::stoul(line.substr(6));
  }
};

double cpu_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

// Cases are longer in the slow suite.
size_t rounds(size_t quick, size_t slow) {
  return std::getenv("RINGFOLD_TEST_SLOW") != nullptr ? slow : quick;
}

}  // namespace

TEST_CASE("C52: a thousand lives of a communicator leave nothing behind") {
  const std::string transport = GENERATE(from_range(transports()));
  const size_t lives = rounds(transport == "shm" ? 100 : 20, transport == "shm" ? 1000 : 200);
  const rlimit few{256, 256};
  CHECK(run_ranks(2, 170s, [&](const Rendezvous& where) {
          setrlimit(RLIMIT_NOFILE, &few);
          Options options;
          options.transports = transport;
          const auto live = [&] {
            auto comm = Communicator::create(where, options);
            if (!rank_ok(comm.status())) return false;
            int32_t x = 1;
            return rank_ok(comm->all_reduce(&x, &x, 1, DType::i32, Op::sum).wait()) &&
                   RANK_CHECK(x == 2);
          };
          for (int i = 0; i < 3; ++i)
            if (!live()) return 1;
          const Resources before;
          for (size_t i = 0; i < lives; ++i)
            if (!live()) return 1;
          const Resources after;
          RANK_CHECK(after.descriptors == before.descriptors);
          RANK_CHECK(after.threads == before.threads);
          RANK_CHECK(after.mappings <= before.mappings + 3);  // the heap may grow by some
          RANK_CHECK(after.resident_kib <= before.resident_kib + 2048);
          return 0;
        }) == "");
}

TEST_CASE("C53: memory stays flat over very many small operations, waited for or not") {
  const size_t operations = rounds(40'000, 1'000'000);
  CHECK(on_transport(
            2, "shm", {},
            [&](Communicator& comm) {
              std::vector<float> x(16, 1.0F);
              const auto all_reduce = [&] {
                return comm.all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::max);
              };
              for (int i = 0; i < 2000; ++i) rank_ok(all_reduce().wait());
              const Resources before;
              for (size_t i = 0; i < operations; ++i)
                if (!rank_ok(all_reduce().wait())) return;
              for (size_t i = 0; i < operations / 16; ++i) {
                std::array<Work, 16> works;
                for (Work& work : works) work = all_reduce();
                for (Work& work : works)
                  if (!rank_ok(work.wait())) return;
              }
              const Resources after;
              RANK_CHECK(after.resident_kib <= before.resident_kib + 1024);
            },
            170s) == "");
}

TEST_CASE("C54: a barrier and the end right after it fail nobody") {
  const std::string transport = GENERATE(from_range(transports()));
  const size_t lives = rounds(transport == "shm" ? 40 : 10, transport == "shm" ? 300 : 60);
  CHECK(run_ranks(4, 170s, [&](const Rendezvous& where) {
          std::mt19937 random(static_cast<unsigned>(where.rank));
          Options options;
          options.transports = transport;
          for (size_t i = 0; i < lives; ++i) {
            auto comm = Communicator::create(where, options);
            if (!rank_ok(comm.status())) return 1;
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
            if (!rank_ok(comm->barrier().wait())) return 1;
          }
          return 0;
        }) == "");
}

TEST_CASE("C55: a communicator of one rank costs no thread, no socket and hardly any memory") {
  const Resources before;
  std::vector<Communicator> alone;
  for (int i = 0; i < 100; ++i) {
    auto comm = Communicator::create(Rendezvous{});
    REQUIRE(comm.ok());
    float x = 3;
    REQUIRE(comm->all_reduce(&x, &x, 1, DType::f32, Op::avg).wait().ok());
    REQUIRE(x == 3);
    alone.push_back(*comm);
  }
  const Resources after;
  CHECK(after.descriptors == before.descriptors);
  CHECK(after.threads == before.threads);
  CHECK(after.resident_kib <= before.resident_kib + 100 * 64);
  Communicator nothing;
  CHECK(nothing.barrier().wait().code() == Code::invalid_argument);
  CHECK(nothing.health().code() == Code::invalid_argument);
}

TEST_CASE("C62: ranks that do nothing, and ranks that wait, use no processor") {
  const bool waiting = GENERATE(false, true);
  const Nanoseconds pause = rounds(3, 10) * 1s;
  const double allowed = 0.005 * std::chrono::duration<double>(pause).count();
  INFO((waiting ? "waiting in a barrier" : "doing nothing"));
  CHECK(on_transport(4, GENERATE(from_range(transports())), {}, [&](Communicator& comm) {
          rank_ok(comm.barrier().wait());
          const double before = cpu_seconds();
          if (!waiting || comm.rank() == 0) std::this_thread::sleep_for(pause);
          if (waiting) rank_ok(comm.barrier().wait());
          const double used = cpu_seconds() - before;
          if (used > allowed)
            rank_fail(fmt::format("{:.1f} ms of processor time, allowed {:.1f}", used * 1e3,
                                  allowed * 1e3));
        }) == "");
}

TEST_CASE("C24: a rank killed in mid-operation is an error on all others, named, within a second") {
  const std::string transport = GENERATE(from_range(transports()));
  Shared<std::atomic<int>> running;
  Processes ranks(4, [&](const Rendezvous& where) {
    Options options;
    options.transports = transport;
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    std::vector<float> x(4 << 20, 1.0F);
    Status status;
    auto last = std::chrono::steady_clock::now();
    for (int i = 0; i < 100'000 && status.ok(); ++i) {
      last = std::chrono::steady_clock::now();
      status = comm->all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::max).wait();
      running->fetch_add(1);
    }
    RANK_CHECK(status.code() == Code::peer_lost);
    RANK_CHECK(status.message().find("rank 1") != std::string::npos);
    RANK_CHECK(std::chrono::steady_clock::now() - last < 3s);
    return 0;
  });
  while (running->load() < 12) std::this_thread::sleep_for(1ms);
  ranks.kill(1);
  const auto ended = ranks.wait(20s);
  for (int r = 0; r < 4; ++r) {
    if (r == 1) continue;
    INFO(transport << ", rank " << r << ": " << ended[static_cast<size_t>(r)].to_string());
    CHECK(ended[static_cast<size_t>(r)].ok());
  }
}

TEST_CASE("C27: abort from another thread ends the blocked call, here and elsewhere") {
  CHECK(on_transport(3, GENERATE(from_range(transports())), {}, [](Communicator& comm) {
          if (comm.rank() == 2) {  // never calls; hears of it
            const auto until = std::chrono::steady_clock::now() + 5s;
            while (comm.health().ok() && std::chrono::steady_clock::now() < until)
              std::this_thread::sleep_for(1ms);
            RANK_CHECK(comm.health().code() == Code::aborted);
            return;
          }
          std::thread other;
          if (comm.rank() == 0)
            other = std::thread([&] {
              std::this_thread::sleep_for(100ms);
              const auto start = std::chrono::steady_clock::now();
              comm.abort("enough");
              RANK_CHECK(std::chrono::steady_clock::now() - start < 100ms);
            });
          int32_t x = 0;
          const Status status = comm.all_reduce(&x, &x, 1, DType::i32, Op::sum).wait();
          RANK_CHECK(status.code() == Code::aborted);
          RANK_CHECK(status.message().find("rank 0: enough") != std::string::npos);
          if (other.joinable()) other.join();
        }) == "");
}

TEST_CASE("C22: a rank that skips a call: a time-out on all, which says who was waited for") {
  Options options;
  options.timeout = 1s;
  CHECK(on_transport(4, GENERATE(from_range(transports())), options, [](Communicator& comm) {
          int64_t x = 1;
          if (comm.rank() == 3) std::this_thread::sleep_for(2s);
          const Status status = comm.all_reduce(&x, &x, 1, DType::i64, Op::sum).wait();
          RANK_CHECK(status.code() == Code::timeout);
          RANK_CHECK(status.message().find("all_reduce i64 sum of 1 elements") !=
                     std::string::npos);
        }) == "");
}

TEST_CASE("C49: a forked child is refused and ends; the parent goes on") {
  CHECK(on_transport(2, GENERATE(from_range(transports())), {}, [](Communicator& comm) {
          int64_t x = 1;
          rank_ok(comm.all_reduce(&x, &x, 1, DType::i64, Op::max).wait());
          for (int i = 0; i < 4; ++i) {
            const pid_t child = fork();
            if (child == 0) {
              const Status status = comm.barrier().wait();
              _exit(status.code() == Code::invalid_argument ? 0 : 1);
            }
            int ended = -1;
            RANK_CHECK(waitpid(child, &ended, 0) == child);
            RANK_CHECK(ended == 0);
          }
          for (int i = 0; i < 100; ++i)
            rank_ok(comm.all_reduce(&x, &x, 1, DType::i64, Op::max).wait());
        }) == "");
}

TEST_CASE("C50: threads with communicators of their own, and threads that share one") {
  CHECK(on_transport(2, GENERATE(from_range(transports())), {}, [](Communicator& comm) {
          std::vector<Communicator> own;
          for (int t = 0; t < 4; ++t) {
            auto part = comm.split(0, comm.rank());
            if (!rank_ok(part.status())) return;
            own.push_back(*part);
          }
          std::vector<std::thread> threads;
          for (int t = 0; t < 4; ++t)
            threads.emplace_back([&, t] {
              std::mt19937 random(static_cast<unsigned>(t));
              for (int i = 0; i < 60; ++i) {
                std::vector<int32_t> x(1 + random() % 20'000, t + i);
                rank_ok(own[static_cast<size_t>(t)]
                            .all_reduce(x.data(), x.data(), x.size(), DType::i32, Op::sum)
                            .wait());
                RANK_CHECK(x == std::vector<int32_t>(x.size(), 2 * (t + i)));
              }
            });
          for (auto& thread : threads) thread.join();
          // Same calls from two threads of each rank: which comes first does not matter.
          threads.clear();
          for (int t = 0; t < 2; ++t)
            threads.emplace_back([&] {
              for (int i = 0; i < 200; ++i) {
                int32_t x = 5;
                rank_ok(comm.all_reduce(&x, &x, 1, DType::i32, Op::sum).wait());
                RANK_CHECK(x == 10);
              }
            });
          for (auto& thread : threads) thread.join();
        }) == "");
}

TEST_CASE("C51: two communicators, many operations in flight, waited for in reverse") {
  CHECK(on_transport(3, GENERATE(from_range(transports())), {}, [](Communicator& comm) {
          auto other = comm.split(0, comm.rank());
          if (!rank_ok(other.status())) return;
          std::vector<std::vector<int64_t>> data;
          for (int i = 0; i < 32; ++i)
            data.emplace_back(1000 + static_cast<size_t>(i) * 777, comm.rank() + i);
          std::vector<Work> works;
          for (size_t i = 0; i < data.size(); ++i)
            works.push_back((i % 2 == 0 ? comm : *other)
                                .all_reduce(data[i].data(), data[i].data(), data[i].size(),
                                            DType::i64, Op::sum));
          for (size_t i = works.size(); i-- > 0;) {
            rank_ok(works[i].wait());
            RANK_CHECK(data[i] ==
                       std::vector<int64_t>(data[i].size(), 3 + 3 * static_cast<int64_t>(i)));
          }
        }) == "");
}
