"""The base model's own weights on their way to and from other processes: merged with an adapter, or replaced."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from twinkle.data_format import TensorData
from twinkle.nn.causal_lm import PackedCausalLM
from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.lora_weights import LoraWeights
from twinkle.nn.peft_files import tensor_of


def merged_parameters(model: PackedCausalLM, adapter: LoraWeights) -> dict[str, Tensor]:
    """Return the base weights by the model's own names, those that the adapter changes as `W + scaling B A`.

    Computed in float32 and rounded once to the dtype of W. What is not changed is the model's own tensor.

    Raises:
        UnsupportedModel: the adapter changes a head that is tied to the embeddings, which stay as they are.
    """
    merged = {name: parameter.detach() for name, parameter in model.base_parameters.items()}
    with torch.no_grad():
        for path, factors in adapter.factors.items():
            if f'{path}.weight' not in merged:
                raise UnsupportedModel(f'{path} is tied to other weights, which a merged adapter would change too')
            weight_OI = merged[f'{path}.weight']
            update_OI = (factors.b @ factors.a).mul_(factors.scaling)
            merged[f'{path}.weight'] = update_OI.add_(weight_OI).to(weight_OI.dtype)
    return merged


def replace_parameters(
    model: PackedCausalLM, state: Mapping[str, TensorData], *, before_each: Callable[[], object] | None = None
) -> None:
    """Overwrite base weights in place, in the dtype the model has them in. No pass may be running.

    Args:
        model: whose weights are replaced.
        state: by the model's own names, tied ones once; those that are not in it stay as they are.
        before_each: called before each weight is overwritten; an exception of it leaves some new and some old.

    Raises:
        ValueError: the model has no tensor of that name, or of another shape, or it is no number of floating
            point; nothing was changed then.
    """
    own = model.base_parameters
    for name, data in state.items():
        if name not in own:
            raise ValueError(f'the model has no weight {name}')
        if data.shape != tuple(own[name].shape) or 'float' not in data.dtype:
            raise ValueError(
                f'{name} must be of floating point and {tuple(own[name].shape)}, got {data.dtype} {data.shape}'
            )
    with torch.no_grad():
        for name, data in state.items():
            if before_each is not None:
                before_each()
            own[name].copy_(tensor_of(data))
