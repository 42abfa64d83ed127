// MACHINE.json: the measured costs that the model works with.
#pragma once

#include <string>
#include <string_view>

#include "ringfold/model.h"
#include "ringfold/status.h"

namespace ringfold::tools {

// {"local": {"alpha": s, "beta": s/B}, "remote": {...}, "gamma": s/B, "per_host": ranks}; what is
// left out keeps its built-in value. invalid_argument: unreadable, or another key or kind of value.
Result<Machine> read_machine(const std::string& file);
// The same of a text; `name` is for messages.
Result<Machine> parse_machine(std::string_view text, std::string_view name);

}  // namespace ringfold::tools
