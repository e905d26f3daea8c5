"""Paths, access rules, query strings and error responses that all routes of the Tinker API share.

The SDK raises immediately on 400, 401, 403, 404, 410, 413 and 422, and retries for minutes on 408, 409, 429 and all
statuses from 500. A status of the second group is used only if a retry may succeed: a permanent conflict returns 400.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from twinkle_services.gateway.catalogue.paths import WeightsPath, parse_path
from twinkle_services.gateway.fleet.model_routes import shown_text
from twinkle_services.gateway.http.call import HttpCall, Response, Route
from twinkle_services.gateway.paging import Slice
from twinkle_services.kit.errors import Code, DomainError, InvalidField

PREFIX = '/api/v1/'
CHECKPOINT_PATH = 'training_runs/{run_id}/checkpoints/{kind}/{name}'
"""Path of the routes of saved weights, see `path_of`."""

# RPC methods whose access rules apply to a route.
ANY_KEY = '/twinkle.api.server.v1.ServerService/GetServerInfo'
SESSIONS = '/twinkle.api.gateway.v1.SessionService/CreateSession'
CATALOGUE = '/twinkle.api.gateway.v1.CatalogueService/ListRuns'
TRAIN = '/twinkle.api.model.v1.TrainingService/Execute'
SAMPLE = '/twinkle.api.sampler.v1.SamplerService/Sample'
CHECKPOINTS = '/twinkle.api.checkpoint.v1.CheckpointService/GetCheckpoint'

WAIT_SECONDS = 25.0
"""Maximum number of seconds that a poll waits for an outcome; clients time out after 45 s."""
MAX_LIMIT = 1000
_MAX_OFFSET = (1 << 53) - 1
_SCOPES = ('owned', 'accessible')
_STATUSES = {
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.DEADLINE_EXCEEDED: 408,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.INTERNAL: 500,
    Code.UNKNOWN: 500,
    Code.DATA_LOSS: 500,
}
"""HTTP status of each error code; all other codes return 400, because a retry cannot succeed."""
_REASONS = {'MESSAGE_TOO_LARGE': 413, 'SESSION_FINISHED': 410, 'FUTURE_EXPIRED': 410}
"""Reasons with a more specific status than their code."""
_PARTLY_TRANSIENT = frozenset({Code.RESOURCE_EXHAUSTED, Code.DATA_LOSS})
"""Codes of both temporary and permanent errors; a used-up quota and a damaged checkpoint are permanent."""
_FIELDS = (
    (r'(operation\.)?forward_(backward|only)\.batch\.features', 'data'),
    (r'(operation\.)?forward_(backward|only)\.loss', 'loss_fn'),
    (r'(operation\.)?clip_grad_and_step', 'adam_params'),
    (r'(operation\.)?save\.name', 'path'),
    (r'((operation\.)?load\.)?checkpoint_path', 'path'),
    (r'lora_config\.lora_rank', 'lora_config.rank'),
    (r'(operation\.)?adapter_id', 'model_id'),
    (r'params(?=\.)', 'sampling_params'),
    (r'prompts\[0\]', 'prompt'),
)
"""Patterns of native fields, and the fields of Tinker's requests that the native fields are converted from."""
_TENSORS = {
    'labels': 'target_tokens',
    'target_ids': 'target_tokens',
    'loss_weights': 'weights',
    'target_weights': 'weights',
    'old_logps': 'logprobs',
    'input_ids': 'model_input',
}


class TinkerErrors:
    """Error responses of the Tinker API."""

    def status_of(self, error: DomainError) -> int:
        if error.reason in _REASONS:
            return _REASONS[error.reason]
        if error.code in _PARTLY_TRANSIENT and not error.disposition.is_transient:
            return 400
        return _STATUSES.get(error.code, 400)

    def body_of(self, error: DomainError, *, request_id: str) -> dict[str, Any]:
        return {'detail': text_of(error), 'reason': error.reason, 'request_id': request_id}


def text_of(error: DomainError) -> str:
    """Return the message of an error, with Tinker's field names."""
    if error.reason == 'CREDENTIALS_MISSING':
        return 'send an API key in the header X-API-Key'
    if error.violations:
        return f'{field_of(error.violations[0].field)}: {shown_text(error.violations[0].problem)}'
    return shown_text(str(error)) or error.reason


def category_of(error: DomainError) -> str:
    """Return the category of a failed future: 'unknown', 'server' if the services failed, or otherwise 'user'."""
    if error.code in {Code.UNKNOWN, Code.CANCELLED}:
        return 'unknown'
    return 'server' if _ERRORS.status_of(error) in {408, 500, 503} else 'user'


def field_of(field: str) -> str:
    """Return the field of Tinker's request that a native field is converted from."""
    for pattern, name in _FIELDS:
        if match := re.match(pattern, field):
            field = name + field[match.end() :]
            break
    head, dot, tail = field.rpartition('.')
    name = re.sub(r"^extra_tensors\[?['\"]?(\w+)['\"]?\]?$", r'\1', tail)
    return f'{head}{dot}{_TENSORS.get(name, name)}'


_ERRORS = TinkerErrors()


def tinker_route(
    path: str, serve: Callable[[HttpCall], Awaitable[Response]], *, access: str, http_method: str = 'POST'
) -> Route:
    """Return a route; `path` is below `PREFIX`, and `access` is the RPC method whose access rules apply."""
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
    """Return the fields of the query string; a repeated field has its last value."""
    return dict(parse_qsl(bytes(call.scope.get('query_string', b'')).decode('latin-1'), keep_blank_values=True))


def slice_of(query: Mapping[str, str], *, limit: int) -> Slice:
    """Return the requested part of a list; `limit` is the default length."""
    return Slice(
        _integer(query, 'offset', default=0, minimum=0, maximum=_MAX_OFFSET),
        _integer(query, 'limit', default=limit, minimum=1, maximum=MAX_LIMIT),
    )


def checked_query_of(call: HttpCall) -> Mapping[str, str]:
    """Return the query fields, and check the access scope.

    Both scopes select the same items, because each key of a tenant may read all items of the tenant.
    """
    query = query_of(call)
    if query.get('access_scope', 'owned') not in _SCOPES:
        raise InvalidField('access_scope', f'must be one of {", ".join(_SCOPES)}, got {query["access_scope"][:80]!r}')
    return query


def path_of(call: HttpCall) -> WeightsPath:
    """Return the path of the saved weights that the URL names."""
    values = call.path_values
    return parse_path(f'tinker://{values["run_id"]}/{values["kind"]}/{values["name"]}', 'path')


def _integer(query: Mapping[str, str], name: str, *, default: int, minimum: int, maximum: int) -> int:
    text = query.get(name, str(default))
    is_number = text.isascii() and text.isdigit() and len(text) <= 16
    if not is_number or not minimum <= int(text) <= maximum:
        raise InvalidField(name, f'must be an integer from {minimum} to {maximum}, got {text[:80]!r}')
    return int(text)
