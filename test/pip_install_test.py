#!/usr/bin/env python3
"""`pip install .` to its end, in a virtual environment of its own: pip_install_test.py SOURCE PYTHON.

From a source distribution where this is a git checkout, so that what it lacks is missed; then the installed
package, away from the sources: what lies in it, ranks that work together, and `import torch` that finds the
backend by its entry point (the torch of PYTHON's environment, if it has one).
"""
import glob
import os
import subprocess
import sys
import tarfile
import tempfile

FILES = ["__init__.py", "_core.pyi", "py.typed", "include/ringfold/c.h", "torch/backend.cpp", "torch/call.h",
         "torch/meet.h", "torch/work.h", "torch/_build.py"]

RANKS_WORK = """
import importlib.metadata, os, ringfold
def fn(comm):
    import numpy
    return float(comm.all_reduce(numpy.full(1000, comm.rank + 1.0), op="avg")[0])
assert ringfold.run(fn, ranks=2) == [1.5, 1.5]
there = os.path.dirname(ringfold.__file__)
for name in FILES + [os.path.basename(ringfold._core.__file__), "libringfold-python.so"]:
    assert os.path.getsize(os.path.join(there, name)) > 0 or name == "py.typed", name
entries = [e for e in importlib.metadata.entry_points(group="torch.backends") if e.name == "ringfold"]
entries[0].load()()  # without torch it does nothing, but does not fail either
print("ringfold", importlib.metadata.version("ringfold"), "works")
"""

TORCH_FINDS_IT = """
import sys, torch
assert "ringfold" not in sys.modules  # known, but not loaded before it is used
import torch.distributed as dist
dist.init_process_group("ringfold", init_method="file://" + sys.argv[1], rank=0, world_size=1)
x = torch.full((10,), 2.0)
dist.all_reduce(x)
assert (x == 2).all() and dist.get_backend() == "ringfold"
dist.destroy_process_group()
print("torch", torch.__version__, "finds it")
"""


def run(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                          **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout[-6000:]}")
    return done.stdout


def what_to_install(source, python, folder):
    """The source distribution, or the folder where none can be made."""
    if not os.path.exists(os.path.join(source, ".git")):
        return source
    make = f"import mesonpy; mesonpy.build_sdist({folder!r})"
    run(python, "-c", make, cwd=source)
    archive = glob.glob(os.path.join(folder, "ringfold-*.tar.gz"))[0]
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    assert any(name.endswith("lib/adapters/torch/backend.cpp") for name in names), names
    return archive


def main():
    source, python = sys.argv[1:]
    if not python:
        print("SKIPPED pip_install: built without the Python package; tools/test builds it where PyPI can "
              "be reached")
        return
    with tempfile.TemporaryDirectory() as folder:
        venv = os.path.join(folder, "venv")
        run("python3", "-m", "venv", venv)
        fresh = os.path.join(venv, "bin", "python3")
        asked = subprocess.run([fresh, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "meson-python"],
                               capture_output=True, text=True, check=False)
        if asked.returncode != 0:
            print("SKIPPED pip_install: PyPI cannot be reached:", asked.stderr.strip().splitlines()[-1])
            return
        # Without the device kernels, which take longer than everything else.
        run(fresh, "-m", "pip", "install", "-q", "--config-settings=setup-args=-Dcuda=disabled", "numpy",
            what_to_install(source, python, folder))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        print(run(fresh, "-c", f"FILES = {FILES!r}" + RANKS_WORK, cwd=folder, env=environment).strip())
        torch = subprocess.run([python, "-c", "import torch; print(torch.__path__[0])"], capture_output=True,
                               text=True, check=False).stdout.strip()
        if not torch:
            print("no torch to be asked")
            return
        # Behind the packages that were just installed.
        site = glob.glob(os.path.join(venv, "lib", "python3*", "site-packages"))[0]
        with open(os.path.join(site, "torch_of_the_build.pth"), "w", encoding="utf-8") as path:
            path.write(os.path.dirname(torch) + "\n")
        environment["RINGFOLD_TORCH_CACHE"] = os.path.join(folder, "torch-cache")
        print(run(fresh, "-W", "ignore", "-c", TORCH_FINDS_IT, os.path.join(folder, "store"), cwd=folder,
                  env=environment).strip())


if __name__ == "__main__":
    main()
