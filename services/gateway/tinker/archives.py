"""Archives of saved weights: what is in one, and answers that stream one or a file of it, from any byte on."""

import re
import tarfile
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from services.gateway.http.call import HttpCall, JsonResponse
from services.gateway.tinker.catalogue_ports import Keeper
from services.kit.errors import Internal

_BLOCK = tarfile.BLOCKSIZE
_RANGE = re.compile(r'bytes=(\d{1,15})-(\d{1,15})?')


@dataclass(frozen=True)
class Span:
    """Consecutive bytes of an archive."""

    begin: int
    size_bytes: int


@dataclass(frozen=True)
class Contents:
    """What is in an archive."""

    files: Mapping[str, Span]
    """By name."""
    size_bytes: int
    """Of the whole archive."""
    digest: str
    """blake3 of the whole archive, hexadecimal."""

    def span_of(self, file: str) -> Span | None:
        """Return where a file is, of the whole archive where `file` is empty; None: there is none of that name."""
        return self.files.get(file) if file else Span(0, self.size_bytes)


async def contents_of(keeper: Keeper, path: str) -> Contents:
    """Return what is in an archive; only the headers of its files are read.

    Raises:
        CheckpointNotFound: the caller may read none of that path.
    """
    found: dict[str, Span] = {}
    offset, size_bytes, digest = 0, _BLOCK, ''
    while offset + _BLOCK <= size_bytes:
        async with aclosing(keeper.archive(path, offset=offset)) as parts:
            part = await anext(parts)
        size_bytes, digest = part.size_bytes, part.digest
        place = 0
        while place + _BLOCK <= len(part.data):
            header = bytes(part.data[place : place + _BLOCK])
            if not any(header):
                return Contents(found, size_bytes, digest)
            info = _read_header(header)
            found[info.name] = Span(offset + place + _BLOCK, info.size)
            place += _BLOCK + -(-info.size // _BLOCK) * _BLOCK
        offset += place
    return Contents(found, size_bytes, digest)


@dataclass(frozen=True)
class FileResponse:
    """Some bytes of an archive, streamed; the part that the client asks for, if it asks for one."""

    keeper: Keeper
    path: str
    span: Span
    name: str
    """What to call it on the client's disk."""
    digest: str
    """Of the archive."""

    @property
    def tag(self) -> str:
        """What differs for different bytes."""
        return f'{self.digest}-{self.span.begin}'

    async def write(self, call: HttpCall) -> None:
        """Write all of it as the client reads; one piece is in memory at a time."""
        size_bytes = self.span.size_bytes
        headers = {
            'etag': f'"{self.tag}"',
            'accept-ranges': 'bytes',
            'content-disposition': f'attachment; filename="{self.name}"',
        }
        wanted = self._wanted(call)
        if wanted is not None and wanted.begin >= size_bytes:
            body = {'detail': f'there are {size_bytes} bytes'}
            await JsonResponse(body, 416, {'content-range': f'bytes */{size_bytes}'}).write(call)
            return
        part = wanted or Span(0, size_bytes)
        if wanted is not None:
            headers['content-range'] = f'bytes {part.begin}-{part.begin + part.size_bytes - 1}/{size_bytes}'
        headers['content-length'] = str(part.size_bytes)
        await self._stream(call, part, headers, status=200 if wanted is None else 206)

    async def _stream(self, call: HttpCall, span: Span, headers: dict[str, str], *, status: int) -> None:
        left = span.size_bytes
        async with aclosing(self.keeper.archive(self.path, offset=self.span.begin + span.begin)) as parts:
            async for part in parts:
                if part.digest != self.digest:
                    # It was replaced since it was looked at, or is being: these would be some bytes of each.
                    break
                if not call.status:
                    await call.begin(status, 'application/octet-stream', headers)
                piece = bytes(part.data[:left])
                left -= len(piece)
                await call.write(piece, is_last=not left)
                if not left:
                    return
        # It was replaced meanwhile: the connection ends, and the client sees that bytes are missing.
        raise Internal(call.request_id)

    def _wanted(self, call: HttpCall) -> Span | None:
        """Return the part that is asked for; None: all. What is asked for in another way is passed over, as it may."""
        match = _RANGE.fullmatch(call.headers.get('range', ''))
        is_same = call.headers.get('if-range', f'"{self.tag}"') == f'"{self.tag}"'
        if match is None or not is_same:
            return None
        begin = int(match[1])
        end = min(int(match[2] or self.span.size_bytes - 1), self.span.size_bytes - 1)
        return Span(begin, end - begin + 1) if end >= begin or begin >= self.span.size_bytes else None


def _read_header(header: bytes) -> Any:
    try:
        return tarfile.TarInfo.frombuf(header, 'utf-8', 'strict')
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise Internal('') from error
