"""The libraries as they are measured between hosts: like libraries.py, in the hosts of a laboratory."""
import dataclasses
import os

import libraries
from laboratory import NETLAB, Laboratory

INTERFACE = "eth0"
UCX_OVER_TCP = (("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", INTERFACE))


@dataclasses.dataclass(frozen=True)
class Spread(libraries.Configuration):
    """One way to run one library, with its ranks on the hosts of a laboratory."""
    laboratory: Laboratory = None

    def commands(self, ranks, common, folder):
        inside, common = self.laboratory.inside, [*common, "--bind", "0"]
        if self.launcher:  # mpirun, on the first host
            return [[*inside(1), *self.launcher, self.program, *common, *self.arguments]]
        def command(rank):
            host = self.laboratory.host_of(rank)
            filled = [word.format(folder=folder, address=self.laboratory.address(host))
                      for word in self.arguments]
            return [*inside(host), self.program, *common, *filled,
                    "--rank", str(rank), "--size", str(ranks)]
        return [command(rank) for rank in range(ranks)]


class Agent(Spread):
    """For a launcher that takes one word for what it reaches other hosts by."""

    def commands(self, ranks, common, folder):
        agent = folder / "agent"
        agent.write_text(f'#!/bin/sh\nexec {NETLAB} ssh "$@"\n', encoding="utf-8")
        agent.chmod(0o755)
        return [[word.format(folder=folder) for word in command]
                for command in super().commands(ranks, common, folder)]


def named_hosts(laboratory):
    """"10.77.0.1:2,10.77.0.2:1" for 2 + 1 ranks."""
    return ",".join(f"{laboratory.address(host)}:{ranks}"
                    for host, ranks in enumerate(laboratory.ranks_of, 1))


def ringfold(places, laboratory):
    program = places.built("ringfold", "a build")
    yield Spread("ringfold", "auto", program, laboratory=laboratory)
    if laboratory.rails > 1:
        rails = ",".join(f"eth{rail}" for rail in range(laboratory.rails))
        yield Spread("ringfold", "rails", program, laboratory=laboratory,
                     environment=(("RINGFOLD_INTERFACES", rails),))
    wheel = places.wheels / "ucx"
    if (wheel / "complete").exists():
        folder = next(wheel.glob("lib/python3*/site-packages/libucx/lib"))
        yield Spread("ringfold", "ucx1.22", program, laboratory=laboratory,
                     environment=(("LD_LIBRARY_PATH", str(folder)),))


def gloo(places, laboratory):
    program = places.built("gloo", "libgloo-dev")
    for algorithm, quick in (("ring", True), ("bcube", False)):
        yield Spread("gloo", algorithm, program, quick=quick, laboratory=laboratory, arguments=(
            "--algorithm", algorithm, "--store", "{folder}", "--address", "{address}"))


def open_mpi(library, program, start, laboratory):
    tcp = {"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": INTERFACE}
    tuned = {**tcp, "coll_tuned_use_dynamic_rules": "1"}
    for name, quick, parameters in (
            ("default", True, tcp),
            ("segmented_ring", True, {**tuned, "coll_tuned_allreduce_algorithm": "5",
                                      "coll_tuned_allreduce_algorithm_segmentsize": "1048576"}),
            ("recursive_doubling", False, {**tuned, "coll_tuned_allreduce_algorithm": "3"})):
        words = [word for pair in parameters.items() for word in ("--mca", *pair)]
        yield Spread(library, name, program, (*start, *words), quick=quick, laboratory=laboratory)


def openmpi4(places, laboratory):
    root = ("--allow-run-as-root",) if os.getuid() == 0 else ()
    start = (libraries.launcher("mpirun.openmpi"), *root, "--host", named_hosts(laboratory),
             "-np", str(laboratory.ranks), "--bind-to", "none", "--mca", "plm_rsh_agent",
             f"{NETLAB} ssh", "--mca", "oob_tcp_if_include", INTERFACE,
             "--mca", "mpi_yield_when_idle", "1")
    yield from open_mpi("openmpi4", places.built("openmpi4", "libopenmpi-dev"), start, laboratory)


def mpich4(places, laboratory):
    start = (libraries.launcher("mpirun.mpich"), "-hosts", named_hosts(laboratory),
             "-np", str(laboratory.ranks), "-bind-to", "none", "-launcher", "ssh",
             "-launcher-exec", "{folder}/agent", "-iface", INTERFACE)
    yield Agent("mpich4", "default", places.built("mpich4", "libmpich-dev"), start,
                environment=UCX_OVER_TCP, laboratory=laboratory)


def install(places):
    """Installs what is missing. Returns sentences on what could not be had."""
    troubles = libraries.install(places, {"ucx"})
    try:
        libraries.run([libraries.ROOT / "tools" / "packages", "iproute2", "ucx-utils"], "packages")
    except libraries.Absent as why:
        troubles.append(str(why))
    return troubles


LIBRARIES = {function.__name__: function for function in (ringfold, gloo, openmpi4, mpich4)}
