#pragma once

#include <cstddef>
#include <cstdint>

#include "ringfold/schedule.h"

namespace ringfold {

struct LinkCost {
  double alpha = 5e-6;  // seconds a message
  double beta = 8e-11;  // seconds a byte
};
struct Machine {
  LinkCost local, remote;
  double gamma = 2e-11;  // seconds a reduced byte
  int per_host = 1;      // ranks on each host
};

}  // namespace ringfold
