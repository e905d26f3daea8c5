"""HTTP server on the event loop of the process: app, limited connections, certificate renewal, limited drain time."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute
from uvicorn.protocols.http.h11_impl import H11Protocol

from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.http.call import MemoryGates, Route
from twinkle_services.gateway.http.guard import Guard
from twinkle_services.kit.byte_gate import ByteGate
from twinkle_services.kit.rpc.auth import Authenticator
from twinkle_services.kit.telemetry import measures
from twinkle_services.kit.tls import TlsFiles

HEAD_SECONDS = 10.0
"""Maximum number of seconds in which the head of a request must arrive."""
UNREAD_SECONDS = 120.0
"""Maximum number of seconds for which a client may read nothing of a pending response."""
_BACKLOG = 2048
"""Maximum number of connections that wait to be accepted."""
_KEEP_ALIVE_SECONDS = 30
_PIPELINED_BYTES = 1 << 16
"""Maximum number of bytes that a client may send after a request before it has received the response."""
_UNKNOWN_ROUTE = '_OTHER'
"""Metric label that all unknown paths and methods share; otherwise callers without credentials could add labels."""
_SETTLE_SECONDS = 2
"""Seconds in which terminated calls can write their errors before their connections are closed."""


class HttpServer:
    """HTTP listener at `config.http_listen`, inactive until `start`.

    The constructor raises ValueError if the certificate cannot be used. Concurrency: all methods must be called from
    the event loop that serves.
    """

    def __init__(self, app: Any, guard: Guard, config: GatewayConfig) -> None:
        self.app = app
        self._host, _, port = config.http_listen.rpartition(':')
        self._port = int(port)
        self._guard = guard
        self._drain_seconds = config.drain_seconds
        certificate = config.listeners()[0].tls
        files = TlsFiles(certificate) if certificate.certificate else None
        self._server = _EmbeddedServer(
            uvicorn.Config(
                app,
                http=partial(BoundedConnection, limit=config.http_connections),  # pyright: ignore[reportArgumentType] (only called)
                ws='none',
                lifespan='off',
                log_config=None,
                log_level='critical',
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_SETTLE_SECONDS,
                ssl_context_factory=(lambda config, default: renewing_context(files)) if files else None,
            )
        )
        self._serving: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Listening address, `host:port`; the port is known once started."""
        return f'{self._host}:{self._port}'

    async def start(self, *, grpc_ports: Callable[[], Sequence[int]] = tuple) -> None:
        """Start listening; `grpc_ports` returns the gRPC ports of this process, and `/healthz` reports the first one.

        Raises:
            OSError: the address is in use or does not belong to this machine, or the certificate cannot be loaded.
        """
        listener = _bound_socket(self._host.strip('[]'), self._port)
        self._port = listener.getsockname()[1]
        self._guard.grpc_ports = grpc_ports
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        listening = asyncio.create_task(self._server.is_listening.wait())
        await asyncio.wait([self._serving, listening], return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            listener.close()
            serving, self._serving = self._serving, None
            await serving

    def begin_stop(self, grace: timedelta | None = None) -> None:
        """Refuse new calls; running calls may finish within `grace`, by default the configured drain time."""
        if self._serving is not None and self._stopping is None:
            seconds = self._drain_seconds if grace is None else grace.total_seconds()
            self._stopping = asyncio.create_task(self._stop(self._serving, seconds))

    async def stop(self, grace: timedelta | None = None) -> None:
        """Call `begin_stop` and wait until the server has stopped."""
        self.begin_stop(grace)
        if self._stopping is not None:
            await self._stopping

    async def _stop(self, serving: asyncio.Task[None], seconds: float) -> None:
        await self._guard.drain(seconds)
        self._server.should_exit = True
        await serving


class _EmbeddedServer(uvicorn.Server):
    """uvicorn server that leaves signals to the process and reports when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_listening.set()


def _bound_socket(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def make_app(routes: Iterable[Route], guard: Guard) -> Starlette:
    """Return the ASGI app that serves `routes` and `/healthz`."""

    async def show_health(request: Request) -> Response:
        del request
        health: dict[str, Any] = {'status': 'draining' if guard.is_draining else 'serving'}
        # gRPC clients that know only the HTTP address discover the gRPC port here.
        if ports := guard.grpc_ports():
            health['grpc_port'] = ports[0]
        return JSONResponse(health, status_code=HTTPStatus.SERVICE_UNAVAILABLE if guard.is_draining else HTTPStatus.OK)

    guarded = [StarletteRoute(route.path, guard.wrap(route), methods=[route.http_method]) for route in routes]
    app = Starlette(
        routes=[*guarded, StarletteRoute('/healthz', show_health, methods=['GET'])],
        exception_handlers={HTTPException: _refuse},
    )
    app.router.redirect_slashes = False
    return app


async def _refuse(request: Request, error: Any) -> Response:
    """Respond to unknown paths and methods in a form that clients of both APIs can read."""
    measures.http_calls.add(1, _UNKNOWN_ROUTE, 'UNKNOWN_URL')
    # `request.url` is built from the Host header, which may contain anything.
    problem = f'there is no route {request.method} {request.scope["path"]}'[:300]
    body = {'message': problem, 'type': 'invalid_request_error', 'param': None, 'code': 'unknown_url'}
    return JSONResponse({'error': body, 'detail': problem}, status_code=error.status_code, headers=error.headers)


class BoundedConnection(H11Protocol):
    """Connection that is closed if there are too many connections, or if its client is too slow or sends too early.

    uvicorn 0.54 itself sets no time limit for a request head or for a client that does not read.
    """

    def __init__(
        self,
        *args: Any,
        limit: int,
        head_seconds: float = HEAD_SECONDS,
        unread_seconds: float = UNREAD_SECONDS,
        **fields: Any,
    ) -> None:
        """Configure one of at most `limit` connections; other arguments are uvicorn's."""
        super().__init__(*args, **fields)
        self._limit = limit
        self._head_seconds = head_seconds
        self._unread_seconds = unread_seconds
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, or close it if the limit was already reached."""
        super().connection_made(transport)
        if len(self.connections) > self._limit:
            transport.abort()
            return
        self._head_timer = self._restarted(self._head_timer, self._head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = self._restarted(self._head_timer, None)
        self._unread_timer = self._restarted(self._unread_timer, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes; bytes of a further request are kept until the response to the current request is complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_timer = self._restarted(self._head_timer, None)
        if self.conn.their_state is h11.DONE:
            # uvicorn stops reading, and would not notice that the client disconnects.
            if len(self.conn.trailing_data[0]) > _PIPELINED_BYTES:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Start the timer for the head of the next request."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._head_timer = self._restarted(self._head_timer, self.timeout_keep_alive + self._head_seconds)

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read."""
        super().pause_writing()
        self._unread_timer = self._restarted(self._unread_timer, self._unread_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_timer = self._restarted(self._unread_timer, None)

    def _restarted(self, timer: asyncio.TimerHandle | None, seconds: float | None) -> asyncio.TimerHandle | None:
        """Cancel `timer`, and start a timer that closes the connection after `seconds`; None only cancels."""
        if timer is not None:
            timer.cancel()
        return None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


def renewing_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that presents the latest usable certificate on disk to each new connection.

    Raises:
        OSError: the files cannot be read, or do not contain a usable certificate and key (ssl.SSLError).
    """
    loaded, latest = files.current(), _context(files)

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # OpenSSL calls this for every connection, even without a server name.
        nonlocal loaded, latest
        del name, context
        material = files.current()
        if material is not loaded:
            # If the files change again while they are loaded, the next connection loads them.
            with suppress(OSError):
                loaded, latest = material, _context(files)
        connection.context = latest

    first = _context(files)
    first.sni_callback = choose
    return first


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(['http/1.1'])
    context.load_cert_chain(*files.paths)
    return context


def open_http(config: GatewayConfig, *, authenticator: Authenticator, routes: Iterable[Route]) -> HttpServer | None:
    """Return the server of `routes`, not started; None if no HTTP address is configured."""
    if not config.http_listen:
        return None
    budget = config.memory
    seconds = budget.wait.total_seconds()
    memory = MemoryGates(
        bodies=ByteGate(tenant_bytes=budget.bodies_per_tenant, total_bytes=budget.bodies, wait_seconds=seconds),
        work=ByteGate(tenant_bytes=budget.work_per_tenant, total_bytes=budget.work, wait_seconds=seconds),
    )
    guard = Guard(authenticator, memory=memory)
    return HttpServer(make_app(routes, guard), guard, config)
