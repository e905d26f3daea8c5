"""A batch by its place: the model service fetches it, and it never comes here."""

import base64
from dataclasses import dataclass, field
from typing import Any

from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.model.v1 import operation_pb2


def loader_state(cursor: dataset_pb2.Cursor) -> dict[str, Any]:
    """Return a position as plain JSON values, as `DataLoader.get_state` gives it."""
    return {
        'consumed_train_samples': cursor.consumed_rows,
        'cursor': base64.b64encode(cursor.state).decode('ascii'),
    }


@dataclass(frozen=True, kw_only=True)
class BatchHandle:
    """Names a batch of a loader. A model's `forward_backward` and its like take it in the place of features."""

    loader_id: str
    consumed_rows: int = 0
    """Examples of the loader before it, over all epochs."""
    cursor_state: bytes = field(default=b'', repr=False)
    """Ties the place to what is read and how; empty: the count alone is believed."""
    size: int | None = None
    """Examples in it, where that is known."""

    def __len__(self) -> int:
        """Return the number of examples.

        Raises:
            TypeError: it is not known here.
        """
        if self.size is None:
            raise TypeError('how many examples the batch has is not known here')
        return self.size

    def to_proto(self) -> operation_pb2.LoaderBatch:
        """Return the message."""
        cursor = dataset_pb2.Cursor(consumed_rows=self.consumed_rows, state=self.cursor_state)
        return operation_pb2.LoaderBatch(loader_id=self.loader_id, cursor=cursor)
