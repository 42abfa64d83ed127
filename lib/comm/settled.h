// Options and environment variables of a communicator, checked.
//
// Threads: any; plain values.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "lib/base/base.h"
#include "lib/cuda/path.h"
#include "lib/record/trace.h"
#include "ringfold/communicator.h"
#include "ringfold/model.h"

namespace ringfold {

// What an option or its environment variable says, checked.
struct Settled {
  Nanoseconds timeout{};
  size_t piece_bytes = 0;
  std::optional<Algorithm> algorithm;
  std::string transports;  // "loopback,shm,ucx" or a part of it
  Numerics numerics = Numerics::exact;
  cuda::Way way = cuda::Way::automatic;
  Nanoseconds spin{};
  bool spin_given = false;
  std::optional<Machine> machine;        // measured costs; empty: the built-in ones
  std::shared_ptr<record::Trace> trace;  // null: none is written. Made when the rank is known
  bool verify = false;

  [[nodiscard]] bool allows(std::string_view transport) const;
};
[[nodiscard]] Result<Settled> settle(const Options& options);

}  // namespace ringfold
