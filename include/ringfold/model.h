// What a collective must cost: bytes, seconds, and the choice that follows.
//
//   alpha  seconds from the last byte of a message leaving to its being there: latency
//   beta   seconds a byte that a link is busy: 1 / bandwidth; links work in both directions at once
//   gamma  seconds a byte that is added up (or, on one rank, copied)
//
// A ring step passes a chunk on piece by piece. If the chunk is long, the link is always busy and
// the step takes chunk * beta; if it is short, the step waits for the first piece to come round,
// which takes alpha + piece * beta. So a step takes the larger of the two, and an all-reduce of one
// segment of D bytes on N ranks
//
//   2(N-1) * max(D/N * beta, alpha + piece * beta), and the fill: alpha if the first is larger,
//                                                     else (D/N - piece) * beta
//
// From D/N * beta = alpha + piece * beta on it runs at its bound, 2(N-1)/N * D * beta: latency no
// longer counts. Additions hide as long as gamma < beta, but for the one piece in the way.
//
// Thread-safety: pure functions of values. The same arguments give the same answer on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "ringfold/schedule.h"

namespace ringfold {

struct LinkCost {
  double alpha = 5e-6;  // seconds a message
  double beta = 8e-11;  // seconds a byte
};
struct Machine {
  LinkCost local, remote;  // between ranks of one host, of different hosts
  double gamma = 2e-11;    // seconds a reduced byte
  int per_host = 1;        // ranks on each host
  int sharers = 1;  // ranks of a host behind one link to the others: per_host if it has only one
};

// Where nothing has been measured; `ringfold doctor --measure` prints what holds on a machine.
// Orders of magnitude of common hardware: two cores sharing a cache; TCP on 25 Gbit/s Ethernet;
// ranks of one process, which read each other's memory.
inline constexpr LinkCost kShmLink{1e-6, 1e-10};
inline constexpr LinkCost kTcpLink{2e-5, 4e-10};
inline constexpr LinkCost kLoopbackLink{5e-7, 5e-11};

// What the executor offers to one operation. A piece in transit keeps its slot until it is used, a
// whole chunk later, while the next chunk arrives: so a chunk in transit has at most half the
// slots.
inline constexpr int kSlots = 16;
inline constexpr int kMaxTransitPieces = kSlots / 2;
inline constexpr size_t kMinPieceBytes = size_t{4} << 10;  // where a chunk is cut at all
inline constexpr size_t kMaxPieceBytes = size_t{1} << 20;
// Between hosts choose() avoids larger ones: they would be fetched by rendezvous, whose
// announcement waits in the link's queue behind the data before it. Measured at 1 Gbit/s with two
// hosts: 94 to 95 % of the line rate with these, 57 % with pieces of 512 KiB.
inline constexpr size_t kMaxRemotePieceBytes = size_t{256} << 10;

// Bytes that each rank must send per byte of the full frame, if all share the work evenly; the
// factor between algorithm and bus bandwidth, with the definitions of nccl-tests:
//   all_reduce       2(N-1)/N  schedule.h derives it
//   all_gather etc.  (N-1)/N   everything but the own part (gather, scatter: through the root's
//   link) broadcast        1         every byte must leave the root; likewise reach it in a reduce
constexpr double bus_factor(Collective collective, int n) {
  const double others = static_cast<double>(n - 1) / n;
  switch (collective) {
    case Collective::all_reduce:
      return 2 * others;
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::all_to_all:
    case Collective::gather:
    case Collective::scatter:
      return others;
    case Collective::broadcast:
    case Collective::reduce:
      return n == 1 ? 0 : 1;
  }
  return 0;
}

// Bytes that a rank must send of a full frame of `bytes`.
constexpr double model_bytes(Collective collective, int n, double bytes) {
  return bus_factor(collective, n) * bytes;
}

// Bytes that the rank at `position` does send, summed over its steps. REQUIRES legal(schedule).
[[nodiscard]] uint64_t bytes_per_rank(const Schedule& schedule, int position, size_t element_bytes);

// The alternative without a ring: everybody sends D bytes to one hub (the root, the parameter
// server), which sends everybody the sum. Bytes into the hub, and as many out of it:
constexpr double hub_bytes(int n, double bytes) {
  return (n - 1) * bytes;
}
// The hub's link takes all of them in before the sum can go out.
constexpr double hub_seconds(int n, double bytes, LinkCost link) {
  return n == 1 ? 0 : 2 * (hub_bytes(n, bytes) * link.beta + link.alpha);
}

// Seconds from the call on all ranks to completion on the last, without contention. piece_bytes 0:
// chunks are not cut. REQUIRES legal(schedule). The formulas are derived in lib/plan/model.cpp.
[[nodiscard]] double predict_seconds(const Schedule& schedule, size_t element_bytes,
                                     size_t piece_bytes, const Machine& machine);

// The same for an all-reduce of `bytes` that goes host by host: added up inside each of `hosts` by
// shared memory, round a ring of hosts in which each link is crossed once, and handed out, so that
// only the first `segment` of bytes on the way in and the last on the way out do not overlap with
// the links.
[[nodiscard]] double predict_by_hosts(int hosts, double bytes, double segment,
                                      const Machine& machine);

// What the caller has already decided, or wishes.
struct Constraints {
  int root = 0;
  size_t grain = 1;
  std::optional<Algorithm> algorithm;  // empty, not offered or too many steps: the fastest
  size_t piece_bytes = 0;              // 0: the model's; else a multiple of element_bytes
  bool nccl_chunks = false;            // a ring all-reduce is cut where NCCL cuts it
};

// NCCL's chunk and its grain: an eighth of its 4 MiB buffer, times four; a vector access.
inline constexpr size_t kNcclChunkBytes = size_t{2} << 20;
inline constexpr size_t kNcclGrainBytes = 16;

struct Choice {
  Schedule schedule;
  size_t piece_bytes = 0;  // > 0, a multiple of element_bytes
  double seconds = 0;      // predicted
};

// The fastest of the legal schedules and piece sizes, by predict_seconds(), within the limits above
// and those of schedule.h. `count` is of the full frame; two levels need positions numbered host by
// host, machine.per_host on each (else give 1). Among predictions that are about the same it takes
// the larger piece (fewer messages), and the ring before others. A given piece grows if there would
// be too many. REQUIRES size, grain, element_bytes >= 1.
//
// Empty if nothing is legal: the root is outside, or the payload beyond all limits (hundreds of
// GiB; 40 GiB for a reduce on 4,096 ranks).
[[nodiscard]] std::optional<Choice> choose(Collective collective, int size, size_t count,
                                           size_t element_bytes, const Machine& machine,
                                           const Constraints& constraints = {});

}  // namespace ringfold
