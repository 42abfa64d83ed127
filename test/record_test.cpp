// What a communicator remembers and counts of its operations, and who may read it when.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "lib/record/picture.h"
#include "test/cases.h"
#include "test/environment.h"
#include "test/hosts.h"
#include "test/processes.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;
using nlohmann::json;

namespace {

void sum(Communicator& comm, size_t count, int times = 1) {
  std::vector<float> x(count, 1);
  for (int i = 0; i < times; ++i)
    rank_ok(comm.all_reduce(x.data(), x.data(), count, DType::f32, Op::max).wait());
}

json record_of(const Communicator& comm) {
  const json record = json::parse(comm.record(), nullptr, false);
  RANK_CHECK(record.is_object());
  return record;
}

// The latest record of an operation of so many elements; null if there is none.
json latest(const json& record, size_t count) {
  json found;
  for (const json& one : record["operations"])
    if (one["count"] == count) found = one;
  return found;
}

}  // namespace

TEST_CASE("every operation is remembered, as what it was and how it ended") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(3, transport, {}, [&](Communicator& comm) {
          sum(comm, 100'000);
          sum(comm, 7, 5);
          float root = 1;
          rank_ok(comm.broadcast(&root, 1, DType::f32, 2).wait());
          std::vector<char> message(9);
          if (comm.rank() == 0) rank_ok(comm.send(message.data(), 9, DType::i8, 1).wait());
          if (comm.rank() == 1) rank_ok(comm.recv(message.data(), 9, DType::i8, 0).wait());
          const json record = record_of(comm);
          RANK_CHECK(record["rank"] == comm.rank());
          RANK_CHECK(record["size"] == 3);
          RANK_CHECK(record["transport"] == comm.transport());
          RANK_CHECK(record["code"] == "ok");
          const json large = latest(record, 100'000);
          RANK_CHECK(large["collective"] == "all_reduce");
          RANK_CHECK(large["op"] == "max");
          RANK_CHECK(large["dtype"] == "f32");
          RANK_CHECK(large["state"] == "done");
          RANK_CHECK(large["algorithm"] == (transport == "region" ? "region" : "ring"));
          RANK_CHECK(large["ended_ns"].get<int64_t>() > large["began_ns"].get<int64_t>());
          RANK_CHECK(large["step"] == large["steps"]);
          RANK_CHECK(large["steps"].get<int>() > 0);
          const json small = latest(record, 7);
          RANK_CHECK(small["state"] == "done");
          RANK_CHECK(small.value("last_seq", small["seq"].get<int>()) ==
                     large["seq"].get<int>() + 5);
          RANK_CHECK(latest(record, 1)["root"] == 2);
          if (comm.rank() == 2) return;
          RANK_CHECK(latest(record, 9)["message"] == (comm.rank() == 0 ? "send" : "receive"));
          RANK_CHECK(latest(record, 9)["partner"] == 1 - comm.rank());
          RANK_CHECK(latest(record, 9)["way"] == "messages");
        }) == "");
}

TEST_CASE("the record is bounded: the latest stay") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(2, transport, {}, [](Communicator& comm) {
          for (size_t count = 1; count <= 300; ++count) sum(comm, count);
          const json record = record_of(comm);
          RANK_CHECK(record["operations"].size() <= 2 * record::kEntries);
          for (size_t count = 300; count > 300 - record::kEntries; --count)
            RANK_CHECK(!latest(record, count).is_null());
          RANK_CHECK(latest(record, 200).is_null());
        }) == "");
}

TEST_CASE("counters: operations, bytes both ways, waits, failures; of one and of the process") {
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_transport(2, transport, {}, [](Communicator& comm) {
          const Counters before = comm.counters();
          sum(comm, 64, 10);
          sum(comm, 100'000);
          std::vector<int64_t> each(10), all(20);
          rank_ok(comm.all_gather(each.data(), all.data(), 10, DType::i64).wait());
          const Counters after = comm.counters();
          RANK_CHECK(after.operations - before.operations == 12);
          RANK_CHECK(after.finished == after.operations);
          // Two ranks send and receive as many bytes as they have, and half of it twice.
          const uint64_t bytes = 640 * 4 + 100'000 * 4 + 10 * 8;
          RANK_CHECK(after.bytes_sent - before.bytes_sent == bytes);
          RANK_CHECK(after.bytes_received - before.bytes_received == bytes);
          RANK_CHECK(after.failures == 0);
          if (comm.rank() == 1) std::this_thread::sleep_for(100ms);
          sum(comm, 1);
          if (comm.rank() == 0) RANK_CHECK(comm.counters().wait_seconds > 0.05);
          if (comm.rank() == 0) RANK_CHECK(comm.counters().waits > after.waits);
          {
            auto part = comm.split(0, 0);
            if (!rank_ok(part.status())) return;
            sum(*part, 1000, 3);
            RANK_CHECK(part->counters().finished >= 3);
          }
          const Counters one = comm.counters(), process = process_counters();
          RANK_CHECK(process.operations >= one.operations + 3);
          RANK_CHECK(process.bytes_sent >= one.bytes_sent + 3 * 4000);
          const std::string text = prometheus_text();
          const std::string metric =
              fmt::format("size=\"2\",transport=\"{}\"}} {}\n", comm.transport(), one.operations);
          RANK_CHECK(text.find("# TYPE ringfold_operations_total counter\n") != std::string::npos);
          RANK_CHECK(text.find(metric) != std::string::npos);
          comm.abort("enough");
          while (comm.counters().failures == 0) std::this_thread::sleep_for(1ms);
          RANK_CHECK(process_counters().failures == 1);
        }) == "");
}

TEST_CASE("reduce_scatter, reduce, gather, scatter and all_to_all: all bytes sent are received") {
  const std::string transport = GENERATE(from_range(transports()));
  Shared<std::array<std::atomic<uint64_t>, 2>> total;
  CHECK(on_transport(3, transport, {}, [&](Communicator& comm) {
          const Counters before = comm.counters();
          const size_t each = 3000;
          std::vector<float> a(3 * each), b(3 * each);
          rank_ok(comm.reduce_scatter(a.data(), b.data(), each, DType::f32, Op::sum).wait());
          rank_ok(comm.all_to_all(a.data(), b.data(), each, DType::f32).wait());
          rank_ok(comm.gather(a.data(), b.data(), each, DType::f32, 1).wait());
          rank_ok(comm.scatter(a.data(), b.data(), each, DType::f32, 1).wait());
          rank_ok(comm.reduce(a.data(), b.data(), each, DType::f32, Op::sum, 2).wait());
          const Counters after = comm.counters();
          total->at(0) += after.bytes_sent - before.bytes_sent;
          total->at(1) += after.bytes_received - before.bytes_received;
        }) == "");
  CHECK(total->at(0) > 0);
  CHECK(total->at(0) == total->at(1));
}

#ifdef RINGFOLD_TEST_UCX

// A call of the user is one operation, whatever many it is made of; its bytes are those of all.
TEST_CASE("counters of all-reduces that go host by host") {
  const Hosts hosts;
  if (!hosts.here() || !hosts.with_ipv4()) return skip("namespaces need root, ip and nsenter");
  Shared<std::array<std::atomic<uint64_t>, 2>> total;
  constexpr size_t kCount = 300'000;
  CHECK(run_ranks(4, 60s, [&](Rendezvous where) {
          if (!RANK_CHECK(hosts.enter(where.rank < 2 ? 0 : 1))) return 1;
          where.coordinator = "10.77.0.1:29611";
          auto comm = Communicator::create(where, {});
          if (!rank_ok(comm.status())) return 1;
          const Counters before = comm->counters(), process_before = process_counters();
          std::vector<int64_t> x(kCount, 1);
          if (where.rank == 3) std::this_thread::sleep_for(100ms);
          Work work = comm->all_reduce(x.data(), x.data(), kCount, DType::i64, Op::max);
          if (!rank_ok(work.wait())) return 1;
          RANK_CHECK(work.report().algorithm == Algorithm::two_level);
          const Counters after = comm->counters(), process = process_counters();
          RANK_CHECK(after.operations - before.operations == 1);
          RANK_CHECK(after.finished == after.operations);
          RANK_CHECK(process.operations - process_before.operations == 1);
          // Half of the bytes cross, but for the cut; half of the sum is handed on inside.
          const uint64_t sent = after.bytes_sent - before.bytes_sent;
          const auto half = static_cast<double>(kCount * 8 / 2);
          const auto across = static_cast<double>(work.report().bytes_sent);
          RANK_CHECK(across > 0.99 * half);
          RANK_CHECK(across < 1.01 * half);
          RANK_CHECK(static_cast<double>(sent) > across + 0.99 * half);
          RANK_CHECK(process.bytes_sent - process_before.bytes_sent == sent);
          if (where.rank == 0) RANK_CHECK(after.wait_seconds - before.wait_seconds > 0.05);
          const std::string record = comm->record(), parts = process_record();
          RANK_CHECK(record.find("\"part_of\"") == std::string::npos);
          RANK_CHECK(parts.find("\"part_of\": 0") != std::string::npos);
          total->at(0) += sent;
          total->at(1) += after.bytes_received - before.bytes_received;
          *comm = Communicator();
          RANK_CHECK(process_counters().operations == process.operations);
          RANK_CHECK(process_counters().bytes_sent == process.bytes_sent);
          return 0;
        }) == "");
  CHECK(total->at(0) == total->at(1));
}

#endif

TEST_CASE("a communicator of one rank records and counts as well") {
  auto comm = Communicator::create({});
  REQUIRE(comm.ok());
  float x = 1;
  for (int i = 0; i < 40; ++i) CHECK(comm->all_reduce(&x, &x, 1, DType::f32, Op::sum).wait().ok());
  CHECK(comm->counters().operations == 40);
  CHECK(comm->counters().finished == 40);
  const json record = json::parse(comm->record(), nullptr, false);
  REQUIRE(record.is_object());
  CHECK(record["operations"].size() == record::kEntries);
  CHECK(record["operations"].back()["seq"] == 39);
  CHECK(json::parse(process_record(), nullptr, false).is_array());
}

TEST_CASE("a failure leaves the record in the folder that was named, and nothing on stderr") {
  const std::string transport = GENERATE(from_range(transports()));
  std::string folder = "/tmp/ringfold-record-XXXXXX";
  REQUIRE(mkdtemp(folder.data()) != nullptr);
  setenv("RINGFOLD_RECORD", folder.c_str(), 1);
  Options options;
  options.timeout = 500ms;
  CHECK(on_transport(3, transport, options, [](Communicator& comm) {
          sum(comm, 1000);
          if (comm.rank() == 2) {
            for (int i = 0; i < 20'000 && comm.health().ok(); ++i) std::this_thread::sleep_for(1ms);
            return;
          }
          float x = 0;
          const Status late = comm.all_reduce(&x, &x, 1, DType::f32, Op::sum).wait();
          RANK_CHECK(late.code() == Code::timeout);
        }) == "");
  unsetenv("RINGFOLD_RECORD");
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++files;
    INFO(entry.path());
    const json record = json::parse(std::ifstream(entry.path()), nullptr, false);
    REQUIRE(record.is_object());
    CHECK(record["code"] == "timeout");
    CHECK(record["failure"].get<std::string>().find("deadline") != std::string::npos);
    if (record["rank"] != 2) CHECK(latest(record, 1)["state"] == "running");
    CHECK(latest(record, 1000)["state"] == "done");
  }
  CHECK(files == 3);
  std::filesystem::remove_all(folder);
}

TEST_CASE("another process reads it, also of one that is stopped, and survives its death") {
  const std::string transport = GENERATE(from_range(transports()));
  Shared<std::atomic<int>> arrived;
  Processes ranks(2, [&](const Rendezvous& where) {
    Options options;
    options.transports = transport;
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    sum(*comm, 2000);
    ++*arrived;
    if (comm->rank() == 1) pause();
    float x = 0;
    (void)comm->all_reduce(&x, &x, 1, DType::f32, Op::sum).wait();
    return 0;
  });
  while (*arrived < 2) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(200ms);
  for (const int rank : {0, 1}) {
    ranks.stop(rank);
    std::this_thread::sleep_for(50ms);
    const auto seen = record::look_at(ranks.pid(rank));
    REQUIRE(seen.ok());
    CHECK(seen->kernel_state == 'T');
    REQUIRE(seen->communicators.size() == 1);
    const record::CommunicatorView& view = seen->communicators[0];
    CHECK(view.rank == rank);
    const std::string text = record::standing(view, steady_clock().now());
    INFO(text);
    if (rank == 0) {
      CHECK(text.find("in operation") != std::string::npos);
      CHECK(text.find("all_reduce f32 sum of 1 elements") != std::string::npos);
      CHECK(text.find("waits for rank 1") != std::string::npos);
    } else {
      CHECK(text.find("in no operation; the last was") != std::string::npos);
      CHECK(text.find("all_reduce f32 max of 2000 elements") != std::string::npos);
    }
  }
  const int pid = ranks.pid(0);
  for (const int rank : {0, 1}) ranks.kill(rank);
  (void)ranks.wait(5s);
  CHECK_FALSE(record::look_at(pid).ok());
}

TEST_CASE("processes without a record, or with something else by its name, are told apart") {
  CHECK(record::look_at(1 << 30).status().code() == Code::system);
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  CHECK_FALSE(record::look_at(child).ok());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const pid_t liar = fork();
  if (liar == 0) {
    const int fd = memfd_create(record::kFileName, 0);
    const int32_t pid = getpid();
    if (pwrite(fd, &pid, sizeof pid, offsetof(record::Page, pid)) != sizeof pid) _exit(1);
    pause();
    _exit(0);
  }
  Status status;
  for (int i = 0; i < 200; ++i) {
    status = record::look_at(liar).status();
    if (status.message().find("version") != std::string::npos) break;
    std::this_thread::sleep_for(5ms);
  }
  CHECK(status.message().find("another version") != std::string::npos);
  kill(liar, SIGKILL);
  waitpid(liar, nullptr, 0);
}

TEST_CASE("a thousand communicators reuse the same memory") {
  CHECK(on_transport(2, "shm", {}, [](Communicator& comm) {
          const Counters before = process_counters();
          for (int i = 0; i < 50; ++i) {
            auto part = comm.split(0, 0);
            if (!rank_ok(part.status())) return;
            sum(*part, 1);
          }
          uint32_t touched = 0;
          const record::Page* page = record::visit([](const record::Slot&) {});
          if (page != nullptr) touched = page->touched.load();
          RANK_CHECK(touched >= 1);
          RANK_CHECK(touched <= 4);
          // Nothing that was counted is lost when a communicator goes.
          RANK_CHECK(process_counters().operations - before.operations == 100);
        }) == "");
}

namespace {

struct Folder {
  std::string path = "/tmp/ringfold-record-XXXXXX";
  Folder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
};

json parsed(const std::string& file) {
  return json::parse(std::ifstream(file), nullptr, false);
}

}  // namespace

TEST_CASE("trace: operations and their steps, one file a rank") {
  const std::string transport = GENERATE(from_range(transports()));
  const Folder folder;
  setenv("RINGFOLD_TRACE", (folder.path + "/%r.json").c_str(), 1);
  CHECK(on_transport(3, transport, {}, [](Communicator& comm) {
          sum(comm, 5, 3);
          sum(comm, 200'000);
        }) == "");
  unsetenv("RINGFOLD_TRACE");
  for (int rank = 0; rank < 3; ++rank) {
    const json events = parsed(fmt::format("{}/{}.json", folder.path, rank));
    INFO("rank " << rank);
    REQUIRE(events.is_array());
    CHECK(events[0]["args"]["name"].get<std::string>().starts_with(fmt::format("rank {}", rank)));
    int operations = 0, steps = 0;
    double began = 0, ended = 0;
    for (const json& event : events) {
      CHECK(event["pid"] == rank);
      const std::string name = event["name"];
      if (event["ph"] == "b" && name.starts_with("step") && began > 0) {
        ++steps;
        CHECK(event["ts"] >= began);
      }
      if (!name.starts_with("all_reduce f32 max")) continue;
      if (event["ph"] == "b") {
        ++operations;
        CHECK(event["args"]["outcome"] == "ok");
      }
      if (name.find("of 200000 elements") == std::string::npos) continue;
      (event["ph"] == "b" ? began : ended) = event["ts"];
    }
    CHECK(operations == 4);
    CHECK(steps > 1);
    CHECK(began > 0);
    CHECK(ended > began);
  }
}

TEST_CASE("trace: a file can be read whenever its process was killed") {
  const Folder folder;
  setenv("RINGFOLD_TRACE", (folder.path + "/trace").c_str(), 1);
  for (int round = 0; round < 5; ++round) {
    Shared<std::atomic<int>> calls;
    Processes ranks(2, [&](const Rendezvous& where) {
      auto comm = Communicator::create(where);
      if (!rank_ok(comm.status())) return 1;
      for (;;) {
        sum(*comm, 100);
        ++*calls;
      }
    });
    while (*calls < 200 + 100 * round) std::this_thread::sleep_for(100us);
    for (const int rank : {0, 1}) ranks.kill(rank);
    (void)ranks.wait(5s);
    for (const int rank : {0, 1}) {
      const std::string file = fmt::format("{}/trace.rank{}", folder.path, rank);
      json events = parsed(file);
      if (events.is_discarded()) {  // killed while it wrote the last operation
        std::ifstream in(file);
        std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
        events = json::parse(text.substr(0, text.rfind(",\n")) + "]", nullptr, false);
      }
      REQUIRE(events.is_array());
      CHECK(events.size() > 50);
    }
  }
  unsetenv("RINGFOLD_TRACE");
}

TEST_CASE("trace: a file that cannot be made is an error at once") {
  setenv("RINGFOLD_TRACE", "/nowhere/trace", 1);
  const auto comm = Communicator::create({});
  unsetenv("RINGFOLD_TRACE");
  CHECK(comm.status().code() == Code::system);
  CHECK(comm.status().message().find("/nowhere/trace.rank0") != std::string::npos);
}

TEST_CASE("machine: measured costs decide, and must be alike") {
  const Folder folder;
  const std::string slow = folder.path + "/slow.json", fast = folder.path + "/fast.json",
                    wrong = folder.path + "/wrong.json";
  // With a second of latency the fewest steps win whatever the size; with none, the ring.
  std::ofstream(slow) << R"({"local": {"alpha": 1.0, "beta": 1e-10}})";
  std::ofstream(fast) << R"({"local": {"alpha": 0, "beta": 1e-3}})";
  std::ofstream(wrong) << R"({"local": {"alpha": "fast"}})";
  const auto algorithm_with = [](const std::string& file, Algorithm expected) {
    setenv("RINGFOLD_MACHINE", file.c_str(), 1);
    const std::string failed = on_transport(4, "shm", {}, [&](Communicator& comm) {
      std::vector<float> x(50'000);
      Work work = comm.all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::sum);
      rank_ok(work.wait());
      RANK_CHECK(work.report().algorithm == expected);
    });
    unsetenv("RINGFOLD_MACHINE");
    return failed;
  };
  CHECK(algorithm_with(slow, Algorithm::recursive_doubling) == "");
  CHECK(algorithm_with(fast, Algorithm::ring) == "");
  CHECK(run_ranks(2, 20s, [&](const Rendezvous& where) {
          if (where.rank == 1) setenv("RINGFOLD_MACHINE", slow.c_str(), 1);
          const auto comm = Communicator::create(where);
          RANK_CHECK(comm.status().code() == Code::mismatch);
          RANK_CHECK(comm.status().message().find("costs of the machine") != std::string::npos);
          RANK_CHECK(comm.status().message().find("built-in") != std::string::npos);
          return 0;
        }) == "");
  for (const std::string& file : {wrong, folder.path + "/missing.json"}) {
    setenv("RINGFOLD_MACHINE", file.c_str(), 1);
    const auto comm = Communicator::create({});
    unsetenv("RINGFOLD_MACHINE");
    CHECK(comm.status().code() == Code::invalid_argument);
    CHECK(comm.status().message().find(file) != std::string::npos);
  }
}
