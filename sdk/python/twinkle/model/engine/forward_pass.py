"""One forward pass of one adapter's batch, its loss and its gradient."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinkle.data_format import InputFeature, LossOutput
from twinkle.loss import Loss, LossBatch
from twinkle.model.engine.adapter_state import AdapterState, PendingForward
from twinkle.model.engine.results import ForwardOptions
from twinkle.model.errors import LossNotFinite
from twinkle.nn import AdapterSpan, LoraWeights, PackedCausalLM, SequenceSpan
from twinkle.processor import PackedBatch


@dataclass(frozen=True)
class PassResult:
    """What one pass gave."""

    logps_R: npt.NDArray[np.float32]
    loss_sum: float
    divisor: int
    """What the loss adds to the number its gradient is divided by."""
    metrics: dict[str, float]
    gradient: Sequence[Tensor] | None = None
    """In the order of the adapter's parameters."""


def split_features(features: Sequence[InputFeature], *, max_tokens: int) -> list[Sequence[InputFeature]]:
    """Cut a batch into runs of at most `max_tokens` tokens, or of one feature where that alone has more."""
    parts: list[list[InputFeature]] = []
    room = 0
    for feature in features:
        length = len(feature['input_ids'])
        if not parts or length > room:
            parts.append([])
            room = max_tokens
        parts[-1].append(feature)
        room -= length
    return list(parts)


def label_logps(
    model: PackedCausalLM,
    batch: PackedBatch,
    weights: LoraWeights | None,
    *,
    options: ForwardOptions,
    is_training: bool,
) -> Tensor:
    """Return float32 [R], with gradient where torch records one."""
    to_device = _mover(model)
    hidden_TD = model.hidden(
        to_device(batch.input_ids_T),
        to_device(batch.position_ids_T),
        sequences=[SequenceSpan(begin, end) for begin, end in batch.sequence_bounds],
        adapters=[AdapterSpan(0, batch.token_count, weights)],
        is_training=is_training,
    )
    hidden_RD = hidden_TD[to_device(batch.rows_R)]
    return model.label_logprobs(hidden_RD, to_device(batch.labels_R), temperature=options.temperature)


def loss_of(loss: Loss, batch: PackedBatch, logps_R: Tensor) -> LossOutput:
    """Return the loss of log-probabilities."""

    def moved(array: npt.NDArray[np.float32] | npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(logps_R.device)

    return loss(
        LossBatch(
            logps_R=logps_R,
            labels_R=moved(batch.labels_R),
            weights_R=moved(batch.weights_R),
            features_R=moved(batch.features_R),
            streams={name: moved(values) for name, values in batch.streams.items()},
        )
    )


def check_loss(state: AdapterState, batch: PackedBatch, logps_R: Tensor, output: LossOutput) -> None:
    """Refuse a loss nothing can be learned from.

    Raises:
        LossNotFinite: names the first feature whose log-probabilities are not finite, if it is one.
    """
    if bool(torch.isfinite(output['loss']).all()):
        return
    broken = np.flatnonzero(~np.isfinite(logps_R.numpy(force=True)))
    raise LossNotFinite(state.adapter_id, int(batch.features_R[broken[0]]) if len(broken) else None)


def gradient_of(state: AdapterState, value: Tensor, *, by_output: Tensor | None = None) -> Sequence[Tensor]:
    """Return the gradient of `value` by the adapter's parameters; zeros for those it does not depend on."""
    return torch.autograd.grad(
        value, state.weights.parameters(), grad_outputs=by_output, allow_unused=True, materialize_grads=True
    )


def run_pass(
    model: PackedCausalLM, state: AdapterState, batch: PackedBatch, *, options: ForwardOptions, is_training: bool
) -> PassResult:
    """Run a batch; with a gradient where it is for training.

    Raises:
        LossNotFinite: nothing was changed.
    """
    weights = None if options.is_adapter_disabled else state.weights
    with torch.set_grad_enabled(is_training):
        logps_R = label_logps(model, batch, weights, options=options, is_training=is_training)
        output = loss_of(state.loss, batch, logps_R)
        check_loss(state, batch, logps_R, output)
        gradient = gradient_of(state, output['loss']) if is_training else None
    return PassResult(
        logps_R=logps_R.numpy(force=True),
        loss_sum=float(output['loss'].detach()),
        divisor=output.get('num_tokens', 0),
        metrics=dict(output.get('metrics', {})),
        gradient=gradient,
    )


def pending_forward(
    model: PackedCausalLM, state: AdapterState, batch: PackedBatch, *, options: ForwardOptions
) -> PendingForward:
    """Run a batch and keep its activations."""
    with torch.enable_grad():
        return PendingForward(batch, label_logps(model, batch, state.weights, options=options, is_training=True))


@contextmanager
def undoing_dropout_draws(state: AdapterState) -> Iterator[None]:
    """Put the adapter's random state back if the block fails, so that a refused batch leaves no trace."""
    generator = state.weights.dropout_generator
    before = generator.get_state()
    try:
        yield
    except BaseException:
        generator.set_state(before)
        raise


def _mover(model: PackedCausalLM):  # noqa: ANN202 - a local function
    def to_device(array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(model.device)

    return to_device
