"""A context manager that passes an error from one thread to another."""

from types import TracebackType


class ErrorCapture:
    """Stores any error that its block raises, including `SystemExit`, so that another thread can report it.

    Concurrency: read `error` only after the thread has signaled that the block ended.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Store the error and suppress it."""
        del kind, trace
        self.error = error
        return error is not None
