#include "lib/comm/layout.h"

#include <algorithm>
#include <map>

namespace ringfold {

bool Layout::in_order() const {
  return std::ranges::is_sorted(ranks);
}

Layout lay_out(const std::vector<std::string>& hosts, int rank) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (size_t r = 0; r < hosts.size(); ++r) ranks_of[hosts[r]].push_back(static_cast<int>(r));
  Layout layout;
  bool even = true;
  for (size_t r = 0; r < hosts.size(); ++r) {
    const std::vector<int>& here = ranks_of[hosts[r]];
    even = even && here.size() == ranks_of[hosts[0]].size();
    if (here.front() == static_cast<int>(r))
      layout.ranks.insert(layout.ranks.end(), here.begin(), here.end());
  }
  layout.position = static_cast<int>(std::ranges::find(layout.ranks, rank) - layout.ranks.begin());
  if (even) layout.per_host = static_cast<int>(ranks_of[hosts[0]].size());
  return layout;
}

}  // namespace ringfold
