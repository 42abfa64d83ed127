// One protocol of measurement for all libraries: a program only says how its library does one
// all-reduce of float32 sums, and serves jobs until there are no more.
//
// Jobs come over a socket, so that the programs of all libraries can be alive at once and take
// turns at every size; between its turns a program sleeps. Two timings are taken for each job:
//   loop   barrier, then calls back to back; time per call, the slowest rank's. Several
//          repetitions: least and median.
//   sync   barrier before every call; the call's time, the slowest rank's. Least and median.
#pragma once

#include <cstddef>
#include <functional>

#include "bench/peers/team.h"

namespace peers {

enum class Role : uint8_t { input, output };

// The library under measurement, on one rank.
class Library {
 public:
  virtual ~Library() = default;

  // How to do one all-reduce of these buffers; `in` equals `out` in place. Every rank calls it.
  using Call = std::function<void()>;
  virtual Call prepare(const float* in, float* out, size_t count) = 0;

  // The buffers of the user: page-aligned heap memory, unless the library has its own to offer.
  // In place there is only the output. Every rank calls them, in the same order.
  virtual float* allocate(size_t bytes, Role role);
  virtual void release(float* buffer);

  // Libraries without one of the two forms say so.
  [[nodiscard]] virtual bool offers(bool in_place) const;
  // Measurements of the hardware leave no sum behind.
  [[nodiscard]] virtual bool sums() const { return true; }
  // Microseconds since the last question that the calls spent on what is not to be timed.
  virtual double untimed_us() { return 0; }
};

// Serves jobs until the socket is closed. To be called once, on every rank.
//
//   rank R pid P                                    from every rank, at first
//   measure BYTES ip|oop BUDGET_US REPETITIONS      to every rank; of loops, at most
//   BYTES,PLACE,...                                 from rank 0: one line, kColumns
//
// ip: in place, oop: out of place.
void serve(const Arguments& arguments, Team& team, Library& library);

constexpr const char* kColumns =
    "bytes,place,iterations,loop_min_us,loop_us,sync_min_us,sync_us,wrong,foreign_percent,"
    "steal_percent,line_before_ns,line_after_ns";

}  // namespace peers
