"""ringfold.run: a function on several local ranks."""
from __future__ import annotations

import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any

import cloudpickle  # type: ignore[import-untyped]

from . import _core
from ._error import Error

_WORKER = "from ringfold._run import _worker; _worker()"
_GRACE = 5.0  # seconds that the others have to end after a rank failed


class RankError(RuntimeError):
    """A rank's function failed: `rank`, and what it raised as `__cause__` (None if the process ended
    without a word)."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


def run(fn: Callable[..., Any], ranks: int, args: Sequence[Any] = (),
        timeout: float | None = None) -> list[Any]:
    """Calls fn(comm, *args) in `ranks` new processes on this host and returns what they returned, by
    rank. For notebooks and tests: the function may be defined anywhere, threads of this process do no
    harm (nothing is forked), and nothing stays behind. RankError if a rank fails; the others are
    ended. TimeoutError after `timeout` seconds."""
    if ranks < 1:
        raise Error("invalid_argument", f"ranks is {ranks}, accepted are 1 and more")
    job = cloudpickle.dumps((fn, tuple(args)))
    deadline = time.monotonic() + timeout if timeout is not None else None
    workers: list[_Rank] = []
    try:
        for rank in range(ranks):
            workers.append(_Rank(rank))
        workers[0].tell((0, ranks, None, job))
        unique = workers[0].hear(deadline) if ranks > 1 else None
        if ranks == 1 or isinstance(unique, bytes):
            for worker in workers[1:]:
                worker.tell((worker.rank, ranks, unique, job))
        else:
            workers[0].answer = unique
        _collect(workers, deadline)
    finally:
        for worker in workers:
            worker.end()
    return [worker.result() for worker in workers]


class _Rank:
    """A process, the pipe that it hears from and the one that it answers through."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.answer: Any = None  # ("returned", pickle) or ("raised", pickle, text); None: no word
        answers, theirs = os.pipe()
        environment = dict(os.environ, RINGFOLD_PYTHON_PATH=os.pathsep.join(sys.path))
        environment.pop("PYTHONSTARTUP", None)
        try:
            self.process = subprocess.Popen([sys.executable, "-c", _WORKER, str(theirs)],
                                            stdin=subprocess.PIPE, pass_fds=[theirs],
                                            env=environment)
        finally:
            os.close(theirs)
        self.answers = os.fdopen(answers, "rb")

    def tell(self, job: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(_framed(pickle.dumps(job)))
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already, which its silence will tell

    def hear(self, deadline: float | None) -> Any:
        """The next thing it says; None if it ends instead."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            if not selector.select(_left(deadline)):
                raise TimeoutError(f"ringfold.run: rank {self.rank} did not start in time")
        return _read(self.answers)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.answers.close()
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass

    def result(self) -> Any:
        return pickle.loads(self.answer[1])

    def error(self) -> RankError | None:
        """Why it failed, if it did. REQUIRES that it has answered or ended."""
        if self.answer is None:
            status = self.process.wait()
            how = (f"ended by signal {signal.Signals(-status).name}" if status < 0
                   else f"ended with status {status}")
            return RankError(self.rank, f"the process {how} before the function returned")
        if self.answer[0] == "returned":
            return None
        error = RankError(self.rank, self.answer[2])
        try:
            error.__cause__ = pickle.loads(self.answer[1])
        except Exception:  # of a class that cannot be made again here: the text has it all
            pass
        return error


def _collect(workers: list[_Rank], deadline: float | None) -> None:
    """Takes the answers. Once one has failed the others have a moment to say why they did, and the one
    with the best reason is raised: not an Error that only tells of another rank's end."""
    errors: list[RankError] = []
    with selectors.DefaultSelector() as selector:
        open_ranks = [worker for worker in workers if worker.answer is None]
        errors += [error for worker in workers if worker.answer and (error := worker.error())]
        for worker in open_ranks:
            selector.register(worker.answers, selectors.EVENT_READ, worker)
        until = deadline
        while selector.get_map():
            ready = selector.select(_left(until))
            if not ready and errors:
                break
            if not ready:
                raise TimeoutError("ringfold.run: " + ", ".join(
                    f"rank {key.data.rank}" for key in selector.get_map().values())
                    + " did not return in time")
            for key, _ in ready:
                selector.unregister(key.fileobj)
                worker = key.data
                worker.answer = _read(worker.answers)
                error = worker.error()
                if error is not None and not errors:
                    until = time.monotonic() + _GRACE
                if error is not None:
                    errors.append(error)
    if errors:
        own = [error for error in errors if not isinstance(error.__cause__, Error)
               or error.__cause__.code not in ("aborted", "peer_lost")]
        raise (own or errors)[0]


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _framed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _read(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        return None
    data = stream.read(struct.unpack("<Q", head)[0])
    return pickle.loads(data)


def _worker() -> None:
    """The main program of a rank."""
    answers = os.fdopen(int(sys.argv[1]), "wb")
    sys.path[:] = os.environ.pop("RINGFOLD_PYTHON_PATH").split(os.pathsep)
    job = _read(sys.stdin.buffer)
    if job is None:
        return  # the parent gave up
    sys.stdin = open(os.devnull, encoding="utf-8")

    def say(what: Any) -> None:
        answers.write(_framed(pickle.dumps(what)))
        answers.flush()

    try:
        rank, size, unique, pickled = job
        if rank == 0 and size > 1:
            unique = _core.unique_id()
            say(unique)
        fn, args = pickle.loads(pickled)
        from . import Communicator

        comm = Communicator(_core.init(unique, rank, size, 0, 0, 0, "auto", None) if size > 1
                            else _core.init(_core.unique_id(), 0, 1, 0, 0, 0, "auto", None))
        with comm:
            result = fn(comm, *args)
        say(("returned", cloudpickle.dumps(result)))
    except BaseException as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        whole = text + "\n" + traceback.format_exc()
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:  # what it refers to cannot leave the process
            pickled = b""
        say(("raised", pickled, whole))
        os._exit(1)
