// What the tests of reported bugs share: buffers with guards, and one body on every transport.
#pragma once

#include <fmt/core.h>

#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ringfold/communicator.h"
#include "test/processes.h"

namespace ringfold::test {

// `count` elements of any type, `offset` elements past an aligned address, with 64 guard bytes
// before and after that nobody may touch. Filled with a sentinel.
class Guarded {
 public:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kFence = 0xa5, kSentinel = 0x5b;

  Guarded(size_t count, DType type, size_t offset = 0)
      : bytes_(count * size_of(type)), begin_(64 + kGuard + offset * size_of(type)) {
    memory_.assign(begin_ + bytes_ + kGuard + 64, kFence);
    base_ = (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
    std::memset(data(), kSentinel, bytes_);
  }
  [[nodiscard]] unsigned char* data() { return memory_.data() + base_ + begin_ - 64; }
  template <class T>
  [[nodiscard]] T* as() {
    return reinterpret_cast<T*>(data());
  }
  [[nodiscard]] bool guards_intact() {
    for (size_t i = 1; i <= kGuard; ++i)
      if (data()[-static_cast<ptrdiff_t>(i)] != kFence || data()[bytes_ + i - 1] != kFence)
        return false;
    return true;
  }
  [[nodiscard]] bool untouched() {
    for (size_t i = 0; i < bytes_; ++i)
      if (data()[i] != kSentinel) return false;
    return guards_intact();
  }

 private:
  size_t bytes_, begin_, base_ = 0;
  std::vector<unsigned char> memory_;
};

// The ways between processes that this build has, and `more`.
inline std::vector<std::string> transports(const std::optional<std::string>& more = {}) {
  std::vector<std::string> all = {"region", "shm"};
#ifdef RINGFOLD_TEST_UCX
  all.emplace_back("ucx");
#endif
  if (more) all.push_back(*more);
  return all;
}

// What goes wrong with `body` on `ranks` processes connected by `transport`; empty: nothing.
inline std::string on_transport(int ranks, const std::string& transport, Options options,
                                const std::function<void(Communicator&)>& body,
                                Nanoseconds deadline = std::chrono::seconds(60)) {
  return run_ranks(ranks, deadline, [&](const Rendezvous& where) {
    options.transports = transport;
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    body(*comm);
    return 0;
  });
}

inline Options forced(Algorithm algorithm, size_t piece_bytes = 0) {
  Options options;
  options.algorithm = algorithm;
  options.piece_bytes = piece_bytes;
  return options;
}

}  // namespace ringfold::test
