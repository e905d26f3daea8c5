"""Serves an app over HTTP on the event loop of the process: no signals, no logs of its own, a bounded drain."""

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import uvicorn

from services.gateway.http.connections import BoundedConnection
from services.gateway.http.guard import Guard
from services.gateway.http.memory import MemoryGates
from services.gateway.http.tls import renewing_context
from services.kit.tls import CertificateConfig, TlsFiles

_BACKLOG = 2048
"""Connections that may wait to be accepted."""
_KEEP_ALIVE_SECONDS = 30
_SETTLE_SECONDS = 2
"""How long ended calls may take to tell their clients so, before their connections are cut."""


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """What the server has to know."""

    listen: str
    """'host:port'; port 0 picks a free one."""
    drain: timedelta
    """How long running calls may go on after a stop was asked for."""
    body_bytes: int
    """Most bytes of a request's body."""
    memory: MemoryGates
    """What bodies take of the process's memory."""
    connections: int
    """Most connections at a time; those beyond are cut."""
    certificate: CertificateConfig | None = None
    """What clients are shown; without one it is plaintext."""


class HttpServer:
    """Listens until stopped.

    Concurrency: all verbs from the event loop that serves.
    """

    def __init__(self, app: Any, guard: Guard, options: HttpOptions) -> None:
        """Describe the server; nothing listens yet.

        Args:
            app: the ASGI app.
            guard: what its calls go through.
            options: where, and for how long.

        Raises:
            ValueError: the certificate cannot be used.
        """
        self.app = app
        """What answers."""
        self._host, _, port = options.listen.rpartition(':')
        self._port = int(port)
        self._guard = guard
        self._drain_seconds = options.drain.total_seconds()
        files = TlsFiles(options.certificate) if options.certificate and options.certificate.certificate else None
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                http=partial(BoundedConnection, limit=options.connections),  # pyright: ignore[reportArgumentType] (called like a class, and used for nothing else)
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
        """Where it listens, 'host:port'; known once started."""
        return f'{self._host}:{self._port}'

    async def start(self, *, grpc_ports: Callable[[], Sequence[int]] = tuple) -> None:
        """Listen.

        Args:
            grpc_ports: where this process serves gRPC, once it does; `/healthz` tells the first.

        Raises:
            OSError: the address is taken or not this machine's.
        """
        listener = _bound_socket(self._host.strip('[]'), self._port)
        self._port = listener.getsockname()[1]
        self._guard.grpc_ports = grpc_ports
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.is_listening.wait()

    def begin_stop(self, grace: timedelta | None = None) -> None:
        """Refuse new calls from now on; running ones may go on for `grace`, the configured time unless given."""
        if self._serving is not None and self._stopping is None:
            seconds = self._drain_seconds if grace is None else grace.total_seconds()
            self._stopping = asyncio.create_task(self._stop(self._serving, seconds))

    async def stop(self, grace: timedelta | None = None) -> None:
        """Begin to stop, if that did not happen yet, and wait for the end."""
        self.begin_stop(grace)
        if self._stopping is not None:
            await self._stopping

    async def _stop(self, serving: asyncio.Task[None], seconds: float) -> None:
        await self._guard.drain(seconds)
        self._server.should_exit = True
        await serving


class _QuietServer(uvicorn.Server):
    """Leaves signals to the process, and tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
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
