"""Checks adapters against the deployment's base models. Only the headers of the models' weights are read."""

from collections.abc import Sequence

from twinkle.checkpoint_engine import AdapterMismatch, InvalidModelFolder, WeightManifest
from twinkle.checkpoint_engine.base_layers import check_fit, layer_shapes
from twinkle.checkpoint_engine.hf_folder import ModelFolder
from twinkle.checkpoint_engine.lora_layers import Shapes
from twinkle.data_format import LoraConfig, listed_base_model
from twinkle.hub import HubError, resolve_model
from twinkle_services.kit.errors import BaseModelNotFound, InvalidField, ServiceUnreachable
from twinkle_services.kit.worker import Threads

_FIELD = 'header.base_model'


class ModelFolders:
    """Implements `ports.BaseModels`."""

    def __init__(self, names: Sequence[str], threads: Threads, *, max_rank: int) -> None:
        """Create the set of known models.

        Args:
            names: Names of the models; if empty, adapters of any model are accepted without checking their shapes.
            threads: Threads that read model folders.
            max_rank: Maximum LoRA rank.
        """
        self._names = tuple(names)
        self._threads = threads
        self._max_rank = max_rank
        self._shapes: dict[str, Shapes] = {}

    def known_name(self, base_model: str) -> str:
        if not self._names:
            return base_model
        found = listed_base_model(base_model, self._names)
        if found is None:
            raise BaseModelNotFound(base_model, self._names)
        return found

    async def check_fit(self, manifest: WeightManifest, *, stated_base_model: str) -> None:
        name = self.known_name(manifest.base_model)
        if listed_base_model(stated_base_model, self._names) not in (None, name):
            problem = f'is {name!r}, but the configuration in the archive names {stated_base_model!r}'
            raise InvalidField(_FIELD, problem)
        shapes = {entry.name: entry.shape for entry in manifest.tensors}
        try:
            check_fit(await self._layers(name), shapes, manifest.lora_config or LoraConfig(), max_rank=self._max_rank)
        except AdapterMismatch as error:
            raise InvalidField('chunk', f'the adapter does not fit {name!r}: {error}') from error

    async def _layers(self, name: str) -> Shapes | None:
        if not self._names:
            return None
        if name not in self._shapes:
            try:
                self._shapes[name] = await self._threads.run(_layers_of, name)
            except (HubError, InvalidModelFolder, OSError) as error:
                raise ServiceUnreachable('base model') from error
        return self._shapes[name]


def _layers_of(name: str) -> Shapes:
    return layer_shapes(ModelFolder.open(resolve_model(name)))
