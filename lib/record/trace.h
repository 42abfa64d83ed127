// Operations and their steps as a Chrome trace: what RINGFOLD_TRACE asks for. Load the file in
// chrome://tracing or ui.perfetto.dev; the files of several ranks may be loaded together, since the
// clock of one host is the same for all its processes.
//
// The file is complete JSON after every operation: each is written by one system call, which also
// closes the list again. Only a process that is killed inside that call may leave its last
// operation cut short, at the border of a page; both programs read such a file all the same.
//
// Threads: any.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "lib/base/base.h"
#include "lib/base/net.h"
#include "ringfold/status.h"

namespace ringfold::record {

// From then on all steps before this one were through.
struct Mark {
  int step = 0;
  Nanoseconds at{};
};
// More steps of one operation than this are not told apart.
inline constexpr size_t kMostMarks = 4096;

class Trace {
 public:
  // The trace of this rank: `pattern` with %r replaced by the rank, or with ".rankR" behind it. The
  // first call of a process for a file makes it anew, later ones add to it. system: why not.
  static Result<std::shared_ptr<Trace>> open(const std::string& pattern, int rank);

  struct Operation {
    uint32_t communicator = 0;
    uint32_t seq = 0;
    std::string name;
    std::string_view transport;
    Nanoseconds began{}, ended{};
    uint64_t bytes_sent = 0;
    std::string_view outcome;  // "ok", "timeout", ...
    std::span<const Mark> marks;
  };
  void write(const Operation& operation);

 private:
  Trace(Descriptor file, int rank)
      : file_(std::move(file)), rank_(rank), generation_(fork_generation()) {}
  Status begin();
  void append(const std::string& events);

  const Descriptor file_;
  const int rank_;
  const uint32_t generation_;  // a forked child does not write into its parent's file
  std::mutex lock_;            // guards what follows
  size_t end_ = 0;             // where the closing of the list is
  uint64_t written_ = 0;       // operations
};

}  // namespace ringfold::record
