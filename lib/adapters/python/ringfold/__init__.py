"""Collectives between processes, on arrays where they lie.

    import numpy, ringfold

    with ringfold.init() as comm:                 # started by ringfold run, torchrun, mpirun or srun
        gradient = numpy.ones(1000, "f4")
        comm.all_reduce(gradient, out=gradient, op="avg")

Arrays are those of numpy and everything with the buffer protocol, `__dlpack__` (torch, cupy, jax) or
`__cuda_array_interface__`; nothing is copied. They must be contiguous and, where they are written to,
writable: anything else is refused. float16, bfloat16 and both float8 (ml_dtypes, torch) included;
complex numbers have sums and averages, truth values have min and max, other types are moved only.

Every operation takes wait=True, or False to get a Work to wait for: meanwhile the arrays belong to the
library, which keeps them alive. Waiting gives up the GIL, and KeyboardInterrupt ends it (the operation
goes on). Arrays of CUDA are used in the order of `stream`, a cudaStream_t as a number; without it that
of the array's `__cuda_array_interface__`, else the default stream.

Threads: any may call, but all ranks must make the calls on one communicator in the same order.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _core
from ._error import EndsWithBlock, Error
from ._gradients import GradientSync, SyncReport
from ._run import RankError, run

__version__ = _core.version()
__all__ = ["Communicator", "Error", "GradientSync", "RankError", "Report", "SyncReport", "Work", "init", "run",
           "unique_id"]


@dataclass(frozen=True)
class Report:
    """What an operation did, and what the bandwidth model says of it. Bytes are those that this rank
    sent; `factor` is 2(N-1)/N for all_reduce. A `measured_seconds` of 0 was too short to be timed."""

    algorithm: str
    transport: str
    steps: int
    bytes_sent: int
    bytes_model: int
    factor: float
    chunk_bytes: int
    piece_bytes: int
    predicted_seconds: float
    measured_seconds: float


class Work:
    """An operation that was started with wait=False. Dropping it does not stop the operation."""

    def __init__(self, work: _core.Work) -> None:
        self._work = work

    def wait(self, timeout: float | None = None) -> Any:
        """Waits, and returns what the call would have with wait=True. Error with code "timeout" if
        `timeout` seconds pass first: then the operation is still running, unless done() says so."""
        return self._work.wait(timeout)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._work.done()

    def report(self) -> Report:
        """Complete once it is done."""
        return Report(**self._work.report())


def _empty(x: Any, shape: tuple[int, ...]) -> Any:
    """A new array of x's kind and type, on its device."""
    library = type(x).__module__.partition(".")[0]
    if library == "torch":
        return x.new_empty(shape)
    if library in ("numpy", "cupy"):
        return sys.modules[library].empty(shape, x.dtype)
    raise Error("invalid_argument", f"out= is needed: new arrays are made of numpy, cupy and torch "
                f"only, and x is a {type(x).__name__}")


class Communicator(EndsWithBlock):
    """The ranks that work together, made by init(), split() or shrink(). At the end of a `with` block
    it is closed, or aborted if the block raised, so that no other rank waits in vain."""

    def __init__(self, comm: _core.Comm) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size

    def __repr__(self) -> str:
        return f"<ringfold.Communicator rank {self.rank} of {self.size}>"

    def __enter__(self) -> Communicator:
        return self

    # ---- Collectives; `out` may be x itself: in place ----

    def all_reduce(self, x: Any, out: Any = None, op: str = "sum", wait: bool = True, *,
                   factor: float = 1.0, stream: int | None = None) -> Any:
        """Reduces the ranks' x element by element into out (None: a new array) on all of them. `op`
        is sum, prod, max, min, avg, or premul_sum: every x is multiplied by its rank's `factor`."""
        out = _empty(x, tuple(x.shape)) if out is None else out
        return _ended(self._comm.all_reduce(x, out, op, factor, stream), wait)

    def reduce(self, x: Any, out: Any = None, op: str = "sum", root: int = 0, wait: bool = True, *,
               factor: float = 1.0, stream: int | None = None) -> Any:
        """The same with the result on `root` only; the others get None."""
        if self.rank != root:
            out = None
        elif out is None:
            out = _empty(x, tuple(x.shape))
        return _ended(self._comm.reduce(x, out, op, factor, root, stream), wait)

    def reduce_scatter(self, x: Any, out: Any = None, op: str = "sum", wait: bool = True, *,
                       factor: float = 1.0, stream: int | None = None) -> Any:
        """As all_reduce, but every rank gets its part only: x has `size` equal parts, one after the
        other. In place: out is part `rank` of x."""
        if out is None:
            out = _empty(x, (self._part(x), *tuple(x.shape)[1:]))
        return _ended(self._comm.reduce_scatter(x, out, op, factor, stream), wait)

    def all_gather(self, x: Any, out: Any = None, wait: bool = True, *,
                   stream: int | None = None) -> Any:
        """The ranks' x, one after the other; a new array has the shape (size, *x.shape). In place: x
        is part `rank` of out."""
        out = _empty(x, (self.size, *x.shape)) if out is None else out
        return _ended(self._comm.all_gather(x, out, stream), wait)

    def broadcast(self, x: Any, root: int = 0, wait: bool = True, *,
                  stream: int | None = None) -> Any:
        """x of `root` into x everywhere."""
        return _ended(self._comm.broadcast(x, root, stream), wait)

    def gather(self, x: Any, out: Any = None, root: int = 0, wait: bool = True, *,
               stream: int | None = None) -> Any:
        """As all_gather on `root`; the others get None."""
        if self.rank != root:
            out = None
        elif out is None:
            out = _empty(x, (self.size, *x.shape))
        return _ended(self._comm.gather(x, out, root, stream), wait)

    def scatter(self, x: Any, out: Any, root: int = 0, wait: bool = True, *,
                stream: int | None = None) -> Any:
        """Part r of x on `root` goes into out of rank r; x is None elsewhere."""
        return _ended(self._comm.scatter(x if self.rank == root else None, out, root, stream), wait)

    def all_to_all(self, x: Any, out: Any = None, wait: bool = True, *,
                   stream: int | None = None) -> Any:
        """Part r of x goes to rank r, part r of out comes from rank r. Not in place."""
        out = _empty(x, tuple(x.shape)) if out is None else out
        return _ended(self._comm.all_to_all(x, out, stream), wait)

    def send(self, x: Any, to: int, wait: bool = True, *, stream: int | None = None) -> Any:
        """To one rank, which calls recv with an array of the same type and number of elements."""
        return _ended(self._comm.send(x, to, stream), wait)

    def recv(self, out: Any, source: int, wait: bool = True, *, stream: int | None = None) -> Any:
        """From one rank; messages of a pair arrive in order."""
        return _ended(self._comm.recv(out, source, stream), wait)

    def barrier(self, wait: bool = True) -> Any:
        """Done when every rank has called it."""
        return _ended(self._comm.barrier(), wait)

    # ---- Communicators ----

    def split(self, color: int, key: int = 0) -> Communicator | None:
        """Ranks of equal colour form a new communicator, ordered by (key, rank). Every rank calls it;
        with a negative colour it gets None."""
        part = self._comm.split(color, key)
        return Communicator(part) if part is not None else None

    def shrink(self, exclude: Sequence[int]) -> Communicator:
        """The ranks that are not in `exclude` form a new communicator; only they call it, also when
        this one has failed."""
        return Communicator(self._comm.shrink(list(exclude)))

    def abort(self, why: str = "abort() was called") -> None:
        """Ends all operations of this communicator on all ranks with code "aborted"."""
        self._comm.abort(why)

    def health(self) -> None:
        """Error if this communicator has failed: what the first failure was."""
        self._comm.health()

    def close(self) -> None:
        """Gives the communicator up; every later call is refused."""
        self._comm.close()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return self._comm.bytes_sent()

    @property
    def transport(self) -> str:
        """What collectives use: "region", "shm", "ucx", "shm+ucx", "loopback" or "self"."""
        return self._comm.transport()

    def _part(self, x: Any) -> int:
        first: int = x.shape[0] if len(x.shape) > 0 else 1
        if first % self.size != 0:
            raise Error("invalid_argument", f"x has a first dimension of {first}, which does not make "
                        f"{self.size} equal parts")
        return first // self.size


def _ended(work: _core.Work, wait: bool) -> Any:
    return work.wait() if wait else Work(work)


def init(*, id: bytes | None = None, rank: int = 0, size: int = 1, timeout: float = 0,
         start_timeout: float = 0, piece_bytes: int = 0, algorithm: str = "auto",
         transports: str | None = None) -> Communicator:
    """Meets the other ranks: those of the environment that `ringfold run`, torchrun, mpirun or srun
    made, or `size` of them that know an id of unique_id(), which rank 0's process has made.

    Seconds and bytes; 0 means the setting in the environment or the default. `timeout` is every
    operation's deadline, `start_timeout` that of the start."""
    return Communicator(_core.init(id, rank, size, timeout, start_timeout, piece_bytes, algorithm,
                                   transports))


def unique_id() -> bytes:
    """An id for init(); rank 0 must be initialised in this process."""
    return _core.unique_id()
