"""What a thread raised, kept for the one who waits for it."""

from types import TracebackType


class Raised:
    """Keeps what its block raises, whatever it is, so that another thread can raise or tell it; nothing is lost.

    Concurrency: read `error` after the thread said that it is done.
    """

    def __init__(self) -> None:
        """Begin with nothing raised."""
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keep the error; the thread goes on behind the block."""
        del kind, trace
        self.error = error
        return error is not None
