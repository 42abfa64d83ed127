// Ranks for the tests of gradients: the same body on threads and on processes, on every transport.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <source_location>
#include <string>
#include <thread>
#include <vector>

#include "ringfold/communicator.h"
#include "test/processes.h"

namespace ringfold::test {

// What one rank finds wrong. One thread.
class Verdict {
 public:
  bool expect(bool right, const std::string& what,
              std::source_location at = std::source_location::current()) {
    if (!right) text_ += fmt::format("line {}: {}\n", at.line(), what);
    return right;
  }
  bool ok(const Status& status, std::source_location at = std::source_location::current()) {
    return expect(status.ok(), status.to_string(), at);
  }
  // The status has this code, and its text all of these parts.
  bool is(const Status& status, Code code, const std::vector<std::string>& parts = {},
          std::source_location at = std::source_location::current()) {
    bool right = status.code() == code;
    std::string listed;
    for (const std::string& part : parts) {
      right = right && status.message().find(part) != std::string::npos;
      listed += fmt::format(" \"{}\"", part);
    }
    return expect(
        right, fmt::format("{}; expected {} with{}", status.to_string(), to_string(code), listed),
        at);
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  std::string text_;
};

struct Way {
  bool threads;
  std::string transport;
  [[nodiscard]] std::string name() const {
    return (threads ? "threads, " : "processes, ") + transport;
  }
};
inline std::vector<Way> ways() {
  return {{true, "region"}, {true, "loopback"}, {false, "region"}, {false, "shm"}};
}

using RankBody = std::function<void(Communicator&, Verdict&)>;

// What goes wrong with `body` on `n` ranks; empty: nothing.
inline std::string on_ranks(const Way& way, int n, const RankBody& body,
                            Nanoseconds deadline = std::chrono::seconds(60)) {
  Options options;
  options.transports = way.transport;
  options.timeout = deadline;
  const auto one = [&](const Rendezvous& where) {
    Verdict verdict;
    auto comm = Communicator::create(where, options);
    if (verdict.ok(comm.status())) body(*comm, verdict);
    return verdict.text();
  };
  if (!way.threads) {
    return run_ranks(n, deadline, [&](const Rendezvous& where) {
      const std::string text = one(where);
      if (!text.empty()) rank_fail(text);
      return text.empty() ? 0 : 1;
    });
  }
  const auto id = Rendezvous::unique_id();
  if (!id.ok()) return id.status().to_string();
  std::vector<std::string> texts(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      const auto where = Rendezvous::from_id(*id, r, n);
      texts[static_cast<size_t>(r)] = where.ok() ? one(*where) : where.status().to_string();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string all;
  for (size_t r = 0; r < texts.size(); ++r)
    if (!texts[r].empty()) all += fmt::format("rank {}: {}", r, texts[r]);
  return all;
}

}  // namespace ringfold::test
