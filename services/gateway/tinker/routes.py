"""What all routes of the Tinker API share: where they are, where credentials are, whose rules of access hold."""

from collections.abc import Awaitable, Callable, Mapping

from services.gateway.http.call import HttpCall, Response, Route
from services.gateway.tinker.errors import TinkerErrors

PREFIX = '/api/v1/'

ANY_KEY = '/twinkle.api.server.v1.ServerService/GetServerInfo'
"""Methods of the native contracts, whose rules of access a route takes over: here, every good key."""
SESSIONS = '/twinkle.api.gateway.v1.SessionService/CreateSession'
CATALOGUE = '/twinkle.api.gateway.v1.CatalogueService/ListRuns'
TRAIN = '/twinkle.api.model.v1.TrainingService/Execute'
SAMPLE = '/twinkle.api.sampler.v1.SamplerService/Sample'
CHECKPOINTS = '/twinkle.api.checkpoint.v1.CheckpointService/GetCheckpoint'

_ERRORS = TinkerErrors()


def tinker_route(
    path: str, serve: Callable[[HttpCall], Awaitable[Response]], *, access: str, http_method: str = 'POST'
) -> Route:
    """Return a route.

    Args:
        path: below `PREFIX`, as Starlette writes it.
        serve: answers a call.
        access: method of a native contract, with leading slash: whoever may call it may call this.
        http_method: of the call.
    """
    name = '.'.join(part.strip('{}') for part in path.split('/'))
    return Route(
        path=PREFIX + path,
        http_method=http_method,
        name=f'tinker.{http_method.lower()}.{name}',
        method=access,
        serve=serve,
        errors=_ERRORS,
        credentials=bearer_of_api_key,
    )


def bearer_of_api_key(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the key that a Tinker client sends as `X-API-Key` as the bearer token that the authenticator reads."""
    key = headers.get('x-api-key', '')
    return {**headers, 'authorization': f'Bearer {key}'} if key else headers
