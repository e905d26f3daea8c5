"""The accumulated gradient of an adapter: adding to it, clipping it, applying it.

It is kept as the plain sum; what it is to be divided by is counted beside it, and the division
is done for the step alone, so that batches may still be added after clipping or stepping.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.errors import LossNotFinite


def sum_gradients(first: Sequence[Tensor] | None, second: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the sum of two gradients, the first of which may be none."""
    if first is None:
        return second
    return [a + b for a, b in zip(first, second, strict=True)]


def check_gradient(state: AdapterState, gradient: Sequence[Tensor]) -> None:
    """Refuse a gradient that would poison the adapter.

    Raises:
        LossNotFinite: an element is infinite or not a number.
    """
    if not all(bool(tensor.isfinite().all()) for tensor in gradient):
        raise LossNotFinite(state.adapter_id, None)


def add_gradient(state: AdapterState, gradient: Sequence[Tensor], *, divisor: int) -> None:
    """Add one batch's gradient.

    Args:
        state: of the adapter.
        gradient: in the order of its parameters.
        divisor: what this batch adds to the number the sum is divided by.
    """
    for parameter, tensor in zip(state.weights.parameters(), gradient, strict=True):
        parameter.grad = tensor.clone() if parameter.grad is None else parameter.grad + tensor
    state.batch_count += 1
    state.divisor += divisor


def clip_gradient(state: AdapterState, *, max_grad_norm: float, norm_type: float) -> float:
    """Scale the gradient so that, divided, its norm is at most `max_grad_norm`; return the norm before."""
    gradients = [parameter.grad for parameter in state.weights.parameters()]
    divisor = max(state.divisor, 1)
    norm = torch.nn.utils.get_total_norm(gradients, norm_type=norm_type) / divisor
    # As torch's own clipping: a small number keeps a zero norm from dividing, and factors above 1 are not used.
    factor = torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0)
    for tensor in gradients:
        tensor.mul_(factor)
    state.grad_norm = float(norm)
    return state.grad_norm


def apply_gradient(state: AdapterState, *, learning_rate: float | None = None) -> float:
    """Step the optimizer with the divided gradient; return the learning rate used.

    Args:
        state: of the adapter.
        learning_rate: for this step alone; unset: the schedule's.
    """
    parameters = state.weights.parameters()
    sums = [parameter.grad for parameter in parameters]
    rates = [group['lr'] for group in state.optimizer.param_groups]
    if state.divisor:
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total / state.divisor
    if learning_rate is not None:
        _set_rates(state, [learning_rate] * len(rates))
    used = state.learning_rate
    try:
        state.optimizer.step()
    finally:
        _set_rates(state, rates)
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total
    state.step_count += 1
    return used


def _set_rates(state: AdapterState, rates: list[float]) -> None:
    for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
        group['lr'] = rate
