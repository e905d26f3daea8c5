"""The admin port of a service: metrics, probes and the version over plain HTTP, from the first moment of the process.

A separate thread serves it, so it responds while the event loop is blocked. Requests need no credentials and no
certificate, and responses reveal nothing about tenants.
"""

import json
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
import structlog

_CONNECTIONS = 32
"""Maximum number of concurrent connections; a further connection closes the oldest one."""
_CONNECTION_SECONDS = 10.0
"""Maximum time to wait for bytes of a request."""
_SERVER = 'twinkle'
"""Value of the header `Server`."""
_log = structlog.get_logger('admin')

Headers = list[tuple[str, str]]
StartResponse = Callable[[str, Headers], Any]


@dataclass(frozen=True)
class AdminAddress:
    """Address of the admin port, and the setting that contains it."""

    address: str
    """Address as `host:port`; port 0 picks a free port. Empty: the port is disabled."""
    field: str = 'admin_listen'
    """Name of the setting, for error messages."""


class Readiness:
    """State that `/readyz` reports. Concurrency: any thread may read it."""

    def __init__(self) -> None:
        self.problem = 'starting'
        """Reason why the service is not ready; empty if it is ready."""
        self.address = ''
        """Address of the admin port as `host:port`; empty if it is disabled."""

    @contextmanager
    def step(self, name: str, **facts: object) -> Iterator[None]:
        """Report `name` as the reason why the service is not ready, from the start of the block on.

        The start and the duration of the block are logged.

        Args:
            name: Short description of this step of the start, such as 'load the model'.
            facts: Fields of both log lines.
        """
        self.problem = name
        _log.info('start step', step=name, **facts)
        begin = time.perf_counter()
        yield
        _log.info('start step finished', step=name, seconds=round(time.perf_counter() - begin, 2), **facts)


@contextmanager
def serving_admin(address: AdminAddress, *, service: str) -> Iterator[Readiness]:
    """Serve the admin port during the block, if it is enabled, and yield the readiness that it reports.

    Raises:
        SystemExit: The address cannot be used; the message names the setting.
    """
    readiness = Readiness()
    if not address.address:
        yield readiness
        return
    host, _, port = address.address.rpartition(':')
    try:
        server = _AdminServer(host.strip('[]'), int(port), _AdminApp(service, readiness))
    except OSError as error:
        problem = f'{address.field}: cannot serve on {address.address}: {error.strerror or error}'
        text = f'{problem}; set a free HOST:PORT of this machine, or port 0 to pick one'
        raise SystemExit(f'{service}: {text}') from error
    readiness.address = f'{host}:{server.server_port}'
    thread = threading.Thread(target=server.serve_forever, name='admin', daemon=True)
    thread.start()
    _log.info('admin port opened', address=readiness.address)
    try:
        yield readiness
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _AdminApp:
    """WSGI application of the admin port."""

    def __init__(self, service: str, readiness: Readiness) -> None:
        self._service = service
        self._readiness = readiness
        self._metrics: Any = prometheus_client.make_wsgi_app()
        # Concurrent collections of OpenTelemetry's reader for Prometheus would repeat metrics in one page.
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Respond to a request."""

        def start(status: str, headers: Headers) -> Any:
            return start_response(status, [*headers, ('server', _SERVER)])

        return self._response(environ, start)

    def _response(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ['PATH_INFO']
        if environ['REQUEST_METHOD'] not in {'GET', 'HEAD'}:
            return _text(start_response, '405 Method Not Allowed', 'send GET or HEAD')
        if path == '/metrics':
            with self._lock:
                return self._metrics(environ, start_response)
        if path == '/livez':
            return _text(start_response, '200 OK', 'ok')
        if path == '/readyz':
            problem = self._readiness.problem
            return _text(start_response, '503 Service Unavailable' if problem else '200 OK', problem or 'ok')
        if path == '/version':
            body = json.dumps({'service': self._service, 'version': metadata.version('twinkle-grpc')})
            return _text(start_response, '200 OK', body, kind='application/json')
        return _text(start_response, '404 Not Found', 'paths: /metrics, /livez, /readyz, /version')


def _text(start_response: StartResponse, status: str, text: str, *, kind: str = 'text/plain') -> list[bytes]:
    start_response(status, [('content-type', f'{kind}; charset=utf-8'), ('cache-control', 'no-store')])
    return [f'{text}\n'.encode()]


class _AdminServer(ThreadingMixIn, WSGIServer):
    """HTTP server with a thread for each connection and a limited number of connections.

    A new connection takes precedence, so that slow clients cannot keep probes out.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, app: Any) -> None:
        self.address_family = socket.AF_INET6 if ':' in host else socket.AF_INET
        self._open: OrderedDict[socket.socket, None] = OrderedDict()
        """Connections in the order of their arrival."""
        self._lock = threading.Lock()
        super().__init__((host, port), _QuietHandler)
        self.set_app(app)

    def server_bind(self) -> None:
        """Bind the address without the reverse lookup of its name, which could block for seconds."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a new thread, and close the oldest one if too many are open."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > _CONNECTIONS:
                oldest, _ = self._open.popitem(last=False)
                # The thread of the connection reads the end of the request, and closes the socket.
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error of a connection, such as a client that disconnects, at debug level."""
        del request, client_address
        _log.debug('admin connection failed', exc_info=True)


class _QuietHandler(WSGIRequestHandler):
    """Handler of a connection, without access logs and with a time limit."""

    timeout = _CONNECTION_SECONDS
    server_version = _SERVER
    sys_version = ''

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        """Log nothing: probes call every few seconds."""
