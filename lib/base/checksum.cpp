#include "lib/base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ringfold {

uint64_t checksum(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

}  // namespace ringfold
