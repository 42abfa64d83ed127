// What a communicator tells of what it did.
#include "lib/comm/two_level.h"

namespace ringfold {

record::CommunicatorView Communicator::Impl::view() const {
  record::CommunicatorView view = record::decode(record_->slot());
  if (two_level_)
    for (const Impl* part : two_level_->parts())
      if (part != nullptr) record::add_part(&view.counters, part->view().counters);
  return view;
}

Counters Communicator::counters() const {
  return impl_ ? impl_->view().counters : Counters();
}

std::string Communicator::record() const {
  return impl_ ? record::to_json(impl_->view(), steady_clock().now()) : "null";
}

}  // namespace ringfold
