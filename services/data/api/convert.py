"""Converts datasets, uploads and pages, and checks all their fields."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import dataset_service_pb2 as wire
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.checkpoint_engine import StateChunk, chunk_checksum
from twinkle_services.data.api.convert_chats import row_from_trajectory
from twinkle_services.data.api.convert_steps import step_to_proto, steps_from_proto
from twinkle_services.data.application.datasets import ApplyRequest, CreateRequest, Piece
from twinkle_services.data.domain import Dataset, HubSource, MixtureSource, RowSource, Source, UploadSource
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.paging import Page, SortKey, page_token_after, parse_page
from twinkle_services.kit.rpc.fields import fingerprint_of, id_from_proto, not_negative, timestamp_to_proto
from twinkle_services.kit.rpc.json_values import dict_from_struct
from twinkle_services.kit.rpc.message_bounds import MAX_LIST_ITEMS
from twinkle_services.kit.rpc.uploads import sha256_from_proto, upload_chunk_from_proto
from twinkle_services.kit.upload_folder import UploadChunk, UploadHeader, UploadStatus
from twinkle_services.kit.weights.wire import chunk_to_proto

FileFormat = Literal['jsonl', 'parquet', 'csv']

_CHUNK_LIMIT_BYTES = 4 << 20
_DEFAULT_PEEKED, _MAX_PEEKED = 20, 100
"""Default and maximum number of rows that PeekRows returns."""
_FORMATS: dict[int, FileFormat] = {
    dataset_pb2.FILE_FORMAT_JSONL: 'jsonl',
    dataset_pb2.FILE_FORMAT_PARQUET: 'parquet',
    dataset_pb2.FILE_FORMAT_CSV: 'csv',
}


def create_request_from_proto(request: wire.CreateDatasetRequest) -> CreateRequest:
    """Convert a request to create a dataset.

    Raises:
        InvalidField, UnknownComponent: A field is invalid.
    """
    return CreateRequest(
        request_id=id_from_proto(request.request_id, 'request_id'),
        fingerprint=fingerprint_of(request),
        source=_source_from_proto(request.source),
        steps=steps_from_proto(request.steps),
        is_lazy=request.is_lazy,
        is_streamed=request.is_streamed,
    )


def apply_request_from_proto(request: wire.ApplyRequest) -> ApplyRequest:
    """Convert a request to apply steps.

    Raises:
        InvalidField, UnknownComponent: A field is invalid.
    """
    if not request.steps:
        raise InvalidField('steps', 'must have at least one step')
    return ApplyRequest(
        request_id=id_from_proto(request.request_id, 'request_id'),
        fingerprint=fingerprint_of(request),
        dataset_id=id_from_proto(request.dataset_id, 'dataset_id'),
        steps=steps_from_proto(request.steps),
    )


def format_from_proto(file_format: int, field: str) -> FileFormat:
    """Convert a file format.

    Raises:
        InvalidField: The format is unset or unknown.
    """
    if file_format not in _FORMATS:
        raise InvalidField(field, 'must be FILE_FORMAT_JSONL, FILE_FORMAT_PARQUET or FILE_FORMAT_CSV')
    return _FORMATS[file_format]


async def upload_parts_from_proto(
    requests: AsyncIterator[wire.UploadRequest],
) -> AsyncIterator[UploadHeader | UploadChunk]:
    """Yield the parts of an upload as they arrive.

    Raises:
        InvalidField: A part is empty or malformed.
    """
    async for request in requests:
        match request.WhichOneof('part'):
            case 'header':
                yield _upload_header_from_proto(request.header)
            case 'chunk':
                yield _chunk_from_proto(request.chunk)
            case _:
                raise InvalidField('part', 'must be a header or a chunk')


def upload_to_proto(status: UploadStatus) -> wire.UploadResponse:
    return wire.UploadResponse(
        upload_id=status.header.upload_id, committed_bytes=status.committed_bytes, is_complete=status.is_complete
    )


def page_from_proto(caller: Caller, request: wire.ListDatasetsRequest) -> Page:
    """Convert the paging fields of a request.

    Raises:
        InvalidField, InvalidPageToken: The page size or the token is invalid.
    """
    return parse_page(request.page_size, request.page_token, query=_query(caller), key_types=(str,))


def page_to_proto(caller: Caller, datasets: Sequence[Dataset], after: SortKey | None) -> wire.ListDatasetsResponse:
    token = page_token_after(after, query=_query(caller))
    return wire.ListDatasetsResponse(datasets=[dataset_to_proto(item) for item in datasets], next_page_token=token)


def dataset_to_proto(dataset: Dataset) -> dataset_pb2.Dataset:
    """Convert a dataset to the message that the tenant receives."""
    return dataset_pb2.Dataset(
        dataset_id=dataset.dataset_id,
        row_count=dataset.row_count,
        columns=dataset.columns,
        is_encoded=dataset.is_encoded,
        token_count=dataset.token_count,
        steps=[step_to_proto(step) for step in dataset.steps],
        warnings=dataset.warnings,
        create_time=timestamp_to_proto(dataset.create_time),
        is_lazy=dataset.is_lazy,
        is_streamed=dataset.stream is not None,
    )


def row_count_from_proto(request: wire.PeekRowsRequest) -> int:
    """Return the number of rows to peek at.

    Raises:
        InvalidField: The number is negative.
    """
    return min(not_negative(request.row_count, 'row_count') or _DEFAULT_PEEKED, _MAX_PEEKED)


def piece_to_proto(piece: Piece) -> wire.ExportDatasetResponse:
    """Convert a piece of an exported file, with its checksum."""
    chunk = StateChunk(piece.offset, piece.data, chunk_checksum(piece.data))
    return wire.ExportDatasetResponse(chunk=chunk_to_proto(chunk))


def _upload_header_from_proto(header: wire.UploadHeader) -> UploadHeader:
    return UploadHeader(
        upload_id=id_from_proto(header.upload_id, 'header.upload_id'),
        size_bytes=not_negative(header.size_bytes, 'header.size_bytes'),
        sha256=sha256_from_proto(header.sha256, 'header.sha256'),
    )


def _chunk_from_proto(chunk: tensor_pb2.TensorChunk) -> UploadChunk:
    if not 1 <= len(chunk.data) <= _CHUNK_LIMIT_BYTES:
        raise InvalidField('chunk.data', f'must have 1 to {_CHUNK_LIMIT_BYTES} bytes, got {len(chunk.data)}')
    return upload_chunk_from_proto(chunk)


def _query(caller: Caller) -> str:
    return f'ListDatasets {caller.tenant_id}'


def _source_from_proto(source: dataset_pb2.DatasetSource) -> Source:
    match source.WhichOneof('source'):
        case 'hub':
            return _hub_from_proto(source.hub)
        case 'rows':
            return RowSource(rows=_rows_from_proto(source.rows))
        case 'trajectories':
            return RowSource(rows=_chats_from_proto(source.trajectories))
        case 'upload':
            return UploadSource(
                upload_id=id_from_proto(source.upload.upload_id, 'source.upload.upload_id'),
                file_format=format_from_proto(source.upload.format, 'source.upload.format'),
            )
        case 'mixture':
            ids = enumerate(source.mixture.dataset_ids)
            parts = tuple(id_from_proto(value, f'source.mixture.dataset_ids[{i}]') for i, value in ids)
            if not 1 <= len(parts) <= MAX_LIST_ITEMS:
                problem = f'must name 1 to {MAX_LIST_ITEMS} datasets, got {len(parts)}'
                raise InvalidField('source.mixture.dataset_ids', problem)
            return MixtureSource(dataset_ids=parts, is_interleaved=source.mixture.is_interleaved)
        case _:
            raise InvalidField('source', 'must contain exactly one of hub, rows, trajectories, upload and mixture')


def _hub_from_proto(hub: dataset_pb2.HubSource) -> HubSource:
    begin = not_negative(hub.begin_row, 'source.hub.begin_row') if hub.HasField('begin_row') else None
    end = not_negative(hub.end_row, 'source.hub.end_row') if hub.HasField('end_row') else None
    if end is not None and end <= (begin or 0):
        raise InvalidField('source.hub.end_row', f'must be greater than begin_row ({begin or 0}), got {end}')
    return HubSource(
        dataset_id=id_from_proto(hub.dataset_id, 'source.hub.dataset_id'),
        subset_name=hub.subset_name or 'default',
        split=hub.split or 'train',
        begin_row=begin,
        end_row=end,
    )


def _rows_from_proto(source: dataset_pb2.RowSource) -> list[dict[str, Any]]:
    rows = [dict_from_struct(row) for row in source.rows]
    if not rows:
        raise InvalidField('source.rows.rows', 'must have at least one row')
    for index, row in enumerate(rows):
        if not row:
            raise InvalidField(f'source.rows.rows[{index}]', 'must have at least one key')
        if set(row) != set(rows[0]):
            keys = ', '.join(sorted(rows[0]))
            raise InvalidField(f'source.rows.rows[{index}]', f'must have the same keys as the first row: {keys}')
    return rows


def _chats_from_proto(source: dataset_pb2.TrajectorySource) -> list[dict[str, Any]]:
    if not source.trajectories:
        raise InvalidField('source.trajectories.trajectories', 'must have at least one chat')
    chats = enumerate(source.trajectories)
    return [row_from_trajectory(chat, f'source.trajectories.trajectories[{index}]') for index, chat in chats]
