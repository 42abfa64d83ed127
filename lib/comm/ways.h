// What the ranks have told of how they can be reached, read in the same way by all of them.
//
// Threads: any.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lib/comm/control.h"
#include "ringfold/status.h"

namespace ringfold {

// Names of a Member's addresses, beside those of the transports:
inline constexpr std::string_view kUcxOfDevice = "cuda by UCX";  // its UCX moves device memory
inline constexpr std::string_view kRails = "rails of UCX";       // how many
inline constexpr std::string_view kWantsUcx = "wants ucx";       // brings it in the second round
inline constexpr std::string_view kWhyNoUcx = "no ucx";          // though it wanted it
// What a rank with a device gives as its address "cuda"; others say why they have none.
inline constexpr std::string_view kDevice = "device";

// Null: it has none of that name.
[[nodiscard]] const std::string* address_of(const Member& member, std::string_view name);
[[nodiscard]] bool has_device(const Member& member);
[[nodiscard]] bool has_ucx_of_device(const Member& member);
[[nodiscard]] bool brings_ucx(const Member& member);
// Of all ranks that have UCX, the fewest.
[[nodiscard]] size_t rails_of(const std::vector<Member>& members);
// Whether every two of them have a way in common. The same on all ranks.
[[nodiscard]] bool all_connected(const std::vector<Member>& members);

// What UCX may use: the interfaces that RINGFOLD_INTERFACES names, a rail each, in the order of
// their addresses, which is that of the networks on every host; else those that have proved to
// lead to other ranks, and RDMA. UCX itself believes that any interface leads to all addresses of
// its network, such as a bridge of containers that has the same address on each host. Empty: it
// chooses, or the user has.
[[nodiscard]] Result<std::vector<std::string>> rails_for_ucx(const std::vector<Member>& all,
                                                             const Member& mine);
[[nodiscard]] std::string joined(const std::vector<std::string>& names, std::string_view between);

}  // namespace ringfold
