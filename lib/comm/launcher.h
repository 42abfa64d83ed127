// What launchers leave in the environment, and what can be derived from it. Used by
// Rendezvous::from_environment(); apart so that it can be tested.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "ringfold/status.h"

namespace ringfold {

// A port below the ephemeral ones that every rank of a job derives alike from its name.
[[nodiscard]] uint16_t port_of_job(std::string_view job);
// First host of a Slurm node list: "n[03-05,9],x1" -> "n03". Empty if malformed.
[[nodiscard]] std::string first_slurm_host(std::string_view list);
// The launcher's own hosts out of an ORTE contact text, comma-separated with the port given:
// "17.0;tcp://10.0.0.1,10.1.0.1:5000;tcp6://[fd00::1]:6000". Empty if there are none.
[[nodiscard]] std::string orte_hosts(std::string_view contact, uint16_t port);
// What hydra (the launcher of MPICH and Intel MPI) gave its proxy, an ancestor of this process:
// "host:port" of mpirun, which names the job. Empty if there is no such ancestor.
[[nodiscard]] std::string hydra_control_port();
// What mpirun of Open MPI 5 gave its daemons on other hosts: a contact text like that of ORTE.
[[nodiscard]] std::string prte_contact();

}  // namespace ringfold
