"""From what passes gave to what verbs answer."""

from collections.abc import Sequence

import numpy as np

from twinkle.data_format import InputFeature
from twinkle.metric import ForwardFacts, Metric
from twinkle.model.engine.adapter_state import AdapterState, PendingForward
from twinkle.model.engine.joint_pass import PassResult
from twinkle.model.engine.results import ForwardResult, StepResult


def result_of_pending(pending: PendingForward) -> PassResult:
    """Return a pending forward pass as a result; its loss is 0 before it was calculated."""
    output = pending.output or {}
    return PassResult(
        batch=pending.batch,
        logps_R=pending.outputs.logps_R.numpy(force=True),
        loss_sum=0.0 if pending.output is None else float(pending.output['loss'].detach()),
        divisor=output.get('num_tokens', 0),
        metrics=dict(output.get('metrics', {})),
    )


def forward_result(
    features: Sequence[InputFeature],
    results: Sequence[PassResult],
    *,
    metrics: Sequence[Metric],
    warnings: tuple[str, ...] = (),
) -> ForwardResult:
    """Add up the passes of one batch, and let `metrics` take the batch in."""
    loss_sum = sum(result.loss_sum for result in results)
    label_count = sum(result.batch.label_count for result in results)
    names = sorted({name for result in results for name in result.metrics})
    reported = {name: float(np.mean([result.metrics[name] for result in results])) for name in names}
    token_count = sum(result.batch.token_count for result in results)
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
        logps=[logps for result in results for logps in result.batch.by_feature(result.logps_R)],
        metrics=reported,
        token_count=token_count,
        padding_token_count=sum(result.padding_token_count for result in results),
        pass_count=len(results),
        pass_adapter_count=max(result.adapter_count for result in results),
        device_seconds=sum(result.seconds for result in results),
        warnings=warnings,
    )


def step_result(state: AdapterState, *, is_applied: bool) -> StepResult:
    """Return where an adapter stands."""
    return StepResult(is_applied=is_applied, learning_rate=state.learning_rate, step_count=state.step_count)
