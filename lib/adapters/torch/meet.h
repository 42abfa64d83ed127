// How the ranks of a process group find each other: rank 0 leaves an id in torch's store.
//
// Thread-safety: any thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "work.h"

namespace ringfold::torch {

inline ringfold_options options_of(std::chrono::milliseconds timeout) {
  ringfold_options options{};
  options.timeout = options.start_timeout = static_cast<double>(timeout.count()) / 1000;
  return options;
}

inline ringfold_comm_t meet(c10d::Store& store, int rank, int size,
                            std::chrono::milliseconds timeout) {
  ringfold_unique_id id;
  const std::string key = "ringfold/id";
  if (rank == 0) {
    check(ringfold_get_unique_id(&id));
    store.set(key, std::vector<uint8_t>(id.bytes, id.bytes + sizeof id.bytes));
  } else {
    const std::vector<uint8_t> bytes = store.get(key);
    TORCH_CHECK(bytes.size() == sizeof id.bytes, "ringfold: rank 0 has put no id into the store");
    std::copy(bytes.begin(), bytes.end(), id.bytes);
  }
  const ringfold_options options = options_of(timeout);
  ringfold_comm_t comm = nullptr;
  check(ringfold_init_id(&comm, id, rank, size, &options));
  return comm;
}

}  // namespace ringfold::torch
