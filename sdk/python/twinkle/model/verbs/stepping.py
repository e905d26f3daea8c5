"""Methods that use the accumulated gradient."""

from collections.abc import Mapping
from typing import Any

from twinkle.model.engine import StepOptions, StepResult
from twinkle.model.verbs.handle import ModelHandle


class SteppingVerbs(ModelHandle):
    """Step methods. `adapter_name` is optional while there is one adapter; for its errors see `chosen_adapter`."""

    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        max_grad_value: float | None = None,
        adapter_name: str | None = None,
    ) -> float | None:
        """Clip the gradient's elements to `max_grad_value`, if it is given, and then its norm.

        Args:
            max_grad_norm: positive; infinity measures the norm without clipping.
            norm_type: p of the p-norm, at least 1.
            max_grad_value: limit of each element's magnitude, applied first; None disables it.
            adapter_name: optional while there is one adapter.

        Returns:
            The norm before it is clipped, or None while accumulating.

        Raises:
            AdapterNotReady: there is no gradient, or its norm is not finite.
            InvalidArgument: a limit is not positive, or `norm_type` is below 1.
        """
        return self.engine.clip_grad_norm(
            self._adapter(adapter_name),
            max_grad_norm=max_grad_norm,
            norm_type=norm_type,
            max_grad_value=max_grad_value,
        )

    def step(
        self,
        *,
        learning_rate: float | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        return_health: bool = False,
        adapter_name: str | None = None,
    ) -> StepResult:
        """Apply the accumulated gradient if it has enough batches.

        Args:
            learning_rate: learning rate of this step only. None uses the current rate of each parameter group.
            optimizer_options: other arguments of the optimizer for this step only, such as `betas`.
            return_health: whether to report each layer's gradient, weights and update.
            adapter_name: optional while there is one adapter.

        Returns:
            The step count, the learning rate, whether the gradient was applied, and the layers' health if requested.

        Raises:
            AdapterNotReady: there is no gradient, or the current learning rate is not finite or too large.
            InvalidArgument: the learning rate is negative or too large, or `return_health` is set for sharded weights.
            InvalidStepOptions: an option is unknown, determines the optimizer's state, or is out of range.
        """
        return self.engine.step(
            self._adapter(adapter_name),
            learning_rate=learning_rate,
            optimizer_options=optimizer_options,
            is_health_returned=return_health,
        )

    def zero_grad(self, *, adapter_name: str | None = None) -> None:
        """Clear the gradient and discard a pending `forward`, unless the gradient is still accumulating."""
        self.engine.zero_grad(self._adapter(adapter_name))

    def lr_step(self, *, adapter_name: str | None = None) -> None:
        """Advance the schedule by one step, unless the gradient is still accumulating.

        Raises:
            AdapterNotReady: there is no schedule, or it has no steps left.
        """
        self.engine.lr_step(self._adapter(adapter_name))

    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        max_grad_value: float | None = None,
        return_health: bool = False,
        adapter_name: str | None = None,
        **step_options: Any,
    ) -> StepResult:
        """Run `clip_grad_norm`, `step`, `zero_grad` and, if there is a schedule, `lr_step`.

        Args:
            max_grad_norm: see `clip_grad_norm`.
            norm_type: see `clip_grad_norm`.
            max_grad_value: see `clip_grad_norm`.
            return_health: see `step`.
            adapter_name: optional while there is one adapter.
            step_options: `learning_rate` and `optimizer_options`, see `step`.

        Raises:
            AdapterNotReady, InvalidArgument, InvalidStepOptions: see these methods; nothing was changed.
            TypeError: an argument is unknown.
        """
        return self.engine.clip_grad_and_step(
            self._adapter(adapter_name),
            max_grad_norm=max_grad_norm,
            norm_type=norm_type,
            max_grad_value=max_grad_value,
            step_options=StepOptions(**step_options),
            is_health_returned=return_health,
        )

    def calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> dict[str, float]:  # noqa: FBT001, FBT002 - an established signature
        """Return the metrics of training, or of forward-only batches, accumulated since the last call; reset them."""
        return self.engine.calculate_metric(self._adapter(adapter_name), is_training=is_training)
