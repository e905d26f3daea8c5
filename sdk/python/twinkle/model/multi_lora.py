"""The trainer that several tenants of one process share."""

from typing import Any

from twinkle.data_format import LoraConfig
from twinkle.model.errors import InvalidArgument
from twinkle.model.transformers_model import TransformersModel


class MultiLoraTransformersModel(TransformersModel):
    """A `TransformersModel` whose adapters are bounded in number and rank.

    Args:
        model_id: a hub id or a folder.
        max_loras: most adapters at a time, at least 1.
        max_r: largest LoRA rank.
        options: of `TransformersModel`.
    """

    def __init__(self, model_id: str, *, max_loras: int = 5, max_r: int = 32, **options: Any) -> None:
        for name, value in (('max_loras', max_loras), ('max_r', max_r)):
            if value < 1:
                raise InvalidArgument(f'{name} must be at least 1, got {value}')
        super().__init__(model_id, **options)
        self._max_loras, self._max_r = max_loras, max_r

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int = 1
    ) -> None:
        """Add an adapter; as `TransformersModel`'s.

        Raises:
            InvalidArgument: there are `max_loras` already, or its rank is above `max_r`.
        """
        if len(self.engine.adapter_ids) >= self._max_loras:
            raise InvalidArgument(f'there are {self._max_loras} adapters already; remove one or raise max_loras')
        if not isinstance(config_or_dir, str):
            config = LoraConfig.of(config_or_dir)
            rank = max([config.r, *config.rank_pattern.values()])
            if rank > self._max_r:
                raise InvalidArgument(f'the LoRA rank {rank} is above max_r {self._max_r}')
        super().add_adapter_to_model(
            adapter_name, config_or_dir, gradient_accumulation_steps=gradient_accumulation_steps
        )

    def remove_adapter(self, adapter_name: str) -> None:
        """Forget an adapter.

        Raises:
            UnknownAdapter: there is none of that name.
        """
        self.engine.delete_adapter(adapter_name)
        self._templates.pop(adapter_name, None)
