#!/usr/bin/env python3
"""Real launchers, without any variable of ours: mpirun of Open MPI 4 and 5, MPICH 4 and 5 and Intel MPI,
torchrun, and srun of a Slurm that is started for it; on this host, and on two hosts made of namespaces.

launchers_test.py BUILD SOURCE PROBE LAUNCHER: openmpi4, openmpi5, mpich4, mpich5, intel, torchrun or slurm

PROBE is test/launcher_probe.cpp: every rank meets the others and prints what it found.
"""
import contextlib
import getpass
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

BUILD, SOURCE, PROBE = sys.argv[1:4]
RINGFOLD = os.path.join(BUILD, "tools", "ringfold")
WHEELS = pathlib.Path(BUILD) / "peers-wheels"
NETLAB = os.path.join(SOURCE, "bench", "peers", "netlab.sh")
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(SOURCE, "bench", "peers"))
from laboratory import Laboratory, Unavailable  # noqa: E402

ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
LIMIT = 120  # seconds; far more than any of it takes


def clean_environment(**more):
    """Without what launchers around this test may have set, and without our variables."""
    ours = re.compile(r"^(RINGFOLD_|OMPI_|PMIX?_|PRTE_|SLURM_|HYDRA_|MPI_|I_MPI_|MPIR_)|"
                      r"^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)$")
    kept = {name: value for name, value in os.environ.items() if not ours.match(name)}
    return {**kept, **more}


def run(command, environment=None, limit=LIMIT):
    """(status, output); a whole session is ended at the limit."""
    process = subprocess.Popen(list(map(str, command)), env=environment or clean_environment(), text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + "\n(ended at the limit)"
    return process.returncode, output


# ---- what is installed -------------------------------------------------------------------------------


def debian(program, test):
    path = shutil.which(program)
    if not path:
        test.skipTest(f"no {program} (tools/packages openmpi-bin mpich)")
    return path


def wheel(name, test):
    """The folder of one of the launchers from PyPI, which bench/peers/compare --install brings."""
    folder = WHEELS / name
    if not (folder / "complete").exists():
        test.skipTest(f"{folder} is missing (bench/peers/compare --install --only {name})")
    return folder


def openmpi4(test):
    return [debian("mpirun.openmpi", test), *ROOT, "--oversubscribe"], clean_environment()


def openmpi5(test):
    return [wheel("openmpi5", test) / "bin" / "mpirun", *ROOT, "--oversubscribe"], clean_environment()


def mpich4(test):
    return [debian("mpirun.mpich", test)], clean_environment()


def mpich5(test):
    return [wheel("mpich5", test) / "bin" / "mpirun"], clean_environment()


def intel(test):
    folder = wheel("intel", test)
    return ([folder / "bin" / "mpiexec.hydra"],
            clean_environment(I_MPI_ROOT=str(folder), LD_LIBRARY_PATH=str(folder / "lib"),
                              PATH=f"{folder / 'bin'}:{os.environ['PATH']}"))


def torchrun(test):
    path = shutil.which("torchrun", path=f"{BUILD}-venv/bin:{os.environ['PATH']}")
    if not path:
        test.skipTest("no torchrun")
    return path


class Told(unittest.TestCase):
    def check(self, outcome, source, ranks, hosts=1, authenticated=True):
        """All ranks have met, by that launcher's own variables."""
        status, output = outcome
        self.assertEqual(status, 0, output)
        # Lines of ranks may come without the newline between them.
        told = re.findall(r"([A-Za-z]+(?: MPI| \(PMI\))?): rank (\d+) of (\d+), local -?\d+, "
                          r"(\d+) processes on (\d+), (secret|open)", output)
        self.assertEqual(sorted(told, key=lambda line: int(line[1])),
                         [(source, str(rank), str(ranks), str(ranks), str(hosts),
                           "secret" if authenticated else "open") for rank in range(ranks)], output)

    def check_bench(self, outcome):
        status, output = outcome
        self.assertEqual(status, 0, output)
        self.assertRegex(output, r"(?m)^ +4096 ")


class OneHost(Told):
    def started(self, launcher, source):
        command, environment = launcher(self)
        self.check(run([*command, "-n", 3, PROBE], environment), source, 3)
        self.check_bench(run([*command, "-n", 3, RINGFOLD, "bench", "-b", "4K", "-e", "4K", "-n", "5"],
                             environment))

    def test_openmpi4(self):
        self.started(openmpi4, "Open MPI")

    def test_openmpi5(self):
        self.started(openmpi5, "Open MPI")

    def test_mpich4(self):
        self.started(mpich4, "mpirun (PMI)")

    def test_mpich5(self):
        self.started(mpich5, "mpirun (PMI)")

    def test_intel(self):
        self.started(intel, "mpirun (PMI)")

    def test_torchrun(self):
        self.check(run([torchrun(self), "--nproc-per-node", 3, "--master-port", free_port(), "--no-python",
                        PROBE]), "torchrun", 3, authenticated=False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class TwoHosts(Told):
    """Two ranks each on two of three namespaces; mpirun reaches them by a launch agent."""

    def setUp(self):
        self.exits = contextlib.ExitStack()
        self.addCleanup(self.exits.close)
        try:
            self.hosts = self.exits.enter_context(Laboratory([2, 2, 0]))
        except Unavailable as why:
            self.skipTest(str(why))
        self.folder = pathlib.Path(self.exits.enter_context(tempfile.TemporaryDirectory()))
        agent = self.folder / "agent"
        agent.write_text(f'#!/bin/sh\nexec env NETLAB={self.hosts.name} {NETLAB} ssh "$@"\n', encoding="utf-8")
        agent.chmod(0o755)
        self.agent = str(agent)

    def open_mpi(self, launcher, beside, *options):
        """mpirun on one of the hosts in `beside`, which puts rank 0 at its side; and away from all
        ranks, where nothing tells the others of rank 0: it says so."""
        command, environment = launcher(self)
        words = [*command, *options, "--host", "10.77.0.1:2,10.77.0.2:2", "-n", 4, PROBE]
        for host in beside:
            self.check(run([*self.hosts.inside(host), *words], environment), "Open MPI", 4, hosts=2)
        status, output = run([*self.hosts.inside(3), *words], environment)
        self.assertNotEqual(status, 0, output)
        self.assertIn("rank 0 is not on the host of mpirun; set RINGFOLD_COORDINATOR", output)

    def hydra(self, launcher, *options):
        """mpirun where rank 0 is, on the other host, and away from both."""
        command, environment = launcher(self)
        words = [*command, *options, "-hosts", "10.77.0.1,10.77.0.2", "-ppn", 2, "-n", 4, PROBE]
        for host in (1, 2, 3):
            self.check(run([*self.hosts.inside(host), *words], environment), "mpirun (PMI)", 4, hosts=2)

    def test_openmpi4(self):
        self.open_mpi(openmpi4, (1, 2), "--mca", "plm_rsh_agent", self.agent,
                      "--mca", "oob_tcp_if_include", "10.77.0.0/24")

    def test_openmpi5(self):
        self.open_mpi(openmpi5, (1,), "--prtemca", "plm_ssh_agent", self.agent,
                      "--prtemca", "prte_if_include", "10.77.0.0/24", "--map-by", "ppr:2:node")

    def test_mpich4(self):
        self.hydra(mpich4, "-launcher", "ssh", "-launcher-exec", self.agent, "-iface", "eth0")

    def test_mpich5(self):
        self.hydra(mpich5, "-launcher", "ssh", "-launcher-exec", self.agent, "-iface", "eth0")

    def test_intel(self):
        self.hydra(intel, "-bootstrap", "ssh", "-bootstrap-exec", self.agent, "-iface", "eth0")

    def test_torchrun(self):
        program = torchrun(self)
        nodes = []
        for node in range(2):
            words = [program, "--nnodes", 2, "--node-rank", node, "--nproc-per-node", 2, "--master-addr",
                     "10.77.0.1", "--master-port", 29500, "--no-python", PROBE]
            nodes.append(subprocess.Popen(
                [*self.hosts.inside(node + 1), *map(str, words)], env=clean_environment(), text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        output = "".join(node.communicate(timeout=LIMIT)[0] for node in nodes)
        self.check((max(node.returncode for node in nodes), output), "torchrun", 4, hosts=2, authenticated=False)


SLURM_CONF = """ClusterName=ringfold
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
CommunicationParameters=NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm(Told):
    """One node, with a configuration, ports and a key of its own; gone when the test ends."""

    @classmethod
    def setUpClass(cls):
        needed = ["munged", "slurmctld", "slurmd", "srun", "sinfo"]
        environment = clean_environment(PATH=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        programs = {name: shutil.which(name, path=environment["PATH"]) for name in needed}
        if os.geteuid() != 0 or not all(programs.values()):
            raise unittest.SkipTest("Slurm needs root, slurm-wlm and munge (tools/packages slurm-wlm munge)")
        cls.exits = contextlib.ExitStack()
        cls.addClassCleanup(cls.exits.close)
        folder = cls.exits.enter_context(tempfile.TemporaryDirectory(prefix="ringfold-slurm-"))
        os.chmod(folder, 0o755)
        for name in ("state", "spool"):
            os.mkdir(os.path.join(folder, name))
        key = os.path.join(folder, "munge.key")
        with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o400), "wb") as file:
            file.write(os.urandom(128))
        cls.conf = os.path.join(folder, "slurm.conf")
        with open(cls.conf, "w", encoding="utf-8") as file:
            file.write(SLURM_CONF.format(folder=folder, host=socket.gethostname().split(".")[0],
                                         user=getpass.getuser(), controller_port=free_port(),
                                         daemon_port=free_port()))
        cls.environment = dict(environment, SLURM_CONF=cls.conf)
        munge = [f"--{word}={folder}/munge.{end}" for word, end in (
            ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"),
            ("seed-file", "seed"))]
        cls.logs = [os.path.join(folder, name) for name in ("slurmctld.log", "slurmd.log", "munge.log")]
        cls.daemon(programs["munged"], "--foreground", "--force", *munge)
        cls.wait(lambda: os.path.exists(f"{folder}/munge.socket"), "munged does not answer")
        cls.daemon(programs["slurmctld"], "-D", "-c", "-f", cls.conf)
        cls.daemon(programs["slurmd"], "-D", "-f", cls.conf)
        cls.wait(lambda: "idle" in run(["sinfo", "-h", "-o", "%T"], cls.environment)[1],
                 "the node does not come up")

    @classmethod
    def daemon(cls, *command):
        process = subprocess.Popen(command, env=cls.environment, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def end():
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        cls.exits.callback(end)

    @classmethod
    def wait(cls, ready, trouble):
        until = time.monotonic() + LIMIT
        while not ready():
            if time.monotonic() > until:
                said = "".join(open(log, encoding="utf-8").read() for log in cls.logs if os.path.exists(log))
                raise AssertionError(f"{trouble}: {said[-4000:]}")
            time.sleep(0.2)

    def test_a_job_of_two_tasks(self):
        self.check(run(["srun", "-n", 2, PROBE], self.environment), "srun", 2)

    def test_the_bench(self):
        self.check_bench(run(["srun", "-n", 4, RINGFOLD, "bench", "-b", "4K", "-e", "4K", "-n", "5"],
                             self.environment))

    def test_two_steps_at_once(self):
        job = "srun --exact -n 2 %s & srun --exact -n 3 %s && wait $!" % (PROBE, PROBE)
        script = f"#!/bin/sh\n{job}\n"
        path = os.path.join(os.path.dirname(self.conf), "job")
        with open(path, "w", encoding="utf-8") as file:
            file.write(script)
        log = path + ".out"
        status, output = run(["sbatch", "--wait", "-n", 8, "-o", log, path], self.environment)
        with open(log, encoding="utf-8") as file:
            told = file.read()
        self.assertEqual(status, 0, output + told)
        for ranks in (2, 3):
            for rank in range(ranks):
                self.assertIn(f"srun: rank {rank} of {ranks}, local {rank}, {ranks} processes on 1, secret",
                              told)


def tests_of(launcher):
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    if launcher == "slurm":
        return load(Slurm)
    return unittest.TestSuite(case(f"test_{launcher}") for case in (OneHost, TwoHosts))


if __name__ == "__main__":
    name = sys.argv[4]
    outcome = unittest.TextTestRunner(verbosity=2).run(tests_of(name))
    if outcome.skipped:
        print(f"SKIPPED launcher_{name}: {'; '.join(sorted({why for _, why in outcome.skipped}))}")
    sys.exit(0 if outcome.wasSuccessful() else 1)
