"""Verbs that run the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle.data_format import InputFeature, ModelOutput
from twinkle.loss import CustomLoss, custom_gradients
from twinkle.model.base import Inputs
from twinkle.model.engine import BatchResult, ForwardOptions
from twinkle.model.verbs.handle import ModelHandle
from twinkle.model.verbs.inputs import forward_options, own_loss, with_labels, with_streams


class TrainingVerbs(ModelHandle):
    """Each takes `adapter_name`; without it the only adapter is meant.

    `options` of the forward verbs: `temperature` divides the logits; `advantages`, `old_logps`,
    `ref_logps`, `returns`, `loss_weights` and whatever else the loss reads, one entry an example: a number
    for all its labels, one a label, or one a token; `return_logits`; `task='embedding'`. `forward_only` and
    `forward_backward` take `loss`, a name, class or instance, and `loss_options`, for this batch alone.
    """

    def forward_only(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ModelOutput:
        """Return loss and log-probabilities; changes nothing but the evaluation metrics.

        Args:
            inputs: one example or several.
            adapter_name: may be left out while there is one adapter.
            options: of the class, and `disable_lora` to run the base model without the adapter.

        Raises:
            InvalidFeatures: names the feature, the field and the cure.
            InvalidArgument: an option is unknown or does not fit.
            BatchTooLarge: memory ran out.
        """
        loss = own_loss(options)
        name, features, chosen = self._prepare(adapter_name, inputs, options)
        return _model_output(self.engine.forward_only(name, features, options=chosen, loss=loss))

    def forward(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ModelOutput:
        """Return log-probabilities and keep what `calculate_loss` and `backward` need; errors as `forward_only`."""
        name, features, chosen = self._prepare(adapter_name, inputs, options)
        return _model_output(self.engine.forward(name, features, options=chosen), is_loss_known=False)

    def calculate_loss(self, *, adapter_name: str | None = None) -> float:
        """Return the loss of the last `forward`.

        Raises:
            AdapterNotReady: there is none.
            LossNotFinite: the model gave no finite loss.
        """
        return self.engine.calculate_loss(self._adapter(adapter_name)).loss

    def backward(self, *, logprob_gradients: Sequence[Any] | None = None, adapter_name: str | None = None) -> None:
        """Add the gradient of the last `calculate_loss`, or of a loss of one's own; errors as `calculate_loss`.

        Args:
            logprob_gradients: float [T] for each example: the own loss's gradient by each label's log-probability.
            adapter_name: may be left out while there is one adapter.
        """
        gradients = None
        if logprob_gradients is not None:
            gradients = [np.asarray(values, np.float32) for values in logprob_gradients]
        self.engine.backward(self._adapter(adapter_name), logprob_gradients=gradients)

    def forward_backward(self, inputs: Inputs, *, adapter_name: str | None = None, **options: Any) -> ModelOutput:
        """Return loss and log-probabilities, and add the gradient to the accumulated one.

        Raises:
            InvalidFeatures: names the feature, the field and the cure.
            InvalidArgument: an option is unknown or does not fit.
            LossNotFinite, BatchTooLarge: no gradient was added.
        """
        loss = own_loss(options)
        name, features, chosen = self._prepare(adapter_name, inputs, options)
        return _model_output(self.engine.forward_backward(name, features, options=chosen, loss=loss))

    def forward_backward_custom(
        self, inputs: Inputs, loss_fn: CustomLoss, *, adapter_name: str | None = None, **options: Any
    ) -> ModelOutput:
        """Add the gradient of a function of the log-probabilities to the accumulated one.

        Args:
            inputs: one example or several, with labels.
            loss_fn: `(features, logps) -> loss` or `-> (loss, metrics)`; see `twinkle.loss.CustomLoss`.
            adapter_name: may be left out while there is one adapter.
            options: as of `forward_backward`.

        Raises:
            InvalidLossInput: the function returned no finite scalar that depends on the log-probabilities; no
                gradient was added.
        """
        name, features, chosen = self._prepare(adapter_name, inputs, options)
        result = self.engine.forward(name, features, options=chosen)
        try:
            ignored = self.engine.adapter(name).loss.ignore_index
            own = custom_gradients(loss_fn, features, result.logps, ignore_index=ignored)
        except BaseException:
            self.engine.drop_forward(name)
            raise
        self.engine.backward(name, logprob_gradients=own.gradients)
        output = _model_output(result, is_loss_known=False)
        output['loss'] = own.loss
        output['metrics'] = own.metrics
        return output

    def _prepare(
        self, adapter_name: str | None, inputs: Inputs, options: dict[str, Any]
    ) -> tuple[str, Sequence[InputFeature], ForwardOptions]:
        name = self._adapter(adapter_name)
        chosen = forward_options(options, learns_values=self.engine.adapter(name).value_head is not None)
        features = with_streams(self._features(name, inputs), options)
        return name, with_labels(features) if 'embeddings' in chosen.more_outputs else features, chosen


def _model_output(result: BatchResult, *, is_loss_known: bool = True) -> ModelOutput:
    output = ModelOutput(logps=list(result.logps), num_tokens=result.num_tokens)
    if is_loss_known:
        output['loss'] = result.loss
        output['metrics'] = dict(result.metrics)
    if result.values:
        output['values'] = _padded(result.values)
    if 'logits' in result.outputs:
        output['logits'] = _padded(result.outputs['logits'])
    if 'embeddings' in result.outputs:
        output['embeddings'] = np.stack(list(result.outputs['embeddings']))
    return output


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return one array [N, T, ...], zeros after the end of the shorter ones."""
    longest = max(len(array) for array in arrays)
    padded = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), np.float32)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded
