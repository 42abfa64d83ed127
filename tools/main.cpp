// ringfold: one executable, a subcommand for each thing people do with the library by hand.
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "ringfold_config.h"
#include "tools/command.h"

namespace ringfold::tools {
namespace {

std::string accepted(const CLI::App& app) {
  std::string names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    names += sub->get_name() + "  ";
  }
  for (const CLI::Option* option : app.get_options()) names += option->get_name(true, true) + "  ";
  return names;
}

// What was given, and mostly what is accepted, is in the error's sentence.
int explain(const CLI::App& app, const CLI::ParseError& error, const std::string& first) {
  const auto chosen = app.get_subcommands();
  const CLI::App& where = chosen.empty() ? app : *chosen.front();
  const std::string name = chosen.empty() ? "ringfold" : "ringfold " + where.get_name();
  const bool no_command = chosen.empty() && !first.empty() && first.front() != '-';
  fmt::print(stderr, "{}: {}\n", name,
             no_command ? fmt::format("\"{}\" is no subcommand", first) : error.what());
  if (chosen.empty() || error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError)) {
    fmt::print(stderr, "accepted: {}\n", accepted(where));
  }
  fmt::print(stderr, "see: {} --help\n", name);
  return kBadArguments;
}

int run(std::vector<std::string> arguments) {
  // `run` starts another program, whose arguments are nobody's business here.
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  const std::vector<std::string> program(dashes == arguments.end() ? dashes : dashes + 1,
                                         arguments.end());
  arguments.erase(dashes, arguments.end());

  CLI::App app("ringfold: ring all-reduce collectives, measured, started, predicted and examined.",
               "ringfold");
  app.set_version_flag("--version", "ringfold " RINGFOLD_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Exit status: 0 success; 1 the run failed or a result was wrong; 2 bad arguments;\n"
      "3 the environment does not allow it (ranks missing, device absent).");
  const std::vector<Command> commands = {add_bench(app), add_run(app, program), add_model(app),
                                         add_sim(app), add_doctor(app)};
  const auto subcommands = app.get_subcommands([](const CLI::App*) { return true; });
  const std::string first = arguments.empty() ? "" : arguments.front();
  try {
    std::reverse(arguments.begin(), arguments.end());  // as this overload of CLI11 wants them
    app.parse(arguments);
    if (!program.empty() && !app.got_subcommand("run")) {
      throw CLI::ExtrasError({"-- " + program.front()});
    }
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return explain(app, error, first);
  }
  for (size_t i = 0; i < commands.size(); ++i) {
    if (subcommands[i]->parsed()) return commands[i]();
  }
  return kBadArguments;
}

}  // namespace

int fail(Exit status, std::string_view sentence) {
  fmt::print(stderr, "ringfold: {}\n", sentence);
  return status;
}

}  // namespace ringfold::tools

int main(int argc, char** argv) {
  try {
    return ringfold::tools::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {  // CLI11, JSON and the standard library throw
    return ringfold::tools::fail(ringfold::tools::kFailed, error.what());
  }
}
