// Where the ranks of a benchmark come from.
#pragma once

#include <functional>
#include <string>

#include "ringfold/bootstrap.h"

namespace ringfold::tools {

struct Start {
  int ranks = 0;  // 0: as many as the launcher started
  std::string transport = "auto";
  bool bind = true;               // each rank that is started here to one core
  std::string command = "bench";  // for messages
};

// Calls `rank` as every rank that belongs to this process, or starts this command line anew for
// each of `ranks`. "loopback" only reaches ranks of one process: they are threads then. Returns the
// exit status; has said why if there are no ranks.
int start_ranks(const Start& start, const std::function<int(const Rendezvous&)>& rank);

}  // namespace ringfold::tools
