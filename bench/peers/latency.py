"""UCX's own one-way latency between two hosts of a laboratory: what a step costs at least."""
import shutil
import subprocess
import time

from hosts import UCX_OVER_TCP
from libraries import Absent

PORT = "13400"


def parse(output):
    """Median of one way, in microseconds, from what ucx_perftest -f prints."""
    for line in reversed(output.splitlines()):
        words = line.replace("Final:", "").split()
        if len(words) >= 4 and words[0].isdigit():
            return float(words[1])
    raise Absent(f"ucx_perftest printed no figure: {output.strip()[-200:]!r}")


def one_way_us(laboratory, size, messages=5000):
    """Between the first two hosts."""
    program = shutil.which("ucx_perftest")
    if not program:
        raise Absent("there is no ucx_perftest (ucx-utils); --install brings it")
    environment = {**laboratory.environment, **dict(UCX_OVER_TCP)}
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    with subprocess.Popen([*laboratory.inside(1), program, "-p", PORT], stdout=subprocess.DEVNULL,
                          **quiet) as server:
        try:
            time.sleep(0.5)
            done = subprocess.run(
                [*laboratory.inside(2), program, laboratory.address(1), "-p", PORT, "-t", "tag_lat",
                 "-s", str(size), "-n", str(messages), "-w", "200", "-f"], timeout=60, text=True,
                stdout=subprocess.PIPE, check=False, **quiet)
        except subprocess.TimeoutExpired as late:
            raise Absent("ucx_perftest does not end") from late
        finally:
            server.terminate()
    return parse(done.stdout)
