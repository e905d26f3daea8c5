"""Contract tests of batch sources, for the data service's client and the fake."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fixtures.data_service import ENCODE, chat, chats, ints_of, serving_data, set_template
from fixtures.fake_batches import FakeBatches, FakeLoader
from twinkle.api.data.v1.input_feature_pb2 import FeatureBatch
from twinkle.data_format import InputFeature
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import Code, DomainError, InvalidField
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.model.backends.data_client import DataClient
from twinkle_services.model.domain.errors import LoaderAtEnd
from twinkle_services.model.domain.loader_batch import BatchReference, BatchSource, LoaderCursor

ALICE = Caller(tenant_id='alice', scopes=frozenset({'train', 'data'}))
BOB = Caller(tenant_id='bob', scopes=frozenset({'train', 'data'}))
TEXTS = ['a', 'two words', 'and three words', 'four', 'five and no more']


@dataclass
class OpenedLoader:
    """A batch source, and a loader of alice with five examples in batches of two."""

    source: BatchSource
    loader_id: str
    examples: Sequence[list[int]]

    async def load(self, cursor: LoaderCursor | None = None, caller: Caller = ALICE) -> tuple[object, LoaderCursor]:
        """Return the token ids of a batch's examples, and the cursor after it."""
        with acting_for(caller):
            loaded = await self.source.load(BatchReference(loader_id=self.loader_id, cursor=cursor))
        batch = FeatureBatch.FromString(loaded.content)
        return [ints_of(feature.input_ids) for feature in batch.features], loaded.next_cursor


@pytest.fixture(params=['fake', 'data-service'])
async def opened(request: pytest.FixtureRequest, tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[OpenedLoader]:
    """Each implementation of the port."""
    if request.param == 'fake':
        examples = [[index] * (index + 2) for index in range(5)]
        features = [InputFeature(input_ids=np.array(ids), labels=np.array(ids)) for ids in examples]
        fake = FakeBatches(loaders={'ld-1': FakeLoader('alice', features, 2)})
        yield OpenedLoader(fake, 'ld-1', examples)
        return
    async with (
        serving_data(tmp_path, base_models=(str(tiny_llama_dir),)) as data,
        open_channel(data.address, service='data') as channel,
    ):
        source = chats(*(chat('question', text) for text in TEXTS))
        dataset = await data.create(source, set_template(tiny_llama_dir), ENCODE)
        loader = await data.open(dataset.dataset_id, 2)
        examples = [ids for batch in await data.read_all(loader.loader_id) for ids in batch]
        yield OpenedLoader(DataClient(channel), loader.loader_id, examples)


async def test_cursors_traverse_the_whole_loader(opened: OpenedLoader) -> None:
    """Following the cursors reads all examples in order."""
    read: list[object] = []
    cursor = None
    for _ in range(3):
        batch, cursor = await opened.load(cursor)
        read.append(batch)
    assert cursor is not None
    assert cursor.consumed_rows == 5
    assert read == [opened.examples[:2], opened.examples[2:4], opened.examples[4:]]


async def test_equal_reference_returns_the_same_batch(opened: OpenedLoader) -> None:
    """Repeated loads of a reference, even one with only a row count, return the same examples and cursor."""
    _, cursor = await opened.load()
    first = await opened.load(cursor)
    assert await opened.load(cursor) == first
    assert await opened.load(LoaderCursor(consumed_rows=2)) == first


async def test_error_at_the_end_contains_the_position(opened: OpenedLoader) -> None:
    """Loading after the last batch raises LoaderAtEnd with the position."""
    with pytest.raises(LoaderAtEnd) as refusal:
        await opened.load(LoaderCursor(consumed_rows=5))
    assert refusal.value.metadata() == {'loaderId': opened.loader_id, 'consumedRows': '5'}


async def test_loader_of_another_tenant_is_not_found(opened: OpenedLoader) -> None:
    """Another tenant's loader raises the same error as an unknown loader."""
    unknown = OpenedLoader(opened.source, 'ld-unknown', [])
    for loader, caller in ((opened, BOB), (unknown, ALICE)):
        with pytest.raises(DomainError) as refusal:
            await loader.load(caller=caller)
        assert (refusal.value.code, refusal.value.reason) == (Code.NOT_FOUND, 'LOADER_NOT_FOUND')


@pytest.mark.parametrize('cursor', [LoaderCursor(consumed_rows=1), LoaderCursor(consumed_rows=2, state=b'forged')])
async def test_cursor_of_another_loader_is_refused(opened: OpenedLoader, cursor: LoaderCursor) -> None:
    """The error for a cursor that is not between two batches, or belongs to another loader, names its field."""
    with pytest.raises(InvalidField) as refusal:
        await opened.load(cursor)
    assert refusal.value.violations[0].field.startswith('batch.loader.cursor')


async def test_unreachable_service_is_retryable(tmp_path: Path) -> None:
    """An unreachable data service raises UNAVAILABLE with a retry time."""
    async with open_channel(f'unix:{tmp_path}/absent', service='data') as channel:
        with pytest.raises(DomainError) as refusal, acting_for(ALICE):
            await DataClient(channel).load(BatchReference(loader_id='ld-1'))
    assert (refusal.value.code, refusal.value.reason) == (Code.UNAVAILABLE, 'SERVICE_UNREACHABLE')
    assert refusal.value.retry_after is not None


async def test_oversized_batch_is_refused(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """A batch above the message size limit is refused with InvalidField."""
    async with (
        serving_data(tmp_path, base_models=(str(tiny_llama_dir),)) as data,
        open_channel(data.address, service='data', message_bytes=64) as channel,
    ):
        dataset = await data.create(chats(chat('question', 'answer')), set_template(tiny_llama_dir), ENCODE)
        loader = await data.open(dataset.dataset_id, 1)
        with pytest.raises(InvalidField) as refusal, acting_for(ALICE):
            await DataClient(channel).load(BatchReference(loader_id=loader.loader_id))
    assert refusal.value.violations[0].field == 'batch.loader'
