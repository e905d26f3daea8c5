"""Trainer for several LoRA adapters, for example of several tenants."""

from collections.abc import Sequence
from typing import Any

from twinkle.data_format import InputFeature, LoraConfig
from twinkle.model.base import Inputs
from twinkle.model.errors import InvalidArgument
from twinkle.model.transformers_model import TransformersModel


class MultiLoraTransformersModel(TransformersModel):
    """`TransformersModel` with limits on the number and rank of adapters and on the length of examples.

    Args:
        model_id: hub id or folder.
        max_loras: maximum number of adapters, at least 1.
        max_r: maximum LoRA rank.
        max_length: maximum number of tokens per example; None uses the model's limit.
        options: arguments of `TransformersModel`.

    Raises:
        InvalidArgument: a limit is below 1. Methods raise it if an adapter or an example exceeds a limit.
        NotSupportedYet, ValueError, UnsupportedModel, ImportError, HubError: see `TransformersModel`.
    """

    _supports_full_training = False

    def __init__(
        self, model_id: str, *, max_loras: int = 5, max_r: int = 32, max_length: int | None = None, **options: Any
    ) -> None:
        for name, value in (('max_loras', max_loras), ('max_r', max_r), ('max_length', max_length)):
            if value is not None and value < 1:
                raise InvalidArgument(f'{name} must be at least 1, got {value}')
        super().__init__(model_id, **options)
        self._max_loras, self._max_r, self._max_length = max_loras, max_r, max_length

    def _check_config(self, config: LoraConfig) -> None:
        if len(self.engine.adapter_ids) >= self._max_loras:
            raise InvalidArgument(f'there are already {self._max_loras} adapters; remove one or raise max_loras')
        rank = max([config.r, *config.rank_pattern.values()])
        if rank > self._max_r:
            raise InvalidArgument(f'the LoRA rank {rank} is above max_r ({self._max_r}); lower r or raise max_r')

    def _features(self, name: str, inputs: Inputs) -> Sequence[InputFeature]:
        features = super()._features(name, inputs)
        for index, feature in enumerate(features):
            length = len(feature.get('input_ids', ()))
            if self._max_length is not None and length > self._max_length:
                raise InvalidArgument(
                    f'features[{index}] has {length} tokens; max_length is {self._max_length}; shorten the example'
                )
        return features
