// A CUDA driver in host memory, for tests: devices whose streams are threads. The library's whole
// CUDA path runs on it where there is no GPU.
//
//   memory     Device memory is a range of addresses that nobody can access, ever. Kernels and
//              copies reach it by another mapping of the same memory; so a host access that should
//              not be there faults. Kernels reach that of another device if access was enabled, and
//              that of another process, on the same devices, if it was opened by IPC.
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

inline constexpr int kMostDevices = 4;

struct EmulatedOptions {
  uint64_t seed = 1;
  int version = CUDA_VERSION;    // what cuDriverGetVersion() says
  int hardware_queues = 0;       // 1 to 8; 0: by chance
  int resident_blocks = 0;       // of a whole device; 0: by chance
  int devices = 1;               // up to kMostDevices
  bool peer_access = true;       // devices can be given access to each other
  bool ipc = true;               // memory can be exported to other processes
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
  // Mappings of other processes' memory that are open.
  [[nodiscard]] static int opened();
  // Bytes that the workers' commands have read and written, by where they lie.
  struct Traffic {
    uint64_t read_pinned = 0, written_pinned = 0, read_device = 0, written_device = 0;
    uint64_t read_others = 0;  // device memory of other processes
  };
  [[nodiscard]] static Traffic traffic();
};

// The functions by name, as the driver library would give them.
void* emulated_function(const char* name);

}  // namespace ringfold::test
