"""Transfer of tensors to vLLM's processes through an in-memory file and a description of its layout.

The bytes are written once, or not at all if they are already in a shared-memory file. On Linux, they are not written to
disk: the file is a memfd, which the kernel deletes at the latest when the process that created it exits.
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
"""Maximum number of buffers in one writev call on Linux."""


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """The weights of an adapter version."""

    config: LoraConfig
    tensors: Mapping[str, TensorData]
    """Weights by PEFT's names."""
    segment_path: str = ''
    """File that contains only the bytes of these tensors, in order and without gaps. Empty: there is no such file."""


@contextmanager
def in_memory_file(tensors: Mapping[str, TensorData], *, segment_path: str = '') -> Iterator[str]:
    """Return a context with the path of a temporary file that contains the tensors without gaps.

    Args:
        tensors: tensors, in order.
        segment_path: existing file with the tensors, used instead of a temporary file and not deleted.
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
    """Return a description of the file's layout. Equal layouts give equal bytes.

    In the file, the tensors are packed in the order of the mapping, even if their data are separate views of a buffer.
    """
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    offset = 0
    for name, tensor in tensors.items():
        entries.append((name, tensor.dtype, tensor.shape, offset))
        offset += len(tensor.data)
    described = None if config is None else {**asdict(config), 'seed': None}
    return json.dumps({'tensors': entries, 'size_bytes': offset, 'config': described}, separators=(',', ':')).encode()


def _new_file() -> tuple[int, str]:
    if hasattr(os, 'memfd_create'):
        descriptor = os.memfd_create('twinkle-weights')
        return descriptor, f'/proc/{os.getpid()}/fd/{descriptor}'
    return tempfile.mkstemp(prefix='twinkle-weights-')


def _write(descriptor: int, parts: list[bytes | memoryview]) -> None:
    """Write all parts one after the other, with as many calls as necessary."""
    views = [memoryview(part).cast('B') for part in parts if len(part)]
    while views:
        written = os.writev(descriptor, views[:_WRITE_VECTORS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
