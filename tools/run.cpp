// ringfold run: N local ranks of any program.
#include <memory>

#include "tools/command.h"
#include "tools/launch.h"

namespace ringfold::tools {

Command add_run(CLI::App& app, const std::vector<std::string>& program) {
  auto* const run = app.add_subcommand("run",
                                       "Start local ranks of a program: ringfold run "
                                       "--ranks N -- PROGRAM ARGUMENTS...");
  auto what = std::make_shared<Launch>();
  what->program = program;
  run->add_option("-n,--ranks", what->ranks, "how many")->required()->check(CLI::Range(1, 4096));
  bool* const prefix = &what->prefix;
  run->add_flag_callback(
      "--no-prefix", [prefix] { *prefix = false; },
      "pass lines on as they are, without [rank] before them");
  run->footer(
      "Each copy gets RINGFOLD_RANK, RINGFOLD_SIZE, RINGFOLD_LOCAL_RANK, RINGFOLD_COORDINATOR and "
      "a\n"
      "random RINGFOLD_SECRET. When one fails, or on Ctrl-C, the others get SIGTERM and 2 s later\n"
      "SIGKILL. Exit status: that of the first that failed (128 + N for signal N, 127 if the\n"
      "program cannot be started).");
  return [what]() -> int {
    if (what->program.empty()) {
      return fail(kBadArguments,
                  "run: no program given; accepted: ringfold run --ranks N "
                  "[--no-prefix] -- PROGRAM ARGUMENTS...");
    }
    return launch(*what);
  };
}

}  // namespace ringfold::tools
