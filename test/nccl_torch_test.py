#!/usr/bin/env python3
"""PyTorch with our libnccl.so.2 before its own: nccl_torch_test.py LIBRARY.

Needs a CUDA build of torch, in this python or in the one named by RINGFOLD_TEST_PYTHON, but no GPU:
importing it binds every function of NCCL that it uses.
"""
import os
import re
import subprocess
import sys
import tempfile

BINDING = re.compile(r"binding file (\S+) \[\d+\] to (\S+) \[\d+\]: normal symbol `(p?nccl[A-Z]\w*)'")
SEE = "import torch, torch.distributed as d; print(torch.version.cuda, d.is_nccl_available())"


def main():
    library = os.path.realpath(sys.argv[1])
    python = os.environ.get("RINGFOLD_TEST_PYTHON", sys.executable)
    plain = subprocess.run([python, "-W", "ignore", "-c", SEE], capture_output=True, text=True)
    if plain.returncode != 0 or plain.stdout.startswith("None"):
        print("SKIPPED nccl_torch: no CUDA build of torch in", python)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        # Bound at once, like Python's extension modules: one function too few and the import fails.
        environment = dict(os.environ, LD_PRELOAD=library, LD_BIND_NOW="1", LD_DEBUG="bindings",
                           LD_DEBUG_OUTPUT=os.path.join(folder, "log"))
        ran = subprocess.run([python, "-W", "ignore", "-c", SEE], capture_output=True, text=True,
                             env=environment)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split()[-1] == "True", ran.stdout
        bound = {}
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as log:
                for line in log:
                    found = BINDING.search(line)
                    if found and "libtorch" in found.group(1):
                        bound[found.group(3)] = found.group(2)
    elsewhere = {name: path for name, path in bound.items() if os.path.realpath(path) != library}
    assert not elsewhere, elsewhere
    assert len(bound) >= 20 and "ncclAllReduce" in bound, sorted(bound)
    print(f"torch binds {len(bound)} functions of NCCL, all to {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
