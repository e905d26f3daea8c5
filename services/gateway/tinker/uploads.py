"""Uploads of adapters: the archive of a PEFT folder as the body of one request, or of several."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.gateway.catalogue.grpc import GrpcCheckpoints
from services.gateway.catalogue.rules import UploadRequest
from services.gateway.http.body import ClientGone, Pace, arriving
from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.tinker.catalogue import checkpoint_to_json
from services.gateway.tinker.paths import WeightsKind, WeightsPath, parse_kind, parse_name
from services.gateway.tinker.routes import query_of, tinker_route
from services.kit.errors import DomainError, InvalidField, StreamOutOfOrder

_UPLOAD = '/twinkle.api.checkpoint.v1.CheckpointService/UploadCheckpoint'
_PACE = Pace(seconds=24 * 3600.0)
"""Uploads may take long, as they are not collected in memory, but must not stall."""
_LENGTH = re.compile(r'\d{1,15}')
_RANGE = re.compile(r'bytes (?:(\d{1,15})-(\d{1,15})|\*)/(\d{1,15})')


@dataclass(frozen=True)
class _Part:
    """Bytes of an archive in one body."""

    begin: int
    size_bytes: int
    """Size of the complete archive."""


class UploadRoutes:
    """Route of uploads."""

    def __init__(self, checkpoints: GrpcCheckpoints, *, pace: Pace = _PACE) -> None:
        """Create the route; bodies must arrive at `pace`."""
        self._checkpoints = checkpoints
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
            base_model=query.get('base_model', ''),
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


class _Body:
    """Body of a call, read chunk by chunk."""

    def __init__(self, call: HttpCall, pace: Pace) -> None:
        self._call = call
        self._pace = pace
        self.failure: ClientGone | DomainError | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks; the stream ends early when the client disconnects or is too slow."""
        try:
            async for chunk in arriving(self._call, self._pace):
                if chunk:
                    yield chunk
            self._call.body_done.set()
        except (ClientGone, DomainError) as error:
            # An error would cancel the upload to the checkpoint service, which can keep the bytes so far.
            self.failure = error


def _part_of(call: HttpCall) -> _Part:
    """Return the part of the archive in the body."""
    length = call.headers.get('content-length', '')
    if not _LENGTH.fullmatch(length):
        raise InvalidField('content-length', 'is required')
    if call.headers.get('content-encoding', 'identity') != 'identity':
        raise InvalidField('content-encoding', 'must be absent; compress the archive itself, such as .tar.gz')
    if 'content-range' not in call.headers:
        return _Part(0, int(length))
    match = _RANGE.fullmatch(call.headers['content-range'])
    if match is None:
        raise InvalidField('content-range', 'must be bytes <first>-<last>/<size>, or bytes */<size>')
    begin = int(match[1] or 0)
    expected = int(match[2]) - begin + 1 if match[2] else 0
    if match[2] and int(match[2]) >= int(match[3]):
        raise InvalidField('content-range', 'ends after the end of the archive')
    if int(length) != expected:
        raise InvalidField('content-range', f'has {expected} bytes, but the body has {length}')
    return _Part(begin, int(match[3]))
