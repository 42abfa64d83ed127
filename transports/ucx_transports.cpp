#include "transports/ucx_transports.h"

#include <fmt/core.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>

#include "transports/ucx_library.h"

namespace ringfold {
namespace {

constexpr unsigned kApiMajor = 1, kApiMinor = 13;
// All but those in shared memory. They report no dead peer, so they are never chosen, but a process
// that is killed would leave their segments behind in /dev/shm.
constexpr const char* kOwnChoice = "^sm";

// UCX tells the transports of a context in words only: "#  resource 1 : md 1 ... -- tcp/eth0".
std::vector<std::string> names_of(const UcxLibrary& ucx, ucp_context_h context) {
  char* text = nullptr;
  size_t length = 0;
  FILE* const stream = open_memstream(&text, &length);
  if (stream == nullptr) return {};
  ucx.ucp_context_print_info(context, stream);
  (void)std::fclose(stream);
  const std::unique_ptr<char, decltype(&std::free)> owner(text, &std::free);
  const std::string_view all(text, length);
  constexpr std::string_view kMark = " -- ";
  std::set<std::string> names;
  for (size_t at = all.find(kMark); at != all.npos; at = all.find(kMark, at)) {
    at += kMark.size();
    names.emplace(all.substr(at, all.find('/', at) - at));
  }
  return {names.begin(), names.end()};
}

// A sentence on what was asked for and what there is.
Status asked_in_vain(const std::string& wanted, const char* why) {
  if (wanted == "all") return {Code::system, fmt::format("UCX has no transport here: {}", why)};
  const auto there = ucx_transports("all");
  if (!there.ok()) return there.status();
  std::string list;
  for (const std::string& name : *there) list += (list.empty() ? "" : ", ") + name;
  return {Code::system, fmt::format("UCX_TLS={} asks for transports that this machine does not "
                                    "have; there are {}",
                                    wanted, list)};
}

}  // namespace

Result<std::vector<std::string>> ucx_transports(const std::string& wanted) {
  const Result<const UcxLibrary*> library = ucx_library();
  if (!library.ok()) return library.status();
  const UcxLibrary& ucx = **library;
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucx.ucp_config_read(nullptr, nullptr, &config);
  ucp_context_h context = nullptr;
  if (status == UCS_OK) {
    status = ucx.ucp_config_modify(config, "TLS", wanted.c_str());
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    if (status == UCS_OK)
      status = ucx.ucp_init_version(kApiMajor, kApiMinor, &params, config, &context);
    ucx.ucp_config_release(config);
  }
  if (status != UCS_OK) return asked_in_vain(wanted, ucx.ucs_status_string(status));
  const std::vector<std::string> names = names_of(ucx, context);
  ucx.ucp_cleanup(context);
  return names;
}

std::string ucx_transports_wanted() {
  const char* const given = std::getenv("UCX_TLS");
  return given != nullptr ? given : kOwnChoice;
}

bool is_rdma(std::string_view transport) {
  constexpr std::array kFamilies = {"rc_", "dc_", "ud_", "srd_"};
  for (const std::string_view family : kFamilies)
    if (transport.starts_with(family)) return true;
  return false;
}

}  // namespace ringfold
