// A new communicator of those that are here and of newcomers, which have nothing but an id.
#include <fmt/format.h>

#include <type_traits>

#include "lib/comm/communicator_impl.h"
#include "lib/comm/work.h"

namespace ringfold {
namespace {

// What rank 0 decides.
struct Invitation {
  UniqueId id;
  int64_t newcomers = 0;
};
static_assert(std::is_trivially_copyable_v<Invitation>);

}  // namespace

// The newcomers share no world with the others, so all meet anew.
Result<Communicator> Communicator::grow(const UniqueId& id, int newcomers) {
  if (!impl_)
    return Status(Code::invalid_argument,
                  "this Communicator is empty: create() or split() makes one");
  if (in_callback())
    return Status(Code::invalid_argument, "grow() waits, so it cannot be called from a callback");
  if (newcomers < 1)
    return Status(Code::invalid_argument,
                  fmt::format("grow by {} ranks: expected at least 1", newcomers));
  if (Status status = impl_->usable(); !status.ok()) return status;
  Invitation mine{id, newcomers}, agreed = mine;
  if (Status status = broadcast(&agreed, sizeof agreed, DType::u8, 0).wait(); !status.ok())
    return status;
  int64_t least = newcomers == agreed.newcomers ? 1 : 0;
  if (Status status = all_reduce(&least, &least, 1, DType::i64, Op::min).wait(); !status.ok())
    return status;
  if (least == 0)
    return Status(
        Code::mismatch,
        fmt::format("grow: rank 0 expects {} newcomers, rank {} {}{}", agreed.newcomers, rank(),
                    newcomers, newcomers == agreed.newcomers ? "; another rank differs" : ""));
  auto where = Rendezvous::from_id(agreed.id, rank(), size() + newcomers);
  if (!where.ok()) return where.status();
  const Options options = impl_->options();
  where->timeout = options.timeout;
  return create(*where, options);
}

Options Communicator::Impl::options() const {
  Options options;
  options.timeout = settled_.timeout;
  options.piece_bytes = settled_.piece_bytes;
  options.algorithm = settled_.algorithm;
  options.transports = settled_.transports;
  options.numerics = settled_.numerics;
  options.cuda_path = cuda::name(settled_.way);
  return options;
}

}  // namespace ringfold
