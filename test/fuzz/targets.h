// Every parser of bytes that come from outside this process, as a function that takes any bytes.
// A target must neither crash nor hang, nor break what it asserts, whatever it is given.
//
//   -Dfuzzers=true   libFuzzer programs of them (clang): see test/fuzz/run
//   test/fuzz        an ordinary test that replays the corpus in test/data/fuzz and some noise
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace ringfold::test::fuzz {

using Input = std::span<const uint8_t>;

struct Target {
  const char* name;
  void (*run)(Input input);
};

void frames(Input input);       // introductions and members of start-up
void notices(Input input);      // of the control star
void handshake(Input input);    // hello, challenge, proof, verdict
void link(Input input);         // a sealed stream, as bytes on a socket
void addresses(Input input);    // hosts, interface lists, shared memory, cores
void unique_id(Input input);    // with a right checksum
void shm_ring(Input input);     // records in a segment that the peer writes
void environment(Input input);  // settings and what launchers leave
void machine(Input input);      // MACHINE.json

inline constexpr std::array kTargets = {
    Target{"frames", frames},       Target{"notices", notices},
    Target{"handshake", handshake}, Target{"link", link},
    Target{"addresses", addresses}, Target{"unique_id", unique_id},
    Target{"shm_ring", shm_ring},   Target{"environment", environment},
    Target{"machine", machine},
};

inline std::string_view text(Input input) {
  return {reinterpret_cast<const char*>(input.data()), input.size()};
}
// Like assert(), in every build.
inline void require(bool holds) {
  if (!holds) __builtin_trap();
}

}  // namespace ringfold::test::fuzz
