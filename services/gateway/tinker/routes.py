"""Paths, access rules, and query strings that all routes of the Tinker API share."""

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl

from services.gateway.http.call import HttpCall, Response, Route
from services.gateway.paging import Slice
from services.gateway.tinker.errors import TinkerErrors
from services.gateway.tinker.paths import WeightsPath, parse_path
from services.kit.errors import InvalidField

PREFIX = '/api/v1/'

# RPC methods whose access rules apply to a route.
ANY_KEY = '/twinkle.api.server.v1.ServerService/GetServerInfo'
SESSIONS = '/twinkle.api.gateway.v1.SessionService/CreateSession'
CATALOGUE = '/twinkle.api.gateway.v1.CatalogueService/ListRuns'
TRAIN = '/twinkle.api.model.v1.TrainingService/Execute'
SAMPLE = '/twinkle.api.sampler.v1.SamplerService/Sample'
CHECKPOINTS = '/twinkle.api.checkpoint.v1.CheckpointService/GetCheckpoint'

MAX_LIMIT = 1000
_MAX_OFFSET = (1 << 53) - 1
_SCOPES = ('owned', 'accessible')
_ERRORS = TinkerErrors()


def tinker_route(
    path: str, serve: Callable[[HttpCall], Awaitable[Response]], *, access: str, http_method: str = 'POST'
) -> Route:
    """Return a route.

    Args:
        path: Starlette path pattern below `PREFIX`.
        serve: Handler.
        access: RPC method, with leading slash, whose access rules apply.
        http_method: HTTP method.
    """
    name = '.'.join(part.strip('{}') for part in path.split('/'))
    return Route(
        path=PREFIX + path,
        http_method=http_method,
        name=f'tinker.{http_method.lower()}.{name}',
        method=access,
        serve=serve,
        errors=_ERRORS,
        credentials=bearer_from_api_key,
    )


def bearer_from_api_key(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers with the `X-API-Key` of Tinker clients as a bearer token."""
    key = headers.get('x-api-key', '')
    return {**headers, 'authorization': f'Bearer {key}'} if key else headers


def query_of(call: HttpCall) -> Mapping[str, str]:
    """Return the query fields; the last one wins when a field is repeated."""
    return dict(parse_qsl(bytes(call.scope.get('query_string', b'')).decode('latin-1'), keep_blank_values=True))


def slice_of(query: Mapping[str, str], *, limit: int) -> Slice:
    """Return the requested part of a list; `limit` is the default length.

    Raises:
        InvalidField: `offset` or `limit` is not a number, or is out of bounds.
    """
    return Slice(
        _integer(query, 'offset', default=0, least=0, most=_MAX_OFFSET),
        _integer(query, 'limit', default=limit, least=1, most=MAX_LIMIT),
    )


def check_scope(query: Mapping[str, str]) -> None:
    """Check the access scope; both scopes are equal, as all keys of a tenant see all its items.

    Raises:
        InvalidField: The scope is unknown.
    """
    if query.get('access_scope', 'owned') not in _SCOPES:
        raise InvalidField('access_scope', f'must be one of {", ".join(_SCOPES)}')


def path_of(call: HttpCall) -> WeightsPath:
    """Return the saved weights that the URL names by run, kind and name.

    Raises:
        InvalidField: The URL does not form a valid path.
    """
    values = call.path_values
    return parse_path(f'tinker://{values["run_id"]}/{values["kind"]}/{values["name"]}', 'path')


def _integer(query: Mapping[str, str], name: str, *, default: int, least: int, most: int) -> int:
    text = query.get(name, str(default))
    is_number = text.isascii() and text.isdigit() and len(text) <= 16
    if not is_number or not least <= int(text) <= most:
        raise InvalidField(name, f'must be an integer, {least} to {most}')
    return int(text)
