// Stands in for ucx.cpp and ucx_transports.cpp where UCX's headers were missing at build time.
#include "transports/ucx.h"
#include "transports/ucx_transports.h"

namespace ringfold {

Result<std::vector<std::string>> ucx_transports(const std::string&) {
  return Status(Code::unsupported, "this ringfold was built without UCX");
}

std::string ucx_transports_wanted() {
  return "all";
}

bool is_rdma(std::string_view) {
  return false;
}

Result<std::unique_ptr<Transport>> make_ucx(Peer, Clock&, const std::vector<std::string>&) {
  return Status(Code::unsupported,
                "this ringfold was built without UCX: install its headers (libucx-dev) and rebuild "
                "to connect hosts");
}

}  // namespace ringfold
