// Which of this host's network interfaces to use.
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>

#include "lib/base/base.h"
#include "lib/base/net.h"

namespace ringfold {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

bool in_network(const Address& address, const Address& network, int64_t bits) {
  if (address.family() != network.family()) return false;
  const auto ours = address.bytes(), theirs = network.bytes();
  for (size_t i = 0; bits > 0; ++i, bits -= 8) {
    const int mask = bits >= 8 ? 0xff : 0xff & (0xff << (8 - bits));
    if (((ours[i] ^ theirs[i]) & mask) != 0) return false;
  }
  return true;
}

// One entry of the list, ready to be compared with many interfaces.
struct Pattern {
  std::string_view name;  // unless it is a network
  bool exact = false;     // an interface has exactly this name, so it is no prefix
  std::optional<Address> network;
  int64_t bits = 0;

  [[nodiscard]] bool matches(const Interface& interface) const {
    if (network) return in_network(interface.address, *network, bits);
    return exact ? interface.name == name : interface.name.starts_with(name);
  }
};

Result<Pattern> parse_pattern(std::string_view entry, const std::vector<Interface>& all) {
  Pattern pattern;
  const size_t slash = entry.find('/');
  if (auto address = Address::numeric(entry.substr(0, slash), 0); address.ok()) {
    const auto width = static_cast<int64_t>(8 * address->bytes().size());
    const auto bits = slash == std::string_view::npos ? std::optional<int64_t>(width)
                                                      : parse_integer(entry.substr(slash + 1));
    if (!bits || *bits < 0 || *bits > width) {
      return Status(Code::invalid_argument,
                    fmt::format("\"{}\" is not a network such as 10.0.0.0/8", entry));
    }
    pattern.network = *address;
    pattern.bits = *bits;
    return pattern;
  }
  if (entry.empty() || entry.find_first_of("/^ \t") != std::string_view::npos) {
    return Status(Code::invalid_argument,
                  fmt::format("\"{}\" is neither an interface name, an address nor a network "
                              "(^ stands at the beginning of the whole list)",
                              entry));
  }
  pattern.name = entry;
  pattern.exact = std::any_of(all.begin(), all.end(),
                              [&](const Interface& interface) { return interface.name == entry; });
  return pattern;
}

Status refused(std::string_view filter, std::string_view why, const std::vector<Interface>& all) {
  std::string existing;
  for (const Interface& interface : all) {
    existing += fmt::format("{}{} ({})", existing.empty() ? "" : ", ", interface.name,
                            interface.address.host());
  }
  return {Code::invalid_argument, fmt::format("RINGFOLD_INTERFACES=\"{}\": {}; there are: {}",
                                              filter, why, existing.empty() ? "none" : existing)};
}

bool link_local(const Address& address) {
  return address.family() == AF_INET6 && address.bytes()[0] == 0xfe &&
         (address.bytes()[1] & 0xc0) == 0x80;
}

}  // namespace

Result<std::vector<Interface>> choose_interfaces(std::vector<Interface> all,
                                                 std::string_view filter) {
  if (filter.empty()) return all;
  const bool exclude = filter.front() == '^';
  std::vector<Pattern> patterns;
  for (std::string_view entry : split(filter.substr(exclude ? 1 : 0), ',')) {
    if (exclude && entry.starts_with('^')) entry.remove_prefix(1);
    const auto pattern = parse_pattern(entry, all);
    if (!pattern.ok()) return refused(filter, pattern.status().message(), all);
    patterns.push_back(*pattern);
  }
  std::vector<Interface> chosen;
  for (const Interface& interface : all) {
    const bool listed = std::any_of(patterns.begin(), patterns.end(), [&](const Pattern& pattern) {
      return pattern.matches(interface);
    });
    if (listed != exclude) chosen.push_back(interface);
  }
  if (chosen.empty()) return refused(filter, "no interface is left", all);
  return chosen;
}

Result<std::vector<Interface>> local_interfaces(std::string_view filter) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) {
    return Status(Code::system, fmt::format("cannot list interfaces: {}", reason(errno)));
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, freeifaddrs);
  std::vector<Interface> all;
  for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || (at->ifa_flags & IFF_UP) == 0) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const Address address(at->ifa_addr,
                          family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (!link_local(address)) all.push_back({at->ifa_name, address});
  }
  std::stable_partition(all.begin(), all.end(),
                        [](const Interface& interface) { return !interface.address.loopback(); });
  return choose_interfaces(std::move(all), filter);
}

}  // namespace ringfold
