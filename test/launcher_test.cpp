// Rendezvous::from_environment(): what each launcher sets, what may be wrong with it, and the real
// launchers where they are installed.
#include "lib/comm/launcher.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <fstream>

#include "lib/base/net.h"
#include "ringfold/bootstrap.h"
#include "test/environment.h"
#include "test/skip.h"

using namespace ringfold;
using Catch::Contains;
using ringfold::test::Environment;

namespace {

using Variables = std::vector<std::pair<std::string, std::string>>;

Result<Rendezvous> with(const Variables& variables) {
  Environment environment;
  for (const auto& [name, value] : variables) environment.set(name, value);
  return Rendezvous::from_environment();
}

Rendezvous right(const Variables& variables) {
  auto where = with(variables);
  REQUIRE(where.status().to_string() == "ok");
  return *where;
}

// The message of the refusal, which must be invalid_argument.
std::string wrong(const Variables& variables) {
  const auto where = with(variables);
  CHECK(where.status().code() == Code::invalid_argument);
  return where.status().message();
}

Variables changed(Variables variables, const std::string& name, const std::string& value) {
  for (auto& [known, text] : variables) {
    if (known == name) text = value;
  }
  return variables;
}

const Variables kOwn = {{"RINGFOLD_RANK", "1"},
                        {"RINGFOLD_SIZE", "3"},
                        {"RINGFOLD_LOCAL_RANK", "0"},
                        {"RINGFOLD_COORDINATOR", "node1:4000"}};
const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "29500"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_NAMESPACE", "2047082497"}};
const Variables kSlurm = {{"SLURM_PROCID", "3"},
                          {"SLURM_NTASKS", "4"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_JOB_ID", "1234"},
                          {"SLURM_STEP_ID", "2"},
                          {"SLURM_STEP_NUM_NODES", "2"},
                          {"SLURM_STEP_NODELIST", "rack1-n[07-09,12],gpu3"}};

}  // namespace

TEST_CASE("without any launcher the message says how to start") {
  const auto none = with({});
  CHECK(none.status().code() == Code::unsupported);
  CHECK_THAT(none.status().message(), Contains("ringfold run") && Contains("mpirun") &&
                                          Contains("torchrun") && Contains("srun") &&
                                          Contains("RINGFOLD_RANK"));
  CHECK_THAT(wrong({{"RINGFOLD_COORDINATOR", "a:1"}}), Contains("RINGFOLD_RANK"));
  // A mere allocation is no launcher.
  CHECK(with({{"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "1"}}).status().code() == Code::unsupported);
}

TEST_CASE("RINGFOLD_* come first") {
  Variables all = kOwn;
  all.insert(all.end(), kTorchrun.begin(), kTorchrun.end());
  all.emplace_back("RINGFOLD_SECRET", "abc");
  const Rendezvous where = right(all);
  CHECK(where.source == "RINGFOLD_*");
  CHECK(where.rank == 1);
  CHECK(where.size == 3);
  CHECK(where.local_rank == 0);
  CHECK(where.coordinator == "node1:4000");
  CHECK(where.secret == "abc");
  CHECK_FALSE(where.timeout.has_value());
  CHECK(right({{"RINGFOLD_RANK", "0"}, {"RINGFOLD_SIZE", "1"}}).coordinator.empty());
}

TEST_CASE("RINGFOLD_* that are wrong or incomplete are named") {
  for (const char* missing : {"RINGFOLD_RANK", "RINGFOLD_SIZE", "RINGFOLD_COORDINATOR"}) {
    CHECK_THAT(wrong(changed(kOwn, missing, "")), Contains(missing) && Contains("not set"));
  }
  for (const auto& [name, value] : Variables{{"RINGFOLD_RANK", "x"},
                                             {"RINGFOLD_RANK", "-1"},
                                             {"RINGFOLD_RANK", "3"},
                                             {"RINGFOLD_RANK", "1 "},
                                             {"RINGFOLD_SIZE", "0"},
                                             {"RINGFOLD_SIZE", "99999999999"},
                                             {"RINGFOLD_LOCAL_RANK", "one"},
                                             {"RINGFOLD_COORDINATOR", "node1"},
                                             {"RINGFOLD_COORDINATOR", "node1:0"},
                                             {"RINGFOLD_COORDINATOR", "node1:70000"},
                                             {"RINGFOLD_COORDINATOR", "a:1,b"}}) {
    INFO(name << "=" << value);
    CHECK_THAT(wrong(changed(kOwn, name, value)), Contains(name));
  }
}

TEST_CASE("the secret may be in a file") {
  char path[] = "/tmp/ringfold-secret-XXXXXX";
  const int file = mkstemp(path);
  REQUIRE(file >= 0);
  Variables own = kOwn;
  own.emplace_back("RINGFOLD_SECRET_FILE", path);
  CHECK_THAT(wrong(own), Contains("RINGFOLD_SECRET_FILE"));  // still empty
  REQUIRE(write(file, "in a file\n", 10) == 10);
  close(file);
  CHECK(right(own).secret == "in a file");
  own.emplace_back("RINGFOLD_SECRET", "wins");
  CHECK(right(own).secret == "wins");
  own.pop_back();
  unlink(path);
  CHECK_THAT(wrong(own), Contains("RINGFOLD_SECRET_FILE") && Contains(path));
}

TEST_CASE("torchrun") {
  const Rendezvous where = right(kTorchrun);
  CHECK(where.source == "torchrun");
  CHECK(where.rank == 5);
  CHECK(where.size == 8);
  CHECK(where.local_rank == 1);
  CHECK(where.coordinator == "10.0.0.1:29501");
  CHECK(right(changed(kTorchrun, "MASTER_ADDR", "fd00::1")).coordinator == "[fd00::1]:29501");
  CHECK_FALSE(right(changed(kTorchrun, "LOCAL_RANK", "")).local_rank.has_value());
  for (const char* missing : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    CHECK_THAT(wrong(changed(kTorchrun, missing, "")), Contains(missing) && Contains("not set"));
  }
  for (const auto& [name, value] : Variables{{"RANK", "8"},
                                             {"RANK", "1.0"},
                                             {"WORLD_SIZE", "many"},
                                             {"LOCAL_RANK", "-1"},
                                             {"MASTER_PORT", "65535"},
                                             {"MASTER_PORT", "port"}}) {
    INFO(name << "=" << value);
    CHECK_THAT(wrong(changed(kTorchrun, name, value)),
               Contains(fmt::format("{}=\"{}\"", name, value)));
  }
  Variables elsewhere = kTorchrun;
  elsewhere.emplace_back("RINGFOLD_COORDINATOR", "other:7");
  CHECK(right(elsewhere).coordinator == "other:7");
}

TEST_CASE("Open MPI") {
  const Rendezvous where = right(kOpenMpi);
  CHECK(where.source == "Open MPI");
  CHECK(where.rank == 2);
  CHECK(where.local_rank == 2);
  const auto at = parse_host_port(where.coordinator);
  REQUIRE(at.ok());
  CHECK(at->host == "127.0.0.1");
  CHECK(right(changed(kOpenMpi, "OMPI_COMM_WORLD_RANK", "0")).coordinator == where.coordinator);
  CHECK(right(changed(kOpenMpi, "PMIX_NAMESPACE", "other")).coordinator != where.coordinator);
  CHECK(right(changed(kOpenMpi, "PMIX_NAMESPACE", "other")).secret != where.secret);
  CHECK_THAT(wrong(changed(kOpenMpi, "OMPI_COMM_WORLD_SIZE", "")),
             Contains("OMPI_COMM_WORLD_SIZE"));
  CHECK_THAT(wrong(changed(kOpenMpi, "OMPI_COMM_WORLD_RANK", "4")),
             Contains("OMPI_COMM_WORLD_RANK=\"4\""));

  // Several hosts: where mpirun is, if it says so.
  Variables hosts = changed(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  CHECK_THAT(wrong(hosts), Contains("RINGFOLD_COORDINATOR"));
  hosts.emplace_back("OMPI_MCA_orte_hnp_uri", "17.0;tcp://192.0.2.7,10.9.9.9:5000");
  const std::string port = std::to_string(at->port);
  CHECK(right(hosts).coordinator == "192.0.2.7:" + port + ",10.9.9.9:" + port);
  CHECK_THAT(wrong(changed(hosts, "OMPI_COMM_WORLD_RANK", "0")), Contains("not on the host"));
  hosts = changed(hosts, "OMPI_MCA_orte_hnp_uri", "17.0;tcp://192.0.2.7,127.0.0.1:5000");
  CHECK(right(changed(hosts, "OMPI_COMM_WORLD_RANK", "0")).rank == 0);
}

TEST_CASE("contact texts of ORTE") {
  CHECK(orte_hosts("17.0;tcp://10.0.0.1,10.1.0.1:5000;tcp6://[fd00::1]:6000", 7) ==
        "10.0.0.1:7,10.1.0.1:7,[fd00::1]:7");
  CHECK(orte_hosts("prterun-a-1@0.0;tcp://10.0.0.1,10.1.0.1:5000:24,16", 7) ==
        "10.0.0.1:7,10.1.0.1:7");
  for (const char* nothing : {"", "17.0", "tcp://", ";;;", "tcp://10.0.0.1", "://:"}) {
    INFO(nothing);
    CHECK(orte_hosts(nothing, 7).empty());
  }
}

TEST_CASE("PMI without hydra asks for a coordinator") {
  const Variables pmi = {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}};
  CHECK_THAT(wrong(pmi), Contains("RINGFOLD_COORDINATOR"));
  CHECK_THAT(wrong(changed(pmi, "PMI_SIZE", "")), Contains("PMI_SIZE"));
  Variables given = pmi;
  given.emplace_back("RINGFOLD_COORDINATOR", "a:1");
  CHECK(right(given).coordinator == "a:1");
  Variables slurm = pmi;
  slurm.insert(slurm.end(), kSlurm.begin(), kSlurm.end());
  CHECK_THAT(right(slurm).coordinator, Catch::StartsWith("rack1-n07:"));
}

TEST_CASE("srun") {
  const Rendezvous where = right(kSlurm);
  CHECK(where.source == "srun");
  CHECK(where.rank == 3);
  CHECK(where.local_rank == 1);
  CHECK(parse_host_port(where.coordinator)->host == "rack1-n07");
  CHECK(right(changed(kSlurm, "SLURM_STEP_ID", "3")).coordinator != where.coordinator);
  CHECK_THAT(right(changed(kSlurm, "SLURM_STEP_NUM_NODES", "1")).coordinator,
             Catch::StartsWith("127.0.0.1:"));
  for (const char* missing : {"SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"}) {
    CHECK_THAT(wrong(changed(kSlurm, missing, "")), Contains(missing));
  }
  CHECK_THAT(wrong(changed(kSlurm, "SLURM_STEP_NODELIST", "n[1-")),
             Contains("SLURM_STEP_NODELIST=\"n[1-\""));
}

TEST_CASE("node lists of Slurm") {
  CHECK(first_slurm_host("n1") == "n1");
  CHECK(first_slurm_host("n1,n2") == "n1");
  CHECK(first_slurm_host("n[03-05,9],x1") == "n03");
  CHECK(first_slurm_host("n[9,3]") == "n9");
  CHECK(first_slurm_host("rack[1-2]n[5-6]") == "rack1n5");
  CHECK(first_slurm_host("n[1]-ib,x") == "n1-ib");
  for (const char* malformed : {"", ",", "n[", "n[]", "n[1", "n]", "n[a-b]", "n[-3]"}) {
    INFO(malformed);
    CHECK(first_slurm_host(malformed).empty());
  }
}

TEST_CASE("ports of jobs stay below the ephemeral ones and differ") {
  CHECK(port_of_job("a") == port_of_job("a"));
  CHECK(port_of_job("a") != port_of_job("b"));
  for (int i = 0; i < 1000; ++i) {
    const uint16_t port = port_of_job(std::to_string(i));
    CHECK((port >= 20000 && port < 32000));
  }
}

namespace {

struct Run {
  int status = -1;
  std::string output;
};

Run run(const std::string& command) {
  Run result;
  FILE* const pipe = popen((command + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  char line[1024];
  while (fgets(line, sizeof line, pipe) != nullptr) result.output += line;
  result.status = WEXITSTATUS(pclose(pipe));
  return result;
}

void check_three_ranks(const Run& result, const std::string& source, const std::string& secret) {
  INFO(result.output);
  CHECK(result.status == 0);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_THAT(result.output,
               Contains(fmt::format("{}: rank {} of 3, local {}, 3 processes on 1, {}\n", source,
                                    rank, rank, secret)));
  }
}

bool installed(const char* program) {
  return run(fmt::format("command -v {}", program)).status == 0;
}

}  // namespace

TEST_CASE("the real mpirun of Open MPI") {
  if (!installed("mpirun.openmpi")) return test::skip("no mpirun.openmpi");
  const Environment clean;
  check_three_ranks(run("timeout 60 mpirun.openmpi --allow-run-as-root --oversubscribe -n "
                        "3 " RINGFOLD_LAUNCHER_PROBE),
                    "Open MPI", "secret");
}

TEST_CASE("the real mpirun of MPICH, also through a shell, and two jobs at once") {
  if (!installed("mpirun.mpich")) return test::skip("no mpirun.mpich");
  const Environment clean;
  check_three_ranks(run("timeout 60 mpirun.mpich -n 3 " RINGFOLD_LAUNCHER_PROBE), "mpirun (PMI)",
                    "secret");
  const std::string through_shell =
      "timeout 60 mpirun.mpich -n 3 sh -c '" RINGFOLD_LAUNCHER_PROBE "; exit $?'";
  check_three_ranks(run(through_shell), "mpirun (PMI)", "secret");
  const Run both = run("(" + through_shell + ") & " + through_shell + " && wait $!");
  INFO(both.output);
  CHECK(both.status == 0);
  CHECK(both.output.find("error") == std::string::npos);
}
