"""Compiles the backend against the installed torch, once for each version of it."""
from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from .. import _core  # noqa: F401  (loads the library)

_HERE = Path(__file__).parent
_PACKAGE = _HERE.parent
_SOURCES = ["backend.cpp", "call.h", "meet.h", "work.h"]
_NAME = "_ringfold_torch"


def load() -> ModuleType:
    """The compiled backend; the first process compiles, the others wait for it."""
    folder = _cache() / _key()
    library = folder / (_NAME + sysconfig.get_config_var("EXT_SUFFIX"))
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w", encoding="utf-8") as lock:  # goes with the process
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library)
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache() -> Path:
    own = os.environ.get("RINGFOLD_TORCH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ringfold" / "torch"


def _key() -> str:
    """Names what the binary depends on."""
    content = hashlib.sha256()
    for source in [*(_HERE / name for name in _SOURCES), _PACKAGE / "include/ringfold/c.h"]:
        content.update(source.read_bytes())
    return f"torch{torch.__version__}-{sys.implementation.cache_tag}-{content.hexdigest()[:16]}"


def _compile(library: Path) -> None:
    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    torch_libraries = Path(torch.__file__).parent / "lib"
    for unfinished in library.parent.glob("*.new"):  # of a process that was ended; we have the lock
        unfinished.unlink()
    made = library.with_suffix(f".{os.getpid()}.new")
    command = [
        *shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", "-O2", "-fPIC", "-shared",
        "-fvisibility=hidden", "-w", f"-DTORCH_EXTENSION_NAME={_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(word for folder in folders for word in ("-isystem", str(folder))),
        f"-I{_PACKAGE / 'include'}", str(_HERE / "backend.cpp"), "-o", str(made),
        f"-L{_PACKAGE}", "-lringfold-python",  # _core has loaded it already, from wherever it lies
        f"-L{torch_libraries}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ringfold.torch: compiling the backend for torch {torch.__version__} "
                           f"failed:\n{shlex.join(command)}\n{done.stderr[-4000:]}")
    made.rename(library)  # at once: nobody loads half of it
