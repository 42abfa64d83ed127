// The plainest user of the library: its own output is nothing at all, so whatever appears on stdout
// or stderr comes from the library. Driven by tools_test.
#include "ringfold/communicator.h"

int main() {
  const auto where = ringfold::Rendezvous::from_environment();
  if (!where.ok()) return 1;
  auto comm = ringfold::Communicator::create(*where);
  if (!comm.ok()) return 2;
  float value = 1;
  if (!comm->all_reduce(&value, &value, 1, ringfold::DType::f32, ringfold::Op::sum).wait().ok()) {
    return 3;
  }
  return value == static_cast<float>(comm->size()) ? 0 : 4;
}
