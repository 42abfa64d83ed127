#include "lib/comm/ways.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>

#include "lib/base/base.h"
#include "lib/base/net.h"
#include "transports/shm_host.h"

namespace ringfold {

const std::string* address_of(const Member& member, std::string_view wanted) {
  for (const auto& [name, address] : member.addresses)
    if (name == wanted) return &address;
  return nullptr;
}

bool has_device(const Member& member) {
  const std::string* const text = address_of(member, "cuda");
  return text != nullptr && *text == kDevice;
}

size_t rails_of(const std::vector<Member>& members) {
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (const Member& member : members)
    if (const std::string* rails = address_of(member, kRails))
      fewest = std::min(fewest, parse_integer(*rails).value_or(1));
  return fewest == std::numeric_limits<int64_t>::max() ? 1 : static_cast<size_t>(fewest);
}

bool has_ucx_of_device(const Member& member) {
  return address_of(member, kUcxOfDevice) != nullptr;
}

bool brings_ucx(const Member& member) {
  return address_of(member, "ucx") != nullptr || address_of(member, kWantsUcx) != nullptr;
}

namespace {

// How a rank can be reached, as numbers that are equal where the ways are the same: there are so
// many pairs of ranks that nothing may be decoded for each of them.
struct Ways {
  int process = -1, memory = -1;  // -1: it has no such way
  bool ucx = false;
};

std::vector<Ways> ways_of(const std::vector<Member>& members) {
  std::map<std::string, int> known;
  const auto number = [&](std::string place) {
    return known.emplace(std::move(place), static_cast<int>(known.size())).first->second;
  };
  std::vector<Ways> all;
  for (const Member& member : members) {
    Ways ways;
    ways.ucx = brings_ucx(member);
    if (const std::string* loopback = address_of(member, "loopback"))
      ways.process = number(fmt::format("{} process {}", member.host, *loopback));
    const std::string* const shm = address_of(member, "shm");
    if (const auto address = shm != nullptr ? shm::Address::decode(*shm) : std::nullopt)
      ways.memory = number(fmt::format("{} memory {}", member.host, address->host));
    all.push_back(ways);
  }
  return all;
}

}  // namespace

bool all_connected(const std::vector<Member>& members) {
  const auto connected = [](const Ways& a, const Ways& b) {
    return (a.ucx && b.ucx) || (a.process >= 0 && a.process == b.process) ||
           (a.memory >= 0 && a.memory == b.memory);
  };
  const std::vector<Ways> all = ways_of(members);
  for (size_t a = 0; a < all.size(); ++a)
    for (size_t b = a + 1; b < all.size(); ++b)
      if (!connected(all[a], all[b])) return false;
  return true;
}

std::string joined(const std::vector<std::string>& names, std::string_view between) {
  std::string all;
  for (const std::string& name : names) all.append(all.empty() ? "" : between).append(name);
  return all;
}

namespace {

// Devices that speak InfiniBand or RoCE, as UCX names them: "mlx5_0:1".
std::vector<std::string> rdma_devices() {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& device : std::filesystem::directory_iterator("/sys/class/infiniband", error))
    for (const auto& port : std::filesystem::directory_iterator(device.path() / "ports", error))
      names.push_back(device.path().filename().string() + ":" + port.path().filename().string());
  return names;
}

// The addresses over which this rank has met others, or, if it has met rank 0 inside this host
// only, rank 0 has. Empty: nobody has met anybody on another host.
std::vector<std::string> reached(const std::vector<Member>& all, const Member& mine) {
  std::vector<std::string> hosts;
  const auto add = [&](const Member& member) {
    for (const auto& [name, host] : member.addresses) {
      const auto address = Address::numeric(host, 0);
      if (name == kReached && address.ok() && !address->loopback()) hosts.push_back(host);
    }
  };
  add(mine);
  if (hosts.empty() && all[0].host == mine.host) add(all[0]);
  return hosts;
}

}  // namespace

Result<std::vector<std::string>> rails_for_ucx(const std::vector<Member>& all, const Member& mine) {
  const std::string filter = setting("RINGFOLD_INTERFACES").value_or("");
  auto interfaces = local_interfaces(filter);
  if (!interfaces.ok()) return interfaces.status();
  std::vector<std::string> devices;
  const auto add = [&](const Interface& interface) {
    if (std::ranges::find(devices, interface.name) == devices.end())
      devices.push_back(interface.name);
  };
  if (!filter.empty()) {
    std::ranges::stable_sort(*interfaces, [](const Interface& a, const Interface& b) {
      return std::ranges::lexicographical_compare(a.address.bytes(), b.address.bytes());
    });
    for (const bool loopback : {false, true})  // that only if there is nothing else
      for (const Interface& interface : *interfaces)
        if (interface.address.loopback() == loopback && (!loopback || devices.empty()))
          add(interface);
    if (filter.front() != '^') return devices;  // else what is left need not lead anywhere
    return std::vector{joined(devices, ",")};
  }
  const std::vector<std::string> proved = reached(all, mine);
  if (proved.empty() || std::getenv("UCX_NET_DEVICES") != nullptr)
    return std::vector{std::string()};
  devices = rdma_devices();
  for (const Interface& interface : *interfaces)
    if (std::ranges::find(proved, interface.address.host()) != proved.end()) add(interface);
  return std::vector{joined(devices, ",")};
}

}  // namespace ringfold
