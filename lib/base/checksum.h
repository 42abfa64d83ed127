// The checksum of what crosses between ranks when RINGFOLD_VERIFY asks for it. It finds damage, not
// malice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringfold {

[[nodiscard]] uint64_t checksum(const void* data, size_t bytes);

}  // namespace ringfold
