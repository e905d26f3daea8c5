"""Packs an adapter's batch into passes of bounded size and runs them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from twinkle.data_format import InputFeature
from twinkle.loss import MissingStream
from twinkle.model.engine.adapter_state import AdapterState, PendingForward
from twinkle.model.engine.forward_pass import PassResult, run_pass, split_features
from twinkle.model.engine.results import ForwardOptions
from twinkle.model.errors import InvalidArgument, LossNotFinite
from twinkle.nn import PackedCausalLM
from twinkle.processor import InputLimits, InvalidFeatures, PackedBatch


class BatchRunner:
    """See `TrainerEngine` for the arguments."""

    def __init__(self, model: PackedCausalLM, *, max_pass_tokens: int) -> None:
        self._model = model
        self._max_pass_tokens = max_pass_tokens
        self._limits = InputLimits(vocab_size=model.vocab_size, max_tokens=model.max_position_embeddings)

    def pack(self, state: AdapterState, features: Sequence[InputFeature]) -> PackedBatch:
        """Check and pack a whole batch.

        Raises:
            InvalidFeatures: names the feature, the field and the cure.
            MissingStream: the loss needs what the features do not carry.
        """
        batch = state.processor(features, self._limits, ignore_index=state.loss.ignore_index)
        missing = [name for name in state.loss.required_streams if name not in batch.streams]
        if missing:
            raise MissingStream(type(state.loss).__name__, missing[0])
        return batch

    def parts(self, state: AdapterState, features: Sequence[InputFeature]) -> list[PackedBatch]:
        """Check the whole batch and pack it into as many passes as it needs; raises as `pack`."""
        whole = self.pack(state, features)
        if whole.token_count <= self._max_pass_tokens or not state.loss.is_separable:
            return [whole]
        return [self.pack(state, part) for part in split_features(features, max_tokens=self._max_pass_tokens)]

    def run(
        self, state: AdapterState, parts: list[PackedBatch], options: ForwardOptions, *, is_training: bool
    ) -> list[PassResult]:
        """Run the passes one after the other.

        Raises:
            LossNotFinite: names the feature by its place in the whole batch.
        """
        results: list[PassResult] = []
        begin = 0
        for part in parts:
            try:
                results.append(run_pass(self._model, state, part, options=options, is_training=is_training))
            except LossNotFinite as error:
                index = error.feature_index
                raise LossNotFinite(state.adapter_id, None if index is None else index + begin) from None
            begin += len(part.feature_lengths)
        return results


def check_trainable(parts: list[PackedBatch], options: ForwardOptions) -> None:
    """Refuse a batch from which nothing can be learned.

    Raises:
        InvalidArgument: the adapter is disabled.
        InvalidFeatures: no label counts.
    """
    if options.is_adapter_disabled:
        raise InvalidArgument('is_adapter_disabled is for forward_only; without the adapter nothing is learned')
    if not any(part.label_count for part in parts):
        raise InvalidFeatures('have no label that counts: each is masked or weighs 0', field='labels')


def logprob_gradient(pending: PendingForward, gradients: Sequence[npt.NDArray[np.float32]]) -> torch.Tensor:
    """Return float32 [R] from one array [T] for each feature of a pending forward pass.

    Raises:
        InvalidFeatures: they are not as many, as long, or not finite.
    """
    lengths = pending.batch.feature_lengths
    if len(gradients) != len(lengths):
        raise InvalidFeatures(f'of the last forward were {len(lengths)}, got {len(gradients)} gradients')
    for index, (values, length) in enumerate(zip(gradients, lengths, strict=True)):
        if np.shape(values) != (length,) or not np.isfinite(values).all():
            raise InvalidFeatures(f'must be {length} finite numbers', index=index, field='logprob_gradients')
    return torch.from_numpy(pending.batch.gather(list(gradients))).to(pending.logps_R.device)
