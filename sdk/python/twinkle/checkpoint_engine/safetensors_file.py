"""Reading and writing of safetensors headers.

A file is `u64 length | JSON header | bytes of the tensors`. The tensors have the same layout as in a state, so a
section of a state with a header before it is a valid file, and no tensor is copied. Tests check that the safetensors
library can open the files.
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
"""Codes of dtypes in safetensors headers."""
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LENGTH = struct.Struct('<Q')
_MAX_HEADER_BYTES = 100_000_000
"""Maximum length of a header, the same as in the safetensors library."""


@dataclass(frozen=True)
class FileEntry:
    """A tensor in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    end: int
    """Offset after its last byte in the file."""


def build_header(entries: Sequence[TensorEntry], *, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file, to be written before the bytes of `entries`.

    Args:
        entries: consecutive tensors without gaps, in order. The first offset may have any value.
        metadata: strings to store in the file, in addition to the format entry that PEFT requires.

    Returns:
        Length and header, padded so that the tensors start at a multiple of 8 bytes.
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
    """Parse the header of a safetensors file and check it against the file's size.

    Args:
        data: the file, or at least its header.
        file_bytes: size of the file. None: the size of `data`.

    Returns:
        The tensors in order of offset, and the file's metadata.

    Raises:
        ValueError: the file is not a safetensors file, or has gaps, overlaps or unknown dtypes.
    """
    file_bytes = len(data) if file_bytes is None else file_bytes
    header, origin = _load_header(data)
    metadata = header.pop('__metadata__', {})
    if not isinstance(metadata, dict):
        raise ValueError('the metadata is not a JSON object')
    entries = sorted(
        (_file_entry(name, value, origin) for name, value in header.items()), key=lambda entry: (entry.begin, entry.end)
    )
    end = origin
    for entry in entries:
        if entry.begin != end:
            raise ValueError(f'tensor {entry.name!r} begins at {entry.begin}, but the previous tensor ends at {end}')
        end = entry.end
    if end != file_bytes:
        raise ValueError(f'the tensors end at byte {end}, but the file ends at {file_bytes}')
    return entries, {str(key): str(value) for key, value in cast(dict[Any, Any], metadata).items()}


def _load_header(data: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Return the parsed header and the offset of the tensors' bytes."""
    if len(data) < _LENGTH.size:
        raise ValueError('the file is too short for a safetensors file')
    length = _LENGTH.unpack(data[: _LENGTH.size])[0]
    origin = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or origin > len(data):
        raise ValueError(f'the header has an invalid length of {length} bytes')
    try:
        header = json.loads(bytes(data[_LENGTH.size : origin]))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError('the header is not JSON') from None
    if not isinstance(header, dict):
        raise ValueError('the header is not a JSON object')
    return cast(dict[str, Any], header), origin


def _file_entry(name: str, value: Any, origin: int) -> FileEntry:
    """Check the untrusted description of one tensor and return its entry."""
    try:
        dtype, shape, (begin, end) = _DTYPES[value['dtype']], tuple(value['shape']), value['data_offsets']
    except (KeyError, TypeError, ValueError):
        raise ValueError(f'tensor {name!r} has no valid dtype, shape and offsets') from None
    numbers = (*shape, begin, end)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f'tensor {name!r} has a size or offset that is negative or not an integer')
    expected = prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise ValueError(f'tensor {name!r} covers {end - begin} bytes, but its shape and dtype need {expected}')
    return FileEntry(name, dtype, shape, origin + begin, origin + end)
