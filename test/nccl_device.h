// Ranks with device memory that call libnccl.so.2 as programs do: what the scenarios of the program
// nccl_device share. A thread drives one rank or, in groups, all of them.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "test/cuda_test_driver.h"
#include "test/exact.h"
#include "test/nccl_minimal.h"

namespace ringfold::test {

// The driver that this process has opened: the real one, or the emulated one.
const TestDriver& cuda_driver();
// A context of device 0 for a thread.
void enter_device();

// ---- checks, from any thread ------------------------------------------------------------------

// Where a check stands, and what it says.
struct Spot {
  const char* file;
  int line;
  const char* text;
};
void expect(bool good, const Spot& spot, const std::string& why = "");
void expect_result(ncclResult_t got, ncclResult_t wanted, const char* words, const Spot& spot);
void expect_cuda(CUresult result, const Spot& spot);
int failures();

#define SPOT(text) (Spot{__FILE__, __LINE__, #text})
#define EXPECT(condition) expect((condition), SPOT(condition))
#define OK(call) expect_result((call), ncclSuccess, "", SPOT(call))
// The call is refused, and the text says `words`.
#define REFUSED(call, code, words) expect_result((call), code, words, SPOT(call))
#define CUDA(call) expect_cuda(cuda_driver().call, SPOT(call))

// ---- memory -----------------------------------------------------------------------------------

enum class Kind : uint8_t { device, managed, pinned };

// Memory of one kind, allocated once and in advance: an allocation may wait for what runs on the
// device, and so for a rank that waits for this one.
class Arena {
 public:
  Arena(Kind kind, size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  // Aligned to 512 bytes; until clear().
  void* take(size_t bytes);
  void clear() { used_ = 0; }

 private:
  const Kind kind_;
  const size_t bytes_;
  std::byte* begin_ = nullptr;
  size_t used_ = 0;
};

// ---- ranks ------------------------------------------------------------------------------------

struct Rank {
  int rank = 0, size = 1;
  ncclComm_t comm = nullptr;
  CUstream stream = nullptr;  // the one to use; also a handle that stands for a default stream
  CUstream own = nullptr, other = nullptr;
  std::vector<std::unique_ptr<Arena>> arenas;  // by kind

  [[nodiscard]] void* take(size_t bytes, Kind kind = Kind::device) {
    return arenas[static_cast<size_t>(kind)]->take(bytes);
  }
  void clear() {
    for (const auto& arena : arenas) arena->clear();
  }
  [[nodiscard]] int next() const { return (rank + 1) % size; }
  [[nodiscard]] int before() const { return (rank + size - 1) % size; }
  [[nodiscard]] cudaStream_t on() const { return reinterpret_cast<cudaStream_t>(stream); }
  [[nodiscard]] cudaStream_t on_other() const { return reinterpret_cast<cudaStream_t>(other); }

  // On the stream; waits for nothing.
  void put(void* to, const void* from, size_t bytes) const;
  // What is there when the stream has come so far.
  void get(void* to, const void* from, size_t bytes) const;
  template <class T>
  void fill(void* to, size_t count, T value) const {
    const std::vector<T> values(count, value);
    put(to, values.data(), count * sizeof(T));
  }
  // Whether the first `count` elements have that value when the stream has come so far.
  template <class T>
  [[nodiscard]] bool holds(const void* at, size_t count, T value) const {
    std::vector<T> values(count);
    get(values.data(), at, count * sizeof(T));
    return values == std::vector<T>(count, value);
  }
  void wait() const { CUDA(cuStreamSynchronize(stream)); }
};

// The ranks that this thread drives.
using Ranks = std::vector<Rank*>;

// Calls it for each rank: in a group if there are several.
template <class Call>
void together(const Ranks& ranks, const Call& call) {
  if (ranks.size() > 1) OK(ncclGroupStart());
  for (Rank* rank : ranks) call(*rank);
  if (ranks.size() > 1) OK(ncclGroupEnd());
}

// Returns when all ranks have come here: an all-reduce of host memory.
void meet(const Ranks& ranks);

// Polls a non-blocking communicator; what it ends with.
ncclResult_t settled(ncclComm_t comm);
// Waits until the communicator has failed; the failure.
ncclResult_t failure_of(ncclComm_t comm);

// Holds a stream until it is let go.
class Hold {
 public:
  explicit Hold(CUstream stream);
  ~Hold() { let_go(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  void let_go() { *release_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> release_ = std::make_shared<std::atomic<bool>>(false);
};

// Whether every launch waits for its end, as CUDA_LAUNCH_BLOCKING=1 demands.
bool launches_block();

// ---- scenarios --------------------------------------------------------------------------------

struct Scenario {
  const char* name;
  void (*run)(const Ranks& ranks);
};
extern const std::vector<Scenario> kCollectiveScenarios, kLifeScenarios;

}  // namespace ringfold::test
