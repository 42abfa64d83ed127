// Which ranks share a host.
//
// Threads: any; plain values.
#pragma once

#include <string>
#include <vector>

namespace ringfold {

// Ranks in an order that goes host by host, each host where its first rank comes: so a ring crosses
// every host's link once in each direction, however the ranks are numbered. `position` of a
// schedule is the index here.
struct Layout {
  std::vector<std::vector<int>> hosts;  // the ranks of each
  std::vector<int> ranks;               // by position
  int position = 0;                     // mine
  int per_host = 1;                     // ranks on each host; 1 unless all have as many

  // Whether positions are ranks.
  [[nodiscard]] bool in_order() const;
};

// `hosts`: an identity of each rank's host, by rank; equal ones are one host.
[[nodiscard]] Layout lay_out(const std::vector<std::string>& hosts, int rank);

}  // namespace ringfold
