"""Archives of saved weights: signed links to them and to their files, and uploads of adapters.

An upload sends the archive of a PEFT folder in the bodies of one or more requests.
"""

import base64
import binascii
import hashlib
import hmac
import json
import re
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import quote

from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.catalogue.paths import WeightsKind, WeightsPath, parse_kind, parse_name, path_of_native
from twinkle_services.gateway.catalogue.rules import UploadRequest
from twinkle_services.gateway.http.archives import ByteRange, FileResponse
from twinkle_services.gateway.http.body import ClientDisconnected, Pace, read_chunks
from twinkle_services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.tinker.base_models import BaseModels
from twinkle_services.gateway.tinker.bodies import time_to_json
from twinkle_services.gateway.tinker.catalogue import checkpoint_to_json
from twinkle_services.gateway.tinker.routes import (
    CHECKPOINT_PATH,
    CHECKPOINTS,
    PREFIX,
    TinkerErrors,
    path_of,
    query_of,
    tinker_route,
)
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import (
    CheckpointNotFound,
    CredentialsInvalid,
    DomainError,
    Internal,
    InvalidField,
    StreamOutOfOrder,
)
from twinkle_services.kit.rpc.context import current_caller

LINK_LIFETIME = timedelta(hours=1)
_MAX_TOKEN = 2048
_HOST = re.compile(r'[A-Za-z0-9.\-_]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?')
_BLOCK = tarfile.BLOCKSIZE
_FILES = f'{PREFIX}files/'
_UPLOAD = '/twinkle.api.checkpoint.v1.CheckpointService/UploadCheckpoint'
_PACE = Pace(seconds=24 * 3600.0)
"""Uploads may take a day, because they are not collected in memory, but must not stall."""
_LENGTH = re.compile(r'\d{1,15}')
_CONTENT_RANGE = re.compile(r'bytes (?:(\d{1,15})-(\d{1,15})|\*)/(\d{1,15})')


@dataclass(frozen=True)
class Link:
    """Target of a signed link."""

    tenant_id: str
    """Tenant on whose behalf the link reads."""
    path: str
    """Native path of the checkpoint."""
    file: str
    """Name of a file in the archive; empty for the archive itself."""
    expire_time: datetime


class Links:
    """Creates and reads links that need no API key; gateways with the same signing key accept each other's links."""

    def __init__(self, key: bytes, *, clock: Clock, lifetime: timedelta = LINK_LIFETIME) -> None:
        self._key = key
        self._clock = clock
        self._lifetime = lifetime

    def create(self, tenant_id: str, path: str, file: str = '') -> tuple[str, datetime]:
        """Return the token of a link, and the time at which the link expires."""
        expire_time = self._clock.now() + self._lifetime
        facts = [tenant_id, path, file, int(expire_time.timestamp())]
        body = base64.urlsafe_b64encode(json.dumps(facts, separators=(',', ':')).encode()).rstrip(b'=')
        return f'{body.decode()}.{self._signature(body)}', expire_time

    def read(self, token: str) -> Link:
        """Return the target of a token.

        Raises:
            CredentialsInvalid: the signature is wrong, or the link has expired.
        """
        text, _, signature = token.rpartition('.')
        body = text.encode()
        if len(token) > _MAX_TOKEN or not hmac.compare_digest(self._signature(body).encode(), signature.encode()):
            raise CredentialsInvalid()
        try:
            tenant_id, path, file, seconds = json.loads(base64.urlsafe_b64decode(body + b'=' * (-len(body) % 4)))
        except (ValueError, binascii.Error) as error:
            raise CredentialsInvalid() from error
        expire_time = datetime.fromtimestamp(seconds, UTC)
        if expire_time <= self._clock.now():
            raise CredentialsInvalid()
        return Link(tenant_id, path, file, expire_time)

    def _signature(self, body: bytes) -> str:
        return hmac.new(self._key, b'twinkle-link-1\0' + body, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class ArchiveContents:
    """Files of an archive by name, and the archive's size."""

    files: Mapping[str, ByteRange]
    size_bytes: int
    digest: str
    """blake3 of the archive, hexadecimal."""

    def range_of(self, file: str) -> ByteRange | None:
        """Return the byte range of a file, or of the whole archive if `file` is empty; None for an unknown file."""
        return self.files.get(file) if file else ByteRange(0, self.size_bytes)


async def read_contents(checkpoints: GrpcCheckpoints, path: str) -> ArchiveContents:
    """Return the names and positions of the files of an archive, without reading the complete archive.

    Raises:
        DomainError: the caller has no access to such a checkpoint (CHECKPOINT_NOT_FOUND), or the service failed.
        Internal: a header in the archive is damaged.
    """
    found: dict[str, ByteRange] = {}
    offset, size_bytes, digest = 0, _BLOCK, ''
    while offset + _BLOCK <= size_bytes:
        async with aclosing(checkpoints.archive(path, offset=offset)) as parts:
            part = await anext(parts)
        size_bytes, digest = part.size_bytes, part.digest
        position = 0
        while position + _BLOCK <= len(part.data):
            header = bytes(part.data[position : position + _BLOCK])
            if not any(header):
                return ArchiveContents(found, size_bytes, digest)
            info = _parse_header(header)
            found[info.name] = ByteRange(offset + position + _BLOCK, info.size)
            position += _BLOCK + -(-info.size // _BLOCK) * _BLOCK
        offset += position
    return ArchiveContents(found, size_bytes, digest)


def _parse_header(header: bytes) -> Any:
    try:
        return tarfile.TarInfo.frombuf(header, 'utf-8', 'strict')
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise Internal('') from error


class ArchiveRoutes:
    """Routes that link to archives and serve them."""

    def __init__(
        self, checkpoints: GrpcCheckpoints, links: Links, *, has_valid_key: Callable[[str], Awaitable[bool]]
    ) -> None:
        self._checkpoints = checkpoints
        self._links = links
        self._has_valid_key = has_valid_key

    def routes(self) -> list[Route]:
        return [
            tinker_route(f'{CHECKPOINT_PATH}/archive', self._link_archive, access=CHECKPOINTS, http_method='GET'),
            tinker_route(
                f'{CHECKPOINT_PATH}/external_weights_urls', self._link_files, access=CHECKPOINTS, http_method='GET'
            ),
            Route(
                path=f'{_FILES}{{token}}/{{name}}',
                http_method='GET',
                name='tinker.get.files',
                method=CHECKPOINTS,
                serve=self._send,
                errors=TinkerErrors(),
                identify=self._identify,
            ),
        ]

    async def _link_archive(self, call: HttpCall) -> Response:
        path = path_of(call)
        await self._checkpoints.get(path.native)
        token, expire_time = self._links.create(current_caller().tenant_id, path.native)
        url = f'{_server_url(call)}{_FILES}{token}/{quote(path.name)}.tar'
        headers = {'location': url, 'expires': format_datetime(expire_time, usegmt=True)}
        return JsonResponse({'url': url, 'expires': time_to_json(expire_time)}, 302, headers)

    async def _link_files(self, call: HttpCall) -> Response:
        path = path_of(call)
        if path.kind is not WeightsKind.EXTERNAL:
            raise InvalidField('path', f'must have the kind {WeightsKind.EXTERNAL}; save with save_weights_external')
        contents = await read_contents(self._checkpoints, path.native)
        urls: dict[str, str] = {}
        expires = ''
        for name in contents.files:
            token, expire_time = self._links.create(current_caller().tenant_id, path.native, name)
            urls[name] = f'{_server_url(call)}{_FILES}{token}/{quote(name)}'
            expires = time_to_json(expire_time)
        return JsonResponse({'urls': urls, 'expires': expires})

    async def _send(self, call: HttpCall) -> Response:
        link = self._links.read(call.path_values['token'])
        contents = await read_contents(self._checkpoints, link.path)
        found = contents.range_of(link.file)
        if found is None:
            raise CheckpointNotFound(link.path)
        name = link.file or f'{path_of_native(link.path).name}.tar'
        return FileResponse(self._checkpoints, link.path, found, name.replace('"', ''), contents.digest)

    async def _identify(self, call: HttpCall) -> Caller:
        """Return the caller of a link: the tenant that created it, without any scope.

        A started download continues after its link expires, but ends if the tenant no longer has a valid key.
        """
        started = call.caller
        tenant_id = started.tenant_id if started else self._links.read(call.path_values['token']).tenant_id
        if not await self._has_valid_key(tenant_id):
            raise CredentialsInvalid()
        return Caller(tenant_id=tenant_id)


def _server_url(call: HttpCall) -> str:
    """Return the URL at which the client reached this server."""
    host = call.headers.get('host', '')
    if not _HOST.fullmatch(host):
        raise InvalidField('host', 'must be the host and port of this server')
    scheme = call.headers.get('x-forwarded-proto', str(call.scope.get('scheme', 'http')))
    return f'{"https" if scheme == "https" else "http"}://{host}'


@dataclass(frozen=True)
class _Part:
    """Position of the bytes of one body in an archive."""

    begin: int
    size_bytes: int
    """Size of the complete archive."""


class UploadRoutes:
    """Route that receives uploads."""

    def __init__(self, checkpoints: GrpcCheckpoints, base_models: BaseModels, *, pace: Pace = _PACE) -> None:
        self._checkpoints = checkpoints
        self._base_models = base_models
        self._pace = pace

    def routes(self) -> list[Route]:
        return [tinker_route('uploads/{name}', self._upload, access=_UPLOAD, http_method='PUT')]

    async def _upload(self, call: HttpCall) -> Response:
        query = query_of(call)
        name = parse_name(call.path_values['name'], 'name')
        kind = parse_kind(query.get('kind', WeightsKind.TRAINING), 'kind')
        part = _part_of(call)
        request = UploadRequest(
            # Without an id, an upload with the same name resumes the previous one.
            upload_id=query.get('upload_id') or f'http-{name}',
            name=WeightsPath('', kind, name).native_name,
            base_model=await self._base_models.native_name(query.get('base_model', '')),
            size_bytes=part.size_bytes,
        )
        body = _Body(call, self._pace)
        try:
            checkpoint = await self._checkpoints.upload(request, body.chunks(), offset=part.begin)
        except DomainError as error:
            if body.failure is not None:
                raise body.failure from error
            if not isinstance(error, StreamOutOfOrder) or error.offset is None:
                raise
            return JsonResponse({'held_bytes': error.offset, 'size_bytes': part.size_bytes}, 202)
        return JsonResponse(checkpoint_to_json(checkpoint), 201)


@dataclass
class _Body:
    """Body of a call, read chunk by chunk."""

    call: HttpCall
    pace: Pace
    failure: ClientDisconnected | DomainError | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks. If the client disconnects or is too slow, the stream ends early and `failure` is set."""
        try:
            async for chunk in read_chunks(self.call, self.pace):
                if chunk:
                    yield chunk
            self.call.body_done.set()
        except (ClientDisconnected, DomainError) as error:
            # Raising here would cancel the upload before the checkpoint service has stored the bytes received so far.
            self.failure = error


def _part_of(call: HttpCall) -> _Part:
    length = call.headers.get('content-length', '')
    if not _LENGTH.fullmatch(length):
        raise InvalidField('content-length', 'is required')
    if call.headers.get('content-encoding', 'identity') != 'identity':
        raise InvalidField('content-encoding', 'must be absent; compress the archive itself, for example as .tar.gz')
    if 'content-range' not in call.headers:
        return _Part(0, int(length))
    match = _CONTENT_RANGE.fullmatch(call.headers['content-range'])
    if match is None:
        raise InvalidField('content-range', 'must be bytes <first>-<last>/<size>, or bytes */<size>')
    begin = int(match[1] or 0)
    expected = int(match[2]) - begin + 1 if match[2] else 0
    if match[2] and int(match[2]) >= int(match[3]):
        raise InvalidField('content-range', 'ends after the end of the archive')
    if int(length) != expected:
        raise InvalidField('content-range', f'has {expected} bytes, but the body has {length}')
    return _Part(begin, int(match[3]))
