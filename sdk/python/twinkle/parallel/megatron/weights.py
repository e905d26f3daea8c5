"""Reading of parts of weights from a model folder, so that no rank reads the whole model."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from twinkle.nn import UnsupportedModel

_ALL = slice(None)
_INDEX = 'model.safetensors.index.json'
_SINGLE_FILE = 'model.safetensors'


class FolderWeights:
    """Weights of a model folder in the safetensors format. Use it as a context manager, which closes the files.

    Args:
        folder: folder with `model.safetensors`, or with several files and their index.
        dtype: dtype of the tensors that are returned.
        device: device of the tensors that are returned.

    Raises:
        UnsupportedModel: the folder has no weights in this format.
    """

    def __init__(self, folder: str | os.PathLike[str], *, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = Path(folder)
        self.dtype, self.device = dtype, device
        # Frequencies of rotary embeddings, which older models store, are computed from the configuration.
        files = _files_by_name(self._folder)
        self._files = {name: file for name, file in files.items() if not name.endswith('rotary_emb.inv_freq')}
        self._opened: dict[str, Any] = {}
        self._closing = ExitStack()

    def __enter__(self) -> 'FolderWeights':
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.clear()
        self._closing.close()

    @property
    def names(self) -> list[str]:
        """Names of all weights."""
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole weight."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, *, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """Return the rows and columns of a weight, or the elements `rows` of a vector.

        Raises:
            UnsupportedModel: the folder has no such weight.
        """
        stored = self._slice(name)
        part = stored[rows, columns] if len(stored.get_shape()) > 1 else stored[rows]
        return part.to(device=self.device, dtype=self.dtype).contiguous()

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise UnsupportedModel(f'the model folder {self._folder} has no weight {name}')
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = self._closing.enter_context(safe_open(self._folder / file, framework='pt'))
        return self._opened[file].get_slice(name)


def _files_by_name(folder: Path) -> dict[str, str]:
    """Return the file of each weight."""
    if (folder / _INDEX).is_file():
        return json.loads((folder / _INDEX).read_text())['weight_map']
    if (folder / _SINGLE_FILE).is_file():
        opened = cast('Any', safe_open)(folder / _SINGLE_FILE, framework='pt')
        return dict.fromkeys(opened.keys(), _SINGLE_FILE)
    raise UnsupportedModel(
        f'the Megatron backend reads safetensors, and {folder} has no {_SINGLE_FILE} or {_INDEX}; '
        'save the model in this format, or use TransformersModel'
    )
