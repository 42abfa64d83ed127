// One rank's device, stream and clock for `ringfold bench --device cuda`, by the CUDA driver that
// is opened at run time.
//
// Threads: that of the rank, which makes its context current.
#pragma once

#include <cstddef>
#include <memory>

#include "ringfold/status.h"
#include "ringfold/types.h"

namespace ringfold::tools {

class Gpu {
 public:
  // The device for the rank of that number on this host: ranks beyond the devices share them.
  static Result<std::unique_ptr<Gpu>> open(int local_rank);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  [[nodiscard]] Stream stream() const { return {stream_}; }
  // These throw OperationFailed. The copies wait for the stream, and for themselves.
  [[nodiscard]] std::byte* allocate(size_t bytes) const;
  void free(std::byte* memory) const;
  void upload(std::byte* to, const std::byte* from, size_t bytes) const;
  void download(std::byte* to, const std::byte* from, size_t bytes) const;
  void wait() const;
  // Seconds between the two on the stream, which end() waits for.
  void begin() const;
  [[nodiscard]] double end() const;

 private:
  Gpu() = default;
  Status make(int local_rank);

  void *stream_ = nullptr, *begin_ = nullptr, *end_ = nullptr;
};

}  // namespace ringfold::tools
