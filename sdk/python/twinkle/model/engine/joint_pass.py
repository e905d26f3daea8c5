"""One pass of several adapters: forward once, each its own loss, backward once.

The losses are never added up: autograd is given all of them at once, and each reaches its own
adapter's parameters alone, so that what is not finite in one is not seen by another.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinkle.data_format import LossOutput
from twinkle.loss import InvalidLossInput, LossBatch
from twinkle.metric import LabelFacts
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.gradient import check_gradient
from twinkle.model.engine.label_facts import label_facts, more_outputs, target_logps
from twinkle.model.engine.memory import is_out_of_memory
from twinkle.model.engine.pass_outputs import Segment, SegmentOutputs, forward_outputs
from twinkle.model.engine.purpose import Purpose
from twinkle.model.errors import LossFailed, LossNotFinite, TrainerError
from twinkle.nn import PackedCausalLM
from twinkle.nn.rows import padded_row_count
from twinkle.processor import InvalidFeatures, PackedBatch

_REFUSALS = (TrainerError, InvalidFeatures, InvalidLossInput)
"""What a loss refuses in words made for its caller."""
LOSS_FAILURES = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError, RuntimeError)
"""What a loss that is wrong or unfit for its batch raises; memory that ran out is told apart from it."""

_MOST_TOKENS = 1 << 40
"""A loss may divide by this: added up over any number of batches, it still fits the machine's integers."""


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """What one pass gave one adapter."""

    batch: PackedBatch
    facts: LabelFacts
    output: LossOutput
    """Of numbers alone."""
    target_logps: npt.NDArray[np.float32]
    """[R], or [R, K] where the loss has several targets in the place of a label."""
    more: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Other outputs that were asked for."""
    gradient: Sequence[Tensor] | None = None
    """In the order of the adapter's parameters; None without training."""
    seconds: float = 0.0
    """The adapter's share of the pass, by its tokens."""
    padding_token_count: int = 0
    """Rows that were added to the pass; counted for its first adapter."""
    adapter_count: int = 1
    """Adapters in the pass."""


class BackwardFailed(Exception):
    """The backward pass of several adapters raised, and which of them is to blame is not known yet."""


@dataclass
class _Share:
    """One adapter's progress through a pass."""

    segment: Segment
    outputs: SegmentOutputs
    output: LossOutput | None = None
    gradient: Sequence[Tensor] | None = None
    refusal: TrainerError | ValueError | None = None


def run_joint_pass(model: PackedCausalLM, segments: Sequence[Segment]) -> list[PassResult | TrainerError | ValueError]:
    """Run a pass, all of it for training or none; return each segment's result, or why it alone was refused.

    Raises:
        BackwardFailed: one of several losses raised as it was differentiated; run them apart.
        RuntimeError: memory ran out, in torch's words.
    """
    begin = time.perf_counter()
    is_training = segments[0].purpose.is_training
    with torch.set_grad_enabled(is_training):
        outputs = forward_outputs(model, segments)
        shares = [_Share(segment, own) for segment, own in zip(segments, outputs, strict=True)]
        for share in shares:
            _calculate(share)
    if is_training:
        _differentiate([share for share in shares if share.refusal is None and share.output['loss'].requires_grad])
    # The finiteness of every gradient was read by now, so what the device was asked for is done.
    seconds = time.perf_counter() - begin
    widths = chain.from_iterable(model.layers.values())
    padded_count = padded_row_count(sum(segment.batch.token_count for segment in segments), widths)
    return [share.refusal or _result_of(share, shares, seconds=seconds, padded_count=padded_count) for share in shares]


def has_loss(purpose: Purpose, batch: PackedBatch) -> bool:
    """Whether a batch has all for the loss, and anything: labels that count, or features where it learns from those."""
    loss = purpose.loss
    if any(name not in batch.streams for name in loss.required_streams):
        return False
    has_labels = batch.label_count > 0 if loss.takes_every_label else bool(np.any(batch.weights_R != 0))
    return has_labels or 'embeddings' in loss.required_outputs


def loss_of(purpose: Purpose, batch: LossBatch) -> LossOutput:
    """Return the loss of a batch, checked.

    Raises:
        LossNotFinite: names the first feature whose log-probabilities are not finite, if it is one.
        LossFailed: the loss raised, or returned no number.
        InvalidLossInput, InvalidFeatures: the loss refused its batch.
    """
    try:
        # Labels of weight 0 are among the rows only where their log-probabilities were asked for.
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
    """Return what a loss gave without the graph behind it."""
    return LossOutput(
        loss=float(output['loss'].detach()),
        num_tokens=int(output.get('num_tokens', 0)),
        metrics={name: float(value) for name, value in output.get('metrics', {}).items()},
        metric_weight=float(output.get('metric_weight', 1.0)),
    )


def gradients_of(
    states: Sequence[AdapterState], values: Sequence[Tensor], *, by_outputs: Sequence[Tensor] | None = None
) -> list[Sequence[Tensor]]:
    """Return for each adapter the gradient of its own value by its parameters, in one backward pass.

    Args:
        states: of the adapters, each once.
        values: one for each.
        by_outputs: gradients of something else by the values; unset: the values are scalars.

    Returns:
        In the order of `AdapterState.parameters`; zeros for what a value does not depend on.
    """
    parameters = [state.parameters() for state in states]
    flat = torch.autograd.grad(
        list(values),
        [parameter for own in parameters for parameter in own],
        grad_outputs=by_outputs,
        allow_unused=True,
        materialize_grads=True,
    )
    gradients = iter(flat)
    return [[next(gradients) for _ in own] for own in parameters]


def _checked_value(output: LossOutput) -> Tensor:
    value = output['loss']
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TypeError('it must return a scalar tensor as its loss')
    if torch.is_grad_enabled() and not value.requires_grad:
        raise TypeError('its value does not depend on what it was given')
    return value


def _check_numbers(output: LossOutput) -> None:
    """Refuse here, where it concerns one adapter alone, what would fail once all of a pass is summed up."""
    if not 0 <= int(output.get('num_tokens', 0)) <= _MOST_TOKENS:
        raise ValueError('num_tokens must be from 0 to 2^40')
    plain_output(output)


def _calculate(share: _Share) -> None:
    if not has_loss(share.segment.purpose, share.segment.batch):
        share.output = LossOutput(loss=share.outputs.loss_batch.logps_R.new_zeros(()), num_tokens=0)
        return
    try:
        share.output = loss_of(share.segment.purpose, share.outputs.loss_batch)
    except (TrainerError, ValueError) as error:
        share.refusal = error


def _differentiate(shares: Sequence[_Share]) -> None:
    if not shares:
        return
    states = [share.segment.purpose.state for share in shares]
    try:
        gradients = gradients_of(states, [share.output['loss'] for share in shares])
    except LOSS_FAILURES as error:
        if is_out_of_memory(error):
            raise
        if len(shares) > 1:
            raise BackwardFailed from error
        purpose = shares[0].segment.purpose
        shares[0].refusal = LossFailed(purpose.state.adapter_id, purpose.loss_name, str(error))
        return
    for share, gradient in zip(shares, gradients, strict=True):
        share.gradient = gradient
        try:
            check_gradient(share.segment.purpose.state, gradient)
        except LossNotFinite as error:
            share.refusal = error


def _result_of(share: _Share, shares: Sequence[_Share], *, seconds: float, padded_count: int) -> PassResult:
    batch = share.segment.batch
    token_count = sum(other.segment.batch.token_count for other in shares)
    return PassResult(
        batch=batch,
        facts=label_facts(batch, share.outputs),
        output=plain_output(share.output),
        target_logps=target_logps(share.segment.purpose.loss, share.outputs),
        more=more_outputs(share.segment.purpose.options.more_outputs, share.outputs),
        gradient=share.gradient,
        seconds=seconds * batch.token_count / token_count,
        padding_token_count=padded_count - token_count if share is shares[0] else 0,
        adapter_count=len(shares),
    )
