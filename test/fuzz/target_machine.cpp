// Apart from the others: start-up and schedules both have a Frame.
#include "test/fuzz/targets.h"
#include "tools/machine.h"

namespace ringfold::test::fuzz {

void machine(Input input) {
  auto machine = tools::parse_machine(text(input), "it");
  if (!machine.ok()) return;
  require(machine->per_host >= 1);
  for (const int ranks : {1, 2, 7, 64})
    (void)choose(Collective::all_reduce, ranks, 1000, 4, *machine);
}

}  // namespace ringfold::test::fuzz
