"""Follow an adapter's operations."""

from collections import Counter
from collections.abc import AsyncGenerator

from services.kit.caller import Caller
from services.kit.errors import Draining
from services.model.application.adapter_queue import AdapterQueue
from services.model.application.directory import AdapterDirectory
from services.model.application.queues import Queues
from services.model.application.train_stream import Refused
from services.model.domain.result import OperationResult


class WatchOperations:
    """Tells results in the order of their numbers. For one event loop.

    A watcher has no queue of its own: it reads the record, so one that is slow takes no memory. What falls out of
    the record before it is told ends the watch.
    """

    def __init__(self, directory: AdapterDirectory, queues: Queues) -> None:
        """Use the parts given."""
        self._directory = directory
        self._queues = queues
        self._watched: Counter[AdapterQueue] = Counter()
        self._is_closed = False

    async def __call__(
        self, caller: Caller, adapter_id: str, *, after: int
    ) -> AsyncGenerator[OperationResult | Refused, None]:
        """Yield the outcome of each operation after number `after`: those on record, then those that come.

        Raises:
            AdapterNotFound: no such adapter of the caller, or it was deleted.
            OperationNotFound: an operation that is to be told next is no longer on record.
            Draining: the service ends.
        """
        self._directory.get(caller, adapter_id)
        async with self._queues.use(adapter_id) as queue:
            self._watched[queue] += 1
            try:
                number = after + 1
                while not self._is_closed:
                    self._directory.get(caller, adapter_id)
                    if number <= queue.sequence.last_number and queue.is_settled(number):
                        yield _outcome(queue, adapter_id, number)
                        number += 1
                    else:
                        await queue.wait_for_change()
            finally:
                self._watched -= Counter([queue])
        raise Draining()

    def close(self) -> None:
        """End every watch: by themselves they would hold up the end of the service."""
        self._is_closed = True
        for queue in self._watched:
            queue.tell_watchers()


def _outcome(queue: AdapterQueue, adapter_id: str, number: int) -> OperationResult | Refused:
    entry = queue.sequence.entry(number)
    if entry.result is not None:
        return entry.result
    assert entry.error is not None  # noqa: S101 - settled entries have one of the two
    return Refused(adapter_id, number, entry.error)
