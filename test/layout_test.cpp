#include "lib/comm/layout.h"

#include <catch2/catch.hpp>

using ringfold::lay_out;
using ringfold::Layout;
using Ranks = std::vector<int>;

TEST_CASE("ranks of one host keep their order") {
  const Layout layout = lay_out({"a", "a", "a"}, 1);
  CHECK(layout.ranks == Ranks{0, 1, 2});
  CHECK(layout.in_order());
  CHECK(layout.position == 1);
  CHECK(layout.per_host == 3);
}

TEST_CASE("positions go host by host, whatever the numbering") {
  const std::vector<std::string> hosts = {"b", "a", "c", "a", "b", "c"};
  const Ranks expected = {0, 4, 1, 3, 2, 5};
  for (int rank = 0; rank < 6; ++rank) {
    const Layout layout = lay_out(hosts, rank);
    CHECK(layout.ranks == expected);
    CHECK_FALSE(layout.in_order());
    CHECK(layout.ranks[static_cast<size_t>(layout.position)] == rank);
    CHECK(layout.per_host == 2);
  }
}

TEST_CASE("uneven hosts have no common number of ranks") {
  const Layout layout = lay_out({"a", "b", "a"}, 1);
  CHECK(layout.ranks == Ranks{0, 2, 1});
  CHECK(layout.hosts == std::vector<Ranks>{{0, 2}, {1}});
  CHECK(layout.position == 2);
  CHECK(layout.per_host == 1);
  CHECK(lay_out({"a", "b"}, 0).per_host == 1);
  CHECK(lay_out({"a"}, 0).per_host == 1);
}
