// A CUDA driver in host memory, for tests: one device whose streams are threads. The library's
// whole CUDA path runs on it where there is no GPU.
//
//   memory     Device memory is a range of addresses that nobody can access, ever. Kernels and
//              copies reach it by another mapping of the same memory; so a host access that should
//              not be there faults.
//   kernels    The bodies of kernels/ compiled for the host, found by the names of the entries; a
//              block is one thread.
//   streams    Each is a thread. Streams share some hardware queues, as on a device: what stands in
//              one queue starts in the order of the calls, so a stream may have to wait for what it
//              does not depend on. The legacy stream waits for the others, and they for it.
//   hazards    Blocks wait for room on the device. The first launch of a kernel that was not
//   loaded,
//              and every allocation and release, wait for all that runs. Starts are late by chance.
//
// Everything left to chance comes from one seed. What a program must not do (unknown handles, calls
// from where they are forbidden) ends the process with a sentence.
#pragma once

#include <cstdint>

#include "lib/cuda/driver.h"

namespace ringfold::test {

struct EmulatedOptions {
  uint64_t seed = 1;
  int version = CUDA_VERSION;    // what cuDriverGetVersion() says
  int hardware_queues = 0;       // 1 to 8; 0: by chance
  int resident_blocks = 0;       // of the whole device; 0: by chance
  bool launch_blocking = false;  // as CUDA_LAUNCH_BLOCKING=1
};

// Takes the place of libcuda.so.1 for the library and for test_driver() while it lives. One at a
// time. Its destructor waits for all streams.
class EmulatedDriver {
 public:
  explicit EmulatedDriver(const EmulatedOptions& options = {});
  ~EmulatedDriver();
  EmulatedDriver(const EmulatedDriver&) = delete;
  EmulatedDriver& operator=(const EmulatedDriver&) = delete;

  // Bytes of device and of pinned memory in use, and graphs' user objects alive.
  [[nodiscard]] static size_t device_bytes();
  [[nodiscard]] static size_t pinned_bytes();
  [[nodiscard]] static int user_objects();
  // Kernels launched so far, replays included.
  [[nodiscard]] static int launches();
};

// The functions by name, as the driver library would give them.
void* emulated_function(const char* name);

}  // namespace ringfold::test
