"""The context manager that sends an adapter's operations on one stream."""

from types import TracebackType

from twinkle_client.model.operations import OperationLog
from twinkle_client.model.senders import StreamSender, UnarySender
from twinkle_client.rpc import Connection, LoopThread, remote_method


class Pipeline:
    """Sends operations on one stream inside a `with` or `async with` block, and waits for all results at its end."""

    def __init__(self, connection: Connection, operations: OperationLog) -> None:
        self._connection = connection
        self._operations = operations
        self._stream = StreamSender(connection)

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    @remote_method
    async def begin(self) -> None:
        """Send operations on the stream from now on."""
        self._operations.sender = self._stream

    @remote_method
    async def end(self) -> None:
        """Send operations as unary calls again, and wait for the results of the stream."""
        self._operations.sender = UnarySender(self._connection)
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
