"""Scaled rotary position embeddings, for longer sequences than in the training of a model."""

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from twinkle.patch.base import Patch, PatchError
from twinkle.patch.versions import VersionRange

_TYPES = ('linear', 'yarn')


class RopeScalingPatch(Patch):
    """Multiplies the number of supported positions by `factor`, like a `config.json` with the same rope scaling.

    'yarn' (Peng et al. 2023, arXiv:2309.00071, section 3.4) interpolates only low frequencies; 'linear' (Chen et al.
    2023, arXiv:2306.15595) interpolates all. Schemes that depend on the length of the input are not supported, because
    one tenant's sequence would change the results of other tenants.

    Args:
        factor: supported positions divided by trained positions, above 1.
        rope_type: 'yarn' or 'linear'.

    Raises:
        ValueError: an argument is out of range.
    """

    libraries: ClassVar[Mapping[str, VersionRange]] = {'transformers': ('5.16.1', '5.20')}

    def __init__(self, factor: float, rope_type: str = 'yarn') -> None:
        super().__init__()
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1.0 < factor < math.inf:
            raise ValueError(f'factor must be a number above 1, got {factor!r}')
        if rope_type not in _TYPES:
            raise ValueError(f'rope_type must be one of {_TYPES}, got {rope_type!r}')
        self.factor, self.rope_type = float(factor), rope_type
        self._before: tuple[Any, int] | None = None
        self._modules: dict[str, nn.Module] = {}

    def apply(self, model: Any) -> None:
        """Replace the model's rotary embeddings with scaled embeddings.

        Raises:
            PatchError: the model has no rotary embeddings, already scales them, or has several kinds of them; or their
                class cannot be built from a configuration.
        """
        config = model.config.get_text_config()
        present = self._checked_parameters(config)
        modules = {path: module for path, module in model.named_modules() if path.rpartition('.')[2] == 'rotary_emb'}
        if not modules:
            raise PatchError(type(self).__name__, f'{type(model).__name__} has no rotary embeddings')
        trained = config.max_position_embeddings
        scaled = copy.deepcopy(config)
        scaled.max_position_embeddings = int(trained * self.factor)
        scaled.rope_parameters = {
            **present,
            'rope_type': self.rope_type,
            'factor': self.factor,
            'original_max_position_embeddings': trained,
        }
        replacements = {path: self._like(module, scaled) for path, module in modules.items()}
        self._before, self._modules = (config.rope_parameters, trained), modules
        config.rope_parameters, config.max_position_embeddings = scaled.rope_parameters, scaled.max_position_embeddings
        _set_modules(model, replacements)

    def undo(self, model: Any) -> None:
        """Restore the model's modules and configuration."""
        config = model.config.get_text_config()
        if self._before is not None:
            config.rope_parameters, config.max_position_embeddings = self._before
        _set_modules(model, self._modules)
        self._before, self._modules = None, {}

    def _checked_parameters(self, config: Any) -> dict[str, Any]:
        name, parameters = type(self).__name__, getattr(config, 'rope_parameters', None)
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            raise PatchError(name, 'the model has no rotary embeddings, or has several kinds of them')
        if parameters.get('rope_type', 'default') != 'default':
            raise PatchError(name, f'the model already scales its rotary embeddings ({parameters["rope_type"]})')
        return parameters

    def _like(self, module: nn.Module, config: Any) -> nn.Module:
        try:
            built = type(module)(config=config)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise PatchError(type(self).__name__, f'{type(module).__name__} cannot be scaled: {error}') from error
        buffer = next(module.buffers(), None)
        return (built if buffer is None else built.to(buffer.device)).train(module.training)


def _set_modules(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    for path, module in modules.items():
        parent, _, name = path.rpartition('.')
        setattr(model.get_submodule(parent), name, module)
