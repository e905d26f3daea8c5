"""Engine methods that use the accumulated gradient: clip, step, advance the schedule, report metrics."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from twinkle.component import InvalidComponentOptions
from twinkle.data_format import LayerHealth, StepResult
from twinkle.metric import StepFacts
from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.adapters import AdapterTable
from twinkle.model.engine.optimizer_step import apply_gradient, apply_on_owner, clip_gradient, clip_on_owner
from twinkle.model.engine.reports import step_result
from twinkle.model.engine.results import ClipOptions, StepOptions
from twinkle.model.errors import AdapterNotReady, InvalidArgument, InvalidStepOptions
from twinkle.module import measure_health, rehearse_step, step_changes
from twinkle.nn import FullWeights

_LARGEST_RATE = torch.finfo(torch.float32).max
"""Maximum learning rate. Optimizers multiply float32 weights by the rate, and larger rates cause errors in a step."""
_SAFE_RATE = 1e3
"""Learning rate above which a step is first tried on dummy parameters, because torch may raise for some options."""


class Stepping(AdapterTable):
    """Clips and applies gradients.

    `clip_grad_norm`, `step`, `zero_grad` and `lr_step` do nothing while the gradient is accumulating, which means that
    it has batches, but fewer than `gradient_accumulation_steps`.
    """

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
            adapter_id: id of the adapter.
            max_grad_norm: positive; infinity measures the norm without clipping.
            norm_type: p of the p-norm, at least 1.
            max_grad_value: limit of each element's magnitude, applied first; None disables it.

        Returns:
            The norm of the gradient before clipping, divided as in the step; None while accumulating.

        Raises:
            InvalidArgument: a limit is not positive, or `norm_type` is below 1.
            AdapterNotReady: there is no gradient, or its norm is not finite.
        """
        limits = ClipOptions(max_grad_norm=max_grad_norm, norm_type=norm_type, max_grad_value=max_grad_value)
        state = self._with_gradient(adapter_id)
        if state.is_accumulating:
            return None
        return clip_gradient(state, limits) if state.owner is None else clip_on_owner(state.owner, state, limits)

    def step(
        self,
        adapter_id: str,
        *,
        learning_rate: float | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        is_health_returned: bool = False,
    ) -> StepResult:
        """Apply the accumulated gradient, which remains until `zero_grad`.

        Args:
            adapter_id: id of the adapter.
            learning_rate: learning rate of this step only, at least 0. None uses the current rate of each parameter
                group.
            optimizer_options: other options of this step only, by name; see `twinkle.module.step_option_names`.
            is_health_returned: whether to measure every layer, which copies the weights.

        Raises:
            AdapterNotReady: there is no gradient, or the current learning rate is not finite or too large.
            InvalidArgument: the learning rate is negative, not finite as float32, or too large for the optimizer; or
                `is_health_returned` is set for sharded weights.
            InvalidStepOptions: an option is unknown, determines the optimizer's state, or is out of range.
        """
        _check_health(self.adapter(adapter_id), is_health_returned=is_health_returned)
        options = StepOptions(learning_rate=learning_rate, optimizer_options=optimizer_options or {})
        changes = _changes(self.adapter(adapter_id), options)
        state = self._with_gradient(adapter_id)
        if learning_rate is None:
            _check_rate(state)
        gradients = _gradients(state) if is_health_returned else None
        return _step(state, changes, gradients=gradients)

    def zero_grad(self, adapter_id: str) -> None:
        """Clear the gradient and discard a pending `forward`, unless the gradient is still accumulating."""
        state = self.adapter(adapter_id)
        if not state.is_accumulating:
            state.drop_gradient()

    def lr_step(self, adapter_id: str) -> StepResult:
        """Advance the schedule by one step, unless the gradient is still accumulating.

        Raises:
            AdapterNotReady: there is no schedule, or it has no steps left.
        """
        state = self.adapter(adapter_id)
        if state.scheduler is None:
            raise AdapterNotReady(adapter_id, 'a schedule: call set_lr_scheduler')
        is_applied = not state.is_accumulating
        if is_applied:
            _check_schedule(state)
            state.optimization.advance()
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
        """Run clip_grad_norm, step, zero_grad and, if there is a schedule, lr_step; see these methods for arguments.

        Raises:
            InvalidArgument, InvalidStepOptions, AdapterNotReady: see these methods; nothing was changed.
        """
        _check_health(self.adapter(adapter_id), is_health_returned=is_health_returned)
        own = step_options or StepOptions()
        limits = ClipOptions(max_grad_norm=max_grad_norm, norm_type=norm_type, max_grad_value=max_grad_value)
        changes = _changes(self.adapter(adapter_id), own)
        state = self._with_gradient(adapter_id)
        if state.is_accumulating:
            return step_result(state, is_applied=False)
        if own.learning_rate is None:
            _check_rate(state)
        _check_schedule(state)
        gradients = _gradients(state) if is_health_returned else None
        if state.owner is None:
            clip_gradient(state, limits)
        else:
            clip_on_owner(state.owner, state, limits)
        result = _step(state, changes, gradients=gradients)
        state.drop_gradient()
        if state.scheduler is not None:
            state.optimization.advance()
        return result

    def calculate_metric(self, adapter_id: str, *, is_training: bool = True) -> dict[str, float]:
        """Return the metrics accumulated since the last call, and reset them."""
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
    """Apply the gradient, and measure the layers if `gradients` are given: copies made before clipping."""
    if state.is_accumulating:
        return step_result(state, is_applied=False)
    before = None if gradients is None else _copies(state)
    owner = state.owner
    rate = apply_gradient(state, changes) if owner is None else apply_on_owner(owner, state, changes)
    facts = StepFacts(learning_rate=rate, step_count=state.step_count, grad_norm=state.grad_norm)
    for metric in state.train_metrics:
        metric.accumulate_step(facts)
    layers: tuple[LayerHealth, ...] = ()
    if gradients is not None and before is not None:
        if owner is None:
            layers = _health(state, gradients, before)
        else:
            layers = owner.run(f'measured {state.adapter_id}', lambda: _health(state, gradients, before))
    return StepResult(
        is_applied=True, grad_norm=state.grad_norm, learning_rate=rate, step_count=state.step_count, layers=layers
    )


def _health(
    state: AdapterState, gradients: Mapping[str, Tensor | None], before: Mapping[str, Tensor]
) -> tuple[LayerHealth, ...]:
    after = {name: tensor.detach() for name, tensor in state.named_parameters().items()}
    return tuple(measure_health(gradients, before, after, divisor=max(state.divisor, 1)))


def _gradients(state: AdapterState) -> dict[str, Tensor | None]:
    parameters = state.named_parameters().items()
    return {name: None if item.grad is None else item.grad.clone() for name, item in parameters}


def _copies(state: AdapterState) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.named_parameters().items()}


def _check_health(state: AdapterState, *, is_health_returned: bool) -> None:
    if is_health_returned and isinstance(state.weights, FullWeights) and state.weights.is_sharded:
        raise InvalidArgument('the health of layers is not supported for a full-parameter run with fsdp ranks')


def _check_rate(state: AdapterState) -> None:
    rates = [abs(float(group['lr'])) for group in state.optimizer.param_groups]
    is_safe = all(rate <= _SAFE_RATE for rate in rates) and not getattr(state.scheduler, 'cycle_momentum', False)
    try:
        if not all(rate <= _LARGEST_RATE for rate in rates):
            raise ValueError('the learning rate exceeds float32')
        if not is_safe:
            rehearse_step(state.optimizer)
    except ValueError as error:
        raise AdapterNotReady(
            state.adapter_id, 'a finite learning rate and momentum: set the optimizer or the schedule again'
        ) from error


def _changes(state: AdapterState, options: StepOptions) -> dict[str, Any]:
    """Return the validated changes of a step to the parameter groups.

    Raises:
        InvalidArgument, InvalidStepOptions: see `Stepping.step`.
    """
    rate = options.learning_rate
    if rate is not None and not 0.0 <= rate <= _LARGEST_RATE:
        raise InvalidArgument(f'learning_rate must be at least 0 and finite as float32, got {rate}')
    if not options.optimizer_options and (rate is None or rate <= _SAFE_RATE):
        return {} if rate is None else {'lr': rate}
    try:
        return step_changes(state.optimizer, options.optimizer_options, learning_rate=rate)
    except InvalidComponentOptions as error:
        if not options.optimizer_options:
            raise InvalidArgument(f'learning_rate {rate} is too large for the optimizer; lower it') from error
        raise InvalidStepOptions(error.problem) from error


def _check_schedule(state: AdapterState) -> None:
    if state.optimization.is_at_end:
        raise AdapterNotReady(state.adapter_id, 'a schedule with steps left: set a new schedule')
