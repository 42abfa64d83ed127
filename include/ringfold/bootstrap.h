// How ranks find each other.
//
// Thread-safety: plain values and free functions; any thread.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "ringfold/status.h"
#include "ringfold/types.h"

namespace ringfold {

// Passed out of band (a file, MPI, a store) to every rank of one communicator: the coordinator's
// addresses and 32 random bytes that serve as the shared secret. Opaque, copied as bytes.
struct UniqueId {
  std::array<unsigned char, 128> bytes{};
};

// Everything needed to find the others. A plain value; making one opens nothing.
struct Rendezvous {
  int rank = 0;  // 0 <= rank < size
  int size = 1;
  // "host:port" where rank 0 listens, "[v6]:port" for IPv6; several, comma-separated: all are tried
  std::string coordinator;
  std::string secret;  // proves membership; empty: start-up is not authenticated (one warning)
  std::optional<Nanoseconds> timeout;  // for start-up; empty: RINGFOLD_TIMEOUT, else ten minutes
  std::string source;  // where it came from, for messages: "RINGFOLD_*", "torchrun", "mpirun"...
  std::optional<int> local_rank;  // among the ranks of this host, if the launcher says

  // From the first of these that is set: RINGFOLD_RANK/SIZE/COORDINATOR; torchrun (RANK,
  // WORLD_SIZE, MASTER_ADDR, MASTER_PORT + 1); mpirun (Open MPI: OMPI_COMM_WORLD_*, MPICH and Intel
  // MPI: PMI_*); srun (SLURM_PROCID, SLURM_NTASKS, first host of the step, port from the job id).
  // RINGFOLD_COORDINATOR, RINGFOLD_SECRET and RINGFOLD_SECRET_FILE count with every launcher.
  // Without a secret the job's own name or key stands in, where the launcher gives one (torchrun
  // does not); only Open MPI's is really secret. On several hosts, without RINGFOLD_COORDINATOR,
  // rank 0 of MPICH and Intel MPI leaves its address with mpirun (over PMI, unless the program has
  // MPI in it); rank 0 of Open MPI must be on mpirun's own host.
  // invalid_argument: a variable is malformed, or some but not all are there; names it.
  // unsupported: none is set; the message lists how to start.
  [[nodiscard]] static Result<Rendezvous> from_environment();

  // Makes an id whose coordinator is this process: it listens until rank 0's create() takes over
  // (also in another thread of this process) or the process ends.
  [[nodiscard]] static Result<UniqueId> unique_id();
  [[nodiscard]] static Result<Rendezvous> from_id(const UniqueId& id, int rank, int size);
};

}  // namespace ringfold
