"""The safetensors header: which bytes of the file are which tensor.

The file is `u64 length | JSON header | tensors' bytes`. Because the tensors' bytes lie as in a
state, a state's section becomes a file by putting the header in front of it, and no tensor is
ever copied into a second layout. Files written here open in the safetensors library; its
tests hold that.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from twinkle.checkpoint_engine.manifest import DTYPE_BYTES, TensorEntry

_CODES = {
    'bool': 'BOOL',
    'uint8': 'U8',
    'int32': 'I32',
    'int64': 'I64',
    'float16': 'F16',
    'bfloat16': 'BF16',
    'float32': 'F32',
    'float64': 'F64',
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LENGTH = struct.Struct('<Q')
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses longer headers, too."""


@dataclass(frozen=True)
class FileEntry:
    """A tensor in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Where its bytes begin in the file."""
    end: int
    """Where they end."""


def build_header(entries: Sequence[TensorEntry], *, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return what has to stand in front of the bytes of `entries` to make a safetensors file.

    Args:
        entries: Tensors that lie one after the other without gaps, in this order. Their
            offsets may begin anywhere.
        metadata: Strings to keep in the file. Unset: only the mark that peft asks for.

    Returns:
        Length and header, padded so that the tensors begin at a multiple of 8 bytes.
    """
    origin = entries[0].offset if entries else 0
    header: dict[str, Any] = {'__metadata__': {'format': 'pt', **(metadata or {})}}
    for entry in entries:
        header[entry.name] = {
            'dtype': _CODES[entry.dtype],
            'shape': list(entry.shape),
            'data_offsets': [entry.offset - origin, entry.end - origin],
        }
    text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
    text += b' ' * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def parse_header(data: bytes | memoryview, *, file_bytes: int | None = None) -> tuple[list[FileEntry], dict[str, str]]:
    """Read the header of a safetensors file and check it against the file's size.

    Args:
        data: The file, or at least its header.
        file_bytes: Size of the whole file. Unset: that of `data`.

    Returns:
        The tensors in order of offset, and the file's metadata.

    Raises:
        ValueError: it is no safetensors file, or one with gaps, overlaps or unknown dtypes.
    """
    file_bytes = len(data) if file_bytes is None else file_bytes
    header, origin = _load_header(data)
    metadata = header.pop('__metadata__', {})
    if not isinstance(metadata, dict):
        raise ValueError('its metadata is no object')
    entries = sorted(
        (_file_entry(name, value, origin) for name, value in header.items()), key=lambda entry: (entry.begin, entry.end)
    )
    end = origin
    for entry in entries:
        if entry.begin != end:
            raise ValueError(f'tensor {entry.name!r} begins at byte {entry.begin}, the one before it ends at {end}')
        end = entry.end
    if end != file_bytes:
        raise ValueError(f'its tensors end at byte {end}, the file at {file_bytes}')
    return entries, {str(key): str(value) for key, value in cast(dict[Any, Any], metadata).items()}


def _load_header(data: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Return the header as JSON and where the tensors' bytes begin."""
    if len(data) < _LENGTH.size:
        raise ValueError('it is too short for a safetensors file')
    length = _LENGTH.unpack(data[: _LENGTH.size])[0]
    origin = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or origin > len(data):
        raise ValueError(f'its header claims {length} bytes')
    try:
        header = json.loads(bytes(data[_LENGTH.size : origin]))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError('its header is no JSON') from None
    if not isinstance(header, dict):
        raise ValueError('its header is no object')
    return cast(dict[str, Any], header), origin


def _file_entry(name: str, value: Any, origin: int) -> FileEntry:
    """Check one tensor's description, as untrusted JSON."""
    try:
        dtype, shape, (begin, end) = _DTYPES[value['dtype']], tuple(value['shape']), value['data_offsets']
    except (KeyError, TypeError, ValueError):
        raise ValueError(f'tensor {name!r} has no known dtype, shape and offsets') from None
    numbers = (*shape, begin, end)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f'tensor {name!r} has a size or offset that is no natural number')
    expected = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise ValueError(f'tensor {name!r} covers {end - begin} bytes, its shape and dtype need {expected}')
    return FileEntry(name, dtype, shape, origin + begin, origin + end)
