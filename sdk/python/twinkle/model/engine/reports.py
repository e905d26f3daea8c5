"""Conversion of pass results to the results of engine methods."""

from collections.abc import Sequence

import numpy as np
import torch

from twinkle.data_format import InputFeature, LossOutput, StepResult
from twinkle.loss import Loss, merge_metrics
from twinkle.metric import ForwardFacts, Metric
from twinkle.model.engine.adapter_state import AdapterState, PendingForward
from twinkle.model.engine.joint_pass import LOSS_FAILURES, PassResult, plain_output
from twinkle.model.engine.label_facts import by_feature, joined_facts, label_facts, more_outputs, target_logps
from twinkle.model.engine.results import BatchResult
from twinkle.model.errors import MetricFailed

_DIVIDED = 'memory ran out: the batch ran in smaller pieces, so the last bits of its gradient may differ'


def result_of_pending(pending: PendingForward, loss: Loss, *, more: Sequence[str] = ()) -> PassResult:
    """Return a pending forward pass as a result; the loss is 0 if `calculate_loss` was not called."""
    output = LossOutput(loss=torch.zeros(())) if pending.output is None else pending.output
    return PassResult(
        batch=pending.batch,
        facts=label_facts(pending.batch, pending.outputs),
        output=plain_output(output),
        target_logps=target_logps(loss, pending.outputs),
        more=more_outputs(more, pending.outputs),
        shared_token_count=pending.shared_token_count,
    )


def forward_result(
    features: Sequence[InputFeature],
    results: Sequence[PassResult],
    *,
    metrics: Sequence[Metric],
    warnings: tuple[str, ...] = (),
    is_divided: bool = False,
) -> BatchResult:
    """Combine the passes of one batch and update the metrics.

    Raises:
        MetricFailed: a metric raised an exception; no metric was updated.
    """
    loss_sum = sum(result.output['loss'] for result in results)
    divisor = sum(result.output['num_tokens'] for result in results)
    reported = merge_metrics([result.output for result in results])
    facts = ForwardFacts(
        features=features,
        loss_sum=loss_sum,
        label_count=sum(int(np.count_nonzero(result.batch.weights_R)) for result in results),
        token_count=sum(result.batch.token_count for result in results),
        loss_metrics=reported,
        labels=joined_facts(
            [result.facts for result in results], [len(result.batch.feature_lengths) for result in results]
        ),
    )
    _update_metrics(facts, metrics)
    outputs = {
        name: [array for result in results for array in by_feature(name, result.batch, result.more[name])]
        for name in results[0].more
    }
    return BatchResult(
        loss_sum=loss_sum,
        loss=loss_sum / divisor if divisor else loss_sum,
        num_tokens=facts.label_count,
        logps=[logps for result in results for logps in result.batch.by_feature(result.target_logps)],
        metrics=reported,
        values=outputs.pop('values', ()),
        outputs=outputs,
        token_count=facts.token_count,
        padding_token_count=sum(result.padding_token_count for result in results),
        shared_token_count=sum(result.shared_token_count for result in results),
        pass_count=len(results),
        pass_adapter_count=max(result.adapter_count for result in results),
        device_seconds=sum(result.seconds for result in results),
        is_divided=is_divided,
        warnings=(*warnings, _DIVIDED) if is_divided else warnings,
    )


def _update_metrics(facts: ForwardFacts, metrics: Sequence[Metric]) -> None:
    before = [metric.state() for metric in metrics]
    for metric in metrics:
        try:
            metric.accumulate(facts)
        except LOSS_FAILURES as error:
            for each, state in zip(metrics, before, strict=True):
                each.load_state(state)
            raise MetricFailed(type(metric).__name__, str(error)) from error


def step_result(state: AdapterState, *, is_applied: bool) -> StepResult:
    """Return the current step count and learning rate of an adapter."""
    return StepResult(is_applied=is_applied, learning_rate=state.learning_rate, step_count=state.step_count)
