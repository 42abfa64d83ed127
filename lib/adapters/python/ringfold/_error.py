class Error(RuntimeError):
    """What went wrong, in the library's words. `code` is "invalid_argument", "unsupported",
    "mismatch", "timeout", "peer_lost", "aborted", "system" or "internal"."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"
