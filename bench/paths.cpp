// Latency and bandwidth of a transport between two processes of this host: what the cost model and
// the choice of piece sizes start from.
//
//   paths [--sleep]
//
// Prints, for each message size, half a round trip and the bandwidth of a stream of messages with
// eight receives posted ahead; with --sleep both sides sleep whenever nothing moves.
#include <fmt/core.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <string_view>
#include <vector>

#include "transports/transports.h"

namespace {

using namespace ringfold;

class RealClock final : public Clock {
 public:
  [[nodiscard]] Nanoseconds now() const override {
    return std::chrono::steady_clock::now().time_since_epoch();
  }
};

struct Request : Completion {
  Request() {
    done = [](Completion* self, const Status& status) noexcept {
      static_cast<Request*>(self)->ended = true;
      if (!status.ok()) fmt::print(stderr, "{}\n", status.to_string());
    };
  }
  bool ended = false;
};

constexpr int kWindow = 8;

struct Rank {
  Transport& end;
  int me;
  bool sleeps;
  uint32_t seq = 0;
  std::vector<uint8_t> data = std::vector<uint8_t>(8 << 20, 1);
  std::vector<uint8_t> into = std::vector<uint8_t>(8 << 20, 1);

  template <class Until>
  void wait(Until holds) {
    while (!holds()) {
      if (end.progress() || !sleeps) continue;
      pollfd sleep{end.arm(), POLLIN, 0};
      if (sleep.fd >= 0) poll(&sleep, 1, -1);
    }
  }
  void send(size_t bytes, uint32_t number, Request* request) {
    end.send(1 - me, {1, number, 0, 0}, {data.data(), bytes}, request);
  }
  void recv(size_t bytes, uint32_t number, Request* request, bool lend) {
    uint8_t* place = into.data() + number % kWindow * bytes;
    end.recv(1 - me, {1, number, 0, 0}, {place, bytes}, lend, request);
  }

  void round_trips(size_t bytes, int count) {
    for (int i = 0; i < count; ++i) {
      Request sent, got;
      recv(bytes, seq, &got, false);
      if (me == 0) send(bytes, seq, &sent);
      wait([&] { return got.ended; });
      if (me == 1) send(bytes, seq, &sent);
      wait([&] { return sent.ended; });
      ++seq;
    }
  }

  // From rank 0 to rank 1, and an empty message back when all is there.
  void stream(size_t bytes, int count, bool lend) {
    std::deque<Request> requests;
    for (int i = 0; i < count; ++i, ++seq) {
      Request& request = requests.emplace_back();
      if (me == 0)
        send(bytes, seq, &request);
      else
        recv(bytes, seq, &request, lend);
      if (requests.size() < kWindow) continue;
      wait([&] { return requests.front().ended; });
      if (requests.front().lender != nullptr) end.give_back(&requests.front());
      requests.pop_front();
    }
    wait([&] {
      return std::all_of(requests.begin(), requests.end(), [](auto& r) { return r.ended; });
    });
    for (Request& request : requests)
      if (request.lender != nullptr) end.give_back(&request);
    Request last;
    if (me == 0)
      recv(0, seq, &last, false);
    else
      send(0, seq, &last);
    wait([&] { return last.ended; });
    ++seq;
  }
};

// Runs are short and the best one counts, so that other work on the machine matters less.
template <class F>
double best_seconds(F f) {
  double best = 1e9;
  for (int run = 0; run < 40; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    const auto end = std::chrono::steady_clock::now();
    best = std::min(best, std::chrono::duration<double>(end - begin).count());
  }
  return best;
}

void measure(Rank& rank) {
  if (rank.me == 0)
    fmt::print("{:>9} {:>14} {:>12} {:>12}\n", "bytes", "half trip us", "copied GB/s", "lent GB/s");
  for (const size_t bytes : {size_t{8}, size_t{1} << 10, size_t{4} << 10, size_t{16} << 10,
                             size_t{64} << 10, size_t{256} << 10, size_t{1} << 20}) {
    const int trips = static_cast<int>(std::clamp<size_t>((4 << 20) / bytes, 10, 300));
    const int count = static_cast<int>(std::clamp<size_t>((16 << 20) / bytes, 32, 2000));
    const double trip = best_seconds([&] { rank.round_trips(bytes, trips); });
    const double copied = best_seconds([&] { rank.stream(bytes, count, false); });
    const double lent = best_seconds([&] { rank.stream(bytes, count, true); });
    const double total = static_cast<double>(bytes) * count / 1e9;
    if (rank.me == 0)
      fmt::print("{:>9} {:>14.2f} {:>12.2f} {:>12.2f}\n", bytes, trip / trips / 2 * 1e6,
                 total / copied, total / lent);
  }
}

int run(int me, int other, bool sleeps) {
  RealClock clock;
  auto made = make_shm(me, clock);
  if (!made.ok()) return fmt::print(stderr, "{}\n", made.status().to_string()), 1;
  std::array<char, 1024> mine{}, theirs{};
  const std::string address = (*made)->address();
  std::memcpy(mine.data(), address.data(), std::min(address.size(), mine.size() - 1));
  if (write(other, mine.data(), mine.size()) != static_cast<ssize_t>(mine.size()) ||
      recv(other, theirs.data(), theirs.size(), MSG_WAITALL) != static_cast<ssize_t>(theirs.size()))
    return 1;
  const Status connected = (*made)->connect(1 - me, theirs.data());
  if (!connected.ok()) return fmt::print(stderr, "{}\n", connected.to_string()), 1;
  Rank rank{**made, me, sleeps};
  measure(rank);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool sleeps = argc > 1 && std::string_view(argv[1]) == "--sleep";
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 1;
  const pid_t child = fork();
  const int failed = run(child == 0 ? 1 : 0, ends[child == 0 ? 1 : 0], sleeps);
  if (child != 0) waitpid(child, nullptr, 0);
  return failed;
}
