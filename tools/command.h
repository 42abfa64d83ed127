// What the subcommands of `ringfold` share: exit statuses and how they are registered.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string_view>

namespace ringfold::tools {

enum Exit : int {
  kSuccess = 0,
  kFailed = 1,        // the run failed or a result was wrong
  kBadArguments = 2,  // the message says what was given and what is accepted
  kEnvironment = 3,   // ranks missing, no such device
};

// Prints "ringfold: <sentence>" to stderr and gives `status` back.
int fail(Exit status, std::string_view sentence);

// Adds one subcommand to the app. What comes back runs it, once its options have been parsed, and
// gives the exit status.
using Command = std::function<int()>;
Command add_bench(CLI::App& app);
Command add_run(CLI::App& app, const std::vector<std::string>& program);
Command add_model(CLI::App& app);
Command add_doctor(CLI::App& app);
Command add_sim(CLI::App& app);

// doctor --attach.
int attach(int pid);

}  // namespace ringfold::tools
