"""Custom losses: the loss runs in the client, and the service computes log-probabilities and gradients."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from twinkle.api.model.v1 import operation_pb2
from twinkle.data_format import IGNORE_INDEX
from twinkle_client.convert import feature_from_proto, tensor_to_proto, vector
from twinkle_client.dataloader.handle import BatchHandle
from twinkle_client.model.forward import ForwardOutput, Inputs, forward_fields, forward_output, log_warnings
from twinkle_client.model.handle import ModelHandle
from twinkle_client.rpc import remote_method

Array = npt.NDArray[np.float32]
LossFunction = Callable[[list[dict[str, Any]], list[Any]], Any]


class CustomLossVerbs(ModelHandle):
    """Training with a loss that runs in the client."""

    @remote_method
    async def forward_backward_custom(
        self,
        inputs: Inputs,
        loss_fn: LossFunction,
        *,
        framework: Literal['torch', 'numpy'] = 'torch',
        adapter_name: str | None = None,
        **options: Any,
    ) -> ForwardOutput:
        """Compute a loss in this process and add its gradient to the accumulated gradient.

        This takes two operations: `forward` returns the log-probabilities, from which `loss_fn` computes the loss,
        and `backward` takes the gradient of the loss with respect to each log-probability. No other operation of the
        adapter runs between the two.

        Args:
            inputs: One or more features with labels. Fields that are not sent to the server, such as `user_data`, are
                passed to `loss_fn` too.
            loss_fn: Function called once as `loss_fn(features, logps)`, in a worker thread. `features` are
                dictionaries of arrays without padding. `logps` has one float32 [T] array per feature, natural log,
                0.0 where the label is ignored. With 'torch', `logps` are tensors that require gradients, and the
                function returns a scalar tensor, or a scalar tensor and a mapping of metrics. With 'numpy', `logps`
                are arrays, and the function returns the loss and one gradient per array, optionally followed by a
                mapping of metrics.
            framework: Library that `loss_fn` uses. 'torch' must be installed in this process.
            adapter_name: Unset: the only adapter.
            options: See `forward_backward`.

        Returns:
            Loss and metrics of `loss_fn`, the log-probabilities, and the receipt of the forward pass.

        Raises:
            TypeError: An option is unknown.
            ValueError: `inputs` are chats or a handle, or `loss_fn` returned a wrong structure, a wrong length or a
                value that is not finite. No gradient was added.
            RuntimeError: `framework` is 'torch', which is not installed.
        """
        if isinstance(inputs, BatchHandle):
            raise ValueError('inputs: a custom loss needs tokens; pass features, not a batch handle')
        fields = forward_fields(inputs, options)
        features = _features_of(fields['batch'], [inputs] if isinstance(inputs, Mapping) else inputs)
        function = _torch_gradients if framework == 'torch' else _numpy_gradients
        async with self._adapter(adapter_name).operations.consecutive() as run:
            result = await run(forward=operation_pb2.Forward(**fields))
            output = forward_output(log_warnings(result))
            loss, gradients, metrics = await asyncio.to_thread(function, loss_fn, features, output['logps'])
            tensors = [tensor_to_proto(gradient) for gradient in gradients]
            log_warnings(await run(backward=operation_pb2.Backward(logprob_gradients=tensors)))
        return {**output, 'loss': loss, 'metrics': metrics}


def _features_of(batch: operation_pb2.Batch, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the features as sent, together with their additional fields."""
    if batch.WhichOneof('source') != 'features':
        raise ValueError('inputs: a custom loss needs tokens; pass features, not chats')
    return [{**given, **feature_from_proto(sent)} for given, sent in zip(inputs, batch.features.features, strict=True)]


def _numpy_gradients(
    function: LossFunction, features: list[dict[str, Any]], logps: list[Array]
) -> tuple[float, list[Array], dict[str, float]]:
    returned = function(features, [np.array(values) for values in logps])
    if not isinstance(returned, tuple) or len(cast('tuple[Any, ...]', returned)) not in (2, 3):
        raise ValueError('loss_fn must return (loss, gradients) or (loss, gradients, metrics)')
    loss, given, *rest = list(cast('tuple[Any, ...]', returned))
    if not np.isfinite(loss):
        raise ValueError(f'loss_fn returned the loss {loss}; it must be finite')
    if len(given) != len(logps):
        raise ValueError(f'loss_fn returned {len(given)} gradients for {len(logps)} features; return one for each')
    gradients = [
        _masked(vector(gradient, np.float32, field=f'gradients[{index}]'), features[index], index)
        for index, gradient in enumerate(given)
    ]
    metrics: Mapping[str, Any] = rest[0] if rest else {}
    return float(loss), gradients, {name: float(value) for name, value in metrics.items()}


def _masked(gradient: Array, feature: Mapping[str, Any], index: int) -> Array:
    labels = np.asarray(feature['labels'])
    if len(gradient) != len(labels):
        raise ValueError(f'gradients[{index}] has {len(gradient)} elements for {len(labels)} labels')
    if not np.isfinite(gradient).all():
        raise ValueError(f'gradients[{index}] contains a value that is not finite')
    return np.where(labels == IGNORE_INDEX, np.float32(0.0), gradient)


def _torch_gradients(
    function: LossFunction, features: list[dict[str, Any]], logps: list[Array]
) -> tuple[float, list[Array], dict[str, float]]:
    try:
        # Imported by name, because the client runs without torch.
        library = import_module('twinkle.loss.custom')
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed; install torch, or pass framework='numpy' and return gradients"
        raise RuntimeError(text) from error
    result = library.custom_gradients(function, features, logps)
    return result.loss, result.gradients, dict(result.metrics)
