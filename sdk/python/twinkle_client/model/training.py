"""Methods that compute: forward passes, gradients and optimizer steps."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from twinkle.api.model.v1 import operation_pb2, operation_result_pb2, training_config_pb2
from twinkle_client.convert import loss_config, tensor_to_proto, vector
from twinkle_client.convert.config import struct
from twinkle_client.model.forward import ForwardOutput, Inputs, forward_fields, forward_output
from twinkle_client.model.handle import ModelHandle
from twinkle_client.model.receipt import Receipt, receipt_of
from twinkle_client.rpc import remote_method


class StepOutput(TypedDict):
    """Result of an optimizer step."""

    is_applied: bool
    """False if the gradient is still being accumulated, so no step was applied."""
    grad_norm: float | None
    """Norm of the gradient before clipping; None if it was not computed."""
    learning_rate: float
    """Learning rate of this step, or of the next step if no step was applied."""
    step_count: int
    """Number of optimizer steps applied so far."""
    layers: 'list[LayerHealth]'
    """Health of each layer in the model's order; empty unless requested."""
    receipt: Receipt
    """Resources used by the operation."""


class LayerHealth(TypedDict):
    """Effect of a step on one layer; norms are Euclidean."""

    path: str
    """Path of the layer in the base model."""
    grad_norm: float
    """Norm of the gradient, scaled as for the step; before clipping if `clip_grad_and_step` clips it."""
    weight_norm: float
    """Norm of the weights before the step."""
    relative_update: float
    """Norm of the change divided by `weight_norm`; 0.0 if nothing changed, infinity if only `weight_norm` is 0."""
    non_finite_location: str
    """First element that is infinite or NaN; empty if all elements are finite."""


def own_loss(options: dict[str, Any]) -> training_config_pb2.LossConfig | None:
    """Remove the options `loss` and `loss_options` of a batch; return the loss, or None without `loss`.

    Raises:
        TypeError: `loss_options` is given without `loss`.
    """
    name, arguments = options.pop('loss', None), dict(options.pop('loss_options', None) or {})
    if name is None:
        if arguments:
            raise TypeError('loss_options requires `loss`; pass the name or class of the loss')
        return None
    return loss_config(name, arguments, reduction=arguments.pop('reduction', None))


def step_fields(
    *, learning_rate: float | None = None, optimizer_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the message fields that override the optimizer's options for one step."""
    options = struct(optimizer_options, field='optimizer_options') if optimizer_options else None
    return {'learning_rate': learning_rate, 'optimizer_options': options}


class TrainingVerbs(ModelHandle):
    """Methods of the training loop; `adapter_name` may be omitted if there is one adapter."""

    @remote_method
    async def forward_only(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ForwardOutput:
        """Compute log-probabilities and loss without a gradient.

        Only the evaluation metrics change; see `add_metric`. The arguments are the same as for `forward_backward`.
        """
        verb = operation_pb2.ForwardOnly(loss=own_loss(options), **forward_fields(inputs, options))
        return forward_output(await self._run(adapter_name, forward_only=verb))

    @remote_method
    async def forward(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ForwardOutput:
        """Compute log-probabilities; the server keeps the state that `calculate_loss` and `backward` need.

        The arguments are the same as for `forward_backward`, without `loss` and `loss_options`.
        """
        verb = operation_pb2.Forward(**forward_fields(inputs, options))
        return forward_output(await self._run(adapter_name, forward=verb))

    @remote_method
    async def calculate_loss(self, *, adapter_name: str | None = None) -> float:
        """Return the loss of the last `forward`."""
        result = await self._run(adapter_name, calculate_loss=operation_pb2.CalculateLoss())
        return result.forward.loss

    @remote_method
    async def backward(
        self, *, logprob_gradients: Sequence[Any] = (), adapter_name: str | None = None
    ) -> ForwardOutput:
        """Compute the gradient for the last `forward`, and add it to the accumulated gradient.

        Args:
            logprob_gradients: Gradient of a custom loss with respect to the log-probability of each label, one float
                [T] array per example. Empty: the configured loss is used.
            adapter_name: Unset: the only adapter.
        """
        tensors = [
            tensor_to_proto(vector(item, np.float32, field=f'logprob_gradients[{index}]'))
            for index, item in enumerate(logprob_gradients)
        ]
        return forward_output(await self._run(adapter_name, backward=operation_pb2.Backward(logprob_gradients=tensors)))

    @remote_method
    async def forward_backward(
        self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any
    ) -> ForwardOutput:
        """Compute the loss and its gradient, and add the gradient to the accumulated gradient.

        Args:
            inputs: One or more features, or a loader's `BatchHandle`, whose examples the service fetches itself.
                Chats are part of the contract, but the server does not support them yet.
            adapter_name: Unset: the only adapter.
            options: Inputs of the loss, such as `advantages`, `old_logps`, `ref_logps`, `returns`, `old_values` and
                `loss_weights`. Each has one entry per example: a number for all its labels, one number per label,
                or one number per token. Also `temperature`, `return_logps`, `return_routed_experts` and
                `micro_batch_size` (maximum number of examples in one pass); and `loss` (name or class) and
                `loss_options`, which apply to this batch only. `disable_lora` runs the base model without the adapter;
                only `forward_only` accepts it.

        Raises:
            TypeError, ValueError: An argument cannot be sent; no request was made.
            UsageError: The server refused the batch; the message names the field. Nothing has changed.
        """
        verb = operation_pb2.ForwardBackward(loss=own_loss(options), **forward_fields(inputs, options))
        return forward_output(await self._run(adapter_name, forward_backward=verb))

    @remote_method
    async def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        *,
        norm_type: float = 2.0,
        max_grad_value: float | None = None,
        adapter_name: str | None = None,
    ) -> float:
        """Scale the accumulated gradient to a norm of at most `max_grad_norm`; return the norm before scaling.

        While gradients are being accumulated, nothing is scaled, and 0.0 is returned.

        Args:
            max_grad_norm: Positive limit.
            norm_type: Order of the norm.
            max_grad_value: Limit for the absolute value of each element, applied first. Unset: no limit.
            adapter_name: Unset: the only adapter.
        """
        verb = operation_pb2.ClipGradNorm(
            max_grad_norm=max_grad_norm, norm_type=norm_type, max_grad_value=max_grad_value
        )
        return (await self._run(adapter_name, clip_grad_norm=verb)).step.grad_norm

    @remote_method
    async def step(
        self,
        *,
        learning_rate: float | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        return_health: bool = False,
        adapter_name: str | None = None,
    ) -> StepOutput:
        """Apply the accumulated gradient.

        Args:
            learning_rate: Learning rate of this step only. Unset: the scheduled learning rate.
            optimizer_options: Optimizer arguments for this step only, such as `betas`.
            return_health: Report gradient, weights and update of each layer.
            adapter_name: Unset: the only adapter.
        """
        fields = step_fields(learning_rate=learning_rate, optimizer_options=optimizer_options)
        verb = operation_pb2.Step(**fields, is_health_returned=return_health)
        return step_output(await self._run(adapter_name, step=verb))

    @remote_method
    async def zero_grad(self, *, adapter_name: str | None = None) -> None:
        """Clear the accumulated gradient."""
        await self._run(adapter_name, zero_grad=operation_pb2.ZeroGrad())

    @remote_method
    async def lr_step(self, *, adapter_name: str | None = None) -> float:
        """Advance the learning rate schedule by one step; return the new learning rate.

        Raises:
            UsageError: The adapter has no schedule.
        """
        return (await self._run(adapter_name, lr_step=operation_pb2.LrStep())).step.learning_rate

    @remote_method
    async def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        *,
        norm_type: float = 2.0,
        max_grad_value: float | None = None,
        return_health: bool = False,
        adapter_name: str | None = None,
        **step_options: Any,
    ) -> StepOutput:
        """Run `clip_grad_norm`, `step`, `zero_grad` and, if there is a schedule, `lr_step` as one operation.

        Args:
            max_grad_norm: Positive limit; infinity computes the norm without clipping.
            norm_type: Order of the norm.
            max_grad_value: See `clip_grad_norm`.
            return_health: See `step`.
            adapter_name: Unset: the only adapter.
            step_options: `learning_rate` and `optimizer_options`, see `step`.
        """
        verb = operation_pb2.ClipGradAndStep(
            max_grad_norm=max_grad_norm,
            norm_type=norm_type,
            max_grad_value=max_grad_value,
            is_health_returned=return_health,
            **step_fields(**step_options),
        )
        return step_output(await self._run(adapter_name, clip_grad_and_step=verb))

    @remote_method
    async def calculate_metric(self, *, is_training: bool = True, adapter_name: str | None = None) -> dict[str, float]:
        """Return the values of the metrics by name, and reset these metrics.

        Args:
            is_training: Return the metrics of training batches if True, of forward-only batches if False.
            adapter_name: Unset: the only adapter.
        """
        verb = operation_pb2.CalculateMetric(is_training=is_training)
        return dict((await self._run(adapter_name, calculate_metric=verb)).metric.values)


def step_output(result: operation_result_pb2.OperationResult) -> StepOutput:
    """Return the output of a step operation."""
    step = result.step
    return StepOutput(
        is_applied=step.is_applied,
        grad_norm=step.grad_norm if step.HasField('grad_norm') else None,
        learning_rate=step.learning_rate,
        step_count=step.step_count,
        layers=[
            LayerHealth(
                path=layer.path,
                grad_norm=layer.grad_norm,
                weight_norm=layer.weight_norm,
                relative_update=layer.relative_update,
                non_finite_location=layer.non_finite_location,
            )
            for layer in step.layers
        ],
        receipt=receipt_of(result),
    )
