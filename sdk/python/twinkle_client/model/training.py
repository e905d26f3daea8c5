"""Verbs that compute: forward passes, gradients and steps."""

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
    """What came of a step."""

    is_applied: bool
    """False where gradient accumulation only counted."""
    grad_norm: float | None
    """Norm of the gradient before clipping; None where it was not computed."""
    learning_rate: float
    """Used, or to be used next."""
    step_count: int
    """Optimizer steps applied so far."""
    layers: 'list[LayerHealth]'
    """In the model's order; empty unless asked for."""
    receipt: Receipt
    """What it cost."""


class LayerHealth(TypedDict):
    """How a layer took a step; norms are Euclidean."""

    path: str
    """In the base model."""
    grad_norm: float
    """Of the gradient divided as for the step, before clipping."""
    weight_norm: float
    """Before the step."""
    relative_update: float
    """Norm of the change by the norm of the weights; 0.0 where nothing was applied."""
    non_finite_location: str
    """First element that is infinite or not a number; empty where all are finite."""


def own_loss(options: dict[str, Any]) -> training_config_pb2.LossConfig | None:
    """Take the loss of one batch out of its options; None where there is none."""
    name, arguments = options.pop('loss', None), dict(options.pop('loss_options', None) or {})
    if name is None:
        if arguments:
            raise TypeError('loss_options are of `loss`, which is not given')
        return None
    return loss_config(name, arguments, reduction=arguments.pop('reduction', None))


def step_fields(
    *, learning_rate: float | None = None, optimizer_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields that both verbs that step have for this step alone."""
    options = struct(optimizer_options, field='optimizer_options') if optimizer_options else None
    return {'learning_rate': learning_rate, 'optimizer_options': options}


class TrainingVerbs(ModelHandle):
    """Each takes `adapter_name`; without it the only adapter is meant."""

    @remote_method
    async def forward_only(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ForwardOutput:
        """Compute log-probabilities and loss; no gradient, no change of state. Arguments as `forward_backward`."""
        verb = operation_pb2.ForwardOnly(loss=own_loss(options), **forward_fields(inputs, options))
        return forward_output(await self._run(adapter_name, forward_only=verb))

    @remote_method
    async def forward(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ForwardOutput:
        """Compute as `forward_only`, and keep what `calculate_loss` and `backward` need."""
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
        """Add the gradient of the last `forward` to the accumulated one.

        Args:
            logprob_gradients: of the caller's own loss by each label's log-probability: float [T] for
                each example. Empty: the configured loss.
            adapter_name: unset: the only adapter.
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
        """Compute loss and gradient, and add the gradient to the accumulated one.

        Args:
            inputs: features, one or many, or a loader's `BatchHandle`, whose examples the service fetches itself.
                Chats are in the contract, not built yet at the server.
            adapter_name: unset: the only adapter.
            options: `advantages`, `old_logps`, `ref_logps`, `returns`, `old_values`, `loss_weights` and what
                else the loss reads: one entry an example, a number for all its labels, one number a
                label, or one a token. `temperature`, `disable_lora`, `return_logps`. `loss`, a name or class,
                and `loss_options`: of this batch alone.

        Raises:
            TypeError, ValueError: something cannot be sent; nothing was.
            UsageError: the server refuses; the message names the field. Nothing changed.
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
        """Scale the accumulated gradient to a norm of at most `max_grad_norm`; return the norm before.

        Args:
            max_grad_norm: positive.
            norm_type: the norm's order.
            max_grad_value: first limit each element to plus or minus this. Unset: not limited.
            adapter_name: unset: the only adapter.
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
            learning_rate: of this step alone. Unset: the optimizer's, as the schedule set it.
            optimizer_options: other arguments of the optimizer for this step alone, such as `betas`.
            return_health: report each layer's gradient, weights and change.
            adapter_name: unset: the only adapter.
        """
        of_step = step_fields(learning_rate=learning_rate, optimizer_options=optimizer_options)
        verb = operation_pb2.Step(**of_step, is_health_returned=return_health)
        return step_output(await self._run(adapter_name, step=verb))

    @remote_method
    async def zero_grad(self, *, adapter_name: str | None = None) -> None:
        """Drop the accumulated gradient."""
        await self._run(adapter_name, zero_grad=operation_pb2.ZeroGrad())

    @remote_method
    async def lr_step(self, *, adapter_name: str | None = None) -> float:
        """Move the schedule by one step; return the learning rate from now on."""
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
        **of_step: Any,
    ) -> StepOutput:
        """Do `clip_grad_norm`, `step`, `zero_grad` and `lr_step` in one; arguments as theirs.

        Args:
            max_grad_norm: positive; infinity only measures.
            norm_type: the norm's order.
            max_grad_value: as of `clip_grad_norm`.
            return_health: as of `step`.
            adapter_name: unset: the only adapter.
            of_step: `learning_rate` and `optimizer_options`, as of `step`.
        """
        verb = operation_pb2.ClipGradAndStep(
            max_grad_norm=max_grad_norm,
            norm_type=norm_type,
            max_grad_value=max_grad_value,
            is_health_returned=return_health,
            **step_fields(**of_step),
        )
        return step_output(await self._run(adapter_name, clip_grad_and_step=verb))

    @remote_method
    async def calculate_metric(self, *, is_training: bool = True, adapter_name: str | None = None) -> dict[str, float]:
        """Return what the metrics gathered, as numbers by name, and begin anew."""
        verb = operation_pb2.CalculateMetric(is_training=is_training)
        return dict((await self._run(adapter_name, calculate_metric=verb)).metric.values)


def step_output(result: operation_result_pb2.OperationResult) -> StepOutput:
    """Return what came of a step."""
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
