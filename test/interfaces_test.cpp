// Which way the ranks of several hosts find to each other: cases C36 to C40 of the list, on two
// hosts made of namespaces.
#include <cstring>
#include <thread>

#include "test/cases.h"
#include "test/hosts.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr const char* kOwnNames =
    "the hosts file of each host says that its own name is 127.0.0.1, as many systems do";

// Exact sums of `ranks`, the first `on_alpha` of them on the first host.
std::string sums(const Hosts& hosts, int ranks, int on_alpha, const std::string& coordinator,
                 const std::string& interfaces = "") {
  return run_ranks(ranks, 60s, [&](Rendezvous where) {
    if (!RANK_CHECK(hosts.enter(where.rank < on_alpha ? 0 : 1))) return 1;
    if (!interfaces.empty()) setenv("RINGFOLD_INTERFACES", interfaces.c_str(), 1);
    where.coordinator = coordinator;
    where.timeout = 20s;
    Options options;
    options.timeout = 10s;
    auto comm = Communicator::create(where, options);
    if (!rank_ok(comm.status())) return 1;
    for (const size_t count : {size_t{1}, size_t{1000}, size_t{300'000}}) {
      std::vector<int64_t> x(count, 1 + where.rank);
      if (!rank_ok(comm->all_reduce(x.data(), x.data(), count, DType::i64, Op::sum).wait()))
        return 1;
      RANK_CHECK(x == std::vector<int64_t>(count, ranks * (ranks + 1) / 2));
    }
    return 0;
  });
}

}  // namespace

#ifdef RINGFOLD_TEST_UCX

TEST_CASE("C36, C37: uneven hosts, whose own names mean 127.0.0.1 to themselves") {
  const Hosts hosts;
  if (!hosts.here() || !hosts.with_ipv4()) return skip("namespaces need root, ip and nsenter");
  INFO(kOwnNames);
  CHECK(sums(hosts, 4, 2, "alpha:29600") == "");
  CHECK(sums(hosts, 5, 3, "alpha:29601") == "");
  CHECK(sums(hosts, 5, 1, "10.77.0.1:29602") == "");
}

TEST_CASE("C38: a bridge that is up on both hosts, with the same address, leads nowhere") {
  const Hosts hosts;
  if (!hosts.here() || !hosts.with_ipv4()) return skip("namespaces need root, ip and nsenter");
  for (const size_t host : {0, 1}) {
    REQUIRE(hosts.ip(host, "link add docker0 type bridge"));
    REQUIRE(hosts.ip(host, "addr add 172.17.0.1/16 dev docker0"));
    REQUIRE(hosts.ip(host, "link set docker0 up"));
    // A container, so that it has a carrier.
    REQUIRE(hosts.ip(host, "link add outside type veth peer name inside"));
    REQUIRE(hosts.ip(host, "link set outside master docker0 up"));
    REQUIRE(hosts.ip(host, "link set inside up"));
  }
  CHECK(sums(hosts, 4, 2, "alpha:29600") == "");
  CHECK(sums(hosts, 2, 1, "10.77.0.1:29601") == "");
}

TEST_CASE("C39: hosts without IPv6, and hosts with nothing else") {
  const Hosts hosts;
  if (!hosts.here()) return skip("namespaces need root, ip and nsenter");
  SECTION("no IPv6") {
    REQUIRE(hosts.with_ipv4());
    for (const size_t host : {0, 1})
      REQUIRE(hosts.run(host, "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"));
    CHECK(sums(hosts, 4, 2, "alpha:29600") == "");
  }
  SECTION("IPv6 only") {
    const bool made = hosts.ip(0, "addr add fd77::1/64 dev v0 nodad") &&
                      hosts.ip(1, "addr add fd77::2/64 dev v0 nodad");
    if (!made) return skip("no IPv6 here");
    CHECK(sums(hosts, 4, 2, "[fd77::1]:29600") == "");
  }
}

TEST_CASE("C40: forms of RINGFOLD_INTERFACES that work, and an error that lists what there is") {
  const Hosts hosts;
  if (!hosts.here() || !hosts.with_ipv4()) return skip("namespaces need root, ip and nsenter");
  int port = 29600;
  for (const char* form : {"^lo,docker", "v", "v0", "10.77.0.0/24"}) {
    INFO("RINGFOLD_INTERFACES=" << form);
    CHECK(sums(hosts, 2, 1, fmt::format("10.77.0.1:{}", port++), form) == "");
  }
  for (const char* form : {"nosuch0", "192.168.1.1", "^", "v0,^lo"}) {
    INFO("RINGFOLD_INTERFACES=" << form);
    const std::string told = sums(hosts, 2, 1, fmt::format("10.77.0.1:{}", port++), form);
    CHECK(told.find("RINGFOLD_INTERFACES") != std::string::npos);
    CHECK(told.find("v0 (10.77.0.1)") != std::string::npos);
    CHECK(told.find("v0 (10.77.0.2)") != std::string::npos);
  }
}

#endif
