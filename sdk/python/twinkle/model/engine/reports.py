"""From what passes gave to what verbs answer."""

from collections.abc import Sequence

import numpy as np

from twinkle.data_format import InputFeature
from twinkle.metric import ForwardFacts, Metric
from twinkle.model.engine.adapter_state import AdapterState, PendingForward
from twinkle.model.engine.forward_pass import PassResult
from twinkle.model.engine.results import ForwardResult, StepResult
from twinkle.processor import PackedBatch


def result_of_pending(pending: PendingForward) -> PassResult:
    """Return a pending forward pass as a result; its loss is 0 before it was calculated."""
    output = pending.output or {}
    return PassResult(
        logps_R=pending.logps_R.numpy(force=True),
        loss_sum=0.0 if pending.output is None else float(pending.output['loss'].detach()),
        divisor=output.get('num_tokens', 0),
        metrics=dict(output.get('metrics', {})),
    )


def forward_result(
    features: Sequence[InputFeature],
    parts: list[PackedBatch],
    results: list[PassResult],
    *,
    metrics: Sequence[Metric],
) -> ForwardResult:
    """Add up the passes of one batch, and let `metrics` take the batch in."""
    loss_sum = sum(result.loss_sum for result in results)
    label_count = sum(part.label_count for part in parts)
    names = sorted({name for result in results for name in result.metrics})
    reported = {name: float(np.mean([result.metrics[name] for result in results])) for name in names}
    token_count = sum(part.token_count for part in parts)
    facts = ForwardFacts(
        features=features,
        loss_sum=loss_sum,
        label_count=label_count,
        token_count=token_count,
        loss_metrics=reported,
    )
    for metric in metrics:
        metric.accumulate(facts)
    divisor = sum(result.divisor for result in results)
    return ForwardResult(
        loss_sum=loss_sum,
        loss=loss_sum / divisor if divisor else loss_sum,
        num_tokens=label_count,
        logps=[logps for part, result in zip(parts, results, strict=True) for logps in part.by_feature(result.logps_R)],
        metrics=reported,
        token_count=token_count,
    )


def step_result(state: AdapterState, *, is_applied: bool) -> StepResult:
    """Return where an adapter stands."""
    return StepResult(is_applied=is_applied, learning_rate=state.learning_rate, step_count=state.step_count)
