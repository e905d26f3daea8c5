"""Properties of a model, read from its folder and vLLM's configuration without reading weights."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from twinkle.checkpoint_engine import FileEntry, parse_header


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Constant properties of an engine's model."""

    context_tokens: int
    """Maximum number of tokens of one sequence, including its prompt."""
    vocabulary_size: int
    parameter_count: int
    dtype: str
    """Data type that vLLM computes in, such as 'float32'."""
    max_sequences: int
    """Maximum number of running sequences."""
    eos_token_ids: frozenset[int]


def read_model_facts(folder: str, config: Any) -> ModelFacts:
    """Return the properties of a model under vLLM's configuration."""
    model = config.model_config
    return ModelFacts(
        context_tokens=model.max_model_len,
        vocabulary_size=model.get_vocab_size(),
        parameter_count=sum(prod(shape) for shape in checkpoint_shapes(folder).values()),
        dtype=str(model.dtype).removeprefix('torch.'),
        max_sequences=config.scheduler_config.max_num_seqs,
        eos_token_ids=_eos_token_ids(Path(folder)),
    )


def checkpoint_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a folder's safetensors files, by name."""
    return {entry.name: entry.shape for path in sorted(Path(folder).glob('*.safetensors')) for entry in _header(path)}


def _header(path: Path) -> list[FileEntry]:
    with path.open('rb') as file:
        size = file.read(8)
        data = size + file.read(int.from_bytes(size, 'little'))
    return parse_header(data, file_bytes=path.stat().st_size)[0]


def _eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the end-of-sequence tokens from generation_config.json, or else from config.json."""
    for name in ('generation_config.json', 'config.json'):
        path = folder / name
        declared = json.loads(path.read_text()).get('eos_token_id') if path.exists() else None
        if declared is not None:
            return frozenset([declared] if isinstance(declared, int) else declared)
    return frozenset()
