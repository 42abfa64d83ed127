// MACHINE.json: the measured costs that the model works with. What RINGFOLD_MACHINE names.
#pragma once

#include <string>
#include <string_view>

#include "ringfold/model.h"
#include "ringfold/status.h"

namespace ringfold {

// {"local": {"alpha": s, "beta": s/B}, "remote": {...}, "gamma": s/B, "per_host": ranks}; what is
// left out keeps its built-in value. Findings of `ringfold doctor --measure --json` have this as
// their "machine". invalid_argument: unreadable, or another key or kind of value.
[[nodiscard]] Result<Machine> read_machine(const std::string& file);
// The same of a text; `name` is for messages.
[[nodiscard]] Result<Machine> parse_machine(std::string_view text, std::string_view name);
// The same for the same costs: for comparison between ranks.
[[nodiscard]] std::string to_string(const Machine& machine);

}  // namespace ringfold
