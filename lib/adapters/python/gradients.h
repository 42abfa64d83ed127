// A gradient synchroniser that was made from Python, and the arrays that it averages.
//
// Thread-safety: only with the GIL; what waits gives it up.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <vector>

#include "lib/adapters/python/buffer.h"
#include "ringfold/c.h"

namespace ringfold::python {

class Gradients {
 public:
  struct Options {
    size_t first_bytes, bucket_bytes;
    bool require_all;
    std::string compression;
    double sparse_share;
  };
  // `gradients`: of each name an array, which is kept, or a pair of a type's name and a number of
  // elements: that one shall live in bucket storage. Waits for the other ranks.
  Gradients(ringfold_comm_t comm, const std::vector<std::string>& names,
            const std::vector<nb::object>& gradients, const Options& options);
  ~Gradients();  // in the middle of a step: aborts it, on all ranks
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  void begin(std::optional<double> weight);
  void ready(size_t parameter) const;
  void finish();
  void accumulate(bool on) const;
  // The bytes of a gradient as a numpy array that keeps `self`, this object of Python.
  [[nodiscard]] nb::object memory(nb::handle self, size_t parameter) const;
  [[nodiscard]] nb::dict report() const;
  void abort(const std::string& why) const;

 private:
  ringfold_gradient_sync_t handle_ = nullptr;
  std::vector<Buffer> gradients_;
};

}  // namespace ringfold::python
