"""Streams of batches that open while another request closes their loader or changes their dataset."""

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle_services.data.application.live_streams import LiveStreams
from twinkle_services.data.application.loaders import Credits, Loaders, OpenRequest, StreamStart
from twinkle_services.data.backends.disk_datasets import DiskDatasets, DiskRows
from twinkle_services.data.backends.disk_loaders import DiskLoaders
from twinkle_services.data.domain import Dataset, Loader, LoaderNotFound, Table
from twinkle_services.data.domain.dataset import new_dataset
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import InvalidField, StoredDataDamaged
from twinkle_services.kit.store_threads import StoreThreads

ALICE = Caller(tenant_id='alice', scopes=frozenset({'data'}))
OPEN = OpenRequest(
    request_id='r2', fingerprint='f2', dataset_id='ds-1', batch_size=2, shuffle_seed=None, epoch_count=1,
    is_last_partial_dropped=False,
)  # fmt: skip


class Store(DiskDatasets):
    """Datasets. Before a reader opens their files, another request may close the loaders and delete the files."""

    loaders: DiskLoaders | None = None
    is_raced = False
    folder = Path()

    async def reader(self, dataset: Dataset) -> DiskRows:
        """Run the other request, and return a reader."""
        if self.loaders is not None:
            for loader in self.loaders.of_tenant(dataset.tenant_id):
                await self.loaders.delete(loader.loader_id)
        if self.is_raced:
            shutil.rmtree(self.folder / dataset.dataset_id / f'revision-{dataset.revision}')
        return await super().reader(dataset)


@pytest.fixture
def threads() -> Iterator[StoreThreads]:
    """Pool of one thread."""
    started = StoreThreads('rows', count=1)
    yield started
    started.close()


@pytest.fixture
def store(tmp_path: Path, threads: StoreThreads) -> Store:
    """A store without datasets."""
    store = Store(tmp_path / 'datasets', threads)
    store.folder = tmp_path / 'datasets'
    return store


@pytest.fixture
def kept(tmp_path: Path, threads: StoreThreads) -> DiskLoaders:
    """A store without loaders."""
    return DiskLoaders(tmp_path / 'loaders', threads)


def _table(token_id: int) -> Table:
    row = {'input_ids': np.full(3, token_id, np.int32), 'labels': np.full(3, token_id, np.int32)}
    return Table(rows=[row] * 4, is_encoded=True)


async def _saved(store: Store, dataset: Dataset, table: Table) -> Dataset:
    return await store.save(replace(dataset.changed(table, (), ('r1', 'f1')), is_encoded=True), table)


async def _opened(store: Store, kept: DiskLoaders) -> tuple[Loaders, Loader, Dataset]:
    unused: Any = None
    empty = new_dataset('ds-1', tenant_id='alice', create_time=datetime(2026, 1, 1, tzinfo=UTC))
    dataset = await _saved(store, empty, _table(5))
    loaders = Loaders(store, kept, unused, LiveStreams(unused, limit=1, tenant_limit=1), limit=10)
    return loaders, await loaders.open(ALICE, OPEN), dataset


async def _token_ids(loaders: Loaders, loader: Loader) -> list[int]:
    async def requests() -> AsyncIterator[StreamStart | Credits]:
        yield StreamStart(loader.loader_id, None, False)
        yield Credits(10)

    items = [item async for item in loaders.stream(ALICE, requests())]
    return [int(row['input_ids'][0]) for item in items for row in getattr(item, 'rows', ())]


async def test_undisturbed_stream_reads_its_dataset(store: Store, kept: DiskLoaders) -> None:
    """A stream without an interfering request returns all rows of its dataset."""
    loaders, loader, _ = await _opened(store, kept)
    assert await _token_ids(loaders, loader) == [5] * 4


async def test_loader_that_was_opened_during_a_change_is_refused(store: Store, kept: DiskLoaders) -> None:
    """A loader never returns rows of a revision other than the revision for which it was opened."""
    loaders, loader, dataset = await _opened(store, kept)
    await _saved(store, dataset, _table(6))
    with pytest.raises(InvalidField, match='opened while its dataset changed'):
        await _token_ids(loaders, loader)
    await loaders.close(ALICE, loader.loader_id)
    again = await loaders.open(ALICE, replace(OPEN, request_id='r3', fingerprint='f3'))
    assert await _token_ids(loaders, again) == [6] * 4


async def test_loader_that_is_closed_before_its_files_are_open_is_not_found(store: Store, kept: DiskLoaders) -> None:
    """Rows that were deleted after their loader was closed are not reported as damaged."""
    loaders, loader, _ = await _opened(store, kept)
    store.loaders, store.is_raced = kept, True
    with pytest.raises(LoaderNotFound):
        await _token_ids(loaders, loader)


async def test_missing_rows_of_an_open_loader_are_damaged(store: Store, kept: DiskLoaders) -> None:
    """Missing files are reported as damaged while the loader is open."""
    loaders, loader, _ = await _opened(store, kept)
    store.is_raced = True
    with pytest.raises(StoredDataDamaged):
        await _token_ids(loaders, loader)
