// The checksums of what the phases of a region show, for RINGFOLD_VERIFY.
#include "lib/base/checksum.h"
#include "lib/region/moves.h"

namespace ringfold::region {

// Whether every reader reads the same of stage A.
bool Moves::alike() const {
  return !part_to_each(collective_) && !shape_.folded;
}

Moves::Range Moves::bytes_for(const Block& b, int reader) const {
  if (alike()) return {0, b.count * element_};
  if (part_to_each(collective_))
    return {static_cast<size_t>(reader) * shape_.block * element_, b.count * element_};
  const Range own = part(b, reader);
  return {own.begin * element_, own.count * element_};
}

// Of a payload beside the flag, gaps included: they lie there for everybody.
size_t Moves::small_bytes() const {
  const size_t parts = part_to_each(collective_) ? static_cast<size_t>(size_) : 1;
  return shape_.total * parts * element_;
}

void Moves::seal(int step, Flag& flag) const {
  const auto blocks = static_cast<int>(shape_.blocks);
  if (shape_.small) {
    flag.check = checksum(flag.payload(small_bytes()), small_bytes());
    return;
  }
  auto& checks = *reinterpret_cast<Checks*>(flag.payload(sizeof(Checks)));
  for (int r = 0; step < blocks && r < (alike() ? 1 : size_); ++r) {
    const Range bytes = bytes_for(block(step), r);
    checks.a[static_cast<size_t>(r)] =
        checksum(segment_.pool(rank_) + block(step).a + bytes.begin, bytes.count);
  }
  if (!shape_.folded || step < 1) return;
  const Block& last = block(step - 1);
  checks.b = checksum(segment_.pool(rank_) + last.b, part(last, rank_).count * element_);
}

bool Moves::intact(int step, uint32_t base, int rank) const {
  const auto blocks = static_cast<int>(shape_.blocks);
  const Flag& flag = segment_.flag(rank, base + static_cast<uint32_t>(step) - 1);
  if (shape_.small) return flag.check == checksum(flag.payload(small_bytes()), small_bytes());
  const auto& checks = *reinterpret_cast<const Checks*>(flag.payload(sizeof(Checks)));
  if (step - 1 < blocks) {
    const Block& b = block(step - 1);
    const Range bytes = bytes_for(b, rank_);
    if (checks.a[alike() ? 0 : static_cast<size_t>(rank_)] !=
        checksum(segment_.pool(rank) + b.a + bytes.begin, bytes.count))
      return false;
  }
  if (!shape_.folded || step < 2) return true;
  const Block& b = block(step - 2);
  return checks.b == checksum(segment_.pool(rank) + b.b, part(b, rank).count * element_);
}

}  // namespace ringfold::region
