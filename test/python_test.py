#!/usr/bin/env python3
"""Installs the Python package of a build into an empty folder and runs pytest on files of test/python:
python_test.py BUILD PYTHON FILE..."""
import os
import subprocess
import sys
import tempfile


def main():
    build, python, files = sys.argv[1], sys.argv[2], sys.argv[3:]
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "python")
    name = "torch" if "torch_test.py" in files else "python"
    if not python:
        print(f"SKIPPED {name}: built without the Python package; tools/test builds it where PyPI "
              "can be reached")
        return 0
    if name == "torch" and subprocess.run([python, "-c", "import torch"], check=False,
                                          capture_output=True).returncode != 0:
        print(f"SKIPPED {name}: no torch in {python}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", folder,
                        "--tags", "python-runtime"], check=True)
        site = [path for path, folders, _ in os.walk(folder) if "ringfold" in folders
                and path.endswith("-packages")]
        environment = dict(os.environ, PYTHONPATH=site[0], PYTHONDONTWRITEBYTECODE="1",
                           RINGFOLD_TORCH_CACHE=os.path.join(build, "torch-cache"),
                           RINGFOLD_TEST_TOOL=os.path.join(build, "tools", "ringfold"))
        return subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs",
                               *(os.path.join(here, file) for file in files)], env=environment,
                              check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
