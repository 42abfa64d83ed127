"""Starts the programs, gives them their jobs in turn, and leaves nothing behind.

A program's ranks meet in anonymous memory and get their jobs over a socket in the run's folder. Between its turns a program is stopped: some libraries poll for ever.

All of them stay in this session: Linux shares cores out between sessions first (sched_autogroup), so
that ranks in different ones could not yield to each other.
"""
import ctypes
import glob
import os
import pathlib
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time

# What MPI libraries leave in /dev/shm when they are killed.
REMAINS = ["vader_segment.*", "sm_segment.*", "mpich_*", "Intel_MPI_*", "ucx_shm_posix_*"]
SHM = "/dev/shm"


class Failed(Exception):
    """Why a program could not start or go on."""


class Workplace:
    """A folder for everything that lives as long as the run. All of it goes at the end, and what
    libraries leave in /dev/shm: a process of its own sees to that, also when this one is killed."""

    def __init__(self, at_end=None):
        self.at_end = at_end  # a command that clears up what else this run has made; may be repeated

    def __enter__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ringfold-peers-"))
        before = set(self.remains())
        end, self.life = os.pipe()
        self.cleaner = os.fork()
        if self.cleaner == 0:
            os.setsid()  # a Ctrl-C is not for it
            os.close(self.life)
            os.read(end, 1)  # returns when the run has ended, however it did
            self.clean(before)
            os._exit(0)
        os.close(end)
        return self

    def __exit__(self, *_):
        os.close(self.life)
        os.waitpid(self.cleaner, 0)

    def clean(self, before, seconds=5):
        """Removes what came after `before`, once the ranks that use it are gone."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (set(self.remains()) - before) & mapped_files():
            time.sleep(0.1)
        for path in set(self.remains()) - before - mapped_files():
            pathlib.Path(path).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.at_end:
            subprocess.run(self.at_end, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, check=False)

    @staticmethod
    def remains():
        """Such files of this user."""
        for pattern in REMAINS:
            for path in glob.glob(os.path.join(SHM, pattern)):
                try:
                    if os.stat(path).st_uid == os.getuid():
                        yield path
                except FileNotFoundError:
                    pass


def mapped_files():
    """Files in /dev/shm that a process still uses."""
    used = set()
    for maps in glob.glob("/proc/[0-9]*/maps"):
        try:
            with open(maps, encoding="utf-8", errors="replace") as file:
                used.update(line.split(maxsplit=5)[5].strip() for line in file if SHM in line)
        except OSError:
            pass
    return used


def die_with_parent():
    """In a child before it becomes the program: it ends with this process, however that ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Program:
    """All ranks of one configuration, waiting for jobs. Failed says why something went wrong."""

    def __init__(self, configuration, ranks, workplace):
        self.configuration, self.ranks = configuration, ranks
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=workplace.folder))
        self.meeting = os.memfd_create("ringfold-peers")
        self.processes, self.pids, self.connections, self.rank0 = [], [], [], None
        self.log = open(self.folder / "log", "w+b")  # pylint: disable=consider-using-with
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self, seconds=30):
        """Returns when all ranks are there."""
        jobs = self.folder / "jobs"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(jobs))
            listener.listen(self.ranks)
            listener.settimeout(0.1)
            common = ["--meeting", f"/proc/{os.getpid()}/fd/{self.meeting}", "--jobs", str(jobs)]
            files = self.folder / "files"
            files.mkdir()
            environment = {**os.environ, "TMPDIR": str(files),
                           **dict(self.configuration.environment)}
            for command in self.configuration.commands(self.ranks, common, files):
                self.processes.append(subprocess.Popen(  # pylint: disable=consider-using-with
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=self.log,
                    stderr=self.log, process_group=0, preexec_fn=die_with_parent))
            deadline = time.monotonic() + seconds
            while len(self.connections) < self.ranks:
                try:
                    self.welcome(listener.accept()[0])
                except TimeoutError:
                    self.check(deadline, f"{len(self.connections)} of {self.ranks} ranks started")
        self.signal(signal.SIGSTOP)

    def welcome(self, connection):
        """Takes the first line of a rank."""
        connection.settimeout(10)
        file = connection.makefile("r", encoding="utf-8")
        words = file.readline().split()
        self.connections.append(connection)
        if len(words) != 4:
            raise Failed(self.explain("a rank ended before it said who it is"))
        self.pids.append(int(words[3]))
        if words[1] == "0":
            self.rank0 = connection

    def check(self, deadline, state):
        """Raises Failed if a process has ended or time is up."""
        for process in self.processes:
            if process.poll() is not None:
                raise Failed(self.explain(f"ended with status {process.returncode}"))
        if time.monotonic() > deadline:
            raise Failed(self.explain(f"{state} when time was up"))

    def explain(self, what):
        """The sentence and the last words of the program."""
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().decode(errors="replace").splitlines()]
        last = [line for line in lines if line.strip("-= ")][-4:]
        return what + (": " + " | ".join(last)[:400] if last else "")

    def signal(self, number):
        """To all ranks that are still there."""
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def measure(self, size, place, budget_us, repetitions, seconds=120):
        """The line that answers this job."""
        self.signal(signal.SIGCONT)
        job = f"measure {size} {place} {budget_us:.0f} {repetitions}\n".encode()
        answer, deadline = b"", time.monotonic() + seconds
        try:
            with selectors.DefaultSelector() as selector:
                for connection in self.connections:
                    connection.sendall(job)
                    selector.register(connection, selectors.EVENT_READ)
                while not answer.endswith(b"\n"):
                    for key, _ in selector.select(0.2):
                        received = key.fileobj.recv(4096)
                        if not received:
                            raise Failed(self.explain(f"a rank ended at {size} B {place}"))
                        answer += received
                    self.check(deadline, f"no answer at {size} B {place}")
        except OSError as error:
            raise Failed(self.explain(f"{error} at {size} B {place}")) from error
        self.signal(signal.SIGSTOP)
        return answer.decode()

    def close(self):
        """Lets the ranks go; ends whatever has not gone by itself soon."""
        for connection in self.connections:
            connection.close()
        self.signal(signal.SIGCONT)
        deadline = time.monotonic() + (5 if len(self.pids) == self.ranks else 0)
        for end in (None, signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                if end is not None and process.poll() is None:
                    os.killpg(process.pid, end)
            if end == signal.SIGKILL:
                self.signal(end)
            for process in self.processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pass
            if all(process.poll() is not None for process in self.processes):
                break
            deadline = time.monotonic() + 2
        os.close(self.meeting)
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
