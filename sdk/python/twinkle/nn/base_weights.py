"""Export and replacement of the base model's weights: merged with an adapter, or overwritten in place."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from twinkle.data_format import TensorData
from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.expert_factors import ExpertFactors
from twinkle.nn.lora_weights import LoraWeights
from twinkle.nn.packed_model import PackedModel
from twinkle.nn.peft_files import tensor_of


def merged_parameters(model: PackedModel, adapter: LoraWeights) -> dict[str, Tensor]:
    """Return all base weights by name, with `W + scaling B A` where the adapter has an update.

    The sum is computed in float32 and rounded once to the dtype of W. Unchanged entries alias the model's tensors.

    Raises:
        UnsupportedModel: the adapter updates a head that is tied to the embeddings.
    """
    merged = dict(model.base_state())
    with torch.no_grad():
        for path, factors in adapter.factors.items():
            name = path if isinstance(factors, ExpertFactors) else f'{path}.weight'
            if name not in merged:
                raise UnsupportedModel(
                    f'{path} shares its weight with another layer, so an adapter on it cannot be merged'
                )
            weight = merged[name]
            merged[name] = factors.delta().add_(weight).to(weight.dtype)
    return merged


def replace_parameters(
    model: PackedModel, state: Mapping[str, TensorData], *, before_each: Callable[[], object] | None = None
) -> None:
    """Overwrite base weights in place, converted to the model's dtype. No pass may be running.

    Args:
        model: model to change.
        state: new weights by parameter name, tied weights once; other parameters keep their values.
        before_each: called before each write; if it raises, some weights are new and the rest old.

    Raises:
        ValueError: a name is unknown, or a tensor has a different shape or a dtype that is not floating-point; no
            weight was changed.
    """
    own = model.base_parameters
    for name, data in state.items():
        if name not in own:
            raise ValueError(f'the model has no weight {name}')
        if data.shape != tuple(own[name].shape) or 'float' not in data.dtype:
            raise ValueError(
                f'{name} must be a float tensor of shape {tuple(own[name].shape)}, got {data.dtype} {data.shape}'
            )
    with torch.no_grad():
        for name, data in state.items():
            if before_each is not None:
                before_each()
            own[name].copy_(tensor_of(data))
