// What the library did: counters, the flight recorder, and both as text.
//
// Every communicator remembers its latest operations and counts what it does, always; it costs a
// few nanoseconds an operation. A communicator that fails leaves its record as a file
// `ringfold-HOST-PID-rankR-commC.json` in the folder that RINGFOLD_RECORD names (none by default);
// `ringfold doctor --attach PID` reads it from a process that lives, hangs or is stopped.
//
// Thread-safety: any thread, at any time. Figures of operations under way may be a moment old.
#pragma once

#include <cstdint>
#include <string>

#include "ringfold/types.h"

namespace ringfold {

struct Counters {
  uint64_t operations = 0;      // called
  uint64_t finished = 0;        // of these, over and well
  uint64_t bytes_sent = 0;      // payload, of finished and failed operations
  uint64_t bytes_received = 0;  // payload; through a region: what was read of other ranks
  uint64_t waits = 0;           // times that a thread slept or helped until an operation was over
  double wait_seconds = 0;      // spent so
  uint64_t failures = 0;        // communicators that failed
};

// Of all communicators that this process has, and has had.
[[nodiscard]] Counters process_counters();
// The records of all communicators of this process (of one rank excepted), as JSON.
[[nodiscard]] std::string process_record();
// The counters, in the text format that Prometheus scrapes.
[[nodiscard]] std::string prometheus_text();

}  // namespace ringfold
