"""Adapters in and out of the standard peft folder; the folder's layout is `twinkle.checkpoint_engine`'s."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from twinkle.checkpoint_engine import read_peft_folder, write_peft_folder
from twinkle.data_format import TensorData
from twinkle.nn.lora_weights import LoraWeights
from twinkle.nn.targets import Layers

_TORCH_DTYPES = {
    'bool': torch.bool,
    'uint8': torch.uint8,
    'int32': torch.int32,
    'int64': torch.int64,
    'float16': torch.float16,
    'bfloat16': torch.bfloat16,
    'float32': torch.float32,
    'float64': torch.float64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


def tensor_data_of(tensor: Tensor) -> TensorData:
    """Copy a tensor into the shared byte layout.

    Raises:
        KeyError: its dtype has no name there.
    """
    view = tensor_view_of(tensor)
    return TensorData(view.dtype, view.shape, bytes(view.data))


def tensor_view_of(tensor: Tensor) -> TensorData:
    """Show a tensor in the shared byte layout, without copying one that lies contiguous on the CPU.

    Raises:
        KeyError: its dtype has no name there.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return TensorData(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data.toreadonly())


def tensor_of(data: TensorData) -> Tensor:
    """Copy the shared byte layout into a tensor on the CPU."""
    dtype = _TORCH_DTYPES[data.dtype]
    if not data.data:
        return torch.empty(data.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data.data), dtype=dtype).reshape(data.shape)


def tensors_of(state: Mapping[str, TensorData]) -> dict[str, Tensor]:
    """Copy named tensors out of the shared byte layout."""
    return {name: tensor_of(data) for name, data in state.items()}


def save_adapter(weights: LoraWeights, path: str | os.PathLike[str], *, base_model: str) -> None:
    """Write an adapter as a peft folder.

    Args:
        weights: the adapter.
        path: the folder; made, or replaced.
        base_model: recorded in the configuration.
    """
    state = {name: tensor_data_of(tensor) for name, tensor in weights.peft_state().items()}
    write_peft_folder(path, state, weights.config, base_model=base_model)


def load_adapter(
    path: str | os.PathLike[str], layers: Layers, *, device: str = 'cpu', is_trainable: bool = False
) -> LoraWeights:
    """Read a peft folder that this library, peft or another tool wrote.

    Raises:
        InvalidPeftFolder: the folder is missing a file or malformed.
        ValueError: its tensors do not fit the model.
    """
    state, config = read_peft_folder(path)
    return LoraWeights.from_peft_state(layers, config, tensors_of(state), device=device, is_trainable=is_trainable)
