"""One pass of several adapters: one forward pass, one loss per adapter, one backward pass.

Losses are not summed: autograd differentiates all losses in one call, and the gradient of each loss reaches only the
parameters of its adapter. A value that is not finite in one loss therefore does not affect the other losses.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinkle.data_format import LossOutput
from twinkle.loss import InvalidLossInput, LossBatch
from twinkle.metric import LabelFacts
from twinkle.model.engine.adapter_state import AdapterState, SegmentOutputs
from twinkle.model.engine.gradient import check_gradient
from twinkle.model.engine.label_facts import label_facts, more_outputs, target_logps
from twinkle.model.engine.memory import is_out_of_memory
from twinkle.model.engine.pass_outputs import Segment, forward_outputs
from twinkle.model.engine.purpose import Purpose
from twinkle.model.errors import LossFailed, LossNotFinite, TrainerError
from twinkle.nn import BaseSharding, FullWeights, PackedModel
from twinkle.processor import InvalidFeatures, PackedBatch

_REFUSALS = (TrainerError, InvalidFeatures, InvalidLossInput)
"""Errors with messages for the caller, raised by losses and validation."""
LOSS_FAILURES = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError, RuntimeError)
"""Exceptions of a loss that is faulty or does not suit its batch; out-of-memory errors are handled separately."""

_MAX_DIVISOR = 1 << 40
"""Maximum `num_tokens` of a loss, by which its gradient is divided; the sum over millions of batches fits 64 bits."""


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """Results of one pass for one adapter."""

    batch: PackedBatch
    facts: LabelFacts
    output: LossOutput
    """Output of the loss as plain numbers."""
    target_logps: npt.NDArray[np.float32]
    """Log-probabilities to return: float32 [R] for R labels, or [R, K] if K candidates replace each label."""
    more: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Other requested outputs."""
    gradient: Sequence[Tensor] | None = None
    """Gradient, in the order of the adapter's parameters.

    None if the pass computed no gradient, because it was not for training or had no loss; if the weights are sharded
    and store the gradient; and on ranks that do not own the adapter.
    """
    seconds: float = 0.0
    """The adapter's share of the pass's duration, by rows."""
    padding_token_count: int = 0
    """Number of padding rows of the pass, reported for its first adapter only."""
    shared_token_count: int = 0
    """Number of tokens whose results were taken from an equal prefix of another sequence in the same pass."""
    adapter_count: int = 1
    """Number of adapters in the pass."""


class BackwardFailed(Exception):
    """The joint backward pass of several adapters raised an exception; the adapter that caused it is unknown."""


@dataclass
class _SegmentRun:
    """Progress of one adapter in a pass."""

    segment: Segment
    outputs: SegmentOutputs
    output: LossOutput | None = None
    gradient: Sequence[Tensor] | None = None
    refusal: TrainerError | ValueError | None = None


def run_joint_pass(
    model: PackedModel, segments: Sequence[Segment], *, is_repeated: bool = False
) -> list[PassResult | TrainerError | ValueError]:
    """Run a pass; return each segment's result or the error that refused it. Either all segments train, or none.

    Args:
        model: model of all segments.
        segments: segments of different adapters.
        is_repeated: whether another rank runs the same pass, so that this rank must not compute a gradient.

    Raises:
        BackwardFailed: the backward pass of several losses raised an exception; run the adapters separately.
        RuntimeError: the pass failed, for example because memory ran out.
        MemoryError: memory ran out.
    """
    begin = time.perf_counter()
    is_training = segments[0].purpose.is_training
    running_pass = nullcontext() if model.sharding is None else model.sharding.running_pass()
    with torch.set_grad_enabled(is_training), running_pass:
        outputs = forward_outputs(model, segments)
        runs = [_SegmentRun(segment, own) for segment, own in zip(segments, outputs, strict=True)]
        for run in runs:
            _calculate(run)
        if model.sharding is not None:
            for run, refusal in zip(runs, model.sharding.agree([run.refusal for run in runs]), strict=True):
                run.refusal = refusal
        error = None
        if is_training and not is_repeated:
            learning = [run for run in runs if run.refusal is None and run.output['loss'].requires_grad]
            error = _differentiate(model, learning)
    if error is not None:
        # The error is raised after the block, because `running_pass` skips its collectives after an exception, and
        # other ranks wait for them.
        raise BackwardFailed from error
    # The check that values are finite has waited for the device, so the device has completed the pass.
    seconds = time.perf_counter() - begin
    row_counts = [segment.tree.row_count for segment in segments]
    padding = model.padded_count(*row_counts) - sum(row_counts)
    row_seconds = seconds / sum(row_counts)
    return [
        run.refusal
        or _result_of(run, row_seconds=row_seconds, padding=padding if run is runs[0] else 0, adapter_count=len(runs))
        for run in runs
    ]


def has_loss(purpose: Purpose, batch: PackedBatch) -> bool:
    """Return whether the loss can be calculated on a batch.

    The batch needs the required streams. Unless the loss reads embeddings, it also needs a counted label, or any label
    for a loss with `takes_every_label`.
    """
    loss = purpose.loss
    if any(name not in batch.streams for name in loss.required_streams):
        return False
    has_labels = batch.label_count > 0 if loss.takes_every_label else bool(np.any(batch.weights_R != 0))
    return has_labels or 'embeddings' in loss.required_outputs


def loss_of(purpose: Purpose, batch: LossBatch) -> LossOutput:
    """Return the validated output of the loss.

    Raises:
        LossNotFinite: the loss is not finite; the error names the first feature with a log-probability that is not
            finite, if there is one.
        LossFailed: the loss raised an exception, or its output is not a valid `LossOutput`.
        InvalidLossInput, InvalidFeatures: the loss refused its batch.
    """
    try:
        # Rows include labels of weight 0 only if their log-probabilities were requested.
        output = purpose.loss(batch.counting() if bool((batch.weights_R == 0).any()) else batch)
        value = _checked_value(output)
        _check_numbers(output)
    except _REFUSALS:
        raise
    except LOSS_FAILURES as error:
        if is_out_of_memory(error):
            raise
        raise LossFailed(purpose.state.adapter_id, purpose.loss_name, str(error)) from error
    if not bool(value.isfinite().all()):
        broken = np.flatnonzero(~np.isfinite(batch.logps_R.numpy(force=True)))
        raise LossNotFinite(purpose.state.adapter_id, int(batch.features_R[broken[0]]) if len(broken) else None)
    return output


def plain_output(output: LossOutput) -> LossOutput:
    """Return the output of a loss as plain numbers, without the autograd graph."""
    return LossOutput(
        loss=float(output['loss'].detach()),
        num_tokens=int(output.get('num_tokens', 0)),
        metrics={name: float(value) for name, value in output.get('metrics', {}).items()},
        metric_weight=float(output.get('metric_weight', 1.0)),
    )


def gradients_of(
    states: Sequence[AdapterState],
    values: Sequence[Tensor],
    *,
    by_outputs: Sequence[Tensor] | None = None,
    more_inputs: Sequence[Tensor] = (),
) -> list[Sequence[Tensor]]:
    """Return the gradient of each adapter's value with respect to its parameters, from one backward pass.

    Args:
        states: states of different adapters.
        values: one value per adapter.
        by_outputs: upstream gradients of the values; None for scalar values.
        more_inputs: tensors that the backward pass must reach, see `BaseSharding.pass_inputs`; their gradients are
            discarded.

    Returns:
        Gradients in the order of `AdapterState.parameters`; zeros where a value does not depend on a parameter.
    """
    parameters = [state.parameters() for state in states]
    flat = torch.autograd.grad(
        list(values),
        [*(parameter for own in parameters for parameter in own), *more_inputs],
        grad_outputs=by_outputs,
        allow_unused=True,
        materialize_grads=True,
    )
    gradients = iter(flat)
    return [[next(gradients) for _ in own] for own in parameters]


def completed_gradients(
    states: Sequence[AdapterState], gradients: Sequence[Sequence[Tensor]], sharding: BaseSharding
) -> list[Sequence[Tensor]]:
    """Return the gradients, completed with the parts of other ranks. All ranks of the pass must call this function.

    The gradients of value heads are already complete and are returned unchanged.
    """
    paths = [state.weights.layer_paths for state in states]
    named = [
        pair for own_paths, own in zip(paths, gradients, strict=True) for pair in zip(own_paths, own, strict=False)
    ]
    completed = iter(sharding.complete(named))
    return [
        [*(next(completed) for _ in own_paths), *own[len(own_paths) :]]
        for own_paths, own in zip(paths, gradients, strict=True)
    ]


def _checked_value(output: LossOutput) -> Tensor:
    value = output['loss']
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TypeError('the loss must return a scalar tensor')
    if torch.is_grad_enabled() and not value.requires_grad:
        raise TypeError('the loss does not depend on the outputs of the model')
    return value


def _check_numbers(output: LossOutput) -> None:
    """Validate numbers per adapter that would otherwise fail when the results of the pass are combined."""
    if not 0 <= int(output.get('num_tokens', 0)) <= _MAX_DIVISOR:
        raise ValueError(f'num_tokens must be from 0 to 2^40, got {output.get("num_tokens", 0)}')
    plain_output(output)


def _calculate(run: _SegmentRun) -> None:
    if not has_loss(run.segment.purpose, run.segment.batch):
        run.output = LossOutput(loss=run.outputs.loss_batch.logps_R.new_zeros(()), num_tokens=0)
        return
    try:
        run.output = loss_of(run.segment.purpose, run.outputs.loss_batch)
    except (TrainerError, ValueError) as error:
        run.refusal = error


def _differentiate(model: PackedModel, runs: Sequence[_SegmentRun]) -> Exception | None:
    """Calculate the gradients; return the exception of the backward pass if several losses may have caused it."""
    if not runs:
        return None
    states = [run.segment.purpose.state for run in runs]
    if isinstance(states[0].weights, FullWeights) and states[0].weights.is_sharded:
        _differentiate_shards(runs[0])
        return None
    try:
        more_inputs = () if model.sharding is None else model.sharding.pass_inputs
        partial = gradients_of(states, [run.output['loss'] for run in runs], more_inputs=more_inputs)
    except LOSS_FAILURES as error:
        if is_out_of_memory(error):
            raise
        if len(runs) > 1:
            return error
        purpose = runs[0].segment.purpose
        runs[0].refusal = LossFailed(purpose.state.adapter_id, purpose.loss_name, str(error))
        return None
    # Outside of the try statement, because an error here means that a rank was lost, not that a loss failed.
    gradients = partial if model.sharding is None else completed_gradients(states, partial, model.sharding)
    for run, gradient in zip(runs, gradients, strict=True):
        run.gradient = gradient
        try:
            check_gradient(run.segment.purpose.state, gradient)
        except LossNotFinite as error:
            run.refusal = error
    return None


def _differentiate_shards(run: _SegmentRun) -> None:
    """Add the gradient of a loss to the sharded weights of a full-parameter run; see `FullWeights.collecting`."""
    try:
        torch.autograd.backward(run.output['loss'])
    except LOSS_FAILURES as error:
        if is_out_of_memory(error):
            raise
        purpose = run.segment.purpose
        run.refusal = LossFailed(purpose.state.adapter_id, purpose.loss_name, str(error))


def _result_of(run: _SegmentRun, *, row_seconds: float, padding: int, adapter_count: int) -> PassResult:
    batch, row_count = run.segment.batch, run.segment.tree.row_count
    return PassResult(
        batch=batch,
        facts=label_facts(batch, run.outputs),
        output=plain_output(run.output),
        target_logps=target_logps(run.segment.purpose.loss, run.outputs),
        more=more_outputs(run.segment.purpose.options.more_outputs, run.outputs),
        gradient=run.gradient,
        seconds=row_seconds * row_count,
        padding_token_count=padding,
        shared_token_count=batch.token_count - row_count,
        adapter_count=adapter_count,
    )
