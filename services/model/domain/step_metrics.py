"""Metrics of a run that the gateway stores: those of each optimizer step and of each CalculateMetric."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from twinkle.data_format import ForwardResult, StepResult
from twinkle_services.model.domain.engine import VerbRun
from twinkle_services.model.domain.operation import (
    Backward,
    CalculateMetric,
    ClipGradAndStep,
    ClipGradNorm,
    Forward,
    ForwardBackward,
    Load,
    Operation,
    Step,
    Undo,
    ZeroGrad,
    token_count,
)
from twinkle_services.model.domain.result import MetricResult

MAX_REPORTS = 8
"""Maximum number of reports that an adapter stores. A reader of the change feed that falls further behind misses the
older reports."""
_MEAN_OF = 'mean.'
_COUNT_OF = 'count.'
"""Prefixes of the totals of metrics that a loss reports."""
_OWN_NAMES = frozenset(
    {'loss', 'grad_norm', 'learning_rate', 'token_count', 'pass_adapter_count', 'queue_seconds', 'device_seconds'}
)
"""Names of the values of each step, which take precedence over metrics of a loss with the same names."""


@dataclass(frozen=True, kw_only=True)
class MetricReport:
    """Metrics of a run at one step."""

    sequence_number: int
    """Number of the operation that completed the report."""
    step: int
    """Number of optimizer steps applied."""
    values: Mapping[str, float]
    """Values by name, such as 'train/loss'."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Recent reports of an adapter, and totals of its operations since the last optimizer step."""

    reports: tuple[MetricReport, ...] = ()
    """The last reports, at most `MAX_REPORTS`, by ascending sequence number."""
    totals: Mapping[str, float] = field(default_factory=dict[str, float])
    """Totals by name. A mean is stored as a sum and a count, whose names start with `mean.` and `count.`."""


def metrics_after(
    metrics: StepMetrics, operation: Operation, run: VerbRun, *, step_count: int, queue_seconds: float
) -> StepMetrics:
    """Return an adapter's metrics after an operation.

    Args:
        metrics: Metrics before the operation.
        operation: The operation, which succeeded.
        run: Result of the operation on the engine.
        step_count: Number of optimizer steps that were applied up to the end of the operation.
        queue_seconds: Time in the queue, without `run.wait_seconds`.
    """
    if isinstance(operation.verb, ZeroGrad | Load | Undo):
        return StepMetrics(reports=metrics.reports)
    totals, values = _totals_after(metrics.totals, operation, run, queue_seconds), dict[str, float]()
    match operation.verb, run.outcome:
        case Step() | ClipGradAndStep(), StepResult(is_applied=True) as outcome:
            totals, values = {}, _step_values(totals, outcome)
        case CalculateMetric(is_training=is_training), MetricResult() as outcome:
            prefix = 'metric' if is_training else 'eval'
            values = {f'{prefix}/{name}': value for name, value in outcome.values.items()}
        case _:
            pass
    if not values:
        return StepMetrics(reports=metrics.reports, totals=totals)
    report = MetricReport(sequence_number=operation.sequence_number, step=step_count, values=values)
    return StepMetrics(reports=(*metrics.reports, report)[-MAX_REPORTS:], totals=totals)


def _totals_after(
    totals: Mapping[str, float], operation: Operation, run: VerbRun, queue_seconds: float
) -> dict[str, float]:
    """Return the totals after an operation."""
    after = dict(totals)

    def add(name: str, value: float) -> None:
        after[name] = after.get(name, 0.0) + value

    add('queue_seconds', queue_seconds + run.wait_seconds)
    add('device_seconds', run.device_seconds)
    if isinstance(operation.verb, Forward | ForwardBackward):
        add('token_count', token_count(operation.verb))
        add(f'{_MEAN_OF}pass_adapter_count', run.pass_adapter_count)
        add(f'{_COUNT_OF}pass_adapter_count', 1)
    match operation.verb, run.outcome:
        case Backward() | ForwardBackward(), ForwardResult() as outcome:
            # The loss of a batch is weighted by its number of labels.
            weight = max(outcome.num_tokens, 1)
            add(f'{_MEAN_OF}loss', weight * outcome.loss)
            add(f'{_COUNT_OF}loss', weight)
            others = {name: value for name, value in outcome.metrics.items() if name not in _OWN_NAMES}
            for name, value in others.items():
                add(f'{_MEAN_OF}{name}', value)
                add(f'{_COUNT_OF}{name}', 1)
        case ClipGradNorm(), StepResult(grad_norm=float() as grad_norm):
            after['grad_norm'] = grad_norm
        case _:
            pass
    return after


def _step_values(totals: Mapping[str, float], outcome: StepResult) -> dict[str, float]:
    """Return the metrics of an optimizer step from the totals of its operations and its result."""
    values = {'learning_rate': outcome.learning_rate}
    for key, total in totals.items():
        if key.startswith(_MEAN_OF):
            name = key.removeprefix(_MEAN_OF)
            values[name] = total / totals[f'{_COUNT_OF}{name}']
        elif not key.startswith(_COUNT_OF):
            values[key] = total
    if outcome.grad_norm is not None:
        values['grad_norm'] = outcome.grad_norm
    return {f'train/{name}': value for name, value in values.items()}
