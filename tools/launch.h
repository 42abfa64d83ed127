// Starts local ranks and leaves nothing behind.
#pragma once

#include <string>
#include <vector>

namespace ringfold::tools {

struct Launch {
  int ranks = 1;
  bool prefix = true;                // "[2] " before every line of rank 2
  bool bind = false;                 // each rank to one core, in turn
  std::vector<std::string> program;  // with its arguments; looked up in PATH
};

// Runs `ranks` copies of the program with RINGFOLD_RANK, _SIZE, _LOCAL_RANK, _COORDINATOR (a free
// port of 127.0.0.1) and a random _SECRET, and passes their output on in whole lines. When a rank
// fails, or on SIGINT, SIGTERM, SIGHUP or a closed stdout, the others get SIGTERM and two seconds
// later SIGKILL. Every rank leads a process group of its own, so that its children end with it;
// ranks also die with this process, however that ends.
// Returns 0, or the exit status of the rank that failed first (128 + its signal); 127 if the
// program cannot be started, 128 + signal if one ended the launcher. Installs signal masks for the
// whole process and is to be called once, from a process with one thread.
int launch(const Launch& what);

}  // namespace ringfold::tools
