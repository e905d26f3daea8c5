"""Clipping of an adapter's gradient, and the optimizer step that applies it; see `twinkle.model.engine.gradient`."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.owner import AdapterOwner
from twinkle.model.engine.results import ClipOptions
from twinkle.model.errors import AdapterNotReady
from twinkle.module import GradientNotFinite, clip_by_norm, clip_by_value


def clip_gradient(state: AdapterState, limits: ClipOptions) -> float:
    """Clip each element of the divided gradient, then its norm; return the norm before it is clipped.

    Raises:
        AdapterNotReady: the norm is not finite; nothing was changed.
    """
    gradients = [parameter.grad for parameter in state.parameters() if parameter.grad is not None]
    divisor = max(state.divisor, 1)
    try:
        if limits.max_grad_value is not None:
            clip_by_value(gradients, max_value=limits.max_grad_value, divisor=divisor)
        norm = clip_by_norm(gradients, max_norm=limits.max_grad_norm, norm_type=limits.norm_type, divisor=divisor)
    except GradientNotFinite as error:
        raise AdapterNotReady(state.adapter_id, 'a finite gradient; clear the gradient with zero_grad') from error
    state.grad_norm = norm
    return norm


def clip_on_owner(owner: AdapterOwner, state: AdapterState, limits: ClipOptions) -> float:
    """Run `clip_gradient` on the owner, and return the norm on all ranks; every rank must call it."""
    state.grad_norm = owner.run(f'clipped {state.adapter_id}', lambda: clip_gradient(state, limits))
    return state.grad_norm


def apply_gradient(state: AdapterState, changes: Mapping[str, Any]) -> float:
    """Run an optimizer step with the divided gradient; return the learning rate that was used.

    Args:
        state: state of the adapter.
        changes: values of every parameter group for this step only, such as `lr`; see `step_changes`.
    """
    parameters = state.parameters()
    sums = [parameter.grad for parameter in parameters]
    own = [{name: group[name] for name in changes} for group in state.optimizer.param_groups]
    if state.divisor:
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = None if total is None else total / state.divisor
    _set_values(state, [changes] * len(own))
    used = state.learning_rate
    try:
        state.optimizer.step()
    finally:
        _set_values(state, own)
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total
    state.step_count += 1
    return used


def apply_on_owner(owner: AdapterOwner, state: AdapterState, changes: Mapping[str, Any]) -> float:
    """Run `apply_gradient` on the owner, which sends the new weights to the other ranks; every rank must call it."""
    rate, groups = owner.run(
        f'stepped {state.adapter_id}',
        lambda: (apply_gradient(state, changes), state.optimization.copy_groups()),
        updated=state.parameters(),
    )
    if not owner.is_this_rank:
        # Some optimizers store counters in their parameter groups.
        state.optimization.replace_groups(groups)
        state.step_count += 1
    return rate


def _set_values(state: AdapterState, values: Sequence[Mapping[str, Any]]) -> None:
    for group, changed in zip(state.optimizer.param_groups, values, strict=True):
        group.update(changed)
