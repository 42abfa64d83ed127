"""The type stubs: what users write is accepted, mistakes are found, and the stubs tell the truth."""
import ast
import os
import subprocess
import sys

import ringfold
from ringfold import _core

RIGHT = """
import numpy
import ringfold

with ringfold.init(timeout=5) as comm:
    rank: int = comm.rank
    work: ringfold.Work = comm.all_reduce(numpy.ones(3), op="avg", wait=False)
    work.wait(timeout=1.5)
    factor: float = work.report().factor
    part = comm.split(color=0)
    if part is not None:
        part.barrier()
    sync = ringfold.GradientSync(comm, {"w": numpy.ones(3), "b": ((2, 3), "f4")}, compression="bf16")
    sync.begin(weight=8)
    sync.finish()
    names: list[str] = sync.report().unused
try:
    results: list[object] = ringfold.run(lambda comm: comm.rank, ranks=2)
except ringfold.RankError as error:
    print(error.rank)
except ringfold.Error as error:
    print(error.code.upper())
"""
WRONG = """
import ringfold
comm = ringfold.init()
comm.split(0).barrier()
comm.all_reduce([], op=3)
comm.size = "many"
"""


def mypy(folder, text):
    path = folder / "user.py"
    path.write_text(text)
    return subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder / "cache", path],
                          capture_output=True, text=True, check=False).stdout


def test_users_code(tmp_path):
    assert "Success" in mypy(tmp_path, RIGHT)
    wrong = mypy(tmp_path, WRONG)
    assert "Found 3 errors" in wrong, wrong
    assert 'has no attribute "barrier"' in wrong and 'argument "op"' in wrong.replace("Argument", "argument").lower()


def arguments(function):
    return [argument.arg for argument in function.args.args]


def test_the_stubs_are_those_of_the_module():
    """Every function of the extension module is in its stub with these arguments, and no other is."""
    with open(os.path.join(os.path.dirname(ringfold.__file__), "_core.pyi"), encoding="utf-8") as file:
        stub = ast.parse(file.read())
    seen = 0
    for scope, owner in [(stub, _core), *((node, getattr(_core, node.name)) for node in stub.body
                                          if isinstance(node, ast.ClassDef))]:
        functions = {node.name: node for node in scope.body if isinstance(node, ast.FunctionDef)}
        there = {name for name in vars(owner) if not name.startswith("_")
                 and not isinstance(vars(owner)[name], type)}
        assert set(functions) == there
        for name, function in functions.items():
            signature = getattr(vars(owner)[name], "__nb_signature__", None)
            if signature is not None:  # properties have none
                real = ast.parse(signature[0][0].replace("\\", "") + ": ...").body[0]
                assert arguments(function) == arguments(real), name
                seen += 1
    assert seen > 20
