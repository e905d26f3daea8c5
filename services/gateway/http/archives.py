"""Downloads of archives of saved weights, which clients can resume with ranges of bytes."""

import re
from contextlib import aclosing
from dataclasses import dataclass

from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.http.call import HttpCall, JsonResponse
from twinkle_services.kit.errors import Internal

_CONTENT_TYPE = 'application/octet-stream'
_RANGE = re.compile(r'bytes=(\d{1,15})-(\d{1,15})?')


@dataclass(frozen=True)
class ByteRange:
    """Consecutive bytes of an archive."""

    begin: int
    size_bytes: int


@dataclass(frozen=True)
class FileResponse:
    """Response that streams `content`, or the range of `content` that the client requested."""

    checkpoints: GrpcCheckpoints
    path: str
    """Native path of the checkpoint."""
    content: ByteRange
    name: str
    """File name for the client."""
    digest: str
    """Digest of the archive."""

    @property
    def tag(self) -> str:
        return f'{self.digest}-{self.content.begin}'

    async def write(self, call: HttpCall) -> None:
        size_bytes = self.content.size_bytes
        headers = {
            'etag': f'"{self.tag}"',
            'accept-ranges': 'bytes',
            # A shared cache would not know who may read the checkpoint.
            'cache-control': 'private',
            'content-disposition': f'attachment; filename="{self.name}"',
        }
        wanted = self._requested_range(call)
        if wanted is not None and wanted.begin >= size_bytes:
            body = {'detail': f'the range begins after the end of the file, which has {size_bytes} bytes'}
            await JsonResponse(body, 416, {'content-range': f'bytes */{size_bytes}'}).write(call)
            return
        part = wanted or ByteRange(0, size_bytes)
        if wanted is not None:
            headers['content-range'] = f'bytes {part.begin}-{part.begin + part.size_bytes - 1}/{size_bytes}'
        headers['content-length'] = str(part.size_bytes)
        status = 200 if wanted is None else 206
        if call.scope['method'] == 'HEAD':
            await call.begin(status, _CONTENT_TYPE, headers)
            await call.write(b'', is_last=True)
            return
        await self._stream(call, part, headers, status=status)

    async def _stream(self, call: HttpCall, part: ByteRange, headers: dict[str, str], *, status: int) -> None:
        remaining = part.size_bytes
        async with aclosing(self.checkpoints.archive(self.path, offset=self.content.begin + part.begin)) as parts:
            async for found in parts:
                if found.digest != self.digest:
                    # The checkpoint has been replaced, and the response would mix bytes of two archives.
                    break
                if not call.status:
                    await call.begin(status, _CONTENT_TYPE, headers)
                chunk = bytes(found.data[:remaining])
                remaining -= len(chunk)
                await call.write(chunk, is_last=not remaining)
                if not remaining:
                    return
        # The error closes the connection, so that the client notices the missing bytes.
        raise Internal(call.request_id)

    def _requested_range(self, call: HttpCall) -> ByteRange | None:
        """Return the requested range; None for the complete file, even if the range is outdated or unsupported."""
        match = _RANGE.fullmatch(call.headers.get('range', ''))
        is_same = call.headers.get('if-range', f'"{self.tag}"') == f'"{self.tag}"'
        if match is None or not is_same:
            return None
        begin = int(match[1])
        end = min(int(match[2] or self.content.size_bytes - 1), self.content.size_bytes - 1)
        return ByteRange(begin, end - begin + 1) if end >= begin or begin >= self.content.size_bytes else None
