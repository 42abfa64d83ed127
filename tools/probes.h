// What this machine offers, found out by trying. Each probe gives JSON and adds to `problems` what
// somebody should know, with the remedy.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ringfold::tools {

using Json = nlohmann::ordered_json;
using Problems = std::vector<std::string>;

Json probe_cores(Problems& problems);   // online, affinity, cgroup quota
Json probe_topology();                  // NUMA nodes, caches
Json probe_memory(Problems& problems);  // /dev/shm, memlock, memfd
Json probe_kernel(Problems& problems);  // descriptors, cross-memory attach, pidfd
Json probe_interfaces();
// Libraries that ringfold opens at run time. They are opened in a child process, so that one that
// crashes or hangs is a finding and not our end.
Json probe_ucx(Problems& problems);
Json probe_cuda();
Json probe_nccl();

}  // namespace ringfold::tools
