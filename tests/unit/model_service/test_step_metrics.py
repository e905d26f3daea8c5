"""The metrics that an adapter reports after each optimizer step."""

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fixtures import journals
from fixtures.crashing import ALICE, Died, Service, StrictStore, start
from fixtures.model_verbs import create_request
from twinkle.data_format import ForwardResult, InputFeature, LoraConfig, StepResult
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import Draining
from twinkle_services.model.application.directory import AdapterEvent
from twinkle_services.model.backends.journal.memory import MemoryJournal
from twinkle_services.model.domain.engine import VerbRun
from twinkle_services.model.domain.operation import (
    Backward,
    CalculateLoss,
    CalculateMetric,
    ClipGradAndStep,
    ClipGradNorm,
    Forward,
    ForwardBackward,
    ForwardOnly,
    LrStep,
    Operation,
    Step,
    Undo,
    ZeroGrad,
)
from twinkle_services.model.domain.result import MetricResult
from twinkle_services.model.domain.step_metrics import MAX_REPORTS, StepMetrics, metrics_after
from twinkle_services.model.domain.training_config import TrainingConfig

ADAPTER = 'ad-1'
GATEWAY = Caller(tenant_id='', is_internal=True)
FEATURES = [InputFeature(input_ids=[1, 2, 3]), InputFeature(input_ids=[4])]


class Run:
    """Applies verbs one after the other, and records the adapter's metrics."""

    def __init__(self) -> None:
        self.metrics, self.number, self.step_count = StepMetrics(), 0, 0

    def verb(self, verb: Any, outcome: Any = None, **run: Any) -> None:
        """Apply a verb that waits one second in the queue."""
        self.number += 1
        if isinstance(outcome, StepResult):
            self.step_count = outcome.step_count
        operation = Operation(adapter_id=ADAPTER, sequence_number=self.number, verb=verb, fingerprint='')
        self.metrics = metrics_after(
            self.metrics, operation, VerbRun(outcome=outcome, **run), step_count=self.step_count, queue_seconds=1.0
        )

    def backward(self, loss: float, labels: int, **fields: Any) -> None:
        """Apply ForwardBackward on four tokens, in a pass of half a second with one other adapter."""
        outcome = ForwardResult(loss=loss, num_tokens=labels, **fields)
        self.verb(ForwardBackward(features=FEATURES), outcome, device_seconds=0.5, pass_adapter_count=2)

    def step(self, verb: Any = None, *, is_applied: bool = True, **fields: Any) -> None:
        """Apply a step, by default ClipGradAndStep."""
        count = self.step_count + is_applied
        result = StepResult(is_applied=is_applied, learning_rate=0.25, step_count=count, **fields)
        self.verb(verb or ClipGradAndStep(), result, device_seconds=0.25)

    @property
    def values(self) -> dict[str, float]:
        """The values of the last report."""
        return dict(self.metrics.reports[-1].values)


def test_report_has_the_totals_and_means_of_a_step():
    """The loss is a mean over labels and a reported metric a mean over batches; tokens and times are sums."""
    run = Run()
    run.backward(3.0, 1, metrics={'kl': 1.0})
    run.backward(1.0, 3, metrics={'kl': 2.0, 'ratio': 5.0})
    run.verb(ForwardOnly(features=FEATURES), ForwardResult(loss=99.0, num_tokens=4), wait_seconds=4.0)
    run.step(grad_norm=7.0)
    (report,) = run.metrics.reports
    assert (report.sequence_number, report.step) == (4, 1)
    assert run.values == {
        'train/loss': 1.5,
        'train/kl': 1.5,
        'train/ratio': 5.0,
        'train/grad_norm': 7.0,
        'train/learning_rate': 0.25,
        'train/token_count': 8,
        'train/pass_adapter_count': 2.0,
        'train/queue_seconds': 8.0,
        'train/device_seconds': 1.25,
    }
    run.backward(2.0, 1)
    run.step()
    assert run.metrics.reports[-1].step == 2
    assert run.values['train/loss'] == 2.0
    assert 'train/grad_norm' not in run.values


def test_metrics_of_a_loss_do_not_replace_the_values_of_a_step():
    """Metrics of a loss are reported, except those with the names of a step's values."""
    plain, other = Run(), Run()
    plain.backward(3.0, 2, metrics={'kl': 1.0})
    plain.step(grad_norm=7.0)
    own = dict.fromkeys((name.removeprefix('train/') for name in plain.values), 99.0)
    other.backward(3.0, 2, metrics={**own, 'kl': 1.0})
    other.step(grad_norm=7.0)
    assert other.values == plain.values
    assert len(plain.values) == 8


def test_separate_verbs_report_like_the_combined_ones():
    """The seven separate verbs of a step give one report, with the norm from ClipGradNorm."""
    run = Run()
    run.verb(Forward(features=FEATURES), ForwardResult(loss=0.0, num_tokens=0))
    run.verb(CalculateLoss(), ForwardResult(loss=2.0, num_tokens=4))
    run.verb(Backward(), ForwardResult(loss=2.0, num_tokens=4))
    run.verb(ClipGradNorm(), StepResult(is_applied=False, learning_rate=0.5, step_count=0, grad_norm=3.0))
    assert run.metrics.reports == ()
    run.step(Step())
    run.verb(ZeroGrad())
    run.verb(LrStep(), StepResult(is_applied=False, learning_rate=0.125, step_count=1))
    (report,) = run.metrics.reports
    assert report.values['train/loss'] == 2.0
    assert report.values['train/grad_norm'] == 3.0
    assert report.values['train/learning_rate'] == 0.25
    assert report.values['train/token_count'] == 4


def test_accumulated_calls_report_once():
    """A step that only counts towards gradient accumulation reports nothing, and its batches count later."""
    run = Run()
    run.backward(1.0, 2)
    run.step(is_applied=False)
    run.backward(2.0, 2)
    run.step()
    (report,) = run.metrics.reports
    assert report.values['train/loss'] == 1.5


@pytest.mark.parametrize('verb', [ZeroGrad(), Undo(step_count=1)])
def test_dropped_gradient_does_not_count(verb):
    """Batches whose gradient was dropped are not counted in the next report."""
    run = Run()
    run.backward(9.0, 1)
    run.verb(verb)
    run.backward(1.0, 1)
    run.step()
    assert run.values['train/loss'] == 1.0
    assert run.values['train/token_count'] == 4


@pytest.mark.parametrize(('is_training', 'name'), [(True, 'metric/accuracy'), (False, 'eval/accuracy')])
def test_calculated_metrics_are_reported_at_the_current_step(is_training, name):
    """CalculateMetric reports its values and does not end the totals of the step."""
    run = Run()
    run.step()
    run.backward(4.0, 1)
    run.verb(CalculateMetric(is_training=is_training), MetricResult(values={'accuracy': 0.5}))
    assert run.metrics.reports[-1].step == 1
    assert run.values == {name: 0.5}
    run.step()
    assert run.values['train/loss'] == 4.0


def test_only_the_last_reports_are_kept():
    """An adapter stores a fixed number of reports; infinite and missing values are unchanged."""
    run = Run()
    for loss in [0.0, *map(float, range(MAX_REPORTS - 2)), math.inf, math.nan]:
        run.backward(loss, 1)
        run.step()
    assert len(run.metrics.reports) == MAX_REPORTS
    losses = [report.values['train/loss'] for report in run.metrics.reports]
    assert losses[:2] == [0.0, 1.0]
    assert losses[-2] == math.inf
    assert math.isnan(losses[-1])


async def _create(service: Service) -> None:
    command = create_request(
        lora_config=LoraConfig(r=2),
        training_config=TrainingConfig(gradient_accumulation_steps=1),
        adapter_id=ADAPTER,
        fingerprint='c',
    )
    await service.verbs.create_adapter(ALICE, command)


def _script() -> list[Any]:
    batches = [journals.batch_operation(2 * index + 1, ADAPTER, length=3 + index) for index in range(3)]
    steps = [journals.step_operation(2 * index + 2, ADAPTER) for index in range(3)]
    return [operation for pair in zip(batches, steps, strict=True) for operation in pair]


async def _reported(service: Service) -> list[tuple[int, int, dict[str, float]]]:
    await _create(service)
    for operation in _script():
        await service.execute(operation)
    reports = service.verbs.directory.get(ALICE, ADAPTER).metrics.reports
    without = {'train/queue_seconds', 'train/device_seconds'}
    return [
        (report.sequence_number, report.step, {name: report.values[name] for name in report.values.keys() - without})
        for report in reports
    ]


async def test_reports_are_exact_after_a_crash_at_any_moment(tmp_path: Path):
    """Each step is reported once, with the same values as without a crash, wherever the process ends."""
    expected = await _reported(await start(MemoryJournal(), StrictStore()))
    assert [(number, step) for number, step, _ in expected] == [(2, 1), (4, 2), (6, 3)]
    assert [values['train/token_count'] for *_, values in expected] == [3, 4, 5]
    moment, is_complete = 1, False
    while not is_complete:
        journal, store = MemoryJournal(), StrictStore()
        try:
            found = await _reported(await start(journal, store, moment_limit=moment))
            is_complete = True
        except (Died, BaseExceptionGroup):
            found = await _reported(await start(journal, store))
        assert found == expected, f'after a crash at moment {moment}'
        moment += 1
    assert moment > len(_script())


async def test_watch_of_reports_leaves_out_other_changes() -> None:
    """A watch of reports sends the snapshot, each step and the deletion; a watch of adapters sends every change."""
    service = await start(MemoryJournal(), StrictStore())
    await _create(service)
    directory = service.verbs.directory
    watches = [directory.watch(GATEWAY, '', is_reports_only=flag) for flag in (True, False)]
    for watch in watches:
        assert (await anext(watch)).adapter is not None
        assert (await anext(watch)).is_synced
    for operation in _script():
        await service.execute(operation)
    directory.remove(ALICE, ADAPTER)
    directory.close()
    reported, every = [[event.adapter async for event in _until_closed(watch)] for watch in watches]
    assert [None if adapter is None else adapter.step_count for adapter in reported] == [1, 2, 3, None]
    assert [adapter.metrics.reports[-1].sequence_number for adapter in reported if adapter] == [2, 4, 6]
    assert len(every) > len(reported)
    assert [None if adapter is None else adapter.sequence_number for adapter in every][-2:] == [6, None]


async def _until_closed(watch: AsyncGenerator[AdapterEvent, None]) -> AsyncIterator[AdapterEvent]:
    with suppress(Draining):
        async for event in watch:
            yield event
