"""Sizes of the batches in an Arrow stream, read from their metadata before pyarrow decodes them.

The metadata are flatbuffers: https://github.com/apache/arrow/blob/main/format/Message.fbs. A compressed buffer begins
with its decoded size, and pyarrow allocates exactly this size.
"""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from twinkle.dataset import UnreadableFile

_HEADER = 2
"""Index of the field `header` of a message."""
_DATA = 1
"""Index of the field `data` of a dictionary's header; this field is a record batch."""
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = range(4)
"""Indices of the fields of a record batch."""
_NOT_COMPRESSED = -1
"""Declared size of a buffer that a compressed batch stores uncompressed."""
_PREFIX_BYTES = 8
"""Size of the number that declares the decoded size of a buffer."""


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """The size of one batch once it is decoded."""

    is_dictionary: bool
    """Whether the batch contains the values of a dictionary, which stays in memory for the following batches."""
    row_count: int
    value_count: int
    """Number of values in all columns, nested ones included; a value may take no bytes."""
    size_bytes: int
    """Size of all buffers."""


def batch_sizes(stream: Any) -> Iterator[BatchSize]:
    """Yield the sizes of all batches in a stream, in order; nothing is decoded.

    Args:
        stream: a `pyarrow.Buffer` that begins with the message of the schema.

    Raises:
        UnreadableFile: a message is damaged.
        pyarrow.ArrowException: pyarrow found a damaged message.
    """
    for message in pa.ipc.MessageReader.open_stream(stream):
        if message.type in ('record batch', 'dictionary'):
            try:
                yield _size_of(message, is_dictionary=message.type == 'dictionary')
            except struct.error as error:
                raise UnreadableFile('the metadata of an Arrow batch are damaged') from error


def _size_of(message: Any, *, is_dictionary: bool) -> BatchSize:
    metadata, body = memoryview(message.metadata), memoryview(message.body or b'')
    batch = _Table(metadata, *struct.unpack_from('<I', metadata)).table(_HEADER)
    if is_dictionary:
        batch = batch.table(_DATA)
    nodes, buffers = batch.pairs(_NODES), batch.pairs(_BUFFERS)
    is_compressed = batch.position_of(_COMPRESSION) is not None
    sizes = [_decoded_size(body, *buffer) if is_compressed else buffer[1] for buffer in buffers]
    counts = [batch.integer(_LENGTH), *(count for count, _ in nodes)]
    if min(counts + sizes) < 0:
        raise UnreadableFile('the metadata of an Arrow batch have a negative size')
    return BatchSize(
        is_dictionary=is_dictionary, row_count=counts[0], value_count=sum(counts[1:]), size_bytes=sum(sizes)
    )


def _decoded_size(body: memoryview, offset: int, size_bytes: int) -> int:
    if size_bytes == 0:
        return 0
    (decoded_bytes,) = struct.unpack_from('<q', body, offset)
    return size_bytes - _PREFIX_BYTES if decoded_bytes == _NOT_COMPRESSED else decoded_bytes


class _Table:
    """A table of a flatbuffer; fields are named by their index.

    Args:
        data: the flatbuffer.
        position: position of the table in the data.
    """

    def __init__(self, data: memoryview, position: int) -> None:
        self._data, self._position = data, position
        self._fields = position - self._unpack('<i', position)

    def position_of(self, field: int) -> int | None:
        """Return the position of a field; None if it is not set."""
        index = 4 + 2 * field
        offset = self._unpack('<H', self._fields + index) if index < self._unpack('<H', self._fields) else 0
        return self._position + offset if offset else None

    def integer(self, field: int) -> int:
        position = self.position_of(field)
        return 0 if position is None else self._unpack('<q', position)

    def table(self, field: int) -> '_Table':
        return _Table(self._data, self._target_of(field))

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """Return a vector of structs of two integers."""
        begin = self._target_of(field)
        count = self._unpack('<I', begin)
        end = begin + 4 + count * struct.calcsize('<qq')
        if end > len(self._data):
            raise struct.error
        return list(struct.iter_unpack('<qq', self._data[begin + 4 : end]))

    def _target_of(self, field: int) -> int:
        """Return the position to which a field refers."""
        position = self.position_of(field)
        if position is None:
            raise struct.error
        return position + self._unpack('<I', position)

    def _unpack(self, layout: str, position: int) -> int:
        if position < 0:  # a negative position would count from the end
            raise struct.error
        return int(struct.unpack_from(layout, self._data, position)[0])
