"""Reads the adapter in an archive from an untrusted source.

No file is unpacked under a name from the archive: the two files of a PEFT folder are located inside it, validated
completely, and read in place. A compressed archive is first decompressed to a file next to it, up to a size limit.
"""

import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from blake3 import blake3

from twinkle.checkpoint_engine import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_MODEL_FILE,
    CHUNK_BYTES,
    SEED_KEY,
    FileEntry,
    TensorEntry,
    WeightManifest,
    import_adapter,
    parse_header,
)
from twinkle.checkpoint_engine.float_bytes import FLOAT_DTYPES, is_finite
from twinkle.data_format import LoraConfig
from twinkle_services.checkpoint.backends.errors import domain_errors
from twinkle_services.checkpoint.backends.pieces import Piece, StatePieceSource
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.weights.wire import MAX_NAMES
from twinkle_services.kit.worker import Threads

_CONFIG_LIMIT_BYTES = 1 << 20
_HEADER_LIMIT_BYTES = 16 << 20
_MEMBER_LIMIT = 1000
"""Maximum number of files in an archive; a PEFT folder has about a dozen."""
_MEMBER_HEADER_BYTES = 8 << 10
"""Maximum total size of the headers of one file in the archive; the cost of parsing them may grow quadratically."""
_ALL_HEADER_BYTES = 1 << 20
"""Maximum total size of all headers in an archive."""
_MAX_GLOBALS = 64
"""Maximum number of global header fields, which apply to all files of an archive."""
_SPARSE = b'GNU.sparse.'
"""Prefix of the header fields of sparse files."""
_MESSAGE_CHARACTERS = 500
"""Maximum length of the problem that an error states; the problem may quote the archive."""
_PICKLE_FILE = 'adapter_model.bin'
_GZIP_MAGIC = b'\x1f\x8b'
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
"""Argument `wbits` of zlib: the largest window, plus 16 for the gzip format."""
_GZIP_RATIO = 100
"""Maximum compression ratio; weights compress poorly, so a higher ratio indicates a decompression bomb."""
_GZIP_ALLOWANCE_BYTES = 16 << 20
"""Uncompressed size allowed in addition to `_GZIP_RATIO`, because small files may compress well."""


@dataclass(frozen=True)
class OpenAdapter:
    """A validated adapter, and the base model named in its configuration."""

    source: StatePieceSource
    stated_base_model: str
    """Base model named in the archive's configuration; may be empty."""


def open_adapter(path: Path, base_model: str, threads: Threads, *, limit_bytes: int) -> OpenAdapter:
    """Open the adapter inside the archive at `path`.

    Args:
        path: The archive; a compressed one is decompressed to a temporary file next to it.
        base_model: Base model that the adapter belongs to.
        threads: Threads in which the returned source reads.
        limit_bytes: Maximum uncompressed size of a compressed archive.

    Raises:
        InvalidField: The archive does not contain exactly one PEFT folder of safetensors, or it contains links, unsafe
            paths, or weights that are not finite.
    """
    with _invalid_archive():
        file = _open_plain(path, limit_bytes)
        try:
            return _read_adapter(file, base_model, threads)
        except BaseException:
            file.close()
            raise


def _open_plain(path: Path, limit_bytes: int) -> IO[bytes]:
    with path.open('rb') as packed:
        if packed.read(len(_GZIP_MAGIC)) != _GZIP_MAGIC:
            return path.open('rb')
        packed.seek(0)
        ratio_limit = _GZIP_RATIO * path.stat().st_size + _GZIP_ALLOWANCE_BYTES
        plain_path = path.with_suffix('.plain')
        try:
            with plain_path.open('wb') as plain:
                _decompress(packed, plain, min(limit_bytes, ratio_limit))
            return plain_path.open('rb')
        finally:
            # The open file remains readable after its name is removed.
            plain_path.unlink(missing_ok=True)


def _decompress(packed: IO[bytes], plain: IO[bytes], limit_bytes: int) -> None:
    reader = zlib.decompressobj(_GZIP_WINDOW)
    remaining_bytes = limit_bytes
    pending = b''
    while not reader.eof:
        pending = pending or packed.read(CHUNK_BYTES)
        if not pending:
            raise ValueError('the compressed archive is truncated')
        data = reader.decompress(pending, CHUNK_BYTES)
        pending = reader.unconsumed_tail
        remaining_bytes -= plain.write(data)
        if remaining_bytes < 0:
            raise ValueError(f'its uncompressed size exceeds {limit_bytes} bytes')
    if reader.unused_data or packed.read(1):
        raise ValueError('extra data follows the compressed archive')


def _read_adapter(file: IO[bytes], base_model: str, threads: Threads) -> OpenAdapter:
    config_range, model_range = _find_files(file)
    entries, metadata, header_bytes = _read_model_header(file, *model_range)
    seed = metadata.get(SEED_KEY)
    config_data = _read(file, *config_range, limit_bytes=_CONFIG_LIMIT_BYTES)
    shapes = {entry.name: entry.shape for entry in entries}
    adapter = import_adapter(config_data, shapes, seed=None if seed is None else int(seed))
    _check_transferable(adapter.config)
    begin, size_bytes = model_range[0] + header_bytes, model_range[1] - header_bytes
    tensors = tuple(_entry(entry, adapter.names[entry.name], header_bytes) for entry in entries)
    digest = _digest(file, begin, tensors)
    manifest = WeightManifest(base_model, adapter.config, tensors, size_bytes, digest)
    source = StatePieceSource(manifest, [Piece(size_bytes, file, begin)], threads)
    return OpenAdapter(source, adapter.base_model)


def _check_transferable(config: LoraConfig) -> None:
    """Refuse a configuration that is too large for the messages in which it is sent to samplers and trainers."""
    for name in ('target_modules', 'rank_pattern', 'alpha_pattern'):
        value = getattr(config, name)
        if not isinstance(value, str) and len(value) > MAX_NAMES:
            raise ValueError(f'{name} has {len(value)} entries, must have at most {MAX_NAMES}')


@contextmanager
def _invalid_archive() -> Iterator[None]:
    """Convert errors caused by the archive's content to InvalidField."""
    try:
        with domain_errors():
            yield
    except (ValueError, tarfile.TarError, zlib.error, EOFError, OverflowError, RecursionError) as error:
        # The message may quote names from the archive, which may be long and not encodable.
        problem = str(error)[:_MESSAGE_CHARACTERS].encode(errors='backslashreplace').decode()
        raise InvalidField('chunk', f'the archive is not a PEFT folder of safetensors: {problem}') from error


class _PlainInfo(tarfile.TarInfo):
    """A tar header that refuses sparse files before `tarfile` processes them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise ValueError('it contains a sparse file')
        return info


class _BoundedFile:
    """A file that limits how much `tarfile` reads, since the archive's headers determine the amount."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size_bytes = file.seek(0, 2)
        self._member_bytes = self._all_bytes = 0
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        self._member_bytes += size
        self._all_bytes += size
        if size < 0 or self._member_bytes > _MEMBER_HEADER_BYTES or self._all_bytes > _ALL_HEADER_BYTES:
            raise ValueError('it contains a header that is too large')
        data = self._file.read(size)
        if _SPARSE in data:
            raise ValueError('it contains a sparse file')
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and not 0 <= offset <= self._size_bytes:
            raise ValueError('it is truncated')
        # `tarfile` seeks only to the headers of the next file.
        self._member_bytes = 0
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _find_files(file: IO[bytes]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first byte and the size of the configuration and of the weights in the archive."""
    ranges: dict[str, tuple[int, int]] = {}
    has_pickle = False
    for member in _members(file):
        name = member.name.rpartition('/')[2]
        has_pickle |= name == _PICKLE_FILE
        if name not in {ADAPTER_CONFIG_FILE, ADAPTER_MODEL_FILE} or member.isdir():
            continue
        if name in ranges:
            raise ValueError(f'{name} occurs twice')
        ranges[name] = (member.offset_data, member.size)
    if has_pickle and ADAPTER_MODEL_FILE not in ranges:
        raise ValueError(f'{_PICKLE_FILE} is a pickle, which is not accepted; save the weights as {ADAPTER_MODEL_FILE}')
    for name in (ADAPTER_CONFIG_FILE, ADAPTER_MODEL_FILE):
        if name not in ranges:
            raise ValueError(f'{name} is missing')
    return ranges[ADAPTER_CONFIG_FILE], ranges[ADAPTER_MODEL_FILE]


def _members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yield the regular files and folders of the archive, after checking their names."""
    bounded: IO[bytes] = _BoundedFile(file)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    count = 0
    with tarfile.open(fileobj=bounded, mode='r:', tarinfo=_PlainInfo) as archive:
        while (member := archive.next()) is not None:
            # `tarfile` would keep every parsed header, which may be a thousand times larger than its encoded form.
            archive.members.clear()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            count += 1
            if count > _MEMBER_LIMIT:
                raise ValueError(f'it has more than {_MEMBER_LIMIT} files')
            if len(archive.pax_headers) > _MAX_GLOBALS:
                raise ValueError('its global header is too large')
            if not (member.isreg() or member.isdir()):
                raise ValueError(f'{member.name[:100]!r} is neither a regular file nor a folder')
            if member.name.startswith('/') or '..' in member.name.split('/'):
                raise ValueError(f'{member.name[:100]!r} is not a relative path inside the archive')
            yield member


def _read_model_header(file: IO[bytes], begin: int, size_bytes: int) -> tuple[list[FileEntry], dict[str, str], int]:
    """Return the tensors of the weights file, its metadata, and the offset at which the tensors begin."""
    length = int.from_bytes(_read(file, begin, min(8, size_bytes), limit_bytes=8), 'little')
    header_bytes = min(8 + length, size_bytes)
    header = _read(file, begin, header_bytes, limit_bytes=_HEADER_LIMIT_BYTES)
    entries, metadata = parse_header(header, file_bytes=size_bytes)
    return entries, metadata, header_bytes


def _read(file: IO[bytes], begin: int, size_bytes: int, *, limit_bytes: int) -> bytes:
    if not 0 <= size_bytes <= limit_bytes:
        raise ValueError(f'the configuration or a header has {size_bytes} bytes, must have at most {limit_bytes}')
    file.seek(begin)
    data = file.read(size_bytes)
    if len(data) != size_bytes:
        raise ValueError('the archive is truncated')
    return data


def _entry(entry: FileEntry, name: str, header_bytes: int) -> TensorEntry:
    if entry.dtype not in FLOAT_DTYPES:
        raise ValueError(f'tensor {name} has dtype {entry.dtype}, must be one of {", ".join(FLOAT_DTYPES)}')
    return TensorEntry(name, entry.dtype, entry.shape, entry.begin - header_bytes, entry.end - entry.begin)


def _digest(file: IO[bytes], begin: int, tensors: tuple[TensorEntry, ...]) -> str:
    """Return the digest of the tensors' consecutive bytes, after checking that every value is finite."""
    hasher = blake3()
    for entry in tensors:
        for offset in range(0, entry.size_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, entry.size_bytes - offset)
            data = _read(file, begin + entry.offset + offset, length, limit_bytes=CHUNK_BYTES)
            if not is_finite(data, entry.dtype):
                raise ValueError(f'tensor {entry.name} contains infinite or NaN values')
            hasher.update(data)
    return hasher.hexdigest()
