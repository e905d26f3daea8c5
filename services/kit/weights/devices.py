"""Device transports of a service that its configuration names, and transfers over them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Literal, Self, TypeVar

import numpy as np
import structlog
from pydantic import BaseModel, ConfigDict, Field

from twinkle.checkpoint_engine import (
    TransferFailed,
    TransportOptions,
    TransportUnavailable,
    WeightTransport,
    load_transport,
)
from twinkle_services.kit.errors import ServiceUnreachable
from twinkle_services.kit.weights.frames import DeviceTransfer
from twinkle_services.kit.weights.state_bytes import StateBytes
from twinkle_services.kit.worker import Threads

_log = structlog.get_logger('weights')

_Result = TypeVar('_Result')


class DevicesConfig(BaseModel):
    """Settings of the transports that replace gRPC for large states. Both services must name the transport."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    names: tuple[Literal['gloo', 'nccl', 'nixl', 'cuda_ipc'], ...] = ()
    """Transports that this service uses; as a sender, in order of preference. Empty: gRPC sends all bytes."""
    host: str = '127.0.0.1'
    """Name or address under which other services reach this machine. The default works only on the same machine."""
    min_bytes: int = Field(default=64 << 20, ge=1)
    """Minimum size in bytes of states that are sent over a device transport, because connecting takes time."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Maximum time in seconds to wait for the other service, after which bytes are sent over gRPC."""
    is_unencrypted_allowed: bool = False
    """Whether weights may be sent without encryption although `tls` is configured: no device transport encrypts."""


class Devices:
    """The usable transports of this process.

    Concurrency: use it from one event loop only. Four threads run the steps of all transfers; further steps wait.
    """

    def __init__(self, config: DevicesConfig, *, load: Callable[[str], type[WeightTransport]] = load_transport) -> None:
        """Load the configured transports.

        Args:
            config: Settings.
            load: Returns the class of a transport.

        Raises:
            TransportUnavailable: This machine lacks the library or device of a transport.
        """
        self.names = tuple(config.names)
        """Names of the transports."""
        self._classes = {name: load(name) for name in config.names}
        self._min_bytes = config.min_bytes
        self._options = TransportOptions(config.host, timedelta(seconds=config.timeout_seconds))
        self._threads = Threads('transfer', count=4)

    async def prepare(self, offered: Collection[str], size_bytes: int) -> 'OutgoingState | None':
        """Prepare a transfer to a receiver that offers these transports; return None if gRPC should send the bytes."""
        name = next((name for name in self._classes if name in offered), '')
        if not name or size_bytes < self._min_bytes:
            return None
        transport = self._classes[name](self._options)
        try:
            # Run in a thread, because the transport may resolve a host name.
            rendezvous = await _step(transport, asyncio.to_thread(transport.prepare))
        except TransferFailed as error:
            _log.warning('device transport failed; sending bytes', transport=name, problem=str(error))
            return None
        except asyncio.CancelledError:
            transport.close()
            raise
        transfer = DeviceTransfer(name, rendezvous, self._options.piece_bytes)
        return OutgoingState(transport, transfer, self._threads)

    async def receive(self, transfer: DeviceTransfer, size_bytes: int) -> memoryview:
        """Receive the bytes of a state and return them without verification.

        Raises:
            TransferFailed: The bytes could not be received.
        """
        if transfer.transport not in self._classes:
            raise TransferFailed(f'{transfer.transport!r} was not offered')
        options = replace(self._options, piece_bytes=transfer.piece_bytes)
        transport = self._classes[transfer.transport](options)
        try:
            return await _step(transport, self._threads.run(_receive, transport, transfer, size_bytes))
        finally:
            transport.close()


class OutgoingState:
    """A pending transfer to a receiver. Use it as an asynchronous context manager, which ends the transfer."""

    def __init__(self, transport: WeightTransport, transfer: DeviceTransfer, threads: Threads) -> None:
        """Wrap a prepared transport."""
        self.transfer = transfer
        self._transport = transport
        self._threads = threads

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    async def send(self, source: StateBytes) -> None:
        """Send all bytes of `source` to the receiver, and wait until it has them.

        Raises:
            ServiceUnreachable: The transfer failed. The receiver will request the bytes over gRPC.
        """
        transport, transfer = self._transport, self.transfer
        size_bytes = source.manifest.size_bytes
        try:
            await _step(transport, self._threads.run(transport.init_process_group, transfer.rendezvous))
            for begin in range(0, size_bytes, transfer.piece_bytes):
                piece = await source.read(begin, min(transfer.piece_bytes, size_bytes - begin))
                await _step(transport, self._threads.run(transport.send_weights, piece))
            await _step(transport, self._threads.run(transport.finalize))
        except TransferFailed as error:
            _log.warning('device transfer failed', transport=transfer.transport, problem=str(error))
            raise ServiceUnreachable('subscriber') from error


def open_devices(config: DevicesConfig, *, service: str, is_encrypted: bool) -> Devices:
    """Open the configured transports.

    Args:
        config: Settings.
        service: Name of the service, for the error.
        is_encrypted: Whether the service uses TLS.

    Raises:
        SystemExit: A transport cannot be used on this machine, or would send weights without encryption.
    """
    if config.names and is_encrypted and not config.is_unencrypted_allowed:
        problem = 'device transports do not encrypt, but tls is configured; set is_unencrypted_allowed, or remove names'
        raise SystemExit(f'twinkle-{service}: device_transports: {problem}')
    try:
        return Devices(config)
    except TransportUnavailable as error:
        raise SystemExit(f'twinkle-{service}: device_transports.names: {error}') from error


def _receive(transport: WeightTransport, transfer: DeviceTransfer, size_bytes: int) -> memoryview:
    transport.init_process_group(transfer.rendezvous)
    # Allocated once the sender is connected; unlike a bytearray, the memory is not cleared.
    data = np.empty(size_bytes, np.uint8).data
    for begin in range(0, size_bytes, transfer.piece_bytes):
        transport.receive_weights(data[begin : begin + transfer.piece_bytes])
    transport.finalize()
    return data.toreadonly()


async def _step(transport: WeightTransport, call: Awaitable[_Result]) -> _Result:
    """Wait for a step of a transfer, which runs in a thread.

    Cancellation: the step is aborted, and the cancellation is raised once the step has returned.
    """
    step = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        transport.abort()
        await asyncio.wait([step])
        _ = step.cancelled() or step.exception()
        raise
