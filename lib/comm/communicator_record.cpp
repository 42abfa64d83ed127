// What a communicator tells of what it did.
#include "lib/comm/communicator_impl.h"
#include "lib/record/picture.h"

namespace ringfold {

Counters Communicator::counters() const {
  return impl_ ? record::decode(impl_->record().slot()).counters : Counters();
}

std::string Communicator::record() const {
  if (!impl_) return "null";
  return record::to_json(record::decode(impl_->record().slot()), steady_clock().now());
}

}  // namespace ringfold
