"""Serves the files of the web app, which are read into memory once, at the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from twinkle_services.gateway.http.call import HttpCall, Response

INDEX = 'index.html'
SECURITY_HEADERS: Mapping[str, str] = {
    'content-security-policy': (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    'x-content-type-options': 'nosniff',
    'referrer-policy': 'no-referrer',
}
_NO_STORE = 'no-store'
_IMMUTABLE = 'public, max-age=31536000, immutable'
_HASHED = 'assets/'
"""Folder of the files whose names contain a hash of their content."""
_TYPES = {
    '.css': 'text/css; charset=utf-8',
    '.html': 'text/html; charset=utf-8',
    '.ico': 'image/x-icon',
    '.js': 'text/javascript; charset=utf-8',
    '.json': 'application/json',
    '.map': 'application/json',
    '.png': 'image/png',
    '.svg': 'image/svg+xml',
    '.txt': 'text/plain; charset=utf-8',
    '.webmanifest': 'application/manifest+json',
    '.woff2': 'font/woff2',
}
_OTHER_TYPE = 'application/octet-stream'
_NOT_BUILT = (
    'The console is not built. Build it with `./run console`, or install a released package, which contains it. '
    'The other APIs of this gateway are not affected.\n'
)
_RESERVED_BYTES = 1 << 18
"""Upper bound for the bytes of a file that a connection buffers."""


@dataclass(frozen=True)
class BytesResponse:
    """Response whose bytes stay in memory after it has been sent."""

    data: bytes
    content_type: str
    headers: Mapping[str, str]
    status: int = 200

    async def write(self, call: HttpCall) -> None:
        await call.reserve_body(min(len(self.data), _RESERVED_BYTES))
        length = {'content-length': str(len(self.data))}
        await call.begin(self.status, self.content_type, {**SECURITY_HEADERS, **length, **self.headers})
        await call.write(self.data, is_last=True)


@dataclass(frozen=True)
class _File:
    content_type: str
    cache_control: str
    data: bytes
    gzipped: bytes | None


class AppFiles:
    """Files of the web app by name. Names in requests are only looked up, and never become paths."""

    def __init__(self, folder: Path) -> None:
        """Read all files below `folder`. NAME.gz is the compressed content of NAME, and cannot be requested itself."""
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob('*') if path.is_file()}
        self._files = {
            name: _File(
                _TYPES.get(PurePosixPath(name).suffix, _OTHER_TYPE),
                _IMMUTABLE if name.startswith(_HASHED) else _NO_STORE,
                path.read_bytes(),
                paths[f'{name}.gz'].read_bytes() if f'{name}.gz' in paths else None,
            )
            for name, path in paths.items()
            if not name.endswith('.gz')
        }

    def find(self, name: str, *, accept_encoding: str = '') -> Response:
        """Return the response for a file; 404 for an unknown file, and 503 for the page of an app that is not built.

        Args:
            name: Path below the folder, with '/' between its parts.
            accept_encoding: Value of the header `accept-encoding`.
        """
        if name == INDEX and INDEX not in self._files:
            return BytesResponse(_NOT_BUILT.encode(), _TYPES['.txt'], {'cache-control': _NO_STORE}, 503)
        file = self._files.get(name)
        if file is None:
            return BytesResponse(b'There is no such file.\n', _TYPES['.txt'], {'cache-control': _NO_STORE}, 404)
        headers = {'cache-control': file.cache_control}
        if file.gzipped is None:
            return BytesResponse(file.data, file.content_type, headers)
        headers['vary'] = 'accept-encoding'
        if 'gzip' not in accept_encoding.lower():
            return BytesResponse(file.data, file.content_type, headers)
        return BytesResponse(file.gzipped, file.content_type, {**headers, 'content-encoding': 'gzip'})
