"""Devices by name, and the data types of frozen weights that suit them."""

import json
import os
from pathlib import Path

import torch

from twinkle.nn.cpu_facts import cpu_text, has_fast_bfloat16
from twinkle.nn.row_products import IN_ONEDNN
from twinkle.telemetry import gpu_memory

_HALF = ('bfloat16', 'float16')


def device_memory(name: str) -> dict[str, int]:
    """Return the bytes of a GPU's memory by state; see `twinkle.telemetry.gpu_memory`."""
    return gpu_memory(torch.cuda, name)


def torch_device(name: str) -> torch.device:
    """Return the device with this name.

    Raises:
        ValueError: torch does not know the name, or it names a GPU and torch finds none.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"device {name!r} is not known to torch; use 'cpu', 'cuda' or, for example, 'cuda:0'"
        ) from error
    if device.type == 'cuda' and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch finds no GPU on this machine; use device 'cpu'")
    return device


def chosen_dtype(dtype: str, folder: str | os.PathLike[str], *, device: str) -> str:
    """Return the dtype in which to load the frozen weights of a model.

    Args:
        dtype: name of a torch dtype, or 'auto'.
        folder: folder of the model in the Hugging Face layout.
        device: torch device of the model.

    Returns:
        `dtype`, unless it is 'auto'. For 'auto', 'bfloat16' if config.json names half precision and
        `is_bfloat16_fast` is true, otherwise 'float32'.

    Raises:
        OSError: `dtype` is 'auto', and the folder has no config.json.
    """
    if dtype != 'auto':
        return dtype
    is_half = declared_dtype(folder) in _HALF
    return 'bfloat16' if is_half and is_bfloat16_fast(device) else 'float32'


def declared_dtype(folder: str | os.PathLike[str]) -> str:
    """Return the dtype that config.json names; 'float32' if it names none, as in transformers.

    Raises:
        OSError: the folder has no config.json.
    """
    config = json.loads((Path(folder) / 'config.json').read_text())
    for part in (config, config.get('text_config') or {}):
        if found := part.get('dtype') or part.get('torch_dtype'):
            return str(found)
    return 'float32'


def float32_products(device: str, *, is_tf32_allowed: bool) -> str:
    """Return a name for the way in which a device multiplies float32; the last bits of results depend on it."""
    if is_tf32_allowed and device.startswith('cuda'):
        return 'TF32'
    return 'oneDNN' if (torch.device(device).type, torch.float32) in IN_ONEDNN else 'float32'


def is_bfloat16_fast(device: str) -> bool:
    """Return whether a CPU multiplies bfloat16 faster than float32, or a GPU has instructions for bfloat16.

    False for other devices.
    """
    kind = device.partition(':')[0]
    if kind == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == 'cpu' and has_fast_bfloat16(cpu_text())
