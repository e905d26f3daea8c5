"""Resumable iteration over the batches of a dataset."""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from twinkle.api.data.v1 import dataset_pb2, loader_service_pb2
from twinkle.api.data.v1.loader_service_pb2_grpc import LoaderServiceStub
from twinkle.data_format import InputFeature
from twinkle_client.convert import feature_from_proto, trajectory_from_proto
from twinkle_client.dataloader.handle import BatchHandle, loader_state
from twinkle_client.dataset import Dataset
from twinkle_client.errors import RetryableError
from twinkle_client.rpc import LoopThread, new_id, remote_method, remote_stream

Batch = list[InputFeature]

_PREFETCH = 4
"""Number of prefetched batches: enough to hide a round trip."""


class DataLoader:
    """Iterates over a dataset, with `for` or `async for`, in batches of `InputFeature`s.

    `loader.handles()` yields batch handles instead, which models accept in place of features. The data service then
    sends the examples directly to the model service.
    """

    def __init__(
        self,
        dataset: Dataset | Callable[[], Dataset],
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 42,
        epochs: int = 1,
        drop_last: bool = False,
    ) -> None:
        """Create a loader; the server opens it at the first iteration.

        Args:
            dataset: Encoded dataset, or a function that returns such a dataset.
            batch_size: Examples per batch.
            shuffle: Use a different random order in each epoch.
            seed: Seed of the random orders.
            epochs: Number of epochs per iteration; 0 repeats without end.
            drop_last: Omit the last batch of an epoch if it is incomplete.
        """
        self._dataset = dataset if isinstance(dataset, Dataset) else dataset()
        self._connection = self._dataset.client.connection
        self._stub = LoaderServiceStub(self._connection.channel)
        self._options: dict[str, Any] = {
            'batch_size': batch_size,
            'shuffle_seed': seed if shuffle else None,
            'epoch_count': epochs,
            'is_last_partial_dropped': drop_last,
        }
        self._loader: dataset_pb2.Loader | None = None
        self._opening = asyncio.Lock()
        self._cursor: dataset_pb2.Cursor | None = None
        self._resume_from: dataset_pb2.Cursor | None = None

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    def __len__(self) -> int:
        if self._dataset.is_streamed:
            raise TypeError('the number of batches of a streamed dataset is unknown')
        return self.open().batch_count

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self.batches.aio()

    @remote_method
    async def open(self) -> dataset_pb2.Loader:
        """Open the loader on the server if necessary, and return its record.

        Raises:
            StateError: The dataset is not encoded.
            UsageError: An option is out of range.
            QuotaError: The tenant has too many open loaders.
        """
        return await self._opened()

    @remote_stream
    async def batches(self) -> AsyncIterator[Batch]:
        """Yield the batches from the start or, once, from the position that `resume_from_checkpoint` set.

        While the server is unavailable, or reads a streamed dataset up to the position, the stream is opened again.
        """
        cursor, self._resume_from = self._resume_from, None
        self._cursor = cursor
        with self._connection.backoff() as backoff:
            while True:
                try:
                    async with aclosing(self._responses(cursor)) as responses:
                        async for response in responses:
                            backoff.reset()
                            self._cursor = cursor = response.cursor
                            yield _batch(response)
                    return
                except RetryableError as error:
                    await backoff.wait_or_raise(error)

    @remote_stream
    async def handles(self) -> AsyncIterator[BatchHandle]:
        """Yield handles of the batches that `batches` would yield, without reading them.

        The end of a streamed dataset is unknown. The first operation on a batch after the end fails with a StateError
        of the reason LOADER_AT_END.

        Raises:
            ValueError: The dataset was encoded for sampling and has no labels, or is streamed without `drop_last`.
            StateError: The dataset is not encoded.
        """
        begin, self._resume_from = self._resume_from or dataset_pb2.Cursor(), None
        epoch_rows = await self._epoch_rows()
        epochs = self._options['epoch_count']
        self._cursor, consumed, state = begin, begin.consumed_rows, begin.state
        while epoch_rows is None or (epoch_rows and (not epochs or consumed < epochs * epoch_rows)):
            handle = self._handle(consumed, epoch_rows, state)
            consumed, state = consumed + len(handle), b''
            self._cursor = dataset_pb2.Cursor(consumed_rows=consumed)
            yield handle

    @remote_method
    async def batch_at(self, consumed_train_samples: int = 0) -> BatchHandle:
        """Return the handle of the batch after a number of examples.

        Args:
            consumed_train_samples: Number of examples before the batch, over all epochs.

        Raises:
            ValueError: The number is negative, the loader has no batches, or the dataset was encoded for sampling or
                is streamed without `drop_last`.
            StateError: The dataset is not encoded.
        """
        if consumed_train_samples < 0:
            raise ValueError(f'consumed_train_samples must be at least 0, got {consumed_train_samples}')
        epoch_rows = await self._epoch_rows()
        if epoch_rows == 0:
            raise ValueError('the loader has no batches; use a smaller batch_size, or drop_last=False')
        return self._handle(consumed_train_samples, epoch_rows)

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, as JSON-like values.

        After `resume_from_checkpoint`, return the position at which the next iteration starts.
        """
        return loader_state(self._resume_from or self._cursor or dataset_pb2.Cursor())

    def resume_from_checkpoint(self, consumed_train_samples: int | Mapping[str, Any]) -> None:
        """Start the next iteration at the position at which a run stopped.

        Args:
            consumed_train_samples: Number of examples, such as the entry `consumed_train_samples` that a model's
                `resume_from_checkpoint` returns. Or a result of `get_state`, with which the server also verifies that
                rows, order and batch size are unchanged.

        Raises:
            ValueError: The number is negative, or the mapping is not a result of `get_state`.
        """
        state: Mapping[str, Any] = {'cursor': '', 'consumed_train_samples': consumed_train_samples}
        if isinstance(consumed_train_samples, Mapping):
            state = consumed_train_samples
        try:
            count, cursor = int(state['consumed_train_samples']), base64.b64decode(state['cursor'], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'state must be a result of get_state(): {error!r}') from None
        if count < 0:
            raise ValueError(f'consumed_train_samples must be at least 0, got {count}')
        self._resume_from = dataset_pb2.Cursor(consumed_rows=count, state=cursor)

    @remote_method
    async def close(self) -> None:
        """Close the loader on the server, so that its dataset can be deleted."""
        loader, self._loader = self._loader, None
        if loader is not None:
            request = loader_service_pb2.CloseLoaderRequest(loader_id=loader.loader_id)
            await self._connection.unary(self._stub.CloseLoader, request)

    def _handle(self, consumed: int, epoch_rows: int | None, state: bytes = b'') -> BatchHandle:
        assert self._loader is not None  # noqa: S101 - `_epoch_rows` has opened it
        size = self._options['batch_size']
        if epoch_rows is not None:
            size = min(size, epoch_rows - consumed % epoch_rows)
        return BatchHandle(loader_id=self._loader.loader_id, consumed_rows=consumed, cursor_state=state, size=size)

    async def _epoch_rows(self) -> int | None:
        """Return the number of examples per epoch, opening the loader if necessary; None for a streamed dataset."""
        if self._dataset.is_prompt_only:
            raise ValueError('the dataset was encoded for sampling and has no labels; iterate over its batches instead')
        if self._dataset.is_streamed and not self._options['is_last_partial_dropped']:
            raise ValueError('handles of a streamed dataset need drop_last=True, because its last batch is unknown')
        await self._opened()
        if self._dataset.is_streamed:
            return None
        rows, batch_size = (await self._dataset.describe.aio()).row_count, self._options['batch_size']
        return rows - rows % batch_size if self._options['is_last_partial_dropped'] else rows

    async def _opened(self) -> dataset_pb2.Loader:
        async with self._opening:
            if self._loader is None:
                request = loader_service_pb2.OpenLoaderRequest(
                    request_id=new_id('rq'), dataset_id=await self._dataset.dataset_id(), **self._options
                )
                self._loader = (await self._connection.unary(self._stub.OpenLoader, request)).loader
            return self._loader

    async def _responses(
        self, cursor: dataset_pb2.Cursor | None
    ) -> AsyncGenerator[loader_service_pb2.StreamBatchesResponse]:
        loader = await self._opened()
        start = loader_service_pb2.StreamStart(
            loader_id=loader.loader_id, cursor=cursor, is_trajectory_included=self._dataset.is_prompt_only
        )
        credits_given: asyncio.Queue[int] = asyncio.Queue()
        credits_given.put_nowait(_PREFETCH)
        responses = self._connection.duplex(
            self._stub.StreamBatches,
            _requests(start, credits_given),
            request_type=loader_service_pb2.StreamBatchesRequest,
        )
        async with aclosing(responses):
            async for response in responses:
                if response.is_end:
                    return
                # The caller receives this batch, so the server may send another batch.
                credits_given.put_nowait(1)
                yield response


async def _requests(
    start: loader_service_pb2.StreamStart, credits_given: asyncio.Queue[int]
) -> AsyncGenerator[loader_service_pb2.StreamBatchesRequest]:
    yield loader_service_pb2.StreamBatchesRequest(start=start)
    while True:
        yield loader_service_pb2.StreamBatchesRequest(credits=await credits_given.get())


def _batch(response: loader_service_pb2.StreamBatchesResponse) -> Batch:
    features = [feature_from_proto(feature) for feature in response.batch.features]
    for feature, trajectory in zip(features, response.trajectories, strict=False):
        chat: Any = trajectory_from_proto(trajectory)
        feature['messages'] = chat['messages']
        if 'user_data' in chat:
            feature['user_data'] = chat['user_data']
    return features
