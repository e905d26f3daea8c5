"""The verbs that use what was accumulated: clip, step, move the schedule, report."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from twinkle.component import InvalidComponentOptions
from twinkle.data_format import LayerHealth, StepResult
from twinkle.metric import StepFacts
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.adapters import AdapterTable
from twinkle.model.engine.gradient import apply_gradient, clip_gradient
from twinkle.model.engine.reports import step_result
from twinkle.model.engine.results import ClipOptions, StepOptions
from twinkle.model.errors import AdapterNotReady, InvalidArgument, InvalidStepOptions
from twinkle.module import measure_health, rehearse_step, step_changes

_LARGEST_RATE = torch.finfo(torch.float32).max
"""Optimizers multiply float32 weights by the rate; torch raises in the middle of a step for more."""
_USUAL_RATE = 1e3
"""Beyond it a step is tried before it is taken: with some options torch raises at far less than the largest rate."""


class Stepping(AdapterTable):
    """Clips and applies gradients. Until `gradient_accumulation_steps` batches are in one, nothing is done."""

    def clip_grad_norm(
        self,
        adapter_id: str,
        *,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        max_grad_value: float | None = None,
    ) -> float | None:
        """Scale the gradient so that its norm is at most `max_grad_norm`.

        Args:
            adapter_id: the adapter.
            max_grad_norm: positive; infinity only measures.
            norm_type: the p of the p-norm, at least 1.
            max_grad_value: first limit each element to plus or minus this; unset: not limited.

        Returns:
            The norm before it was scaled, of the gradient as the step will use it; None while accumulating.

        Raises:
            InvalidArgument: a number is out of range.
            AdapterNotReady: there is no gradient, or none of finite norm.
        """
        limits = ClipOptions(max_grad_norm=max_grad_norm, norm_type=norm_type, max_grad_value=max_grad_value)
        state = self._with_gradient(adapter_id)
        return None if state.is_accumulating else clip_gradient(state, limits)

    def step(
        self,
        adapter_id: str,
        *,
        learning_rate: float | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        is_health_returned: bool = False,
    ) -> StepResult:
        """Apply the accumulated gradient, which stays until `zero_grad`.

        Args:
            adapter_id: the adapter.
            learning_rate: for this step alone, at least 0. Unset: as the schedule says.
            optimizer_options: others for this step alone, by name; see `twinkle.module.step_option_names`.
            is_health_returned: measure every layer; costs a copy of the weights.

        Raises:
            AdapterNotReady: there is no gradient, or the schedule left no finite learning rate.
            InvalidArgument: the learning rate is negative or not finite as float32.
            InvalidStepOptions: an option is unknown, shapes the optimizer's state, or is out of range.
        """
        options = StepOptions(learning_rate=learning_rate, optimizer_options=optimizer_options or {})
        changes = _changes(self.adapter(adapter_id), options)
        state = self._with_gradient(adapter_id)
        if learning_rate is None:
            _check_rate(state)
        gradients = _gradients(state) if is_health_returned else None
        return _step(state, changes, gradients=gradients)

    def zero_grad(self, adapter_id: str) -> None:
        """Drop the gradient, unless it is still accumulating."""
        state = self.adapter(adapter_id)
        if not state.is_accumulating:
            state.drop_gradient()

    def lr_step(self, adapter_id: str) -> StepResult:
        """Move the schedule by one step, unless the gradient is still accumulating.

        Raises:
            AdapterNotReady: there is no schedule, or all its moves were made.
        """
        state = self.adapter(adapter_id)
        if state.scheduler is None:
            raise AdapterNotReady(adapter_id, 'a schedule: call set_lr_scheduler')
        is_applied = not state.is_accumulating
        if is_applied:
            _check_moves(state)
            state.optimization.move()
        return step_result(state, is_applied=is_applied)

    def clip_grad_and_step(
        self,
        adapter_id: str,
        *,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        max_grad_value: float | None = None,
        step_options: StepOptions | None = None,
        is_health_returned: bool = False,
    ) -> StepResult:
        """Do clip_grad_norm, step, zero_grad and, where there is a schedule, lr_step; arguments as theirs.

        Raises:
            InvalidArgument, InvalidStepOptions, AdapterNotReady: as they do, before any of them has changed anything.
        """
        own = step_options or StepOptions()
        limits = ClipOptions(max_grad_norm=max_grad_norm, norm_type=norm_type, max_grad_value=max_grad_value)
        changes = _changes(self.adapter(adapter_id), own)
        state = self._with_gradient(adapter_id)
        if state.is_accumulating:
            return step_result(state, is_applied=False)
        if own.learning_rate is None:
            _check_rate(state)
        _check_moves(state)
        gradients = _gradients(state) if is_health_returned else None
        clip_gradient(state, limits)
        result = _step(state, changes, gradients=gradients)
        state.drop_gradient()
        if state.scheduler is not None:
            state.optimization.move()
        return result

    def calculate_metric(self, adapter_id: str, *, is_training: bool = True) -> dict[str, float]:
        """Return what the metrics gathered since the last call, and begin anew."""
        state = self.adapter(adapter_id)
        values: dict[str, float] = {}
        for metric in state.train_metrics if is_training else state.eval_metrics:
            values.update(metric.calculate())
            metric.reset()
        return values

    def _with_gradient(self, adapter_id: str) -> AdapterState:
        state = self.adapter(adapter_id)
        if not state.batch_count:
            raise AdapterNotReady(adapter_id, 'a gradient: call forward_backward')
        return state


def _step(
    state: AdapterState, changes: Mapping[str, Any], *, gradients: Mapping[str, Tensor | None] | None
) -> StepResult:
    """Apply the gradient; measure the layers where `gradients`, from before they were clipped, are given."""
    if state.is_accumulating:
        return step_result(state, is_applied=False)
    before = None if gradients is None else _copies(state)
    rate = apply_gradient(state, changes)
    facts = StepFacts(learning_rate=rate, step_count=state.step_count, grad_norm=state.grad_norm)
    for metric in state.train_metrics:
        metric.accumulate_step(facts)
    layers: tuple[LayerHealth, ...] = ()
    if gradients is not None and before is not None:
        after = {name: tensor.detach() for name, tensor in state.named_parameters().items()}
        layers = tuple(measure_health(gradients, before, after, divisor=max(state.divisor, 1)))
    return StepResult(
        is_applied=True, grad_norm=state.grad_norm, learning_rate=rate, step_count=state.step_count, layers=layers
    )


def _gradients(state: AdapterState) -> dict[str, Tensor | None]:
    parameters = state.named_parameters().items()
    return {name: None if item.grad is None else item.grad.clone() for name, item in parameters}


def _copies(state: AdapterState) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.named_parameters().items()}


def _check_rate(state: AdapterState) -> None:
    rates = [abs(float(group['lr'])) for group in state.optimizer.param_groups]
    is_usual = all(rate <= _USUAL_RATE for rate in rates) and not getattr(state.scheduler, 'cycle_momentum', False)
    try:
        if not all(rate <= _LARGEST_RATE for rate in rates):
            raise ValueError('float32 holds no such rate')
        if not is_usual:
            rehearse_step(state.optimizer)
    except ValueError as error:
        raise AdapterNotReady(
            state.adapter_id, 'a finite learning rate and momentum: set the optimizer or the schedule anew'
        ) from error


def _changes(state: AdapterState, options: StepOptions) -> dict[str, Any]:
    """Return what a step changes in the parameter groups, checked.

    Raises:
        InvalidArgument, InvalidStepOptions: as `Stepping.step`.
    """
    rate = options.learning_rate
    if rate is not None and not 0.0 <= rate <= _LARGEST_RATE:
        raise InvalidArgument(f'learning_rate must be at least 0 and finite as float32, got {rate}')
    if not options.optimizer_options and (rate is None or rate <= _USUAL_RATE):
        return {} if rate is None else {'lr': rate}
    try:
        return step_changes(state.optimizer, options.optimizer_options, learning_rate=rate)
    except InvalidComponentOptions as error:
        if not options.optimizer_options:
            raise InvalidArgument(f'learning_rate {rate} is more than the optimizer can take') from error
        raise InvalidStepOptions(error.problem) from error


def _check_moves(state: AdapterState) -> None:
    if state.optimization.is_at_end:
        raise AdapterNotReady(state.adapter_id, 'a schedule with moves left: set a new one')
