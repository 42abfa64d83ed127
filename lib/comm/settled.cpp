#include "lib/comm/settled.h"

#include <fmt/format.h>

#include <algorithm>

#include "lib/comm/machine.h"

namespace ringfold {
namespace {

constexpr Nanoseconds kDefaultTimeout = std::chrono::minutes(10);
constexpr Nanoseconds kDefaultSpin = std::chrono::microseconds(100);
constexpr std::string_view kAllTransports = "loopback,region,shm,ucx";

// A comma-separated list of transports, each of them known.
Status check_transports(const std::string& list) {
  size_t begin = 0;
  while (begin <= list.size()) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string_view word = std::string_view(list).substr(begin, end - begin);
    if (word != "loopback" && word != "region" && word != "shm" && word != "ucx")
      return {Code::invalid_argument, fmt::format("transports \"{}\": \"{}\" is not one of {}",
                                                  list, word, kAllTransports)};
    begin = end + 1;
  }
  return {};
}

Result<std::optional<Algorithm>> algorithm_from(const std::string& word) {
  if (word == "auto") return std::optional<Algorithm>();
  for (int i = 0; i < kAlgorithms; ++i)
    if (word == kAlgorithmNames[static_cast<size_t>(i)])
      return std::optional<Algorithm>(static_cast<Algorithm>(i));
  std::string known = "auto";
  for (const auto name : std::span(kAlgorithmNames).first(kAlgorithms))
    known += ", " + std::string(name);
  return Status(Code::invalid_argument,
                fmt::format("RINGFOLD_ALGORITHM=\"{}\": expected one of {}", word, known));
}

Result<Numerics> numerics_from(const std::string& word) {
  if (word == "exact") return Numerics::exact;
  if (word == "nccl") return Numerics::nccl;
  return Status(Code::invalid_argument,
                fmt::format("RINGFOLD_NUMERICS=\"{}\": expected exact or nccl", word));
}

Result<cuda::Way> way_from(const std::string& word) {
  for (size_t i = 0; i < cuda::kWays.size(); ++i)
    if (word == cuda::kWays[i]) return static_cast<cuda::Way>(i);
  return Status(
      Code::invalid_argument,
      fmt::format("RINGFOLD_CUDA_PATH=\"{}\": expected auto, direct, ucx or staged", word));
}

}  // namespace

bool Settled::allows(std::string_view transport) const {
  return ("," + transports + ",").find(fmt::format(",{},", transport)) != std::string::npos;
}

Result<Settled> settle(const Options& options) {
  Settled settled;
  const auto timeout = setting_duration("RINGFOLD_TIMEOUT");
  if (!timeout.ok()) return timeout.status();
  settled.timeout = options.timeout.value_or(timeout->value_or(kDefaultTimeout));
  if (settled.timeout <= Nanoseconds(0))
    return Status(Code::invalid_argument, "the timeout must be longer than 0");
  const auto piece = setting_bytes("RINGFOLD_PIECE");
  if (!piece.ok()) return piece.status();
  settled.piece_bytes = options.piece_bytes != 0 ? options.piece_bytes : piece->value_or(0);
  if (settled.piece_bytes % 8 != 0)
    return Status(Code::invalid_argument,
                  fmt::format("piece of {} bytes: expected a multiple of 8", settled.piece_bytes));
  const auto algorithm = algorithm_from(setting("RINGFOLD_ALGORITHM").value_or("auto"));
  if (!algorithm.ok()) return algorithm.status();
  settled.algorithm = options.algorithm ? options.algorithm : *algorithm;
  settled.transports = !options.transports.empty() ? options.transports
                                                   : setting("RINGFOLD_TRANSPORTS").value_or("all");
  if (settled.transports == "all" || settled.transports == "auto")
    settled.transports = kAllTransports;
  if (Status status = check_transports(settled.transports); !status.ok()) return status;
  const auto numerics = numerics_from(setting("RINGFOLD_NUMERICS").value_or("exact"));
  if (!numerics.ok()) return numerics.status();
  settled.numerics = options.numerics.value_or(*numerics);
  const auto way =
      way_from(!options.cuda_path.empty() ? options.cuda_path
                                          : setting("RINGFOLD_CUDA_PATH").value_or("auto"));
  if (!way.ok()) return way.status();
  settled.way = *way;
  const auto spin = setting_duration("RINGFOLD_SPIN");
  if (!spin.ok()) return spin.status();
  settled.spin_given = spin->has_value();
  settled.spin = spin->value_or(kDefaultSpin);
  settled.verify = setting("RINGFOLD_VERIFY").value_or("0") == "1";
  const auto file = setting("RINGFOLD_MACHINE");
  if (!file) return settled;
  const auto machine = read_machine(*file);
  if (!machine.ok())
    return Status(machine.status().code(), "RINGFOLD_MACHINE: " + machine.status().message());
  settled.machine = *machine;
  return settled;
}

}  // namespace ringfold
