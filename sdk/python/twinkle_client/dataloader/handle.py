"""Batch handles, which refer to batches that the model service fetches itself."""

import base64
from dataclasses import dataclass, field
from typing import Any

from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.model.v1 import operation_pb2


def loader_state(cursor: dataset_pb2.Cursor) -> dict[str, Any]:
    """Return a cursor as JSON-like values, in the form of `DataLoader.get_state`."""
    return {
        'consumed_train_samples': cursor.consumed_rows,
        'cursor': base64.b64encode(cursor.state).decode('ascii'),
    }


@dataclass(frozen=True, kw_only=True)
class BatchHandle:
    """A reference to a batch of a loader, accepted by a model's forward methods in place of features."""

    loader_id: str
    consumed_rows: int = 0
    """Number of examples before the batch, over all epochs."""
    cursor_state: bytes = field(default=b'', repr=False)
    """State by which the server verifies rows, order and batch size. Empty: only `consumed_rows` is used."""
    size: int | None = None
    """Number of examples in the batch; None if unknown."""

    def __len__(self) -> int:
        """Return the number of examples.

        Raises:
            TypeError: The number is unknown.
        """
        if self.size is None:
            raise TypeError('the number of examples of this batch handle is unknown; create the handle with size=')
        return self.size

    def to_proto(self) -> operation_pb2.LoaderBatch:
        """Return the message of the handle."""
        cursor = dataset_pb2.Cursor(consumed_rows=self.consumed_rows, state=self.cursor_state)
        return operation_pb2.LoaderBatch(loader_id=self.loader_id, cursor=cursor)
