// PMI-1, the words that the launchers of MPICH and Intel MPI exchange with their processes over the
// descriptor PMI_FD. Used where ranks on several hosts know nothing of each other: rank 0 leaves
// its address with the launcher, the others ask for it.
//
// Threads: any; the exchange is made once in a process, and its outcome kept.
// Errors: timeout where not all ranks came to ask; system where the launcher says something else
// than PMI-1.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "lib/base/base.h"
#include "ringfold/status.h"

namespace ringfold::pmi {

// Whether there is such a launcher, and nobody else in this process to speak to it: one that has
// said goodbye listens no more, so a program that uses MPI itself must be left alone with it.
[[nodiscard]] bool usable();

// What rank 0 has to say, on all ranks. `said` is called on rank 0 with the launcher's name of the
// job. Waits until all ranks have come, or the deadline.
[[nodiscard]] Result<std::string> tell_all(int rank,
                                           const std::function<std::string(std::string_view)>& said,
                                           Nanoseconds deadline);

}  // namespace ringfold::pmi
