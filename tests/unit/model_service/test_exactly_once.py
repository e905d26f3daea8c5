"""Crashes at any moment do not change a client's results: repeated requests are neither lost nor applied twice."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures import journals
from fixtures.crashing import Died, StrictStore, create, start
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.api.model.v1 import training_config_pb2
from twinkle_services.kit.rpc.json_values import struct_of
from twinkle_services.model.api.convert_config import training_config_to_proto
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.domain.divergence import first_difference
from twinkle_services.model.domain.errors import JournalUnavailable
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.domain.sequence import is_refusal
from twinkle_services.model.domain.training_config import Component, TrainingConfig

Verb = Callable[[str, int], Any]
"""Creates an operation from an adapter id and a sequence number."""


def _verb(**fields: Callable[[str], Any]) -> Verb:
    ((name, make),) = fields.items()
    return lambda adapter_id, number: journals.operation(number, adapter_id, **{name: make(adapter_id)})


VERBS: dict[str, Verb] = {
    'train': lambda adapter_id, number: journals.batch_operation(number, adapter_id, seed=number),
    'train more': lambda adapter_id, number: journals.batch_operation(number, adapter_id, length=31, seed=-number % 97),
    'clip and step': lambda adapter_id, number: journals.step_operation(number, adapter_id),
    'own loss': lambda adapter_id, number: journals.batch_operation(
        number, adapter_id, seed=number, loss=training_config_pb2.LossConfig(name='unlikelihood')
    ),
    'unknown loss': lambda adapter_id, number: journals.batch_operation(
        number, adapter_id, loss=training_config_pb2.LossConfig(name='no_such_loss')
    ),
    'own step': _verb(
        clip_grad_and_step=lambda _: wire.ClipGradAndStep(
            max_grad_norm=float('inf'), learning_rate=0.125, optimizer_options=struct_of({'weight_decay': 0.5})
        )
    ),
    'step': _verb(step=lambda _: wire.Step(learning_rate=0.25)),
    'zero': _verb(zero_grad=lambda _: wire.ZeroGrad()),
    'metric': _verb(calculate_metric=lambda _: wire.CalculateMetric(is_training=True)),
    'forward': lambda adapter_id, number: journals.forward_operation(number, adapter_id, seed=number),
    'backward': _verb(backward=lambda _: wire.Backward()),
    'configure': _verb(
        configure=lambda _: wire.Configure(
            training_config=training_config_to_proto(
                TrainingConfig(optimizer=Component(name='AdamW', options={'lr': 0.5}))
            )
        )
    ),
    'save': lambda adapter_id, number: journals.operation(
        number, adapter_id, save=wire.Save(name=f's{number}', is_optimizer_included=True)
    ),
    'publish': _verb(publish_version=lambda _: wire.PublishVersion()),
    'load': _verb(
        load=lambda adapter_id: wire.Load(
            checkpoint_path=f'twinkle://{adapter_id}/weights/s2', is_optimizer_included=True
        )
    ),
    'undo 1': _verb(undo=lambda _: wire.Undo(step_count=1)),
    'undo 2': _verb(undo=lambda _: wire.Undo(step_count=2)),
}
SCRIPT = [
    'train', 'save', 'unknown loss', 'clip and step', 'train more', 'publish', 'step', 'zero', 'forward', 'backward',
    'clip and step', 'undo 1', 'own loss', 'own step', 'undo 2', 'load', 'train', 'configure', 'clip and step',
    'publish', 'metric',
]  # fmt: skip


class _NoAttempts(MemoryJournal):
    """A journal that reports each attempt as the first attempt, because no operation causes these crashes."""

    async def begin_attempt(self, operation: Operation) -> int:
        await super().begin_attempt(operation)
        return 1

    async def count_attempt(self, work: str) -> int:
        await super().count_attempt(work)
        return 1


class _FullDisk(_NoAttempts):
    """A journal whose disk is sometimes full; `refused` contains the numbers of the calls that fail."""

    def __init__(self, refused: Set[int]) -> None:
        super().__init__()
        self._refused = refused
        self._call_count = 0
        self._is_in_call = False
        for name in ('accept', 'revoke', 'settle', 'begin_attempt', 'count_attempt', 'add_snapshot', 'note_progress'):
            setattr(self, name, partial(self._call, getattr(self, name)))

    async def _call(self, method: Callable[..., Awaitable[Any]], *values: Any, **options: Any) -> Any:
        if self._is_in_call:
            # `settle` also adds a snapshot; the journal on disk does both in one transaction.
            return await method(*values, **options)
        self._call_count += 1
        if self._call_count in self._refused:
            raise JournalUnavailable('')
        self._is_in_call = True
        try:
            return await method(*values, **options)
        finally:
            self._is_in_call = False


class _Run:
    """A client that sends a sequence of operations and repeats requests after each crash."""

    def __init__(
        self, journal: Any, script: Sequence[str], crashes: Sequence[int], bounds: dict[str, Any], *, adapters: int = 1
    ) -> None:
        self._journal, self._script, self._crashes, self._bounds = journal, script, list(crashes), bounds
        self._adapters = adapters
        self._store = StrictStore()
        self._service: Any = None
        self.moments = 0
        self.outcomes: list[Any] = []

    async def run_to_the_end(self) -> tuple[list[Any], Any]:
        """Return all outcomes and the final state of the engine."""
        ids = [
            await self._retry(lambda service, seed=seed: create(service, f'r{seed}', seed=seed))
            for seed in range(1, self._adapters + 1)
        ]
        numbers = dict.fromkeys(ids, 1)
        for place, name in enumerate(self._script):
            adapter_id = ids[place % len(ids)]
            operation = VERBS[name](adapter_id, numbers[adapter_id])
            outcome = await self._retry(lambda service, operation=operation: service.execute(operation))
            self.outcomes.append(outcome)
            if isinstance(outcome, OperationResult) or not is_refusal(outcome):
                numbers[adapter_id] += 1
            # A client may query the sequence number at any time, so the number must be correct after every operation.
            known = self._service.verbs.directory.find(adapter_id)
            assert known.sequence_number == numbers[adapter_id] - 1, f'operation {place + 1}, {name}'
        states = [await self._retry(lambda service, name=name: _state(service, name)) for name in ids]
        return self.outcomes, states

    async def _retry(self, request: Callable[[Any], Any]) -> Any:
        while True:
            try:
                if self._service is None:
                    moment_limit = self._crashes.pop(0) if self._crashes else float('inf')
                    self._service = await start(self._journal, self._store, moment_limit=moment_limit, **self._bounds)
                answer = await request(self._service)
                self.moments = self._service.journal.moments
                if not isinstance(answer, JournalUnavailable):
                    return answer
            except JournalUnavailable:
                pass
            except Died:
                self._service = None


async def _state(service: Any, adapter_id: str) -> Any:
    async with service.verbs.cleanup._residency.hold(adapter_id):  # noqa: SLF001 - the engine's state has no verb
        adapter = service.trainer.adapters[adapter_id]
    known = service.verbs.directory.find(adapter_id)
    return {
        'weights': adapter.weights.tobytes(),
        'gradient': adapter.gradient.tobytes(),
        'pending': len(adapter.pending),
        'numbers': (adapter.batch_count, adapter.step_count, adapter.loss_sum),
        'config': adapter.training_config,
        'known': (known.sequence_number, known.step_count, known.version, known.training_config),
    }


def _assert_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any], where: str) -> None:
    for number, (first, second) in enumerate(zip(one[0], other[0], strict=True), start=1):
        difference = first_difference(_of_one_adapter(first), _of_one_adapter(second))
        assert difference is None, f'{where}, operation {number}: {difference}'
    assert one[1] == other[1], where


def _of_one_adapter(outcome: Any) -> Any:
    """Return the result without outcomes that have a checkpoint path, because the path contains a random id."""
    path = getattr(getattr(outcome, 'outcome', None), 'checkpoint_path', '')
    return replace(outcome, outcome=None) if path else outcome


async def _uninterrupted(script: Sequence[str], bounds: dict[str, Any]) -> tuple[tuple[list[Any], Any], int]:
    run = _Run(MemoryJournal(), script, (), bounds)
    return await run.run_to_the_end(), run.moments


@pytest.mark.parametrize(
    ('snapshot_operations', 'stride'),
    [(1, 7), (3, 3), (256, 5), *(pytest.param(count, 1, marks=pytest.mark.slow) for count in (1, 3, 256))],
)
async def test_a_crash_at_any_moment_changes_nothing(snapshot_operations, stride):
    """A crash between any two calls of the journal does not change the outcomes or the final state."""
    bounds = {'snapshot_operations': snapshot_operations}
    expected, moments = await _uninterrupted(SCRIPT, bounds)
    assert moments > 2 * len(SCRIPT)
    for crash in range(1, moments + 1, stride):
        run = _Run(MemoryJournal(), SCRIPT, (crash,), bounds)
        _assert_same(expected, await run.run_to_the_end(), f'crash at moment {crash}')


async def test_the_journal_on_disk_survives_the_same_crashes(tmp_path: Path):
    """Two crashes in a row do not change the outcomes with the journal on disk."""
    bounds = {'snapshot_operations': 3}
    expected, moments = await _uninterrupted(SCRIPT, bounds)
    for crash in range(1, moments + 1, 7):
        journal = await journals.open_journal(tmp_path / f'{crash}')
        run = _Run(journal, SCRIPT, (crash, crash), bounds)
        try:
            _assert_same(expected, await run.run_to_the_end(), f'crash at moment {crash}')
        finally:
            await journal.close()


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    script=st.lists(st.sampled_from(sorted(VERBS)), min_size=1, max_size=20),
    crashes=st.lists(st.integers(1, 60), max_size=4),
    refused=st.sets(st.integers(1, 120), max_size=12),
    snapshot_operations=st.integers(1, 8),
    adapters=st.integers(1, 3),
)
def test_random_operations_survive_crashes_and_full_disks(script, crashes, refused, snapshot_operations, adapters):
    """Crashes and failed writes do not change the results of random operations, including refused and failing ones."""

    async def compare() -> None:
        uninterrupted = await _Run(MemoryJournal(), script, (), {}, adapters=adapters).run_to_the_end()
        bounds = {'snapshot_operations': snapshot_operations, 'resident_adapters': 1}
        run = _Run(_FullDisk(refused), script, crashes, bounds, adapters=adapters)
        _assert_same(uninterrupted, await run.run_to_the_end(), f'{crashes}')

    asyncio.run(compare())
