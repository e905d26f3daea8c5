"""The trained token count of an adapter, and saves that exceed the storage quota."""

from pathlib import Path
from typing import Any

from fixtures import journals
from fixtures.crashing import ALICE, Died, Service, StrictStore, start
from fixtures.model_verbs import create_request
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.data_format import LoraConfig
from twinkle_services.kit.errors import QuotaExceeded
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.domain.errors import SequenceReused
from twinkle_services.model.domain.training_config import TrainingConfig

ADAPTER = 'ad-1'
LENGTHS = (3, 5, 8)


async def create(service: Service) -> None:
    """Create the adapter, or return the existing one."""
    command = create_request(
        lora_config=LoraConfig(r=2),
        training_config=TrainingConfig(gradient_accumulation_steps=1),
        adapter_id=ADAPTER,
        fingerprint='c',
    )
    await service.verbs.create_adapter(ALICE, command)


def counted(service: Service) -> int:
    """Return the adapter's trained token count."""
    return service.verbs.directory.get(ALICE, ADAPTER).trained_token_count


def script() -> list[Any]:
    """Return operations that train, step and undo. All their tokens count."""
    batches = [journals.batch_operation(2 * index + 1, ADAPTER, length=size) for index, size in enumerate(LENGTHS)]
    steps = [journals.step_operation(2 * index + 2, ADAPTER) for index in range(len(LENGTHS))]
    pairs = [operation for pair in zip(batches, steps, strict=True) for operation in pair]
    undo = journals.operation(7, ADAPTER, undo=wire.Undo(step_count=2))
    return [*pairs, undo, journals.batch_operation(8, ADAPTER, length=4)]


TOTAL = sum(len(f['input_ids']) for item in script() for f in getattr(item.verb, 'features', ()))
"""Tokens of all batches in `script`."""


async def test_every_token_is_counted_once_across_crashes(tmp_path: Path):
    """Every token is counted once across an undo, repeats and a crash at any moment."""
    moment, crashes = 1, 0
    while True:
        journal, store = MemoryJournal(), StrictStore()
        try:
            service = await start(journal, store, moment_limit=moment)
            await create(service)
            for operation in script():
                await service.execute(operation)
        except (Died, BaseExceptionGroup):
            crashes += 1
            service = await start(journal, store)
            await create(service)
            for operation in script():
                await service.execute(operation)
        else:
            break
        assert counted(service) == TOTAL, f'after a crash at moment {moment}'
        moment += 1
    assert crashes > len(script())
    assert counted(service) == TOTAL > sum(LENGTHS)


async def test_refused_and_repeated_operations_are_not_counted():
    """The tokens of refused and of repeated operations do not count."""
    service = await start(MemoryJournal(), StrictStore())
    await create(service)
    first = journals.batch_operation(1, ADAPTER, length=3)
    await service.execute(first)
    before = counted(service)
    other = journals.batch_operation(1, ADAPTER, length=9)
    assert isinstance(await service.execute(other), SequenceReused)
    await service.execute(first)
    assert counted(service) == before > 0


async def test_refused_save_beyond_the_quota_does_not_use_its_number():
    """A save beyond the quota does not consume its sequence number; a repeat of a recorded save returns its result."""
    service = await start(MemoryJournal(), StrictStore())
    await create(service)
    unlimited = journals.operation(1, ADAPTER, save=wire.Save(name='a'))
    limited = journals.operation(1, ADAPTER, save=wire.Save(name='a', stored_bytes_limit=10))
    refused = await service.execute(limited)
    assert isinstance(refused, QuotaExceeded)
    assert (refused.quota, refused.limit) == ('stored_bytes', 10)
    saved = await service.execute(unlimited)
    repeated = await service.execute(limited)
    assert repeated.outcome == saved.outcome
    assert repeated.is_replayed
