#include "lib/comm/layout.h"

#include <algorithm>
#include <map>

namespace ringfold {

bool Layout::in_order() const {
  return std::ranges::is_sorted(ranks);
}

Layout lay_out(const std::vector<std::string>& hosts, int rank) {
  Layout layout;
  std::map<std::string, size_t> index_of;
  for (size_t r = 0; r < hosts.size(); ++r) {
    const auto [at, fresh] = index_of.try_emplace(hosts[r], layout.hosts.size());
    if (fresh) layout.hosts.emplace_back();
    layout.hosts[at->second].push_back(static_cast<int>(r));
  }
  for (const std::vector<int>& here : layout.hosts)
    layout.ranks.insert(layout.ranks.end(), here.begin(), here.end());
  layout.position = static_cast<int>(std::ranges::find(layout.ranks, rank) - layout.ranks.begin());
  const size_t each = layout.hosts[0].size();
  const auto as_many = [&](const std::vector<int>& here) { return here.size() == each; };
  if (std::ranges::all_of(layout.hosts, as_many)) layout.per_host = static_cast<int>(each);
  return layout;
}

}  // namespace ringfold
