"""Base of all method groups: the engine, and the selection of the adapter."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinkle.data_format import InputFeature, LoraConfig
from twinkle.infra import DeviceMesh, NotSupportedYet
from twinkle.model.base import Inputs
from twinkle.model.engine import TrainerEngine
from twinkle.model.errors import AdapterNotReady, InvalidArgument
from twinkle.model.verbs.batch_shares import BatchShares, SoloShares, TorchShares
from twinkle.template import Template

WHOLE_MODEL = 'default'
"""Name of the full-parameter run that is created when no adapter was added."""


class ModelHandle:
    """Engine with the templates of its adapters and the folder of its base model."""

    _supports_full_training = True
    """Whether setting an optimizer without an adapter starts full-parameter training."""

    def __init__(self, engine: TrainerEngine, *, model_id: str, folder: Path, mesh: DeviceMesh | None = None) -> None:
        self.engine = engine
        self.model_id = model_id
        self._folder = folder
        self._shares: BatchShares = SoloShares() if mesh is None or mesh.world_size == 1 else TorchShares(mesh)
        self._templates: dict[str, Template] = {}

    def __repr__(self) -> str:
        names, device = list(self.engine.adapter_ids), str(self.engine.model.device)
        return f'{type(self).__name__}({self.model_id!r}, adapters={names}, device={device!r})'

    def _adapter(self, adapter_name: str | None) -> str:
        """Return `adapter_name` if the adapter exists, or the name of the only adapter if no name is given."""
        if adapter_name is not None:
            self.engine.adapter(adapter_name)
            return adapter_name
        names = self.engine.adapter_ids
        if not names:
            raise NotSupportedYet(
                'there is no adapter; call add_adapter_to_model first (full_parameters=True trains the whole model)'
            )
        if len(names) > 1:
            raise InvalidArgument(f'there are several adapters {list(names)}; choose one with adapter_name=')
        return names[0]

    def _features(self, name: str, inputs: Inputs) -> Sequence[InputFeature]:
        """Return inputs as features; chats are encoded by the adapter's template."""
        examples: Sequence[Any] = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        if not any('messages' in example and 'input_ids' not in example for example in examples):
            return examples
        if name not in self._templates:
            raise AdapterNotReady(name, 'a template to encode chats: call set_template first')
        return self._templates[name].batch_encode(examples)

    def _check_config(self, config: LoraConfig) -> None:
        """Refuse a configuration beyond the trainer's limits; by default there are no limits."""
