"""Converts loaders, cursors, batches and rows for display, and checks all their fields."""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2, input_feature_pb2
from twinkle.api.data.v1 import loader_service_pb2 as wire
from twinkle_services.data.api.convert_chats import trajectory_of_row
from twinkle_services.data.application.datasets import PeekedRow
from twinkle_services.data.application.loaders import Batch, Credits, End, OpenRequest, StreamStart
from twinkle_services.data.domain import TOKEN_COLUMNS, Cursor, Loader, Row
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import fingerprint_of, id_from_proto, not_negative
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.kit.rpc.tensors import tensor_to_proto

_MAX_ROWS = 65_536
"""Maximum number of rows of a batch."""
_MAX_DEPTH = 30
"""Maximum depth of a value for display: a level of JSON takes three of the 100 levels that protobuf allows."""
_MAX_INTEGER = 10**308
"""Approximately the largest integer that a double can represent."""


def open_request_from_proto(request: wire.OpenLoaderRequest) -> OpenRequest:
    """Convert a request to open a loader.

    Raises:
        InvalidField: A field is missing or out of range.
    """
    if not 1 <= request.batch_size <= _MAX_ROWS:
        raise InvalidField('batch_size', f'must be from 1 to {_MAX_ROWS}, got {request.batch_size}')
    return OpenRequest(
        request_id=id_from_proto(request.request_id, 'request_id'),
        fingerprint=fingerprint_of(request),
        dataset_id=id_from_proto(request.dataset_id, 'dataset_id'),
        batch_size=request.batch_size,
        shuffle_seed=request.shuffle_seed if request.HasField('shuffle_seed') else None,
        epoch_count=not_negative(request.epoch_count, 'epoch_count') if request.HasField('epoch_count') else 1,
        is_last_partial_dropped=request.is_last_partial_dropped,
    )


def loader_to_proto(loader: Loader) -> dataset_pb2.Loader:
    """Convert a loader to the message that the tenant receives."""
    return dataset_pb2.Loader(
        loader_id=loader.loader_id,
        dataset_id=loader.dataset_id,
        batch_size=loader.batch_size,
        batch_count=0 if loader.is_streamed else loader.batch_count,
    )


async def stream_requests_from_proto(
    requests: AsyncIterator[wire.StreamBatchesRequest],
) -> AsyncIterator[StreamStart | Credits]:
    """Yield the requests of a reader as they arrive.

    Raises:
        InvalidField: A request is empty or malformed.
    """
    async for request in requests:
        match request.WhichOneof('part'):
            case 'start':
                yield _start_from_proto(request.start)
            case 'credits':
                yield Credits(request.credits)
            case _:
                raise InvalidField('part', 'must be a start or credits')


def batch_to_proto(item: Batch | End) -> wire.StreamBatchesResponse:
    cursor = dataset_pb2.Cursor(consumed_rows=item.cursor.consumed_rows, state=item.cursor.state)
    if isinstance(item, End):
        return wire.StreamBatchesResponse(cursor=cursor, epoch=item.epoch, is_end=True)
    return wire.StreamBatchesResponse(
        batch=input_feature_pb2.FeatureBatch(features=[_feature_to_proto(row) for row in item.rows]),
        cursor=cursor,
        epoch=item.epoch,
        trajectories=[trajectory_of_row(row) for row in item.rows] if item.is_trajectory_included else [],
    )


def peeked_to_proto(rows: Sequence[PeekedRow]) -> dataset_service_pb2.PeekRowsResponse:
    return dataset_service_pb2.PeekRowsResponse(rows=[_peeked_to_proto(item) for item in rows])


def _peeked_to_proto(item: PeekedRow) -> dataset_service_pb2.PeekedRow:
    if item.row is None:
        return dataset_service_pb2.PeekedRow(index=item.index, problem=item.problem)
    # Rows that are not encoded may have columns with the same names and any values.
    tokens = {name for name in TOKEN_COLUMNS if isinstance(item.row.get(name), np.ndarray)}
    columns = {name: _readable(value) for name, value in item.row.items() if name not in tokens}
    feature = _feature_to_proto({name: item.row[name] for name in tokens}) if 'input_ids' in tokens else None
    return dataset_service_pb2.PeekedRow(index=item.index, columns=struct_of(columns), feature=feature)


def _readable(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return a JSON value in which numbers that a `Struct` cannot represent are null or rounded.

    Values that are nested more than `depth` levels deep are replaced by an ellipsis.
    """
    if not depth:
        return '…'
    if isinstance(value, str):
        # A preprocessor may return halves of surrogate pairs, which cannot be encoded.
        return value.encode(errors='replace').decode()
    if isinstance(value, Mapping):
        return {str(name): _readable(item, depth - 1) for name, item in cast('Mapping[Any, Any]', value).items()}
    if isinstance(value, list | tuple):
        return [_readable(item, depth - 1) for item in cast('Sequence[Any]', value)]
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return None if is_infinite or (isinstance(value, int) and abs(value) > _MAX_INTEGER) else value


def _start_from_proto(start: wire.StreamStart) -> StreamStart:
    cursor = None
    if start.HasField('cursor'):
        cursor = Cursor(not_negative(start.cursor.consumed_rows, 'start.cursor.consumed_rows'), start.cursor.state)
    return StreamStart(id_from_proto(start.loader_id, 'start.loader_id'), cursor, start.is_trajectory_included)


def _feature_to_proto(row: Row) -> input_feature_pb2.InputFeature:
    feature = input_feature_pb2.InputFeature()
    for name in TOKEN_COLUMNS:
        if name in row:
            getattr(feature, name).CopyFrom(tensor_to_proto(np.asarray(row[name])))
    return feature
