"""Methods that run the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import InputFeature, ModelOutput
from twinkle.infra import remote_function
from twinkle.loss import CustomGradients, CustomLoss, custom_gradients
from twinkle.model.base import Inputs
from twinkle.model.engine import BatchResult, ForwardOptions
from twinkle.model.verbs.handle import ModelHandle
from twinkle.model.verbs.inputs import forward_options, own_loss, with_labels, with_streams


class TrainingVerbs(ModelHandle):
    """Training methods. `adapter_name` is optional while there is one adapter; for its errors see `chosen_adapter`.

    The `options` of forward methods are:

    - `temperature`, which divides the logits;
    - streams of the loss, such as `advantages`, `old_logps`, `ref_logps`, `returns` and `loss_weights`, with one entry
      per example: a number for all its labels, a number per label, or a number per token;
    - `return_logits`, `return_routed_experts` and `task='embedding'`, which request additional outputs;
    - `micro_batch_size`, the maximum number of examples in one pass.

    `forward_only` and `forward_backward` also take `loss` (a name, class, instance or function) and `loss_options`,
    which apply to this batch only.
    """

    @remote_function(dispatch='first', collect='first')
    def forward_only(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ModelOutput:
        """Return loss and log-probabilities; only the evaluation metrics are changed.

        Args:
            inputs: one example or several.
            adapter_name: optional while there is one adapter.
            options: see the class; `disable_lora` runs the base model without the adapter.

        Raises:
            InvalidFeatures: an example is invalid, or the examples do not form whole groups of the loss.
            InvalidLossInput: the loss refused the batch.
            InvalidArgument: an option is unknown or does not match the examples, or the loss or a metric failed.
            UnknownComponent, InvalidComponentOptions, PluginRefused, HubError: `loss` cannot be built; see
                `twinkle.loss.build_loss`.
            AdapterNotReady: an example is a chat, and the adapter has no template.
            TemplateError: the template cannot encode a chat.
            LossNotFinite: the loss is not finite.
            BatchTooLarge: memory ran out.
        """
        loss = own_loss(options)
        name, features, chosen, own = self._prepare('forward_only', adapter_name, inputs, options)
        return _model_output(self.engine.forward_only(name, features, options=chosen, loss=loss), own)

    @remote_function(dispatch='first', collect='first')
    def forward(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ModelOutput:
        """Return log-probabilities and store the activations for `calculate_loss` and `backward`.

        For arguments and errors see `forward_backward`; `loss` and `loss_options` are not supported.
        """
        name, features, chosen, own = self._prepare('forward', adapter_name, inputs, options)
        return _model_output(self.engine.forward(name, features, options=chosen), own, is_loss_known=False)

    def calculate_loss(self, *, adapter_name: str | None = None) -> float:
        """Return the loss of the last `forward`.

        Raises:
            AdapterNotReady: there is no pending forward pass.
            InvalidLossInput, InvalidArgument: the loss refused the batch, or failed.
            LossNotFinite: the loss is not finite.
        """
        return self.engine.calculate_loss(self._adapter(adapter_name)).loss

    @remote_function(dispatch='first', collect='first')
    def backward(self, *, logprob_gradients: Sequence[Any] | None = None, adapter_name: str | None = None) -> None:
        """Accumulate the gradient of the last `calculate_loss` or of a custom loss.

        Args:
            logprob_gradients: float [T] for each example of T tokens: derivative of a custom loss with respect to each
                label's log-probability. None uses the loss of the last `calculate_loss`.
            adapter_name: optional while there is one adapter.

        Raises:
            AdapterNotReady: `forward` was not called; or no gradients are given and `calculate_loss` was not called.
            InvalidFeatures: the given gradients do not match the examples, or are not finite.
            LossNotFinite: the gradient is not finite and was not accumulated.
        """
        name, gradients = self._adapter(adapter_name), None
        if logprob_gradients is not None:
            own = logprob_gradients
            gradients, _ = self._shares.gather(
                f'called backward of {name}', lambda: [np.asarray(values, np.float32) for values in own]
            )
        self.engine.backward(name, logprob_gradients=gradients)

    @remote_function(dispatch='first', collect='first')
    def forward_backward(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ModelOutput:
        """Return loss and log-probabilities, and accumulate the gradient. For arguments see `forward_only`.

        Raises:
            InvalidFeatures: see `forward_only`, or no label counts.
            InvalidLossInput: the examples lack a stream that the loss requires, or the loss refused the batch.
            InvalidArgument: see `forward_only`, or `disable_lora` is set.
            UnknownComponent, InvalidComponentOptions, PluginRefused, HubError: see `forward_only`.
            AdapterNotReady, TemplateError, LossNotFinite, BatchTooLarge: see `forward_only`. After any of these errors,
                no gradient was accumulated.
        """
        loss = own_loss(options)
        name, features, chosen, own = self._prepare('forward_backward', adapter_name, inputs, options)
        return _model_output(self.engine.forward_backward(name, features, options=chosen, loss=loss), own)

    @remote_function(dispatch='first', collect='first')
    def forward_backward_custom(
        self, inputs: Inputs, loss_fn: CustomLoss, *, adapter_name: str | None = None, **options: Any
    ) -> ModelOutput:
        """Accumulate the gradient of a function of the log-probabilities.

        In a program of several processes, each process calls `loss_fn` with its examples, and gets the loss and the
        metrics of these examples. The gradients of all processes are added. The sum is the gradient of one process with
        all examples only if the loss is a sum over examples.

        Args:
            inputs: one example or several, with labels.
            loss_fn: `(features, logps) -> loss` or `-> (loss, metrics)`; see `twinkle.loss.CustomLoss`.
            adapter_name: optional while there is one adapter.
            options: see `forward`.

        Raises:
            InvalidLossInput: the function did not return a finite scalar that depends on the log-probabilities, or its
                gradient is not finite; no gradient was accumulated.
            Exception: `loss_fn` raised it; for other errors see `forward`.
        """
        name, features, chosen, own = self._prepare('forward_backward_custom', adapter_name, inputs, options)
        result = self.engine.forward(name, features, options=chosen)
        ignored = self.engine.adapter(name).loss.ignore_index
        found: list[CustomGradients] = []

        def gradients_of_share() -> list[npt.NDArray[np.float32]]:
            if own.start == own.stop:
                return []
            found.append(custom_gradients(loss_fn, features[own], result.logps[own], ignore_index=ignored))
            return list(found[0].gradients)

        try:
            gradients, _ = self._shares.gather(f'calculated a custom loss of {name}', gradients_of_share)
        except BaseException:
            self.engine.drop_forward(name)
            raise
        self.engine.backward(name, logprob_gradients=gradients)
        output = _model_output(result, own, is_loss_known=False)
        output['loss'] = found[0].loss if found else 0.0
        output['metrics'] = found[0].metrics if found else {}
        return output

    def _prepare(
        self, verb: str, adapter_name: str | None, inputs: Inputs, options: dict[str, Any]
    ) -> tuple[str, Sequence[InputFeature], ForwardOptions, slice]:
        """Return the adapter, the features of all ranks, the options, and the slice of this rank's features."""
        name = self._adapter(adapter_name)
        chosen = forward_options(options, learns_values=self.engine.adapter(name).value_head is not None)

        def features_of_share() -> Sequence[InputFeature]:
            features = with_streams(self._features(name, inputs), options)
            return with_labels(features) if 'embeddings' in chosen.more_outputs else features

        features, own = self._shares.gather(f'called {verb} of {name} with {chosen}', features_of_share)
        return name, features, chosen, own


def _model_output(result: BatchResult, own: slice, *, is_loss_known: bool = True) -> ModelOutput:
    """Return the result of a batch, with the outputs of this rank's own examples."""
    output = ModelOutput(logps=list(result.logps[own]), num_tokens=result.num_tokens)
    if is_loss_known:
        output['loss'] = result.loss
        output['metrics'] = dict(result.metrics)
    if result.values:
        output['values'] = _padded(result.values)[own]
    if 'logits' in result.outputs:
        output['logits'] = _padded(result.outputs['logits'])[own]
    if 'routed_experts' in result.outputs:
        output['routed_experts'] = list(result.outputs['routed_experts'][own])
    if 'embeddings' in result.outputs:
        output['embeddings'] = np.stack(list(result.outputs['embeddings']))[own]
    return output


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the arrays as one array [N, T, ...]; shorter arrays are padded with zeros at the end."""
    longest = max(len(array) for array in arrays)
    padded = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), np.float32)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded
