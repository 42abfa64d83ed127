// Which transports UCX has on this machine, for people who want to know why it took one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ringfold/status.h"

namespace ringfold {

// By UCX's names, each once, sorted: "rc_mlx5", "tcp". `wanted`: as in UCX_TLS; "all".
// Code::unsupported: no UCX; Code::system: it has none of these; the message names those that
// it has. Any thread.
[[nodiscard]] Result<std::vector<std::string>> ucx_transports(const std::string& wanted);

// What the ranks use: the user's UCX_TLS, else the library's own choice.
[[nodiscard]] std::string ucx_transports_wanted();

// Whether the network card moves the bytes by itself.
[[nodiscard]] bool is_rdma(std::string_view transport);

}  // namespace ringfold
