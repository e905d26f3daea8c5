"""Conversion of tensors to and from the library's byte layout, and of adapters to and from peft folders.

`twinkle.checkpoint_engine` defines the layout of the folders.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

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


@dataclass(frozen=True)
class TensorShard(TensorData):
    """This rank's part of a tensor that is divided among ranks. `shape` is the whole tensor's; `data` is empty."""

    tensor: DTensor

    def __post_init__(self) -> None:
        """Accept `data` without the bytes of the whole tensor."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to pickle a part without the others."""
        raise TypeError(
            'a part of a divided tensor cannot be pickled; call gathered() on every rank, and pickle its result'
        )


def tensor_data_of(tensor: Tensor) -> TensorData:
    """Copy a tensor into the library's byte layout; a `DTensor` becomes a `TensorShard`.

    Raises:
        KeyError: the layout does not support the tensor's dtype.
    """
    if isinstance(tensor, DTensor):
        return TensorShard(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), b'', tensor.detach().clone())
    view = tensor_view_of(tensor)
    return TensorData(view.dtype, view.shape, bytes(view.data))


def tensor_view_of(tensor: Tensor) -> TensorData:
    """Return a tensor in the library's byte layout; a contiguous CPU tensor is not copied.

    Raises:
        KeyError: the layout does not support the tensor's dtype.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return TensorData(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data.toreadonly())


def tensor_of(data: TensorData) -> Tensor:
    """Copy a tensor of the library's byte layout to the CPU; return the tensor of a `TensorShard` without copying."""
    if isinstance(data, TensorShard):
        return data.tensor
    dtype = _TORCH_DTYPES[data.dtype]
    if not data.data:
        return torch.empty(data.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data.data), dtype=dtype).reshape(data.shape)


def tensors_of(state: Mapping[str, TensorData]) -> dict[str, Tensor]:
    """Copy named tensors of the library's byte layout to the CPU."""
    return {name: tensor_of(data) for name, data in state.items()}


def gathered(data: TensorData) -> TensorData:
    """Return the whole tensor of a `TensorShard`, and other data unchanged. Every rank that has a part must call it."""
    return tensor_data_of(data.tensor.full_tensor()) if isinstance(data, TensorShard) else data


def divided_like(parameter: DTensor, data: TensorData) -> TensorData:
    """Return this rank's part of a whole tensor that is divided among ranks like `parameter`."""
    if isinstance(data, TensorShard):
        return data
    mesh, placements = parameter.device_mesh, parameter.placements
    # Each rank has the whole tensor, so nothing is sent.
    return tensor_data_of(distribute_tensor(tensor_of(data), mesh, placements, src_data_rank=None))


def save_adapter(weights: LoraWeights, path: str | os.PathLike[str], *, base_model: str) -> None:
    """Write an adapter as a peft folder.

    Args:
        weights: the adapter.
        path: folder to create or replace.
        base_model: name of the base model, recorded in the configuration.
    """
    state = {name: tensor_data_of(tensor) for name, tensor in weights.peft_state().items()}
    write_peft_folder(path, state, weights.config, base_model=base_model)


def load_adapter(
    path: str | os.PathLike[str], layers: Layers, *, device: str = 'cpu', is_trainable: bool = False
) -> LoraWeights:
    """Read a peft folder that was written by this library, peft or another tool.

    Raises:
        InvalidPeftFolder: the folder is malformed or lacks a file.
        ValueError: its tensors do not fit the model.
    """
    state, config = read_peft_folder(path)
    return LoraWeights.from_peft_state(layers, config, tensors_of(state), device=device, is_trainable=is_trainable)
