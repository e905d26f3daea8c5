"""Routes of the console: the app's files, login and logout, one-time links, gRPC-Web, and downloads."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import Field

from twinkle.socket_folder import SocketFolder
from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.catalogue.paths import NATIVE_SCHEME
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.console.calls import WebCalls
from twinkle_services.gateway.console.files import INDEX, AppFiles
from twinkle_services.gateway.console.sessions import (
    MAX_SECRET_LENGTH,
    BrowserSession,
    BrowserSessions,
    LoginLinks,
    check_origin,
    set_cookie,
    uses_tls,
)
from twinkle_services.gateway.credentials import Scope
from twinkle_services.gateway.fleet.model_routes import shown_text
from twinkle_services.gateway.http.archives import ByteRange, FileResponse
from twinkle_services.gateway.http.body import Pace, read_bytes, read_json
from twinkle_services.gateway.http.call import JSON_TYPE, STATUSES, HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.http.validation import JsonModel, read_model
from twinkle_services.gateway.keys.authenticator import KeyVerifier
from twinkle_services.gateway.keys.pepper import PepperedSealer, pepper_of
from twinkle_services.kit.caller import Caller, require_scope
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import DomainError, InvalidField
from twinkle_services.kit.rpc.auth import bearer_token
from twinkle_services.kit.rpc.channel import open_forwarding_channel
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.server import RpcServer

API = '/console/api/'
ANY_KEY = '/twinkle.api.server.v1.ServerService/GetServerInfo'
"""RPC method that every key may call."""
DOWNLOAD = '/twinkle.api.checkpoint.v1.CheckpointService/DownloadCheckpoint'
"""RPC method with the access rules of downloads."""
STATIC = Path(__file__).parent / 'static'
"""Folder of the built app."""
_BODY_BYTES = 1 << 12
_PACE = Pace(seconds=10.0)
"""Time limit for the body of a login, which callers without credentials can send."""
_NO_STORE = {'cache-control': 'no-store', 'x-content-type-options': 'nosniff'}
_Secret = Annotated[str, Field(min_length=1, max_length=MAX_SECRET_LENGTH)]

_log = structlog.get_logger('console')


class ConsoleErrors:
    """Error responses of the console, `{"error": {message, reason, field, request_id}}`."""

    def status_of(self, error: DomainError) -> int:
        if error.reason == 'MESSAGE_TOO_LARGE':
            return 413
        if error.violations and error.violations[0].field == 'content-type':
            return 415
        return STATUSES.get(error.code, 500)

    def body_of(self, error: DomainError, *, request_id: str) -> dict[str, Any]:
        field = error.violations[0].field if error.violations else ''
        details = {'reason': error.reason, 'field': field, 'request_id': request_id}
        return {'error': {'message': shown_text(str(error)), **details}}


class LoginBody(JsonModel):
    """Body of a login: an API key or a one-time link."""

    key: _Secret | None = None
    link: _Secret | None = None


@dataclass(frozen=True)
class EmptyResponse:
    """Response without a body."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    async def write(self, call: HttpCall) -> None:
        await call.begin(self.status, JSON_TYPE, {**_NO_STORE, **self.headers})
        await call.write(b'', is_last=True)


class ConsoleRoutes:
    """Routes of the app, of sessions, of gRPC-Web and of downloads.

    The files, login and logout are open: they are served without credentials, within the limits of open calls.
    """

    def __init__(
        self,
        files: AppFiles,
        sessions: BrowserSessions,
        links: LoginLinks,
        *,
        calls: WebCalls,
        checkpoints: GrpcCheckpoints,
    ) -> None:
        self._files = files
        self._sessions = sessions
        self._links = links
        self._calls = calls
        self._checkpoints = checkpoints

    def routes(self) -> list[Route]:
        errors = ConsoleErrors()
        rpc = Route(
            path='/console/rpc/{service}/{method}',
            http_method='POST',
            name='console.rpc',
            method=ANY_KEY,
            serve=self._calls.serve,
            errors=errors,
            identify=self._calls.identify,
            write_error=self._calls.write_error,
        )
        links = Route(
            path=f'{API}links',
            http_method='POST',
            name='console.links',
            method=ANY_KEY,
            serve=self._create_link,
            errors=errors,
        )
        download = Route(
            path=f'{API}checkpoints/{{run_id}}/{{name}}',
            http_method='GET',
            name='console.download',
            method=DOWNLOAD,
            serve=self._download,
            errors=errors,
            identify=self._identify_download,
        )
        return [
            rpc,
            links,
            download,
            _open_route('POST', f'{API}login', 'login', self._log_in),
            _open_route('POST', f'{API}logout', 'logout', self._log_out),
            _open_route('GET', f'{API}session', 'session', self._show_session),
            _open_route('GET', '/', 'root', _redirect),
            _open_route('GET', '/console', 'root', _redirect),
            _open_route('GET', '/console/', 'index', self._send_index),
            _open_route('GET', '/console/{name:path}', 'files', self._send_file),
        ]

    async def _log_in(self, call: HttpCall) -> Response:
        check_origin(call.headers)
        _require_json(call)
        given = await read_json(call, _read_login, limit_bytes=_BODY_BYTES, pace=_PACE)
        session = await self._sessions.start(self._links.redeem(given.link) if given.link else given.key or '')
        _log.info('console login', tenant=session.key.tenant_id, key_id=session.key.key_id)
        cookie = set_cookie(
            self._sessions.seal(session),
            lifetime=self._sessions.lifetime(session),
            is_secure=uses_tls(call.headers, call.scope.get('scheme', '')),
        )
        return JsonResponse(_session_json(session), headers={**_NO_STORE, 'set-cookie': cookie})

    async def _log_out(self, call: HttpCall) -> Response:
        check_origin(call.headers)
        await read_bytes(call, limit_bytes=_BODY_BYTES, pace=_PACE)
        is_secure = uses_tls(call.headers, call.scope.get('scheme', ''))
        return EmptyResponse(204, {'set-cookie': set_cookie('', lifetime=timedelta(), is_secure=is_secure)})

    async def _show_session(self, call: HttpCall) -> Response:
        return JsonResponse(_session_json(await self._sessions.find(call.headers)), headers=_NO_STORE)

    async def _create_link(self, call: HttpCall) -> Response:
        check_origin(call.headers)
        await read_bytes(call, limit_bytes=_BODY_BYTES, pace=_PACE)
        link, expire_time = self._links.create(current_caller().tenant_id, bearer_token(call.headers))
        return JsonResponse({'link': link, 'expire_time': _time_json(expire_time)}, headers=_NO_STORE)

    async def _send_index(self, call: HttpCall) -> Response:
        return self._files.find(INDEX, accept_encoding=call.headers.get('accept-encoding', ''))

    async def _send_file(self, call: HttpCall) -> Response:
        return self._files.find(call.path_values['name'], accept_encoding=call.headers.get('accept-encoding', ''))

    async def _identify_download(self, call: HttpCall) -> Caller:
        """Return the caller of the request's key. The key is also checked at intervals while the file is sent.

        Raises:
            CredentialsMissing, CredentialsInvalid: there is no valid key.
            InvalidField: the request comes from a page of another site.
            ScopeMissing: the key lacks the scope `train`, which the same method requires over gRPC.
        """
        caller = await self._sessions.caller_of(call.headers)
        check_origin(call.headers)
        require_scope(caller, Scope.TRAIN)
        return caller

    async def _download(self, call: HttpCall) -> Response:
        """Return the archive of a checkpoint. The browser writes the archive to its disk while receiving it.

        Raises:
            CheckpointNotFound: the caller has no access to such a checkpoint.
            DomainError: the checkpoint is damaged, or the service cannot be reached.
        """
        run_id, name = call.path_values['run_id'], call.path_values['name']
        path = f'{NATIVE_SCHEME}{run_id}/weights/{name}'
        async with aclosing(self._checkpoints.archive(path, offset=0)) as parts:
            first = await anext(parts)
        content = ByteRange(0, first.size_bytes)
        return FileResponse(self._checkpoints, path, content, f'{run_id}-{name}.tar', first.digest)


def _open_route(http_method: str, path: str, name: str, serve: Callable[[HttpCall], Awaitable[Response]]) -> Route:
    return Route(
        path=path,
        http_method=http_method,
        name=f'console.{name}',
        method=ANY_KEY,
        serve=serve,
        errors=ConsoleErrors(),
        identify=_no_caller,
    )


async def _no_caller(call: HttpCall) -> Caller | None:
    del call
    return None


async def _redirect(call: HttpCall) -> Response:
    del call
    return EmptyResponse(302, {'location': '/console/'})


def _require_json(call: HttpCall) -> None:
    """Refuse a body without a content type, which a page of another site could send."""
    if 'content-type' not in call.headers:
        raise InvalidField('content-type', f'must be {JSON_TYPE}')


def _read_login(body: Mapping[str, Any]) -> LoginBody:
    given = read_model(LoginBody, body)
    if (given.key is None) == (given.link is None):
        raise InvalidField('key', 'give either a key or a link')
    return given


def _session_json(session: BrowserSession) -> dict[str, Any]:
    return {
        'tenant_id': session.key.tenant_id,
        'key_id': session.key.key_id,
        'scopes': sorted(scope.value for scope in session.key.scopes),
        'expire_time': _time_json(session.expire_time),
    }


def _time_json(time: datetime) -> str:
    return time.strftime('%Y-%m-%dT%H:%M:%SZ')


def open_console(
    config: GatewayConfig,
    server: RpcServer,
    verifier: KeyVerifier,
    stack: AsyncExitStack,
    *,
    checkpoints: GrpcCheckpoints,
    clock: Clock,
) -> list[Route]:
    """Return the routes of the console, which call `server` through a private socket; [] if the console is disabled.

    Args:
        config: Configuration of the gateway.
        server: The gateway's gRPC server, not started.
        verifier: Verifier of API keys.
        stack: Closes the channel and removes the socket.
        checkpoints: Client of the checkpoint service.
        clock: Clock of the gateway.
    """
    if not (config.console and config.http_listen):
        return []
    folder = SocketFolder('twinkle-console-')
    stack.callback(folder.remove)
    channel = open_forwarding_channel(server.listen_on_socket(folder.path / 'rpc'))
    stack.push_async_callback(channel.close)
    sessions = BrowserSessions(verifier, PepperedSealer(pepper_of(config)), clock=clock)
    calls = WebCalls(channel, server.methods, sessions, body_bytes=config.http_body_bytes, errors=ConsoleErrors())
    files = AppFiles(config.console_files or STATIC)
    return ConsoleRoutes(files, sessions, LoginLinks(clock=clock), calls=calls, checkpoints=checkpoints).routes()
