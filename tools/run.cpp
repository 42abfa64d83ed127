// ringfold run: N local ranks of any program, or any program with our NCCL.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "tools/command.h"
#include "tools/launch.h"
#include "tools/nccl_preload.h"

namespace ringfold::tools {
namespace {

struct Run {
  Launch launch;
  bool nccl = false;
  bool ranks_given = false;
};

// Becomes the program: it starts its ranks itself.
int replace_by(std::vector<std::string> program) {
  std::vector<char*> words;
  words.reserve(program.size() + 1);
  for (std::string& word : program) words.push_back(word.data());
  words.push_back(nullptr);
  execvp(words[0], words.data());
  fail(kFailed, program[0] + ": " + std::strerror(errno));
  return 127;  // as shells say it
}

int run(const Run& what) {
  if (what.launch.program.empty())
    return fail(kBadArguments,
                "run: no program given; accepted: ringfold run --ranks N [--nccl] "
                "[--no-prefix] -- PROGRAM ARGUMENTS..., or --nccl without --ranks");
  if (!what.ranks_given && !what.nccl)
    return fail(kBadArguments, "run: --ranks is required, unless --nccl is given");
  if (what.nccl) {
    const std::string library = nccl_library();
    if (library.empty())
      return fail(kEnvironment,
                  "run: libnccl.so.2 lies neither in the build folder of this "
                  "executable nor in " RINGFOLD_LIBDIR "/ringfold beside its bin");
    preload_nccl(library);
  }
  return what.ranks_given ? launch(what.launch) : replace_by(what.launch.program);
}

}  // namespace

Command add_run(CLI::App& app, const std::vector<std::string>& program) {
  auto* const command = app.add_subcommand("run",
                                           "Start local ranks of a program: ringfold run "
                                           "--ranks N -- PROGRAM ARGUMENTS...");
  auto what = std::make_shared<Run>();
  what->launch.program = program;
  auto* const ranks =
      command->add_option("-n,--ranks", what->launch.ranks, "how many")->check(CLI::Range(1, 4096));
  bool* const prefix = &what->launch.prefix;
  command->add_flag_callback(
      "--no-prefix", [prefix] { *prefix = false; },
      "pass lines on as they are, without [rank] before them");
  command->add_flag("--nccl", what->nccl,
                    "let the program load ringfold's libnccl.so.2 in place of NCCL's");
  command->footer(
      "Each copy gets RINGFOLD_RANK, RINGFOLD_SIZE, RINGFOLD_LOCAL_RANK, RINGFOLD_COORDINATOR and "
      "a\n"
      "random RINGFOLD_SECRET. When one fails, or on Ctrl-C, the others get SIGTERM and 2 s later\n"
      "SIGKILL. Exit status: that of the first that failed (128 + N for signal N, 127 if the\n"
      "program cannot be started).\n"
      "--nccl sets LD_PRELOAD, LD_LIBRARY_PATH and VLLM_NCCL_SO_PATH. Without --ranks the program\n"
      "runs once and starts its ranks itself: ringfold run --nccl -- torchrun ...");
  return [what, ranks]() -> int {
    what->ranks_given = ranks->count() > 0;
    return run(*what);
  };
}

}  // namespace ringfold::tools
