"""A stretch of a program in which an adapter's verbs travel on one stream."""

from types import TracebackType

from twinkle_client.model.carriers import CallCarrier, StreamCarrier
from twinkle_client.model.operations import OperationLog
from twinkle_client.rpc import Connection, LoopThread, remote_method


class Pipeline:
    """Use it with `with` or `async with`; what it began is finished when the block ends."""

    def __init__(self, connection: Connection, operations: OperationLog) -> None:
        """Change nothing until entered."""
        self._connection = connection
        self._operations = operations
        self._stream = StreamCarrier(connection)

    @property
    def loop_thread(self) -> LoopThread:
        """Where its coroutines run."""
        return self._connection.loop_thread

    @remote_method
    async def begin(self) -> None:
        """Send what follows on the stream."""
        self._operations.carrier = self._stream

    @remote_method
    async def end(self) -> None:
        """Send what follows as calls again, and wait for what is on the stream."""
        self._operations.carrier = CallCarrier(self._connection)
        await self._stream.close()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    async def __aenter__(self) -> None:
        await self.begin.aio()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.end.aio()
