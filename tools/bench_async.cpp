#include "tools/bench_async.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "ringfold_config.h"
#include "tools/bench_ranks.h"
#include "tools/bench_results.h"

namespace ringfold::tools {
namespace {

using nlohmann::json;
constexpr int kServer = 0;

// Whole numbers, so that sums are exact in any order.
float gradient(int rank, size_t i) {
  return static_cast<float>((i + static_cast<size_t>(rank)) % 5);
}

// The ranks whose gradients have arrived, in that order. Filled by the library's threads.
class Arrivals {
 public:
  void add(int rank, const Status& status) {
    const std::lock_guard guard(mutex_);
    ranks_.push_back(rank);
    if (!status.ok()) failed_ = status;
    arrived_.notify_one();
  }
  int next() {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [this] { return !ranks_.empty(); });
    must(failed_);
    const int rank = ranks_.front();
    ranks_.pop_front();
    return rank;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<int> ranks_;
  Status failed_;
};

struct Staleness {
  uint64_t sum = 0, most = 0, pushes = 0;
  [[nodiscard]] double mean() const {
    return pushes == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(pushes);
  }
};

class Server {
 public:
  Server(Communicator& comm, size_t count)
      : comm_(comm), parameters_(count), workers_(static_cast<size_t>(comm.size())) {
    for (Worker& worker : workers_) worker.incoming.resize(count), worker.outgoing.resize(count);
  }
  // After a failure, too, nobody writes to the buffers any more.
  ~Server() {
    for (Worker& worker : workers_) (void)worker.push.wait(), (void)worker.reply.wait();
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  Staleness serve(int rounds) {
    Staleness staleness;
    for (int rank = 1; rank < comm_.size(); ++rank) expect(rank);
    staleness.pushes = static_cast<uint64_t>(rounds) * (workers_.size() - 1);
    for (uint64_t version = 0; version < staleness.pushes; ++version) {
      const int rank = arrivals_->next();
      Worker& worker = workers_[static_cast<size_t>(rank)];
      const uint64_t stale = version - worker.pulled;
      staleness.sum += stale;
      staleness.most = std::max(staleness.most, stale);
      for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i] += worker.incoming[i];
      must(worker.reply.wait());  // long done: the worker has pushed since
      worker.outgoing = parameters_;
      worker.pulled = version + 1;
      worker.reply = comm_.send(worker.outgoing.data(), parameters_.size(), DType::f32, rank);
      if (++worker.pushed < rounds) expect(rank);
    }
    for (Worker& worker : workers_) must(worker.reply.wait());
    return staleness;
  }
  [[nodiscard]] const std::vector<float>& parameters() const { return parameters_; }

 private:
  struct Worker {
    std::vector<float> incoming, outgoing;
    uint64_t pulled = 0;  // the version of the parameters that it has
    int pushed = 0;
    Work push, reply;
  };

  void expect(int rank) {
    Worker& worker = workers_[static_cast<size_t>(rank)];
    worker.push = comm_.recv(worker.incoming.data(), parameters_.size(), DType::f32, rank);
    worker.push.then(
        [arrivals = arrivals_, rank](const Status& status) { arrivals->add(rank, status); });
  }

  Communicator& comm_;
  std::vector<float> parameters_;
  std::vector<Worker> workers_;
  // Shared: the last callbacks may run when the server is gone.
  std::shared_ptr<Arrivals> arrivals_ = std::make_shared<Arrivals>();
};

// What one rank did at one size.
struct Done {
  double seconds = 0;
  uint64_t sent = 0, wrong = 0;
  Staleness staleness;
};

// Pushes and pulls. The last parameters it gets hold all of its own gradients.
uint64_t work(Communicator& comm, size_t count, int rounds) {
  std::vector<float> mine(count), parameters(count);
  for (size_t i = 0; i < count; ++i) mine[i] = gradient(comm.rank(), i);
  for (int round = 0; round < rounds; ++round) {
    must(comm.send(mine.data(), count, DType::f32, kServer).wait());
    must(comm.recv(parameters.data(), count, DType::f32, kServer).wait());
  }
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; ++i)
    wrong += parameters[i] < static_cast<float>(rounds) * mine[i] ? 1 : 0;
  return wrong;
}

// Serves. At the end everybody's gradients are in the parameters, each once.
uint64_t serve(Communicator& comm, size_t count, int rounds, Staleness* staleness) {
  Server server(comm, count);
  *staleness = server.serve(rounds);
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    float expected = 0;
    for (int rank = 1; rank < comm.size(); ++rank)
      expected += static_cast<float>(rounds) * gradient(rank, i);
    wrong += server.parameters()[i] != expected ? 1 : 0;
  }
  return wrong;
}

Done take_part(Communicator& comm, size_t count, int rounds) {
  Done done;
  must(comm.barrier().wait());
  const uint64_t before = comm.bytes_sent();
  const double start = seconds_now();
  done.wrong = comm.rank() == kServer ? serve(comm, count, rounds, &done.staleness)
                                      : work(comm, count, rounds);
  done.seconds = (seconds_now() - start) / rounds;
  done.sent = (comm.bytes_sent() - before) / static_cast<uint64_t>(rounds);
  return done;
}

json line_of(Communicator& comm, size_t count, int rounds) {
  const Done mine = take_part(comm, count, rounds);
  const bool hub = comm.rank() == kServer;
  std::vector<float> data(count);
  Work all_reduce = comm.all_reduce(data.data(), data.data(), count, DType::f32, Op::sum);
  must(all_reduce.wait());
  const Report instead = all_reduce.report();
  const auto bytes = [](double x) { return static_cast<uint64_t>(x); };
  return {
      {"size", count * sizeof(float)},
      {"count", count},
      {"rounds", rounds},
      {"time_us", largest(comm, mine.seconds) * 1e6},
      {"hub",
       {{"bytes_received", bytes(total(comm, hub ? 0 : static_cast<double>(mine.sent)))},
        {"bytes_sent", mine.sent}}},
      {"all_reduce",
       {{"algorithm", name(instead.algorithm)},
        {"bytes_sent_per_rank", bytes(largest(comm, static_cast<double>(instead.bytes_sent)))}}},
      {"staleness", {{"mean", mine.staleness.mean()}, {"max", mine.staleness.most}}},
      {"wrong", bytes(total(comm, static_cast<double>(mine.wrong)))}};
}

void print(const json& line) {
  fmt::print(" {:>11} {:>10.2f} {:>12} {:>12} {:>12} {:>9.2f} {:>5} {:>6}\n",
             line["size"].get<uint64_t>(), line["time_us"].get<double>(),
             line["hub"]["bytes_received"].get<uint64_t>(),
             line["hub"]["bytes_sent"].get<uint64_t>(),
             line["all_reduce"]["bytes_sent_per_rank"].get<uint64_t>(),
             line["staleness"]["mean"].get<double>(), line["staleness"]["max"].get<uint64_t>(),
             line["wrong"].get<uint64_t>());
  std::fflush(stdout);
}

void print_names(const Communicator& comm) {
  fmt::print("# ringfold {} bench all_reduce, baseline parameter_server_async\n", RINGFOLD_VERSION);
  fmt::print(
      "# ranks {}, transport {}: rank 0 serves, each other rank pushes f32 gradients and "
      "pulls the parameters\n",
      comm.size(), comm.transport());
  fmt::print("# staleness: pushes of others between a pull and the next push of that rank\n#\n");
  fmt::print("#{:>11} {:>10} {:>12} {:>12} {:>12} {:>15} {:>6}\n", "", "", "hub", "hub",
             "all_reduce", "staleness", "");
  fmt::print("#{:>11} {:>10} {:>12} {:>12} {:>12} {:>9} {:>5} {:>6}\n", "size", "time", "received",
             "sent", "sends", "mean", "max", "#wrong");
  fmt::print("#{:>11} {:>10} {:>12} {:>12} {:>12} {:>9} {:>5} {:>6}\n", "(B)", "(us/round)",
             "(B/round)", "(B/round)", "(B a rank)", "", "", "");
}

}  // namespace

bool serve_asynchronously(const BenchOptions& options, Communicator& comm) {
  const bool prints = comm.rank() == kServer;
  if (prints) print_names(comm);
  json results = json::array();
  uint64_t wrong = 0;
  for (const uint64_t bytes : sizes(options, DType::f32)) {
    const json line = line_of(comm, bytes / sizeof(float), options.iterations);
    wrong += line["wrong"].get<uint64_t>();
    if (prints) print(line);
    results.push_back(line);
  }
  if (!prints) return true;
  fmt::print("# Out of bounds values : {} {}\n", wrong, wrong == 0 ? "OK" : "FAILED");
  const json all = {
      {"schema", 1},          {"ringfold", RINGFOLD_VERSION},       {"ended", utc_now()},
      {"ranks", comm.size()}, {"baseline", name(options.baseline)}, {"transport", comm.transport()},
      {"results", results}};
  const bool written = options.json.empty() || write_file(options.json, all.dump(2) + "\n");
  return written && wrong == 0;
}

}  // namespace ringfold::tools
