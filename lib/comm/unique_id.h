// Ids made in this process, between Rendezvous::unique_id() and rank 0's coming.
//
// Thread-safety: any thread.
#pragma once

#include <string>
#include <string_view>

#include "lib/base/net.h"

namespace ringfold {

// The listener of an id made in this process, once; empty if there is none.
[[nodiscard]] Descriptor take_id_listener(const std::string& secret);
inline constexpr std::string_view kIdSource = "unique id";  // Rendezvous::source of ids

}  // namespace ringfold
