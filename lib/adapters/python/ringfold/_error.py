from __future__ import annotations

from types import TracebackType


class Error(RuntimeError):
    """What went wrong, in the library's words. `code` is "invalid_argument", "unsupported",
    "mismatch", "timeout", "peer_lost", "aborted", "system" or "internal"."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


class EndsWithBlock:
    """What a `with` block closes when it is left, and aborts before if an exception that is not the
    library's own ends it: the other ranks must not wait for what will not come."""

    def abort(self, why: str = "abort() was called") -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None and not isinstance(error, Error):
            self.abort(f"{kind.__name__}: {error}")
        self.close()
