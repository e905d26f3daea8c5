"""Takes adapters that were made elsewhere: the archive of a peft folder as the body of a request, or of several."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.gateway.catalogue.rules import UploadRequest
from services.gateway.http.body import ClientGone, Pace, arriving
from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.tinker.catalogue_answers import checkpoint_to_json
from services.gateway.tinker.catalogue_ports import Uploads
from services.gateway.tinker.paths import WeightsKind, WeightsPath, parse_kind, parse_name
from services.gateway.tinker.queries import query_of
from services.gateway.tinker.routes import tinker_route
from services.kit.errors import DomainError, InvalidField, StreamOutOfOrder

_UPLOAD = '/twinkle.api.checkpoint.v1.CheckpointService/UploadCheckpoint'
_PACE = Pace(seconds=24 * 3600.0)
"""Nothing of an upload is held while it comes, so that it may take long; it may not trickle."""
_LENGTH = re.compile(r'\d{1,15}')
_RANGE = re.compile(r'bytes (?:(\d{1,15})-(\d{1,15})|\*)/(\d{1,15})')


@dataclass(frozen=True)
class _Part:
    """Which bytes of an archive a body has."""

    begin: int
    size_bytes: int
    """Of the whole archive."""


class UploadRoutes:
    """Serves them."""

    def __init__(self, uploads: Uploads, *, pace: Pace = _PACE) -> None:
        """Give what comes to `uploads`, where it comes at that pace."""
        self._uploads = uploads
        self._pace = pace

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [tinker_route('uploads/{name}', self._take, access=_UPLOAD, http_method='PUT')]

    async def _take(self, call: HttpCall) -> Response:
        query = query_of(call)
        name = parse_name(call.path_values['name'], 'name')
        kind = parse_kind(query.get('kind', WeightsKind.TRAINING), 'kind')
        part = _part_of(call)
        order = UploadRequest(
            # One that is not named is told by its name: the same name goes on with the same upload.
            upload_id=query.get('upload_id') or f'http-{name}',
            name=WeightsPath('', kind, name).native_name,
            base_model=query.get('base_model', ''),
            size_bytes=part.size_bytes,
        )
        body = _Body(call, self._pace)
        try:
            checkpoint = await self._uploads.upload(order, body.pieces(), offset=part.begin)
        except DomainError as error:
            if body.failure is not None:
                raise body.failure from error
            if not isinstance(error, StreamOutOfOrder) or error.offset is None:
                raise
            return JsonResponse({'held_bytes': error.offset, 'size_bytes': part.size_bytes}, 202)
        return JsonResponse(checkpoint_to_json(checkpoint), 201)


class _Body:
    """The body of a call, piece by piece: nothing of it is kept."""

    def __init__(self, call: HttpCall, pace: Pace) -> None:
        self._call = call
        self._pace = pace
        self.failure: ClientGone | DomainError | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what comes; where the client leaves or is too slow, it ends early."""
        try:
            async for piece in arriving(self._call, self._pace):
                if piece:
                    yield piece
            self._call.body_done.set()
        except (ClientGone, DomainError) as error:
            # Whoever sends this on would be cut by an error; what has come so far is worth keeping.
            self.failure = error


def _part_of(call: HttpCall) -> _Part:
    """Return which part of an archive the body is.

    Raises:
        InvalidField: the headers do not say it, or contradict each other.
    """
    length = call.headers.get('content-length', '')
    if not _LENGTH.fullmatch(length):
        raise InvalidField('content-length', 'is required')
    if call.headers.get('content-encoding', 'identity') != 'identity':
        raise InvalidField('content-encoding', 'must be absent: an archive may be compressed itself, as .tar.gz')
    if 'content-range' not in call.headers:
        return _Part(0, int(length))
    match = _RANGE.fullmatch(call.headers['content-range'])
    if match is None:
        raise InvalidField('content-range', 'must be bytes <first>-<last>/<size>, or bytes */<size>')
    begin = int(match[1] or 0)
    expected = int(match[2]) - begin + 1 if match[2] else 0
    if match[2] and int(match[2]) >= int(match[3]):
        raise InvalidField('content-range', 'ends behind the archive')
    if int(length) != expected:
        raise InvalidField('content-range', f'is of {expected} bytes, the body has {length}')
    return _Part(begin, int(match[3]))
