// C32, the second half: whoever connects to the ports of a running job and talks nonsense, or
// nothing, changes nothing.
#include <dirent.h>

#include <atomic>
#include <charconv>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "lib/base/base.h"
#include "lib/base/net.h"
#include "test/cases.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

// Inodes of a process's sockets.
std::set<std::string> sockets_of(pid_t process) {
  std::set<std::string> inodes;
  const std::string folder = fmt::format("/proc/{}/fd", process);
  DIR* const dir = opendir(folder.c_str());
  if (dir == nullptr) return inodes;
  while (const dirent* entry = readdir(dir)) {
    std::array<char, 64> target{};
    const std::string link = folder + "/" + entry->d_name;
    if (readlink(link.c_str(), target.data(), target.size() - 1) < 0) continue;
    const std::string_view text = target.data();
    if (text.starts_with("socket:[")) inodes.emplace(text.substr(8, text.size() - 9));
  }
  closedir(dir);
  return inodes;
}

// The TCP ports that a process listens on.
std::set<uint16_t> ports_of(pid_t process) {
  const std::set<std::string> inodes = sockets_of(process);
  std::set<uint16_t> ports;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    for (std::getline(file, line); std::getline(file, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state, skipped, inode;
      words >> number >> local >> remote >> state;
      for (int i = 0; i < 5; ++i) words >> skipped;
      words >> inode;
      if (state != "0A" || !inodes.contains(inode)) continue;
      const std::string_view port = std::string_view(local).substr(local.find(':') + 1);
      uint16_t value = 0;
      std::from_chars(port.data(), port.data() + port.size(), value, 16);
      ports.insert(value);
    }
  }
  return ports;
}

// Everything that a port scanner does.
int visit(uint16_t port, std::vector<Descriptor>& silent) {
  const auto connect = [&] {
    return connect_to(*Address::numeric("127.0.0.1", port), steady_clock().now() + 500ms);
  };
  int visits = 0;
  for (const std::string& said :
       {std::string(), std::string("abc"), std::string(64, '\x93'),
        std::string("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), std::string(5000, '\0')}) {
    auto stranger = connect();
    if (!stranger.ok()) continue;
    ++visits;
    (void)send_all(*stranger, said, steady_clock().now() + 200ms);
  }
  for (int i = 0; i < 10; ++i)
    if (auto stranger = connect(); stranger.ok()) silent.push_back(std::move(*stranger));
  return visits;
}

}  // namespace

TEST_CASE("C32: strangers at the ports of a running job change nothing") {
  const std::string transport = GENERATE(from_range(transports()));
  Shared<std::atomic<int>> rounds;
  Shared<std::atomic<bool>> over;
  Processes ranks(3, [&](const Rendezvous& where) {
    setenv("UCX_LOG_LEVEL", "fatal", 0);  // it writes an error for each stranger
    Options options;
    options.transports = transport;
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    for (int32_t last = 0; last == 0;) {
      std::vector<int64_t> x(20'000, 1 + where.rank);
      if (!rank_ok(comm->all_reduce(x.data(), x.data(), x.size(), DType::i64, Op::sum).wait(10s)))
        return 1;
      RANK_CHECK(x == std::vector<int64_t>(x.size(), 6));
      last = where.rank == 0 && *over ? 1 : 0;
      if (!rank_ok(comm->broadcast(&last, 1, DType::i32, 0).wait(10s))) return 1;
      rounds->fetch_add(1);
    }
    return 0;
  });
  for (int i = 0; i < 1000 && *rounds < 10; ++i) std::this_thread::sleep_for(5ms);
  std::vector<Descriptor> silent;
  int visits = 0, before = *rounds;
  for (int r = 0; r < 3; ++r)
    for (const uint16_t port : ports_of(ranks.pid(r)))
      for (int i = 0; i < 5; ++i) visits += visit(port, silent);
  for (int i = 0; i < 1000 && *rounds < before + 60; ++i) std::this_thread::sleep_for(5ms);
  *over = true;
  for (const Outcome& end : ranks.wait(20s)) CHECK(end.to_string() == "ok");
  if (transport == "ucx") CHECK(visits > 0);
  fmt::print("strangers: {} over {}, and {} silent ones\n", visits, transport, silent.size());
}
