// ringfold doctor: what this machine offers, what the library would choose, and what is wrong.
#include <fmt/format.h>

#include <fstream>
#include <memory>

#include "lib/base/base.h"
#include "lib/region/segment.h"
#include "ringfold_config.h"
#include "tools/bench_start.h"
#include "tools/command.h"
#include "tools/measure.h"
#include "tools/probes.h"
#include "tools/units.h"

namespace ringfold::tools {
namespace {

bool is_secret(std::string_view name) {
  return name == "RINGFOLD_SECRET";
}

// Why a value cannot be used; empty if it can.
std::string objection(const Setting& s) {
  if (s.kind == "seconds") return setting_duration(s.name).status().message();
  if (s.kind == "size") return setting_bytes(s.name).status().message();
  if (s.kind == "integer") return setting_integer(s.name).status().message();
  const auto value = setting(s.name);
  if (!value || s.kind.find('|') == std::string_view::npos) return {};
  const std::string words = fmt::format("|{}|", s.kind);
  if (words.find(fmt::format("|{}|", *value)) != std::string::npos) return {};
  return fmt::format("{}=\"{}\": expected one of {}", s.name, *value, s.kind);
}

Json settings_json(Problems& problems) {
  Json j = Json::object();
  for (const Setting& s : settings()) {
    const auto value = setting(s.name);
    Json& one = j[std::string(s.name)];
    one["value"] = !value ? Json(nullptr) : is_secret(s.name) ? Json("(set)") : Json(*value);
    one["kind"] = s.kind;
    one["default"] = s.fallback;
    one["must_agree"] = s.must_agree;
    one["meaning"] = s.meaning;
    if (const std::string why = objection(s); !why.empty()) problems.push_back(why);
  }
  for (const UnknownSetting& unknown : unknown_settings()) {
    problems.push_back(unknown.nearest.empty()
                           ? fmt::format("{} is no setting of ringfold", unknown.name)
                           : fmt::format("{} is no setting of ringfold; did you mean {}?",
                                         unknown.name, unknown.nearest));
  }
  return j;
}

Json choices(const Json& found) {
  const bool memfd = found["memory"]["memfd"] == "works";
  const bool ucx = found["ucx"]["found"] == true && !found["ucx"].contains("trouble");
  const bool shm = memfd || found["memory"]["/dev/shm"].is_object();
  Json j;
  j["same process"] = "loopback";
  j["same host"] =
      memfd ? "shared memory (memfd works)"
      : shm ? "shared memory (/dev/shm; memfd: " + found["memory"]["memfd"].get<std::string>() + ")"
      : ucx ? "UCX (no shared memory)"
            : "nothing: neither shared memory nor UCX";
  j["shared region"] =
      memfd
          ? fmt::format(
                "pools of at most {} a rank and {} a communicator; with all else {} of 2 ranks, "
                "{} of 4, {} of 8, for each communicator",
                show_size(region::kPoolBytes), show_size(region::kPoolBytesOfAll),
                show_size(region::Segment::bytes_for(2)), show_size(region::Segment::bytes_for(4)),
                show_size(region::Segment::bytes_for(8)))
          : "none: memfd does not work";
  j["other hosts"] = ucx ? "UCX" : "nothing: UCX is not there";
  return j;
}

Json examine() {
  Problems problems;
  Json found;
  found["schema"] = 1;
  found["ringfold"] = RINGFOLD_VERSION;
  found["cores"] = probe_cores(problems);
  found["topology"] = probe_topology();
  found["memory"] = probe_memory(problems);
  found["kernel"] = probe_kernel(problems);
  found["interfaces"] = probe_interfaces();
  found["ucx"] = probe_ucx(problems);
  found["cuda"] = probe_cuda();
  found["nccl"] = probe_nccl();
  found["choices"] = choices(found);
  found["settings"] = settings_json(problems);
  found["problems"] = problems;
  return found;
}

std::string in_words(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (!value.is_structured()) return value.dump();
  std::string text;
  for (const auto& [key, inner] : value.items()) {
    if (!text.empty()) text += value.is_array() ? ", " : "; ";
    if (value.is_object()) text += key + " ";
    text += in_words(inner);
  }
  return text;
}

void print(const Json& found) {
  fmt::print("ringfold {}\n", found["ringfold"].get<std::string>());
  for (const auto& [title, section] : found.items()) {
    if (!section.is_object() || title == "settings" || title == "machine" || title == "fit")
      continue;
    fmt::print("\n{}\n", title);
    for (const auto& [key, value] : section.items()) {
      fmt::print("  {:<20} {}\n", key, in_words(value));
    }
  }
  fmt::print("\nsettings (environment)\n");
  for (const auto& [key, s] : found["settings"].items()) {
    const bool set = !s["value"].is_null();
    fmt::print("  {:<20} {}\n  {:<20}   {} [{}{}]\n", key,
               set ? in_words(s["value"]) : fmt::format("- ({})", in_words(s["default"])), "",
               in_words(s["meaning"]), in_words(s["kind"]),
               s["must_agree"].get<bool>() ? "; the same on all ranks" : "");
  }
  fmt::print("\nproblems\n");
  for (const Json& problem : found["problems"]) fmt::print("  ! {}\n", in_words(problem));
  if (found["problems"].empty()) fmt::print("  none\n");
}

// Measured beside predicted, and MACHINE.json.
void print_machine(const Json& found) {
  fmt::print("\nlinks: {:<19} {:>6} {:>9} {:>13} {:>13}\n", "algorithm", "ranks", "bytes",
             "measured us", "predicted us");
  for (const auto& [link, rows] : found["fit"].items()) {
    for (const Json& row : rows) {
      fmt::print("{:<6} {:<19} {:>6} {:>9} {:>13.1f} {:>13.1f}\n", link, in_words(row["algorithm"]),
                 in_words(row["ranks"]), in_words(row["bytes"]),
                 row["measured"].get<double>() * 1e6, row["predicted"].get<double>() * 1e6);
    }
  }
  fmt::print("\nmachine (for RINGFOLD_MACHINE and --model)\n{}\n", found["machine"].dump());
}

int report(const Json& found, const std::string& file) {
  print(found);
  if (found.contains("machine")) print_machine(found);
  if (file.empty()) return kSuccess;
  std::ofstream out(file);
  out << found.dump(2) << '\n';
  out.close();
  return out ? kSuccess : fail(kFailed, "doctor: cannot write " + file);
}

}  // namespace

Command add_doctor(CLI::App& app) {
  auto* const doctor =
      app.add_subcommand("doctor", "Examine this machine and the settings, and say what is wrong");
  auto file = std::make_shared<std::string>();
  auto pid = std::make_shared<int>(0);
  auto measured = std::make_shared<bool>(false);
  doctor->add_flag(
      "--measure", *measured,
      "also measure the links between the ranks a launcher has started (two ranks here "
      "without one), and print what RINGFOLD_MACHINE and --model read");
  doctor->add_option("--json", *file, "also write the findings there");
  doctor
      ->add_option("--attach", *pid,
                   "say instead where the communicators of this process stand, also if it hangs")
      ->check(CLI::PositiveNumber);
  return [file, pid, measured]() -> int {
    if (*pid != 0) return attach(*pid);
    if (!*measured) return report(examine(), *file);
    // Without any launcher two ranks are started here.
    const bool alone = Rendezvous::from_environment().status().code() == Code::unsupported;
    return start_ranks({alone ? 2 : 0, "auto", true, "doctor"}, [&](const Rendezvous& where) {
      Json machine;
      const int status = measure_machine(where, &machine);
      if (status != kSuccess || where.rank != 0) return status;
      Json found = examine();
      found.update(machine);
      return report(found, *file);
    });
  };
}

}  // namespace ringfold::tools
