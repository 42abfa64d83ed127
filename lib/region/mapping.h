// Unnamed memory that processes share: made by one, handed over as a descriptor, mapped by all. It
// is gone with the last process that has it, however that ends.
//
// Threads: a Mapping by one at a time; the memory itself is shared by design.
#pragma once

#include <cstddef>
#include <utility>

#include "lib/base/net.h"
#include "ringfold/status.h"

namespace ringfold::region {

// New, zeroed, sealed against any other length and wholly reserved: too little memory is an error
// here, not a SIGBUS later, nor the end of a process that the system chooses. `what` names it in
// the error and in /proc.
[[nodiscard]] Result<Descriptor> make_shared(const char* what, size_t bytes);
// Refuses what make_shared() has not made, or not with this length.
[[nodiscard]] Status check_shared(const Descriptor& fd, size_t bytes);

class Mapping {
 public:
  enum class InChildren : uint8_t { absent, shared };  // after fork(2)

  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : begin_(std::exchange(other.begin_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(begin_, other.begin_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();

  // For reading and writing, with all its pages at hand, from an address that is a multiple of a
  // huge page.
  [[nodiscard]] static Result<Mapping> map(const Descriptor& fd, size_t bytes, InChildren children);
  // Asks for huge pages, which the system may or may not have for such memory.
  void enlarge_pages();
  // Puts private pages with the same contents in the place of [begin, begin + bytes), a part of it:
  // what other processes do to the shared ones is seen no more. Whole pages: what lies beside it on
  // the first and the last one must not be written to meanwhile.
  [[nodiscard]] Status part_from_others(std::byte* begin, size_t bytes);

  [[nodiscard]] std::byte* begin() const { return begin_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  std::byte* begin_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ringfold::region
