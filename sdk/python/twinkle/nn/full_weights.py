"""Weights of the base model as the trainable weights of one run that leases the model.

`FullWeights` has the methods of `LoraWeights` that the trainer calls, so the trainer can use either. The base model is
shared, so its original weights are restored bitwise when the lease ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from twinkle.nn.dropout import RowDropout
from twinkle.nn.errors import UnknownParameters, UnsupportedModel
from twinkle.nn.packed_model import PackedModel
from twinkle.nn.targets import matches_any


class FullWeights:
    """Parameters of the base model, trained in place. The model must not be used elsewhere until `release`.

    If FSDP divides the model among ranks, the parameters are the shards of this rank (`DTensor`). `collecting` returns
    their gradients, because `torch.autograd.grad` does not reach them.

    Args:
        model: model to train; its weights must be float32, because 16-bit weights lose small steps to rounding.
        target_modules: names matched against the dotted parts of each parameter's path; empty selects all.
        seed: seed of `dropout_generator`, which is saved with checkpoints but not used.

    Raises:
        UnknownParameters: a name matches no parameter.
        UnsupportedModel: the weights are not float32, `tp` or `pp` ranks divide the layers, `ulysses` ranks divide the
            rows, or the model has quantized weights or a vision or audio tower.
    """

    def __init__(self, model: PackedModel, target_modules: Sequence[str] = (), *, seed: int = 0) -> None:
        if model.media is not None:
            raise UnsupportedModel('full-parameter training supports only text models; give a LoraConfig')
        if model.is_quantized:
            raise UnsupportedModel('weights in four bits cannot be trained; load the model without quantization')
        if model.row_ranks is not None:
            raise UnsupportedModel('full-parameter training does not support ulysses_size; use dp_size and fsdp_size')
        chosen = select_parameters(model.base_parameters, target_modules)
        self.is_sharded = model.sharding is not None
        """Whether the parameters are shards of this rank."""
        if self.is_sharded and not all(isinstance(parameter, DTensor) for parameter in chosen.values()):
            raise UnsupportedModel(
                'full-parameter training does not support layers divided by tp or pp; use dp_size and fsdp_size'
            )
        if any(parameter.dtype != torch.float32 for parameter in chosen.values()):
            raise UnsupportedModel('full-parameter training needs a base model loaded as float32')
        self.config = None
        """Always None: there is no LoRA configuration."""
        self.target_modules = tuple(target_modules)
        self.dropout_generator = torch.Generator().manual_seed(seed)
        self._parameters = chosen
        self._originals = {name: _local(parameter).to('cpu', copy=True) for name, parameter in chosen.items()}
        self.requires_grad_(is_trainable=True)

    def update_of(self, path: str) -> None:
        """Return None: layers have no update in addition to their weights."""
        del path

    def expert_update_of(self, path: str) -> None:
        """Return None: experts have no update in addition to their weights."""
        del path

    def sample_dropout(self) -> RowDropout | None:
        """Return None: full-parameter training has no dropout."""
        return None

    def peft_state(self) -> dict[str, Tensor]:
        """Return the weights under the model's parameter names, without copying."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def load_peft_state(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite all weights in place.

        Raises:
            ValueError: a tensor is missing, unexpected, or has a different shape; no weight was changed.
        """
        own = self.peft_state()
        if own.keys() != state.keys():
            raise ValueError(
                f'weights do not match the model: {sorted(own.keys() ^ state.keys())[:3]} are missing or unexpected'
            )
        for name, tensor in own.items():
            if state[name].shape != tensor.shape:
                raise ValueError(f'{name} must have shape {tuple(tensor.shape)}, got {tuple(state[name].shape)}')
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def parameters(self) -> list[Tensor]:
        """Return the trained tensors, in the model's order."""
        return list(self._parameters.values())

    @property
    def layer_paths(self) -> list[str]:
        """Name of each of `parameters`."""
        return list(self._parameters)

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the trained tensors under the model's parameter names, in the order of `parameters`."""
        return dict(self._parameters)

    def requires_grad_(self, *, is_trainable: bool) -> 'FullWeights':
        """Set whether the weights collect gradients; return self."""
        for tensor in self._parameters.values():
            tensor.requires_grad_(is_trainable)
        return self

    @property
    def parameter_count(self) -> int:
        """Number of scalars."""
        return sum(tensor.numel() for tensor in self._parameters.values())

    @contextmanager
    def collecting(self) -> Iterator[dict[str, Tensor | None]]:
        """Collect the gradients that backward passes add to sharded parameters in the block.

        Yields:
            A mapping that contains, after the block, the gradient of each parameter by name, or None without a
            gradient. The gradients that the parameters had before are then restored.
        """
        held = {name: parameter.grad for name, parameter in self._parameters.items()}
        found: dict[str, Tensor | None] = {}
        for parameter in self._parameters.values():
            parameter.grad = None
        try:
            yield found
            found.update({name: parameter.grad for name, parameter in self._parameters.items()})
        finally:
            for name, parameter in self._parameters.items():
                parameter.grad = held[name]

    def release(self) -> None:
        """Restore and freeze the base model's weights, which ends the lease."""
        self.requires_grad_(is_trainable=False)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.grad = None
                _local(parameter).copy_(self._originals[name])


def _local(parameter: Tensor) -> Tensor:
    """Return the part of a parameter that this rank stores, detached but in the same memory."""
    own = parameter.detach()
    return own.to_local() if isinstance(own, DTensor) else own


def select_parameters(parameters: Mapping[str, Tensor], target_modules: Sequence[str]) -> dict[str, Tensor]:
    """Return the parameters that match a name, or all when there are no names.

    Raises:
        UnknownParameters: a name matches no parameter.
    """
    if not target_modules:
        return dict(parameters)
    unknown = sorted(name for name in target_modules if not any(matches_any(path, [name]) for path in parameters))
    if unknown:
        _refuse(unknown, parameters)
    return {path: tensor for path, tensor in parameters.items() if matches_any(path, target_modules)}


def _refuse(unknown: list[str], parameters: Mapping[str, Tensor]) -> NoReturn:
    known = sorted({part for path in parameters for part in path.split('.') if not part.isdigit()})
    raise UnknownParameters(unknown, known)
