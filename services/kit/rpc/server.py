"""The gRPC server of a service: endpoints, health, reflection, interceptors and graceful shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor

from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle_services.kit.byte_gate import ByteGate
from twinkle_services.kit.config import LimitsConfig, ServiceConfig
from twinkle_services.kit.rpc.auth import Authenticator
from twinkle_services.kit.rpc.call import Call
from twinkle_services.kit.rpc.channel import service_config_json
from twinkle_services.kit.rpc.layers import Layer, count_bytes, server_layers
from twinkle_services.kit.rpc.reflection import add_reflection
from twinkle_services.kit.rpc.server_info import ServerInfoServicer
from twinkle_services.kit.rpc.service_ports import MAX_CONCURRENT_CALLS, ListenError, ServicePorts
from twinkle_services.kit.server_facts import ServerFacts
from twinkle_services.kit.telemetry.event_loop import ServiceLoop

_log = structlog.get_logger('server')

_MAX_DESCRIPTORS = 1 << 20


@dataclass(frozen=True)
class Endpoint:
    """One service of the contract with its servicer.

    Methods that the servicer does not override return UNIMPLEMENTED and are listed as not supported.
    """

    descriptor: ServiceDescriptor
    """Descriptor of the generated module: `DESCRIPTOR.services_by_name[...]`."""
    servicer: Any
    register: Callable[[Any, grpc.aio.Server], None]
    """Generated function `add_...Servicer_to_server`."""

    def methods(self) -> dict[str, bool]:
        """Return whether each method is implemented, by full name without a leading slash."""
        return {
            f'{self.descriptor.full_name}/{method.name}': self._is_built(method.name)
            for method in self.descriptor.methods
        }

    def _is_built(self, name: str) -> bool:
        for owner in type(self.servicer).__mro__:
            if name in vars(owner):
                return not owner.__module__.endswith('_pb2_grpc')
        return False


class RpcServer:
    """A gRPC server for the endpoints of a service."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        authenticator: Authenticator,
        endpoints: Sequence[Endpoint],
        facts: Callable[[], ServerFacts] = ServerFacts,
        generic_handlers: Mapping[grpc.GenericRpcHandler, Mapping[str, bool]] | None = None,
        server_info: server_service_pb2_grpc.ServerServiceServicer | None = None,
    ) -> None:
        """Create the server without listening yet.

        Args:
            config: Address, limits, certificates and internal token.
            authenticator: Determines the callers.
            endpoints: Services to serve.
            facts: Returns models, components and limits for GetServerInfo.
            generic_handlers: Handlers of raw bytes, with the methods that each of them serves.
            server_info: Servicer of GetServerInfo; None for one that describes this service only.

        Raises:
            ValueError: See `ServicePorts`.
        """
        self._config = config
        self._peers = config.peers()
        self._generic_handlers = dict(generic_handlers or {})
        self.methods: dict[str, bool] = {}
        for methods in (*(endpoint.methods() for endpoint in endpoints), *self._generic_handlers.values()):
            self.methods.update(methods)
        limits = server_service_pb2.Limits(
            message_bytes=config.limits.message_bytes, queue_length=config.limits.queue_length
        )
        info = ServerInfoServicer(config.service, facts=facts, methods=self.methods, limits=limits)
        self.describe = info.describe
        self._endpoints = (*endpoints, _server_endpoint(server_info or info))
        self.methods.update(self._endpoints[-1].methods())
        self._layers = self._make_layers(authenticator)
        self._drain_actions: list[Callable[[], None]] = []
        self._shutdown: asyncio.Future[None] | None = None
        self._service_ports = ServicePorts(config)
        self._sockets: list[Path] = []

    @property
    def address(self) -> str:
        """First address of `addresses`."""
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses as `host:port`, in the order of the configuration; available after `start`."""
        return self._service_ports.addresses

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports of `addresses`; empty before `start`."""
        return self._service_ports.ports

    def use_ports(self, ports: ServicePorts) -> None:
        """Serve on ports that are open already. Call it before `start`."""
        self._service_ports = ports

    def on_drain(self, *actions: Callable[[], None]) -> None:
        """Register actions to run at the beginning of the shutdown, before the server waits for running calls.

        The actions must finish watch streams, which would otherwise never finish.
        """
        self._drain_actions.extend(actions)

    def listen_on_socket(self, path: Path) -> str:
        """Serve on a Unix socket too, in plaintext and with all interceptors, and return its address for channels.

        Only this process may have access to the folder of the socket. Callers on this socket have no certificate, so
        methods that require one refuse them. Call this method before `start`.
        """
        self._sockets.append(path)
        return f'unix:{path}'

    async def start(self) -> None:
        """Start listening, unless the ports are open, and report SERVING in the health service.

        Raises:
            ListenError: An address is in use or does not belong to this machine.
        """
        await self._service_ports.open()
        names = [endpoint.descriptor.full_name for endpoint in self._endpoints]
        self._add_handlers()
        if isinstance(loop := asyncio.get_running_loop(), ServiceLoop):
            loop.measure_stalls()
        await self._service_ports.serve(self._layers, names, sockets=self._sockets)

    async def report_not_serving(self) -> None:
        """Report NOT_SERVING in the health service; calls are still served."""
        await self._service_ports.report_not_serving()

    async def stop(self, grace: timedelta | None = None) -> None:
        """Shut down: report NOT_SERVING, refuse new calls, wait `grace` for running ones, then cancel them.

        None waits for `drain_seconds` of the configuration. Concurrent calls of this method wait for the same shutdown.
        """
        if self._shutdown is None:
            seconds = self._config.drain_seconds if grace is None else grace.total_seconds()
            self._shutdown = asyncio.ensure_future(self._stop(seconds))
        await asyncio.shield(self._shutdown)

    async def _stop(self, seconds: float) -> None:
        await self.report_not_serving()
        for action in self._drain_actions:
            action()
        await self._service_ports.stop(seconds)

    def _trusts(self, call: Call) -> bool:
        if not self._peers or not self._config.is_between_services(call.method[1:]):
            return True
        return bool(self._peers & call.peer_names())

    def _make_layers(self, authenticator: Authenticator) -> list[Layer]:
        return [
            *server_layers(
                authenticator,
                is_supported=lambda method: self.methods.get(method[1:], False),
                default_timeouts=default_timeouts(),
                message_limit_bytes=self._config.limits.message_bytes,
                call_limit=MAX_CONCURRENT_CALLS,
                trusts=self._trusts,
            ),
            count_bytes(_gate(self._config.limits)),
        ]

    def _add_handlers(self) -> None:
        # The generated functions need only the methods that add handlers.
        handlers: Any = self._service_ports.handlers
        for endpoint in self._endpoints:
            endpoint.register(endpoint.servicer, handlers)
        if self._generic_handlers:
            handlers.add_generic_rpc_handlers(tuple(self._generic_handlers))
        add_reflection({method.rpartition('/')[0] for method in self.methods}, handlers)


async def serve_until_stopped(
    server: RpcServer,
    config: ServiceConfig,
    *,
    while_serving: Callable[[asyncio.Event], AbstractAsyncContextManager[None]] | None = None,
) -> None:
    """Start `server`, publish its address, and shut it down on SIGINT, SIGTERM or the event of `while_serving`.

    Args:
        server: Server to start.
        config: Configuration with the address file and the drain time.
        while_serving: Returns a context that is entered once the server serves, and exited before the server drains. It
            receives an event that it may set to stop the service. None for no context.

    Raises:
        SystemExit: The server cannot listen on an address; the message names the setting.
    """
    raise_descriptor_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        await server.start()
    except ListenError as error:
        raise SystemExit(f'{config.service}: {error}') from error
    _log.info('serving', address=server.address)
    if config.address_file is not None:
        write_address_file(config.address_file, service=config.service, address=server.address)
    async with nullcontext() if while_serving is None else while_serving(stopping):
        await stopping.wait()
    _log.info('draining', seconds=config.drain_seconds)
    await server.stop()


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of open file descriptors to its hard limit, up to about a million."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        # Some systems refuse the value that they report as the hard limit.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def write_address_file(path: Path, *, service: str, address: str) -> None:
    """Write service name, address and process id to a file, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({'service': service, 'address': address, 'pid': os.getpid()})
    temporary = path.with_suffix(f'.{os.getpid()}')
    temporary.write_text(content, encoding='utf-8')
    temporary.replace(path)


def _gate(limits: LimitsConfig) -> ByteGate:
    return ByteGate(
        tenant_bytes=limits.bytes_per_tenant,
        total_bytes=limits.bytes_in_all,
        wait_seconds=limits.bytes_wait.total_seconds(),
    )


def default_timeouts() -> dict[str, float]:
    """Return the default timeouts in seconds, with keys such as `/package.Service/Method`."""
    timeouts: dict[str, float] = {}
    for entry in json.loads(service_config_json())['methodConfig']:
        if 'timeout' in entry:
            for name in entry['name']:
                timeouts[f'/{name["service"]}/{name["method"]}'] = float(entry['timeout'].rstrip('s'))
    return timeouts


def _server_endpoint(servicer: server_service_pb2_grpc.ServerServiceServicer) -> Endpoint:
    return Endpoint(
        server_service_pb2.DESCRIPTOR.services_by_name['ServerService'],
        servicer,
        server_service_pb2_grpc.add_ServerServiceServicer_to_server,
    )
