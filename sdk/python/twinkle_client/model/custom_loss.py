"""A loss of the program's own: the service computes log-probabilities and gradients, no code travels."""

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
    """Each takes `adapter_name`; without it the only adapter is meant."""

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
        """Add the gradient of a loss that is computed here to the accumulated one.

        Two operations: `forward` gives the log-probabilities, from which `loss_fn` makes a loss; `backward`
        takes the loss's gradient by each of them. Nothing of the adapter comes between the two.

        Args:
            inputs: features with labels, one or many; what they carry beside goes to `loss_fn` too.
            loss_fn: called once, in a thread of its own, as `loss_fn(features, logps)`. The features are
                dictionaries of arrays as they were sent, padding cut off; `logps` has one float32 [T] for each,
                natural, 0.0 where the label is ignored. With 'torch' they are tensors with gradient, and a scalar
                tensor, or it and a mapping of numbers to report, is returned. With 'numpy' they are arrays, and the
                loss and its gradient by each array are returned, or they and a mapping of numbers.
            framework: what `loss_fn` computes with; 'torch' has to be installed here.
            adapter_name: unset: the only adapter.
            options: as of `forward_backward`.

        Returns:
            The loss and metrics of `loss_fn`, the log-probabilities it saw, and what the forward pass cost.

        Raises:
            ValueError: inputs are chats or a handle, or `loss_fn` gave nothing finite that fits; no gradient was added.
            RuntimeError: torch is asked for and not installed.
        """
        if isinstance(inputs, BatchHandle):
            raise ValueError('inputs: a custom loss needs tokens; give features, not a handle')
        fields = forward_fields(inputs, options)
        features = _features_of(fields['batch'], [inputs] if isinstance(inputs, Mapping) else inputs)
        function = _torch_gradients if framework == 'torch' else _numpy_gradients
        async with self._adapter(adapter_name).operations.together() as run:
            result = await run(forward=operation_pb2.Forward(**fields))
            output = forward_output(log_warnings(result))
            loss, gradients, metrics = await asyncio.to_thread(function, loss_fn, features, output['logps'])
            tensors = [tensor_to_proto(gradient) for gradient in gradients]
            log_warnings(await run(backward=operation_pb2.Backward(logprob_gradients=tensors)))
        return {**output, 'loss': loss, 'metrics': metrics}


def _features_of(batch: operation_pb2.Batch, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what was sent, with whatever else the program keeps in its features."""
    if batch.WhichOneof('source') != 'features':
        raise ValueError('inputs: a custom loss needs tokens; give features, not chats')
    return [{**given, **feature_from_proto(sent)} for given, sent in zip(inputs, batch.features.features, strict=True)]


def _numpy_gradients(
    function: LossFunction, features: list[dict[str, Any]], logps: list[Array]
) -> tuple[float, list[Array], dict[str, float]]:
    returned = function(features, [np.array(values) for values in logps])
    if not isinstance(returned, tuple) or len(cast('tuple[Any, ...]', returned)) not in (2, 3):
        raise ValueError('loss_fn must return (loss, gradients) or (loss, gradients, metrics)')
    loss, given, *rest = list(cast('tuple[Any, ...]', returned))
    if not np.isfinite(loss):
        raise ValueError(f'the loss of loss_fn is {loss}')
    if len(given) != len(logps):
        raise ValueError(f'loss_fn gave {len(given)} gradients for {len(logps)} features')
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
        raise ValueError(f'gradients[{index}] is not finite everywhere')
    return np.where(labels == IGNORE_INDEX, np.float32(0.0), gradient)


def _torch_gradients(
    function: LossFunction, features: list[dict[str, Any]], logps: list[Array]
) -> tuple[float, list[Array], dict[str, float]]:
    try:
        # By name: the client itself runs without torch.
        library = import_module('twinkle.loss.custom')
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed here; install torch, or give framework='numpy' and return gradients"
        raise RuntimeError(text) from error
    result = library.custom_gradients(function, features, logps)
    return result.loss, result.gradients, dict(result.metrics)
