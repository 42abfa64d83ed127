// Runs one scenario of libnccl.so.2 on device memory, on the emulated driver or, with
// RINGFOLD_TEST_DRIVER=real, on this machine's.
//
//   nccl_device SCENARIO threads|group RANKS [STREAM]
//   nccl_device SCENARIO process RANKS RANK FOLDER [STREAM]
//
// group: one thread drives all ranks. STREAM: own (the default), legacy (0), legacy1 (0x1) or
// per_thread (0x2). Exit status 0, or 1 with what was wrong on stderr.
#include "test/nccl_device.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <mutex>

namespace ringfold::test {
namespace {

std::atomic<int> failure_count{0};
CUcontext context = nullptr;

void* open_driver() {
  const char* const which = std::getenv("RINGFOLD_TEST_DRIVER");
  const bool real = which != nullptr && std::strcmp(which, "real") == 0;
  void* const library = dlopen(real ? "libcuda.so.1" : RINGFOLD_EMULATED_CUDA, RTLD_NOW);
  if (library == nullptr) {
    std::cerr << "nccl_device: " << dlerror() << "\n";
    std::exit(1);
  }
  return library;
}

void* find_in_driver(const char* name) {
  static void* const library = open_driver();
  return dlsym(library, name);
}

// A function that only this file needs.
#define TEXT(name) #name
#define DRIVER(name) reinterpret_cast<decltype(&::name)>(find_in_driver(TEXT(name)))

CUstream stream_named(const std::string& name, CUstream own) {
  if (name == "legacy") return nullptr;
  if (name == "legacy1") return CU_STREAM_LEGACY;
  if (name == "per_thread") return CU_STREAM_PER_THREAD;
  return own;
}

void make_stream(CUstream* stream, unsigned flags) {
  EXPECT(DRIVER(cuStreamCreate)(stream, flags) == CUDA_SUCCESS);
}

// Everything but its communicator.
std::unique_ptr<Rank> make_rank(int rank, int size, const std::string& stream) {
  auto made = std::make_unique<Rank>();
  made->rank = rank;
  made->size = size;
  for (const Kind kind : {Kind::device, Kind::managed, Kind::pinned})
    made->arenas.push_back(std::make_unique<Arena>(kind, size_t{4} << 20));
  make_stream(&made->own, CU_STREAM_DEFAULT);
  make_stream(&made->other, CU_STREAM_NON_BLOCKING);
  made->stream = stream_named(stream, made->own);
  return made;
}

ncclUniqueId exchanged_id(int rank, const std::string& folder) {
  ncclUniqueId id{};
  const std::string path = folder + "/id";
  if (rank == 0) {
    OK(ncclGetUniqueId(&id));
    std::ofstream(path + ".new", std::ios::binary).write(id.internal, sizeof id.internal);
    std::rename((path + ".new").c_str(), path.c_str());
    return id;
  }
  for (int i = 0; i < 10000 && access(path.c_str(), R_OK) != 0; ++i) usleep(2000);
  std::ifstream(path, std::ios::binary).read(id.internal, sizeof id.internal);
  return id;
}

void run_rank(const Scenario& scenario, Rank* rank, const ncclUniqueId& id) {
  enter_device();
  OK(ncclCommInitRank(&rank->comm, rank->size, id, rank->rank));
  if (rank->comm == nullptr) return;
  scenario.run({rank});
  if (rank->comm != nullptr) OK(ncclCommDestroy(rank->comm));
}

void run_threads(const Scenario& scenario, int ranks, const std::string& stream) {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  std::vector<std::unique_ptr<Rank>> all;
  for (int r = 0; r < ranks; ++r) all.push_back(make_rank(r, ranks, stream));
  std::vector<std::thread> threads;
  for (const auto& rank : all)
    threads.emplace_back([&, mine = rank.get()] { run_rank(scenario, mine, id); });
  for (std::thread& thread : threads) thread.join();
}

void run_group(const Scenario& scenario, int ranks, const std::string& stream) {
  std::vector<std::unique_ptr<Rank>> all;
  std::vector<ncclComm_t> comms(static_cast<size_t>(ranks));
  const std::vector<int> devices(comms.size(), 0);
  OK(ncclCommInitAll(comms.data(), ranks, devices.data()));
  Ranks mine;
  for (int r = 0; r < ranks; ++r) {
    all.push_back(make_rank(r, ranks, stream));
    all.back()->comm = comms[static_cast<size_t>(r)];
    mine.push_back(all.back().get());
  }
  scenario.run(mine);
  for (Rank* rank : mine)
    if (rank->comm != nullptr) OK(ncclCommDestroy(rank->comm));
}

const Scenario* find_scenario(const std::string& name) {
  for (const auto* list : {&kCollectiveScenarios, &kLifeScenarios})
    for (const Scenario& scenario : *list)
      if (name == scenario.name) return &scenario;
  return nullptr;
}

}  // namespace

const TestDriver& cuda_driver() {
  static const TestDriver driver = test_driver(find_in_driver);
  return driver;
}

void enter_device() {
  CUDA(cuCtxSetCurrent(context));
}

void expect(bool good, const Spot& spot, const std::string& why) {
  static std::mutex lock;
  if (good) return;
  const std::lock_guard guard(lock);
  if (failure_count++ < 20)
    std::cerr << spot.file << ":" << spot.line << ": " << spot.text << why << std::endl;
}

void expect_result(ncclResult_t got, ncclResult_t wanted, const char* words, const Spot& spot) {
  if (got == ncclSuccess && wanted == ncclSuccess) return;
  const std::string text = ncclGetLastError(nullptr);
  expect(got == wanted && text.find(words) != std::string::npos, spot,
         ": " + std::to_string(got) + ": " + text);
}

void expect_cuda(CUresult result, const Spot& spot) {
  expect(result == CUDA_SUCCESS, spot, ": CUDA error " + std::to_string(result));
}

int failures() {
  return failure_count;
}

bool launches_block() {
  const char* const value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

// ---- memory and streams -----------------------------------------------------------------------

Arena::Arena(Kind kind, size_t bytes) : kind_(kind), bytes_(bytes) {
  CUdeviceptr memory = 0;
  void* pinned = nullptr;
  switch (kind) {
    case Kind::device:
      CUDA(cuMemAlloc(&memory, bytes));
      break;
    case Kind::managed:
      CUDA(cuMemAllocManaged(&memory, bytes, CU_MEM_ATTACH_GLOBAL));
      break;
    case Kind::pinned:
      EXPECT(DRIVER(cuMemHostAlloc)(&pinned, bytes, CU_MEMHOSTALLOC_PORTABLE) == CUDA_SUCCESS);
      break;
  }
  begin_ =
      kind == Kind::pinned ? static_cast<std::byte*>(pinned) : reinterpret_cast<std::byte*>(memory);
}

Arena::~Arena() {
  if (kind_ == Kind::pinned)
    (void)DRIVER(cuMemFreeHost)(begin_);
  else
    (void)cuda_driver().cuMemFree(reinterpret_cast<CUdeviceptr>(begin_));
}

void* Arena::take(size_t bytes) {
  void* const taken = begin_ + used_;
  used_ += (bytes + 511) / 512 * 512 + 512;
  if (used_ > bytes_) {
    std::cerr << "nccl_device: an arena is too small\n";
    std::abort();
  }
  return taken;
}

void Rank::put(void* to, const void* from, size_t bytes) const {
  if (bytes > 0) CUDA(cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream));
}

void Rank::get(void* to, const void* from, size_t bytes) const {
  if (bytes > 0) CUDA(cuMemcpyDtoHAsync(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream));
  wait();
}

Hold::Hold(CUstream stream) {
  // Owned by the function: the stream may come to it late.
  auto* const shared = new std::shared_ptr<std::atomic<bool>>(release_);
  const auto wait = [](void* data) {
    const std::unique_ptr<std::shared_ptr<std::atomic<bool>>> owned(
        static_cast<std::shared_ptr<std::atomic<bool>>*>(data));
    while (!**owned) std::this_thread::sleep_for(std::chrono::microseconds(100));
  };
  EXPECT(DRIVER(cuLaunchHostFunc)(stream, wait, shared) == CUDA_SUCCESS);
}

// ---- communicators ----------------------------------------------------------------------------

void meet(const Ranks& ranks) {
  std::vector<int32_t> values(ranks.size(), 1);
  size_t at = 0;
  together(ranks, [&](Rank& me) {
    OK(ncclAllReduce(&values[at], &values[at], 1, ncclInt32, ncclSum, me.comm, nullptr));
    ++at;
  });
}

namespace {

template <class Until>
ncclResult_t poll(ncclComm_t comm, Until until) {
  ncclResult_t state = ncclInProgress;
  for (int i = 0; i < 20000; ++i) {
    if (ncclCommGetAsyncError(comm, &state) != ncclSuccess) return ncclInternalError;
    if (until(state)) return state;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return state;
}

}  // namespace

ncclResult_t settled(ncclComm_t comm) {
  return poll(comm, [](ncclResult_t state) { return state != ncclInProgress; });
}

ncclResult_t failure_of(ncclComm_t comm) {
  return poll(comm,
              [](ncclResult_t state) { return state != ncclInProgress && state != ncclSuccess; });
}

}  // namespace ringfold::test

int main(int count, char** words) {
  using namespace ringfold::test;
  const std::vector<std::string> given(words + 1, words + count);
  const bool process = given.size() >= 5 && given[1] == "process";
  const Scenario* const scenario = given.empty() ? nullptr : find_scenario(given[0]);
  if (scenario == nullptr || given.size() < 3) {
    std::cerr << "nccl_device SCENARIO threads|group|process RANKS [RANK FOLDER] [STREAM]\n";
    return 2;
  }
  CUDA(cuInit(0));
  CUDA(cuDevicePrimaryCtxRetain(&context, 0));
  enter_device();
  const int ranks = std::stoi(given[2]);
  const size_t stream_at = process ? 5 : 3;
  const std::string stream = given.size() > stream_at ? given[stream_at] : "own";
  if (process) {
    const auto rank = make_rank(std::stoi(given[3]), ranks, stream);
    run_rank(*scenario, rank.get(), exchanged_id(rank->rank, given[4]));
  } else if (given[1] == "threads") {
    run_threads(*scenario, ranks, stream);
  } else {
    run_group(*scenario, ranks, stream);
  }
  return failures() == 0 ? 0 : 1;
}
