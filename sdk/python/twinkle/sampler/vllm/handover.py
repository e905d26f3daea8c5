"""Tensors on their way into vLLM's processes: one file in memory and a description of what lies where.

The bytes are written once, or not at all where they lie in a shared-memory file already. Nothing
reaches a disk: the file is a memfd, which vanishes with the process that made it, whatever ends it.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from twinkle.data_format import LoraConfig, TensorData

_WRITE_VECTORS = 1024
"""Buffers of one writev call; Linux takes no more."""


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """A version's weights, as they are given to the engine."""

    config: LoraConfig
    tensors: Mapping[str, TensorData]
    """By peft's names."""
    segment_path: str = ''
    """A file that holds exactly these tensors' bytes, in their order and without gaps; empty: none."""


@contextmanager
def in_memory_file(tensors: Mapping[str, TensorData], *, segment_path: str = '') -> Iterator[str]:
    """Yield the path of a file that holds the tensors one after the other; it is gone afterwards.

    Args:
        tensors: in order.
        segment_path: use this file, which holds them already; it stays.
    """
    if segment_path:
        yield segment_path
        return
    descriptor, path = _new_file()
    try:
        _write(descriptor, [tensor.data for tensor in tensors.values()])
        yield path
    finally:
        os.close(descriptor)
        if not path.startswith('/proc/'):
            Path(path).unlink()


def layout_of(tensors: Mapping[str, TensorData], config: LoraConfig | None = None) -> bytes:
    """Return what the other side needs to find the tensors in the file; equal layouts give equal bytes.

    Tensors whose data are views of one buffer may lie apart in it; in the file they are packed in
    the order of the mapping.
    """
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    offset = 0
    for name, tensor in tensors.items():
        entries.append((name, tensor.dtype, tensor.shape, offset))
        offset += len(tensor.data)
    known = None if config is None else {**asdict(config), 'seed': None}
    return json.dumps({'tensors': entries, 'size_bytes': offset, 'config': known}, separators=(',', ':')).encode()


def _new_file() -> tuple[int, str]:
    if hasattr(os, 'memfd_create'):
        descriptor = os.memfd_create('twinkle-weights')
        return descriptor, f'/proc/{os.getpid()}/fd/{descriptor}'
    return tempfile.mkstemp(prefix='twinkle-weights-')


def _write(descriptor: int, parts: list[bytes | memoryview]) -> None:
    """Write all parts one after the other, whatever one call takes."""
    views = [memoryview(part).cast('B') for part in parts if len(part)]
    while views:
        written = os.writev(descriptor, views[:_WRITE_VECTORS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
