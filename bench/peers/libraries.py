"""The libraries that can be measured: where they come from, how they are built and started.

To add one: a program like mpi.cpp, and a function here that yields its configurations.
"""
import dataclasses
import os
import pathlib
import shutil
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CORES = len(os.sched_getaffinity(0))

DEBIAN = ["openmpi-bin", "libopenmpi-dev", "mpich", "libmpich-dev", "libgloo-dev", "python3-venv"]
WHEELS = {  # folder: what pip installs there; apart from each other, for most bring a libmpi
    "openmpi5": ["openmpi==5.*"],
    "mpich5": ["mpich==5.*"],
    "intel": ["impi-devel", "oneccl-devel"],
    "ucx": ["libucx-cu12==1.22.*"],  # the newest; Debian has 1.13
}


class Absent(Exception):
    """Why a library cannot be measured here."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to run one library."""
    library: str
    name: str
    program: str
    launcher: tuple = ()  # words in front of the program; empty: every rank is started by itself
    crowded: tuple = ()  # more of them where there are more ranks than cores
    arguments: tuple = ()  # behind the program; {folder} is an empty folder
    environment: tuple = ()  # (name, value)
    quick: bool = True  # also in a quick run
    ranks: int = 0  # only with so many; 0: any

    @property
    def title(self):
        """As --only takes it."""
        return "/".join((self.library, self.name))

    def commands(self, ranks, common, folder):
        """The commands that start it: one, or one a rank."""
        words = [self.program, *common, *(word.format(folder=folder) for word in self.arguments)]
        if self.launcher:
            launcher = self.launcher + (self.crowded if ranks > CORES else ())
            return [[word.format(ranks=ranks) for word in launcher] + words]
        return [words + ["--rank", str(rank), "--size", str(ranks)] for rank in range(ranks)]


@dataclasses.dataclass(frozen=True)
class Places:
    """Folders: of meson's build, and of what comes from PyPI."""
    build: pathlib.Path

    @property
    def wheels(self):
        return self.build / "peers-wheels"

    def built(self, name, packages):
        """A program that meson has built, if the library was there."""
        program = self.build / "bench" / "peers" / ("peers_" + name)
        if not program.exists():
            raise Absent(f"not built: needs {packages}; --install brings it")
        return str(program)

    def wheel(self, name):
        folder = self.wheels / name
        if not (folder / "complete").exists():
            raise Absent(f"needs {' '.join(WHEELS[name])} from PyPI; --install brings it")
        return folder


# ---- Installing and building ----

def run(command, what):
    """Runs a command to its end; its output is of interest only when it fails."""
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise Absent(f"{what}: {' '.join(map(str, command[:4]))} ... ended with "
                     f"{done.returncode}:\n{done.stdout[-2000:]}")


def install(places, wanted):
    """Installs what is missing. Returns sentences on what could not be had."""
    troubles = []
    try:
        run([ROOT / "tools" / "packages", *DEBIAN, "python3-matplotlib"], "Debian packages")
    except Absent as why:
        troubles.append(str(why))
    for name, requirements in WHEELS.items():
        folder = places.wheels / name
        if name not in wanted or (folder / "complete").exists():
            continue
        try:
            run(["python3", "-m", "venv", "--clear", folder], name)
            run([folder / "bin" / "pip", "install", "-q", *requirements], name)
            (folder / "complete").touch()
        except Absent as why:
            troubles.append(str(why))
    return troubles


def build(places, look_again):
    """Builds meson's programs: ours, the limits, and those for Debian's libraries. `look_again`: some
    of these may be new."""
    folder = places.build
    if not (folder / "build.ninja").exists():
        run(["meson", "setup", folder, ROOT, "--buildtype=release"], "meson setup")
    elif look_again:
        run(["meson", "setup", "--reconfigure", folder, ROOT], "meson setup")
    targets = subprocess.run(["ninja", "-C", str(folder), "-t", "targets", "all"], check=True,
                             stdout=subprocess.PIPE, text=True).stdout
    programs = [line.split(":")[0] for line in targets.splitlines()
                if line.startswith("bench/peers/peers_") and line.endswith("LINKER")]
    run(["ninja", "-C", folder, *programs], "build")


def compiled(wheel, program, library):
    """The program for a library from PyPI, compiled against it if that was not done yet."""
    sources = [HERE / name for name in (program + ".cpp", "harness.cpp", "team.cpp")]
    headers = [HERE / "harness.h", HERE / "team.h", HERE / "load.h",
               ROOT / "tools" / "line_latency.h"]
    target = wheel / ("peers_" + program)
    newest = max(path.stat().st_mtime for path in sources + headers)
    if not target.exists() or target.stat().st_mtime < newest:
        run(["g++", "-std=c++20", "-O3", "-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX", f"-I{ROOT}",
             "-isystem", wheel / "include", *sources, "-o", target, f"-L{wheel / 'lib'}",
             "-l" + library, "-lmpi", f"-Wl,-rpath,{wheel / 'lib'}"], program)
    return str(target)


def launcher(name):
    """A launcher in PATH."""
    found = shutil.which(name)
    if not found:
        raise Absent(f"there is no {name}; --install brings it")
    return found


# ---- What there is ----

def ringfold(places):
    program = places.built("ringfold", "a build")
    yield Configuration("ringfold", "auto", program)
    yield Configuration("ringfold", "registered", program, arguments=("--memory", "own"))
    yield Configuration("ringfold", "ring", program, arguments=("--transports", "shm"))


def limits(places):
    program = places.built("limits", "a build")
    yield Configuration("limits", "memcpy", program, arguments=("--what", "memcpy"))
    yield Configuration("limits", "cross_read", program, arguments=("--what", "cross_read"),
                        ranks=2)
    yield Configuration("limits", "direct2", program, arguments=("--what", "direct2"), ranks=2)


def open_mpi(library, program, mpirun, crowded):
    """Its defaults and the algorithms that are best at some size."""
    root = ("--allow-run-as-root",) if os.getuid() == 0 else ()
    start = (mpirun, *root, "-np", "{ranks}", "--bind-to", "none")
    tuned = {"pml": "ob1", "coll_tuned_use_dynamic_rules": "1"}
    for name, quick, parameters in (
            ("default", True, {}),
            ("ob1", False, {"pml": "ob1"}),
            ("recursive_doubling", False, {**tuned, "coll_tuned_allreduce_algorithm": "3"}),
            ("segmented_ring", True, {**tuned, "coll_tuned_allreduce_algorithm": "5",
                                      "coll_tuned_allreduce_algorithm_segmentsize": "262144"}),
            ("rabenseifner", False, {**tuned, "coll_tuned_allreduce_algorithm": "6"})):
        words = [word for pair in parameters.items() for word in ("--mca", *pair)]
        yield Configuration(library, name, program, (*start, *words), crowded, quick=quick)


def openmpi4(places):
    yield from open_mpi("openmpi4", places.built("openmpi4", "libopenmpi-dev"),
                        launcher("mpirun.openmpi"), ("--oversubscribe",))


def openmpi5(places):
    wheel = places.wheel("openmpi5")
    yield from open_mpi("openmpi5", compiled(wheel, "mpi", "mpi"), str(wheel / "bin" / "mpirun"),
                        ("--map-by", ":OVERSUBSCRIBE"))


def mpich(library, program, mpirun):
    start = (mpirun, "-np", "{ranks}", "-bind-to", "none")
    release_gather = {"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather",
                      "MPIR_CVAR_REDUCE_INTRANODE_BUFFER_TOTAL_SIZE": "1048576",
                      "MPIR_CVAR_BCAST_INTRANODE_BUFFER_TOTAL_SIZE": "1048576",
                      "MPIR_CVAR_COLL_SHM_LIMIT_PER_NODE": "262144"}
    for name, quick, variables in (
            ("default", True, {}),
            ("yield", False, {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}),
            ("release_gather", False, release_gather),
            ("reduce_scatter", False, {
                "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "reduce_scatter_allgather",
                "MPIR_CVAR_ALLREDUCE_DEVICE_COLLECTIVE": "0"})):
        yield Configuration(library, name, program, start, environment=tuple(variables.items()),
                            quick=quick)


def mpich4(places):
    yield from mpich("mpich4", places.built("mpich4", "libmpich-dev"), launcher("mpirun.mpich"))


def mpich5(places):
    wheel = places.wheel("mpich5")
    yield from mpich("mpich5", compiled(wheel, "mpi", "mpi"), str(wheel / "bin" / "mpirun"))


# It polls without ever yielding: hopeless with more ranks than cores.
INTEL_CROWDED = ("-genv", "I_MPI_THREAD_YIELD", "2")


def intel_start(wheel):
    environment = (("I_MPI_ROOT", str(wheel)), ("I_MPI_FABRICS", "shm"), ("I_MPI_PIN", "0"),
                   ("LD_LIBRARY_PATH", str(wheel / "lib")),
                   ("PATH", f"{wheel / 'bin'}:{os.environ['PATH']}"))
    # Not by mpirun, a script that would outlive us with all its ranks.
    return (str(wheel / "bin" / "mpiexec.hydra"), "-np", "{ranks}"), environment


def intelmpi(places):
    wheel = places.wheel("intel")
    start, environment = intel_start(wheel)
    yield Configuration("intelmpi", "default", compiled(wheel, "mpi", "mpi"), start, INTEL_CROWDED,
                        environment=environment)


def oneccl(places):
    wheel = places.wheel("intel")
    start, environment = intel_start(wheel)
    environment = (*environment, ("CCL_ROOT", str(wheel)))
    # Its workers want cores of their own, so nothing is bound.
    yield Configuration("oneccl", "default", compiled(wheel, "oneccl", "ccl"), start,
                        INTEL_CROWDED, arguments=("--bind", "0"), environment=environment)


def gloo(places):
    program = places.built("gloo", "libgloo-dev")
    for algorithm, bind, quick in (("ring", "0", True), ("bcube", "0", False),
                                   ("halving_doubling", "1", False)):
        yield Configuration("gloo", algorithm, program, quick=quick, arguments=(
            "--algorithm", algorithm, "--store", "{folder}", "--bind", bind))


LIBRARIES = {function.__name__: function for function in (
    ringfold, limits, openmpi4, openmpi5, mpich4, mpich5, intelmpi, oneccl, gloo)}
WHEEL_OF = {"openmpi5": "openmpi5", "mpich5": "mpich5", "intelmpi": "intel", "oneccl": "intel"}
