"""The gradient synchroniser."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ._error import EndsWithBlock, Error

if TYPE_CHECKING:
    from . import Communicator, _core


@dataclass(frozen=True)
class SyncReport:
    """The latest step that was synchronised, on this rank. `unused` names the parameters that were not
    ready and counted as zeros; the seconds are those in which a bucket travelled, and of them those
    for which finish() waited."""

    divisor: float
    unused: list[str]
    buckets: int
    copied_bytes: int
    gradient_bytes: int
    bytes_sent: int
    busy_seconds: float
    exposed_seconds: float


class GradientSync(EndsWithBlock):
    """Averages gradients while the rest of backward still computes.

        sync = ringfold.GradientSync(comm, {"weight": dw, "bias": db})    # once, on all ranks
        sync.begin()                                                       # every step
        ...; sync.ready("bias"); ...; sync.ready("weight")                 # as backward comes to them
        sync.finish()                                                      # the averages are there

    Each gradient is an array of floats in host memory, averaged where it lies, or (shape, dtype): then it
    lives in bucket storage, is sent without a copy, and gradient() has it. Buckets are filled from the
    last parameter to the first, the first of `first_bytes` and the others of `bucket_bytes` (0: 1 MiB and
    25 MiB), and leave as soon as they are full, from a thread of their own. All ranks give the same names,
    shapes and options: otherwise all get an Error that names the difference.

    `compression` is "none", "f16", "bf16", "i8", "f8e4m3" or "sparse" (of each bucket the share
    `sparse_share` of elements that is largest), each with error feedback. With `require_all`, finish()
    fails for parameters that were not ready; otherwise they count as zeros.

    Threads: ready() and abort() from any; everything else from one at a time. From its ready() to the end
    of finish() an array belongs to the synchroniser. finish() waits without the GIL, at most until the
    deadline of an operation.
    """

    def __init__(self, comm: Communicator, gradients: Mapping[str, Any], *, first_bytes: int = 0,
                 bucket_bytes: int = 0, require_all: bool = False, compression: str = "none",
                 sparse_share: float = 0.0) -> None:
        self._names = list(gradients)
        self._index = {name: i for i, name in enumerate(self._names)}
        self._arrays: list[Any] = [None if isinstance(g, tuple) else g for g in gradients.values()]
        self._made: _core.Gradients | None = comm._comm.gradients(
            self._names, [_described(g) for g in gradients.values()], first_bytes, bucket_bytes,
            require_all, compression, sparse_share)
        for i, given in enumerate(gradients.values()):
            if isinstance(given, tuple):
                shape, dtype = given
                self._arrays[i] = self._sync.memory(i).view(dtype).reshape(shape)

    def __enter__(self) -> GradientSync:
        return self

    def begin(self, weight: float | None = None) -> None:
        """Begins a step, which averages by the number of ranks, or by the ranks' weights, on all alike:
        sum(weight * gradient) / sum(weight). A rank without data joins with weight 0."""
        self._sync.begin(weight)

    def ready(self, name: str) -> None:
        """The gradient is final. Does not wait."""
        self._sync.ready(self._place(name))

    def finish(self) -> None:
        """Waits for all averages."""
        self._sync.finish()

    def accumulate(self, on: bool) -> None:
        """While on, steps send nothing; the first one after that sends what has piled up in the
        gradients. Takes effect with begin(); all ranks switch alike."""
        self._sync.accumulate(on)

    def gradient(self, name: str) -> Any:
        """The array of that name; one in bucket storage is of numpy, and zero at first."""
        return self._arrays[self._place(name)]

    def report(self) -> SyncReport:
        """Of the latest step that was synchronised."""
        told = self._sync.report()
        return SyncReport(**{**told, "unused": [self._names[i] for i in told["unused"]]})

    def abort(self, why: str = "abort() was called") -> None:
        """Ends the step under way, and all later ones, on every rank."""
        self._sync.abort(why)

    def close(self) -> None:
        """Gives the synchroniser up, on all ranks if in the middle of a step; every later call is
        refused. Bucket storage stays for as long as an array of it is in use."""
        self._made = None
        self._arrays = []

    def _place(self, name: str) -> int:
        if self._made is None or name not in self._index:
            raise Error("invalid_argument", f"there is no gradient {name!r} here")
        return self._index[name]

    @property
    def _sync(self) -> _core.Gradients:
        if self._made is None:
            raise Error("invalid_argument", "this gradient synchroniser was closed")
        return self._made


def _described(gradient: Any) -> Any:
    """What the extension module takes."""
    if not isinstance(gradient, tuple):
        return gradient
    import numpy
    shape, dtype = gradient
    return numpy.dtype(dtype).name, prod(shape)
