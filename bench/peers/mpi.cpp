// MPI_Allreduce under the common protocol: Open MPI, MPICH, Intel MPI.
#include <mpi.h>

#include "bench/peers/harness.h"

namespace {

class Mpi : public peers::Library {
 public:
  Call prepare(const float* in, float* out, size_t count) override {
    const void* const send = in == out ? MPI_IN_PLACE : in;
    const auto n = static_cast<int>(count);
    return [=] { MPI_Allreduce(send, out, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
  }
};

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const peers::Arguments arguments(argc, argv);
  peers::Team team(arguments, rank, size);
  Mpi library;
  peers::serve(arguments, team, library);
  MPI_Finalize();
}
