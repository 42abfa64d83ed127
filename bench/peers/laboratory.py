"""Several hosts on this machine, for what is measured between hosts: the namespaces of netlab.sh."""
import os
import pathlib
import shutil
import subprocess

NETLAB = pathlib.Path(__file__).resolve().parent / "netlab.sh"
NEEDED = ["ip", "tc", "unshare", "awk"]


class Unavailable(Exception):
    """Why there can be no such hosts here."""


class Laboratory:
    """Hosts, joined by links of one speed. `ranks_of`: how many ranks run on each of them, by rank."""

    def __init__(self, ranks_of, rate=None, rails=1):
        self.ranks_of, self.rate, self.rails = tuple(ranks_of), rate, rails
        self.name = f"ringfold{os.getpid()}"
        self.environment = {**os.environ, "NETLAB": self.name}

    def __enter__(self):
        missing = [tool for tool in NEEDED if not shutil.which(tool)]
        if os.geteuid() != 0 or missing:
            raise Unavailable("network namespaces need root"
                              + (f" and {' '.join(missing)} (iproute2)" if missing else ""))
        self.netlab("create", len(self.ranks_of), self.rails)
        if self.rate:
            self.shape(self.rate)
        return self

    def __exit__(self, *_):
        self.netlab("destroy")

    @property
    def destroy_command(self):
        return ["env", f"NETLAB={self.name}", str(NETLAB), "destroy"]

    def netlab(self, *words):
        """What netlab.sh says to that."""
        done = subprocess.run([NETLAB, *map(str, words)], env=self.environment, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode != 0:
            raise Unavailable(f"netlab.sh {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout

    def shape(self, rate, rail=""):
        """Such as "1gbit"; both directions of every link, or of one rail."""
        self.netlab("shape", rate, rail)

    @property
    def ranks(self):
        return sum(self.ranks_of)

    def host_of(self, rank):
        """The host, from 1, of a rank."""
        for host, ranks in enumerate(self.ranks_of, 1):
            if rank < ranks:
                return host
            rank -= ranks
        raise IndexError(f"rank {rank} is on none of {self.ranks_of}")

    @staticmethod
    def address(host):
        return f"10.77.0.{host}"

    def inside(self, host):
        """Words in front of a command that is to run on the host."""
        return ["env", f"NETLAB={self.name}", str(NETLAB), "exec", str(host)]

    def sent(self, host, rail=""):
        """Bytes that have left the host, headers and all; by one rail if it is given."""
        return int(self.netlab("bytes", host, rail).split()[0])
