"""Drop an operation that still waits."""

from services.kit.caller import Caller
from services.model.application.directory import AdapterDirectory
from services.model.application.dispatcher import Dispatcher
from services.model.application.fill_batch import FillBatch
from services.model.application.queues import Queues


class CancelOperation:
    """Takes operations out of the queue; one that runs is never interrupted."""

    def __init__(
        self, directory: AdapterDirectory, queues: Queues, dispatcher: Dispatcher, fill_batch: FillBatch
    ) -> None:
        """Use the parts given."""
        self._directory = directory
        self._fill_batch = fill_batch
        self._queues = queues
        self._dispatcher = dispatcher

    async def __call__(self, caller: Caller, adapter_id: str, sequence_number: int) -> bool:
        """Say whether the operation was dropped: it ends as cancelled, and its number is free again.

        Raises:
            AdapterNotFound: no such adapter of the caller.
            OperationNotFound: the operation is not here, or no longer on record.
        """
        self._directory.get(caller, adapter_id)
        async with self._queues.use(adapter_id) as queue:
            if queue.is_waiting(sequence_number):
                return queue.drop(sequence_number)
            entry = queue.sequence.entry(sequence_number)
            if not entry.is_running or not self._stop(adapter_id):
                return False
            while entry.is_running and queue.sequence.last_number >= sequence_number and not queue.is_closed:
                # It is struck from the journal first, so that no restart can bring it back.
                await queue.wait_for_change()
            return entry.is_running

    def _stop(self, adapter_id: str) -> bool:
        """End what has not begun to compute: it waits for its pass, or for its batch."""
        return self._dispatcher.cancel(adapter_id) or self._fill_batch.cancel(adapter_id)
