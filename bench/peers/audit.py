"""ringfold's own choice of an algorithm, between the hosts of a laboratory: measures the links, then
holds every algorithm against the choice that follows from them."""
import os
import secrets
import subprocess

PORT = 23457


def on_all(laboratory, command, **more):
    """A command of ringfold as every rank. Returns the worst exit status and what rank 0 printed."""
    settings = {"RINGFOLD_SIZE": str(laboratory.ranks), "RINGFOLD_SECRET": secrets.token_hex(16),
                "RINGFOLD_COORDINATOR": f"{laboratory.address(1)}:{PORT}", **more}
    ranks = []
    for rank in range(laboratory.ranks):
        ranks.append(subprocess.Popen(  # pylint: disable=consider-using-with
            [*laboratory.inside(laboratory.host_of(rank)), *command], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **settings, "RINGFOLD_RANK": str(rank)}))
    outputs = [rank.communicate()[0] for rank in ranks]
    worst = max(rank.returncode for rank in ranks)
    return worst, outputs[0] if worst == 0 else "".join(outputs)


def audit(laboratory, program, sizes, folder):
    """Prints what was measured. Returns whether the choice was right at all sizes."""
    file = folder / "machine.json"
    status, told = on_all(laboratory, [program, "doctor", "--measure", "--json", str(file)])
    print(told[told.find("links:"):] if status == 0 else told)
    good = status == 0
    for size in sizes if good else []:
        status, told = on_all(laboratory, [program, "bench", "--audit-choice", "-b", str(size),
                                           "-e", str(size)], RINGFOLD_MACHINE=str(file))
        print(told)
        good = good and status == 0
    return good
