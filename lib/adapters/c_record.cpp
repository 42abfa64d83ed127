// The part of the C interface that tells what was done.
#include <fmt/core.h>

#include "lib/adapters/c_common.h"
#include "ringfold/c.h"
#include "ringfold/communicator.h"

namespace {

using namespace ringfold;
using namespace ringfold::c;

Status hand_out(const std::string& whole, char* text, size_t bytes, size_t* needed) {
  if (needed != nullptr) *needed = whole.size() + 1;
  if (whole.size() + 1 > bytes)
    return invalid(fmt::format("the text needs {} bytes, given are {}", whole.size() + 1, bytes));
  if (text == nullptr) return null_pointer("text");
  text[whole.copy(text, whole.size())] = '\0';
  return {};
}

void to_c(const Counters& from, ringfold_counters* to) {
  *to = {from.operations, from.finished,     from.bytes_sent, from.bytes_received,
         from.waits,      from.wait_seconds, from.failures};
}

}  // namespace

extern "C" {

ringfold_status ringfold_get_counters(ringfold_comm_t comm, ringfold_counters* counters) {
  if (counters == nullptr) return answer(null_pointer("counters"));
  if (comm == nullptr) {
    to_c(process_counters(), counters);
    return RINGFOLD_OK;
  }
  return answer(with(comm, [&](Communicator& found) {
    to_c(found.counters(), counters);
    return Status();
  }));
}

ringfold_status ringfold_record(ringfold_comm_t comm, char* text, size_t bytes, size_t* needed) {
  if (comm == nullptr) return answer(hand_out(process_record(), text, bytes, needed));
  return answer(with(
      comm, [&](Communicator& found) { return hand_out(found.record(), text, bytes, needed); }));
}

ringfold_status ringfold_prometheus(char* text, size_t bytes, size_t* needed) {
  return answer(hand_out(prometheus_text(), text, bytes, needed));
}

}  // extern "C"
