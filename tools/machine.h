// MACHINE.json, as the tools call it.
#pragma once

#include "lib/comm/machine.h"

namespace ringfold::tools {

using ringfold::parse_machine;
using ringfold::read_machine;

}  // namespace ringfold::tools
