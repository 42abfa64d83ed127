#include "lib/comm/machine.h"

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace ringfold {
namespace {

using nlohmann::json;

// False if the value is no number of at least 0.
bool take(const json& value, double& out) {
  if (!value.is_number() || value.get<double>() < 0) return false;
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
  if (key != "per_host" || !value.is_number_integer() || value.get<int64_t>() < 1) return false;
  out.per_host = value.get<int>();
  return true;
}

}  // namespace

Result<Machine> read_machine(const std::string& file) {
  const json j = json::parse(std::ifstream(file), nullptr, false);
  if (!j.is_object()) return Status(Code::invalid_argument, file + " is not a JSON object");
  Machine machine;
  for (const auto& [key, value] : j.items()) {
    if (take(value, key, machine)) continue;
    return Status(
        Code::invalid_argument,
        fmt::format("{}: \"{}\": {}; accepted: local and remote {{alpha, beta}}, gamma (all "
                    "in seconds), per_host (at least 1)",
                    file, key, value.dump()));
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
