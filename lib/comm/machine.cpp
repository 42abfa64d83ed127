#include "lib/comm/machine.h"

#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

namespace ringfold {
namespace {

using nlohmann::json;

// False if the value is no number of at least 0, or beyond all bounds.
bool take(const json& value, double& out) {
  if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0)
    return false;
  out = value.get<double>();
  return true;
}

bool take(const json& value, LinkCost& out) {
  if (!value.is_object()) return false;
  for (const auto& [key, cost] : value.items()) {
    if (key != "alpha" && key != "beta") return false;
    if (!take(cost, key == "alpha" ? out.alpha : out.beta)) return false;
  }
  return true;
}

bool take(const json& value, const std::string& key, Machine& out) {
  if (key == "local") return take(value, out.local);
  if (key == "remote") return take(value, out.remote);
  if (key == "gamma") return take(value, out.gamma);
  if (key != "per_host" || !value.is_number_integer()) return false;
  const auto ranks = value.get<int64_t>();
  if (ranks < 1 || ranks > std::numeric_limits<int>::max()) return false;
  out.per_host = static_cast<int>(ranks);
  return true;
}

}  // namespace

Result<Machine> read_machine(const std::string& file) {
  std::ifstream in(file);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  return parse_machine(text, file);
}

Result<Machine> parse_machine(std::string_view text, std::string_view name) {
  const json j = json::parse(text, nullptr, false);
  if (!j.is_object())
    return Status(Code::invalid_argument, fmt::format("{} is not a JSON object", name));
  Machine machine;
  const bool findings = j.contains("machine") && j["machine"].is_object();
  for (const auto& [key, value] : (findings ? j["machine"] : j).items()) {
    if (take(value, key, machine)) continue;
    return Status(
        Code::invalid_argument,
        fmt::format("{}: \"{}\": {}; accepted: local and remote {{alpha, beta}}, gamma (all "
                    "in seconds), per_host (at least 1)",
                    name, key, value.dump(-1, ' ', false, json::error_handler_t::replace)));
  }
  return machine;
}

std::string to_string(const Machine& machine) {
  const auto link = [](const LinkCost& cost) {
    return fmt::format("{:.9g} s + {:.9g} s/B", cost.alpha, cost.beta);
  };
  return fmt::format("local {}, remote {}, gamma {:.9g} s/B", link(machine.local),
                     link(machine.remote), machine.gamma);
}

}  // namespace ringfold
