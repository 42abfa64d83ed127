// Rendezvous::from_environment(): reads what the launchers say of rank, size and coordinator.
#include "lib/comm/launcher.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include "lib/base/auth.h"
#include "lib/base/base.h"
#include "lib/base/net.h"
#include "lib/comm/pmi.h"
#include "ringfold/bootstrap.h"

namespace ringfold {
namespace {

constexpr int kMostRanks = 1 << 20;  // a larger number is a mistake
constexpr size_t kLongestSecret = 4096;

std::optional<std::string> variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

Status bad(std::string_view message) {
  return {Code::invalid_argument, std::string(message)};
}

// The number in a variable of [low, high]; an error naming the variable if it is absent or wrong.
Result<int> number(const char* name, int64_t low, int64_t high) {
  const auto text = variable(name);
  if (!text) return bad(fmt::format("{} is not set", name));
  const auto value = parse_integer(*text);
  if (!value || *value < low || *value > high) {
    return bad(
        fmt::format("{}=\"{}\": expected a whole number from {} to {}", name, *text, low, high));
  }
  return static_cast<int>(*value);
}

// Names of the variables of one launcher.
struct Names {
  const char* source;
  const char* rank;
  const char* size;
  const char* local_rank;
};

Result<Rendezvous> read_numbers(const Names& names) {
  Rendezvous where;
  where.source = names.source;
  const auto size = number(names.size, 1, kMostRanks);
  const auto rank = number(names.rank, 0, size.ok() ? *size - 1 : kMostRanks);
  const auto fail = [&](const Status& status) {
    return bad(fmt::format("{}: {}", names.source, status.message()));
  };
  if (!rank.ok()) return fail(rank.status());
  if (!size.ok()) return fail(size.status());
  where.rank = *rank;
  where.size = *size;
  if (!variable(names.local_rank)) return where;
  const auto local = number(names.local_rank, 0, kMostRanks);
  if (!local.ok()) return fail(local.status());
  where.local_rank = *local;
  return where;
}

std::string say_where(std::string_view launcher, std::string_view why) {
  return fmt::format("{}: {}; set RINGFOLD_COORDINATOR=host:port, where rank 0 will listen",
                     launcher, why);
}

Result<std::string> torchrun_coordinator() {
  const auto host = variable("MASTER_ADDR");
  if (!host) return bad("torchrun: MASTER_ADDR is not set");
  // The port itself belongs to torch's own store.
  const auto port = number("MASTER_PORT", 1, 65534);
  if (!port.ok()) return bad("torchrun: " + port.status().message());
  const bool brackets = host->find(':') != std::string::npos && host->front() != '[';
  return fmt::format(fmt::runtime(brackets ? "[{}]:{}" : "{}:{}"), *host, *port + 1);
}

bool is_here(std::string_view coordinator) {
  const auto mine = local_interfaces("");
  while (mine.ok() && !coordinator.empty()) {
    const size_t comma = coordinator.find(',');
    const auto one = parse_host_port(coordinator.substr(0, comma));
    const auto found = one.ok() ? resolve(*one) : Result<std::vector<Address>>(one.status());
    for (const Interface& interface : *mine) {
      const std::string host = interface.address.host();
      const auto same = [&](const Address& address) { return address.host() == host; };
      if (found.ok() && std::any_of(found->begin(), found->end(), same)) return true;
    }
    coordinator.remove_prefix(comma == std::string_view::npos ? coordinator.size() : comma + 1);
  }
  return false;
}

// mpirun tells where it runs itself, which is usually, but need not be, where rank 0 is.
Result<std::string> at_launcher(std::string_view launcher, const Rendezvous& where,
                                std::string coordinator) {
  if (coordinator.empty()) {
    return bad(say_where(launcher,
                         "the ranks are on several hosts, and where rank 0 is, is not "
                         "known"));
  }
  if (where.rank == 0 && !is_here(coordinator)) {
    return bad(say_where(launcher, "rank 0 is not on the host of mpirun"));
  }
  return coordinator;
}

// Every address of this host that others may reach it by.
std::string all_addresses(uint16_t port) {
  constexpr size_t kMost = 900;  // of what a launcher keeps for a name
  std::string all;
  const auto interfaces = local_interfaces(setting("RINGFOLD_INTERFACES").value_or(""));
  if (!interfaces.ok()) return all;
  for (const Interface& interface : *interfaces) {
    Address address = interface.address;
    address.set_port(port);
    const std::string text = address.to_string();
    const bool scoped = text.find('%') != std::string::npos;  // means something here only
    if (address.loopback() || scoped || all.size() + text.size() > kMost) continue;
    all += (all.empty() ? "" : ",") + text;
  }
  return all;
}

Result<std::string> open_mpi_coordinator(const Rendezvous& where) {
  auto job = variable("PMIX_NAMESPACE");
  if (!job) job = variable("OMPI_MCA_ess_base_jobid");
  if (!job) return bad(say_where("Open MPI", "the job has no name"));
  const uint16_t port = port_of_job("Open MPI " + *job);
  const auto local = number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMostRanks);
  if (local.ok() && *local == where.size) return fmt::format("127.0.0.1:{}", port);
  std::string contact = variable("OMPI_MCA_orte_hnp_uri").value_or("");
  if (contact.empty()) contact = prte_contact();
  // The processes beside mpirun of Open MPI 5 are told of it only that it is their server, number
  // 0.
  const std::string server = variable("PMIX_SERVER_URI41").value_or("");
  if (contact.empty() && server.find("@0.0;") != std::string::npos)
    return at_launcher("Open MPI", where,
                       fmt::format("127.0.0.1:{},{}", port, all_addresses(port)));
  return at_launcher("Open MPI", where, orte_hosts(contact, port));
}

// Names the job in the same way on all its hosts.
std::string hydra_job() {
  const std::string control = hydra_control_port();
  return control.empty() ? variable("I_MPI_HYDRA_UUID").value_or("") : control;
}

// Rank 0 leaves its addresses with the launcher.
Result<std::string> coordinator_by_pmi(const Rendezvous& where) {
  const auto timeout = setting_duration("RINGFOLD_TIMEOUT");
  if (!timeout.ok()) return timeout.status();
  const Nanoseconds limit =
      std::min<Nanoseconds>(timeout->value_or(std::chrono::minutes(10)), std::chrono::hours(24));
  const auto said = [](std::string_view job) {
    return all_addresses(port_of_job(fmt::format("PMI {}", job)));
  };
  auto told = pmi::tell_all(where.rank, said, steady_clock().now() + limit);
  if (told.ok() && told->empty())
    return bad(say_where("mpirun (PMI)", "rank 0 has no address that leads to other hosts"));
  return told;
}

Result<std::string> hydra_coordinator(const Rendezvous& where) {
  const std::string job = hydra_job();
  const uint16_t port = port_of_job("hydra " + job);
  const auto local = number("MPI_LOCALNRANKS", 1, kMostRanks);
  if (!job.empty() && local.ok() && *local == where.size) return fmt::format("127.0.0.1:{}", port);
  if (pmi::usable()) return coordinator_by_pmi(where);
  const std::string control = hydra_control_port();
  if (control.empty()) return bad(say_where("mpirun (PMI)", "this process was not started by it"));
  const std::string host = control.substr(0, control.rfind(':'));
  return at_launcher("mpirun (PMI)", where, fmt::format("{}:{}", host, port));
}

Result<std::string> slurm_coordinator() {
  const auto job = variable("SLURM_JOB_ID");
  if (!job) return bad("srun: SLURM_JOB_ID is not set");
  const uint16_t port =
      port_of_job(fmt::format("Slurm {}.{}", *job, variable("SLURM_STEP_ID").value_or("0")));
  if (variable("SLURM_STEP_NUM_NODES") == "1") return fmt::format("127.0.0.1:{}", port);
  const char* name = "SLURM_STEP_NODELIST";
  if (!variable(name)) name = "SLURM_JOB_NODELIST";
  const auto list = variable(name);
  if (!list) return bad("srun: SLURM_STEP_NODELIST is not set");
  const std::string host = first_slurm_host(*list);
  if (host.empty()) return bad(fmt::format("srun: {}=\"{}\" is not a node list", name, *list));
  return fmt::format("{}:{}", host, port);
}

// Something that the processes of this job share and others do not know, or at least do not use by
// accident: it keeps jobs apart that derive the same port.
std::string launcher_secret(std::string_view source) {
  if (source == "Open MPI") {
    if (const auto key = variable("OMPI_MCA_orte_precondition_transports")) return "ORTE " + *key;
    return "PMIx " + variable("PMIX_NAMESPACE").value_or("");
  }
  if (source == "mpirun (PMI)") {
    const std::string job = hydra_job();
    return job.empty() ? "" : "hydra " + job;
  }
  if (source == "srun") {
    return fmt::format("Slurm {}.{}", variable("SLURM_JOB_ID").value_or(""),
                       variable("SLURM_STEP_ID").value_or("0"));
  }
  return {};
}

Result<std::string> given_secret() {
  if (const auto secret = setting("RINGFOLD_SECRET")) return *secret;
  const auto path = setting("RINGFOLD_SECRET_FILE");
  if (!path) return std::string();
  std::ifstream file(*path, std::ios::binary);
  std::string secret(std::istreambuf_iterator<char>(file), {});
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) secret.pop_back();
  if (!file.is_open() || secret.empty() || secret.size() > kLongestSecret) {
    return bad(fmt::format("RINGFOLD_SECRET_FILE=\"{}\": expected a readable file of 1 to {} bytes",
                           *path, kLongestSecret));
  }
  return secret;
}

Result<std::string> coordinator_of(const Rendezvous& where) {
  if (const auto given = setting("RINGFOLD_COORDINATOR")) {
    std::istringstream entries(*given);
    for (std::string one; std::getline(entries, one, ',');) {
      const auto parsed = parse_host_port(one);
      if (!parsed.ok()) return bad("RINGFOLD_COORDINATOR: " + parsed.status().message());
    }
    return *given;
  }
  if (where.size == 1) return std::string();  // nobody to meet
  if (where.source == "torchrun") return torchrun_coordinator();
  if (where.source == "Open MPI") return open_mpi_coordinator(where);
  if (where.source == "mpirun (PMI)") {
    // srun offers PMI as well; then it is Slurm that knows the hosts.
    if (hydra_job().empty() && variable("SLURM_PROCID")) return slurm_coordinator();
    return hydra_coordinator(where);
  }
  if (where.source == "srun") return slurm_coordinator();
  return bad("RINGFOLD_COORDINATOR is not set: expected host:port, where rank 0 will listen");
}

constexpr Names kLaunchers[] = {
    {"RINGFOLD_*", "RINGFOLD_RANK", "RINGFOLD_SIZE", "RINGFOLD_LOCAL_RANK"},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"mpirun (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
};

const Names* find_launcher() {
  for (const Names& names : kLaunchers) {
    // A mere allocation of Slurm sets the number of tasks too; only srun sets the task's own
    // number.
    const bool srun = names.source == std::string_view("srun");
    if (variable(names.rank) || (variable(names.size) && !srun)) return &names;
  }
  return nullptr;
}

}  // namespace

uint16_t port_of_job(std::string_view job) {
  constexpr uint32_t kFirst = 20000, kCount = 12000;
  const Key hash = key_of(job);
  const uint32_t number = hash[0] | hash[1] << 8 | hash[2] << 16;
  return static_cast<uint16_t>(kFirst + number % kCount);
}

std::string first_slurm_host(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    const char next = list.front();
    list.remove_prefix(1);
    if (next != '[') {
      if (next == ']') return {};
      host += next;
      continue;
    }
    const size_t close = list.find(']');
    const size_t end = std::min(list.find_first_of("-,]"), list.size());
    const std::string_view digits = list.substr(0, end);
    const bool whole =
        std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (close == std::string_view::npos || digits.empty() || !whole) return {};
    host += digits;
    list.remove_prefix(close + 1);
  }
  return host;
}

std::string orte_hosts(std::string_view contact, uint16_t port) {
  std::string hosts;
  const auto add = [&](std::string_view host) {
    hosts += fmt::format("{}{}:{}", hosts.empty() ? "" : ",", host, port);
  };
  while (!contact.empty()) {
    const std::string_view part = contact.substr(0, contact.find(';'));
    contact.remove_prefix(std::min(part.size() + 1, contact.size()));
    const size_t scheme = part.find("://");
    if (scheme == std::string_view::npos) continue;
    const bool v6 = part.starts_with("tcp6");
    // Behind the port Open MPI 5 also gives the length of the network's prefix.
    const size_t colon = v6 ? part.rfind(':') : part.find(':', scheme + 3);
    if (colon == std::string_view::npos || colon <= scheme + 3) continue;
    std::string_view list = part.substr(scheme + 3, colon - scheme - 3);
    if (v6 && list.starts_with('[') && list.ends_with(']')) list = list.substr(1, list.size() - 2);
    while (!list.empty()) {
      const std::string_view host = list.substr(0, list.find(','));
      list.remove_prefix(std::min(host.size() + 1, list.size()));
      add(v6 ? fmt::format("[{}]", host) : std::string(host));
    }
  }
  return hosts;
}

namespace {

// The word behind `option` in the command line of the nearest ancestor that has it, and whose name
// contains `program`.
std::string word_of_ancestor(std::string_view program, std::string_view option) {
  constexpr int kGenerations = 32;
  std::string pid = fmt::format("{}", getppid());
  for (int i = 0; i < kGenerations && pid != "0"; ++i) {
    std::ifstream command("/proc/" + pid + "/cmdline", std::ios::binary);
    bool right = false, next_is_it = false;
    for (std::string word; std::getline(command, word, '\0');) {
      if (next_is_it && right) return word;
      right = right || word.find(program) != std::string::npos;
      next_is_it = word == option;
    }
    std::ifstream status("/proc/" + pid + "/status");
    std::string line;
    while (std::getline(status, line) && !line.starts_with("PPid:")) {
    }
    if (!line.starts_with("PPid:")) return {};
    pid = line.substr(line.find_first_of("0123456789"));
  }
  return {};
}

}  // namespace

std::string hydra_control_port() {
  return word_of_ancestor("hydra", "--control-port");
}

std::string prte_contact() {
  std::string contact = word_of_ancestor("prted", "prte_hnp_uri");
  std::erase(contact, '"');
  return contact;
}

Result<Rendezvous> Rendezvous::from_environment() {
  const Names* const launcher = find_launcher();
  if (launcher == nullptr) {
    if (setting("RINGFOLD_COORDINATOR")) {
      return bad("RINGFOLD_COORDINATOR is set, but RINGFOLD_RANK and RINGFOLD_SIZE are not");
    }
    return Status(Code::unsupported,
                  "no launcher's variables are set; start the program with `ringfold run --ranks N "
                  "-- PROGRAM`, mpirun, torchrun or srun, or set RINGFOLD_RANK, RINGFOLD_SIZE and "
                  "RINGFOLD_COORDINATOR=host:port for every process");
  }
  auto where = read_numbers(*launcher);
  if (!where.ok()) return where;
  if (variable("RINGFOLD_LOCAL_RANK")) {
    const auto local = number("RINGFOLD_LOCAL_RANK", 0, kMostRanks);
    if (!local.ok()) return local.status();
    where->local_rank = *local;
  }
  auto coordinator = coordinator_of(*where);
  if (!coordinator.ok()) return coordinator.status();
  where->coordinator = std::move(*coordinator);
  auto secret = given_secret();
  if (!secret.ok()) return secret.status();
  where->secret = secret->empty() ? launcher_secret(where->source) : std::move(*secret);
  return where;
}

}  // namespace ringfold
