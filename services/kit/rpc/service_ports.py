"""The gRPC ports of a service. They open before the service loads its state, and refuse its calls until then.

Health is served from the beginning, so probes can distinguish a service that loads from one that does not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from twinkle_services.kit.config import Listener, ServiceConfig, is_loopback
from twinkle_services.kit.errors import Draining
from twinkle_services.kit.rpc.call import Call
from twinkle_services.kit.rpc.credentials import server_credentials
from twinkle_services.kit.rpc.interceptor import LayeredInterceptor
from twinkle_services.kit.rpc.layers import Layer, count_call, map_errors
from twinkle_services.kit.telemetry.admin import Readiness
from twinkle_services.kit.tls import TlsFiles, shared_files

MAX_CONCURRENT_CALLS = 4096
_TRANSPORT_FACTOR = 4
"""The transport accepts messages up to this multiple of the limit, so that the service can report the size of a message
that it refuses."""


class ListenError(RuntimeError):
    """The server cannot listen on an address; the message names the setting and the fix."""

    def __init__(self, listener: Listener) -> None:
        problem = f'{listener.field}: cannot serve on {listener.address}'
        super().__init__(f'{problem}; set a free HOST:PORT of this machine, or port 0 to pick one')


class HandlerTable(grpc.GenericRpcHandler):
    """The handlers of a server. Unlike those of `grpc.aio.Server`, they can be added while it runs.

    Generated functions `add_...Servicer_to_server` accept a table in place of a server.
    """

    def __init__(self) -> None:
        self._handlers: list[Any] = []

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """Add handlers; earlier ones take precedence."""
        self._handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Do nothing: generated functions also add the same handlers as generic ones."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method; None for an unknown method."""
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)


class ServicePorts:
    """The gRPC ports of a service. Concurrency: all methods must be called from the event loop that serves."""

    def __init__(self, config: ServiceConfig, readiness: Readiness | None = None) -> None:
        """Create the ports without opening them.

        Args:
            config: Addresses, limits and certificates.
            readiness: State that the admin port reports; None if no admin port reports it.

        Raises:
            ValueError: A service other than the gateway has no internal token and does not listen on loopback, or a
                certificate is invalid.
        """
        _check_token(config)
        self.readiness = readiness or Readiness()
        self.health = HealthServicer()
        self.handlers = HandlerTable()
        self.ports: tuple[int, ...] = ()
        self._shutdown: asyncio.Future[None] | None = None
        self._servers: list[grpc.aio.Server] = []
        self._limit_bytes = _TRANSPORT_FACTOR * config.limits.message_bytes
        self._listeners = config.listeners()
        self._files = [shared_files(item.tls, field=item.tls_field) for item in self._listeners]
        self._interceptor = LayeredInterceptor([count_call, map_errors, _refuse_while_starting])
        health_pb2_grpc.add_HealthServicer_to_server(self.health, cast(grpc.aio.Server, self.handlers))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses as `host:port`, in the order of the configuration; available after `open`."""
        hosts = (item.address.rpartition(':')[0] for item in self._listeners)
        return tuple(f'{host}:{port}' for host, port in zip(hosts, self.ports, strict=True))

    async def open(self) -> None:
        """Listen on the addresses and report NOT_SERVING. Does nothing if the ports are open.

        Raises:
            ListenError: An address is in use or does not belong to this machine.
        """
        if self._servers:
            return
        await self.health.set('', health_pb2.HealthCheckResponse.NOT_SERVING)
        server = self._new_server()
        bind = partial(_bind, server)
        self.ports = tuple(map(bind, self._listeners, self._files))
        await server.start()

    def _new_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=[self._interceptor],
            handlers=[self.handlers],
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
            options=[
                ('grpc.max_receive_message_length', self._limit_bytes),
                ('grpc.max_send_message_length', -1),
                ('grpc.so_reuseport', 0),
                ('grpc.http2.min_ping_interval_without_data_ms', 10_000),
                ('grpc.keepalive_permit_without_calls', 1),
            ],
        )
        self._servers.append(server)
        return server

    async def serve(self, layers: Sequence[Layer], services: Sequence[str], *, sockets: Sequence[Path] = ()) -> None:
        """Serve the calls of `handlers` inside `layers`, and report SERVING for `services` and the server.

        The paths `sockets` are Unix sockets on which calls are served in plaintext too. They have a separate server,
        because a running server does not accept further addresses.
        """
        self._interceptor.replace(layers)
        if sockets:
            server = self._new_server()
            for path in sockets:
                server.add_insecure_port(f'unix:{path}')
            await server.start()
        for name in ('', *services):
            await self.health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.readiness.problem = ''

    async def report_not_serving(self) -> None:
        """Report NOT_SERVING; calls are still served."""
        self.readiness.problem = 'draining'
        await self.health.enter_graceful_shutdown()

    async def stop(self, seconds: float) -> None:
        """Refuse new calls, wait `seconds` for running ones, then cancel them and close the ports.

        Concurrent calls of this method wait for the same shutdown, because grpc.aio 1.85 crashes if a server is stopped
        twice.
        """
        if not self._servers:
            return
        if self._shutdown is None:
            self._shutdown = asyncio.ensure_future(self._stop_servers(seconds))
        await asyncio.shield(self._shutdown)

    async def _stop_servers(self, seconds: float) -> None:
        await asyncio.gather(*(server.stop(seconds) for server in self._servers))


@asynccontextmanager
async def opened_ports(config: ServiceConfig, readiness: Readiness) -> AsyncIterator[ServicePorts]:
    """Open the ports of a service, and close them at the end of the block.

    Raises:
        SystemExit: An address cannot be used; the message names the setting.
    """
    ports = ServicePorts(config, readiness)
    try:
        await ports.open()
    except ListenError as error:
        raise SystemExit(f'{config.service}: {error}') from error
    try:
        yield ports
    finally:
        await ports.stop(0)


@asynccontextmanager
async def _refuse_while_starting(call: Call) -> AsyncIterator[None]:
    """Raise Draining for all calls."""
    del call
    raise Draining()
    yield


def _bind(server: grpc.aio.Server, listener: Listener, files: TlsFiles) -> int:
    try:
        if listener.tls.certificate is None:
            return server.add_insecure_port(listener.address)
        return server.add_secure_port(listener.address, server_credentials(files, is_mutual=listener.is_mutual))
    except RuntimeError as error:
        raise ListenError(listener) from error


def _check_token(config: ServiceConfig) -> None:
    if not config.internal_token and not is_loopback(config.listen) and config.service != 'gateway':
        raise ValueError(f'listen: {config.listen} is reachable from other machines; set internal_token')
