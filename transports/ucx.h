// How to make the transport between hosts: UCX active messages. Its rules are in
// lib/engine/transport.h; what is particular to it is told at the top of ucx.cpp.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lib/base/base.h"
#include "lib/engine/transport.h"

namespace ringfold {

// `me` is this process's rank in the world; `clock` must outlive the transport. `rails`: the
// devices UCX may use ("mlx5_0:1,eth0"), all if empty and UCX_NET_DEVICES is not set; the user's
// UCX_* variables hold for everything else. If there are several, the messages are shared out among
// them, and the k-th of each rank must reach the k-th of the others. UCX only warns of a device
// that does not exist: the caller checks the names. REQUIRES one at least; those beyond four are
// left out.
//
// Code::unsupported: built without UCX's headers, or there is no libucp.so.0 to open.
// Code::system: UCX refused; the message carries its reason. Any thread.
Result<std::unique_ptr<Transport>> make_ucx(Peer me, Clock& clock,
                                            const std::vector<std::string>& rails = {""});

}  // namespace ringfold
