"""Fetches weights from the checkpoint service, and follows adapters there or through a sampler that relays versions.

A relay is an optimization. If it cannot be reached, responds too slowly or lacks a version, the stream continues from
the checkpoint service until the fleet names another relay.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta

import grpc
import structlog

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.tls import TlsConfig
from twinkle_services.kit.weights import Devices, Segments
from twinkle_services.kit.weights.wire import ReceivedState, WeightClient
from twinkle_services.sampler.backends.checkpoint_client import CheckpointClient, held_by, weights_of
from twinkle_services.sampler.domain.adapter import AdapterWeights, CheckpointFacts
from twinkle_services.sampler.ports import Synced, WeightUpdate

_log = structlog.get_logger('weights')


class WeightSources:
    """Implements `ports.WeightSource` over the checkpoint service and the current relay.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self,
        checkpoint_address: str = '',
        *,
        internal_token: str = '',
        tls: TlsConfig | None = None,
        segments: Segments | None = None,
        devices: Devices | None = None,
        patience: timedelta = timedelta(seconds=5),
    ) -> None:
        """Create a source.

        Args:
            checkpoint_address: Address of the checkpoint service, `host:port`; if empty, calls wait for
                `use_checkpoint`.
            internal_token: Token of the deployment.
            tls: TLS configuration of this sampler; None for plaintext.
            segments: Shared memory of this host; without it, weights are sent as bytes.
            devices: Device transports of this sampler; without them, gRPC sends all bytes.
            patience: Maximum time without a frame from a relay while its first response or the rest of a version is
                expected. A complete version may take longer, as long as frames arrive.
        """
        self._internal_token = internal_token
        self._tls = tls or TlsConfig()
        self._segments = segments
        self._devices = devices
        self._patience = patience
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._relayed_count: Counter[str] = Counter()
        """Number of open streams from each relay."""
        self._checkpoint: CheckpointClient | None = None
        self._checkpoint_address = checkpoint_address
        self._is_configured = bool(checkpoint_address)
        self._relay_address = ''
        self._source_changed = asyncio.Event()
        if checkpoint_address:
            self._checkpoint = self._open_checkpoint(checkpoint_address)

    def use_checkpoint(self, address: str) -> None:
        """Use the checkpoint service that the fleet names, unless the configuration names one."""
        if not self._is_configured and address != self._checkpoint_address:
            self._checkpoint_address = address
            self._checkpoint = self._open_checkpoint(address)
            self._notify()

    def use_relay(self, address: str) -> None:
        """Follow adapters through the sampler at `address` from now on; empty for the checkpoint service."""
        if address != self._relay_address:
            self._relay_address = address
            self._notify()

    async def close(self) -> None:
        """Close all channels."""
        for channel in list(self._channels.values()):
            await channel.close()

    async def follow(
        self, caller: Caller, adapter_id: str, held: AdapterWeights | None
    ) -> AsyncGenerator[WeightUpdate, None]:
        """Yield versions as they are published; change the source if the fleet names another one or the relay fails."""
        failed_relay = ''
        while True:
            changed, address = self._source_changed, self._relay_address
            is_relayed = address not in ('', failed_relay)
            stream = (
                self._relayed(caller, adapter_id, held, address)
                if is_relayed
                else self._direct(caller, adapter_id, held)
            )
            async with aclosing(_until(stream, changed)) as updates:
                async for update in updates:
                    held = update if isinstance(update, AdapterWeights) else held
                    yield update
            if not changed.is_set():
                failed_relay = address

    async def fetch(self, caller: Caller, adapter_id: str, version: int) -> AdapterWeights:
        return await (await self._checkpoint_service()).fetch(caller, adapter_id, version)

    async def find_checkpoint(self, caller: Caller, path: str) -> CheckpointFacts:
        return await (await self._checkpoint_service()).find_checkpoint(caller, path)

    async def fetch_checkpoint(self, caller: Caller, path: str) -> AdapterWeights:
        return await (await self._checkpoint_service()).fetch_checkpoint(caller, path)

    async def _checkpoint_service(self) -> CheckpointClient:
        """Wait until the address of the checkpoint service is known, and return its client."""
        while self._checkpoint is None:
            await self._source_changed.wait()
        return self._checkpoint

    async def _direct(
        self, caller: Caller, adapter_id: str, held: AdapterWeights | None
    ) -> AsyncGenerator[WeightUpdate, None]:
        source = await self._checkpoint_service()
        async with aclosing(source.follow(caller, adapter_id, held)) as updates:
            async for update in updates:
                yield update

    async def _relayed(
        self, caller: Caller, adapter_id: str, held: AdapterWeights | None, address: str
    ) -> AsyncGenerator[WeightUpdate, None]:
        """Yield the updates of a relay until its stream finishes or fails."""
        async with (
            self._relay(address) as client,
            aclosing(client.follow(adapter_id, **held_by(held), is_retried=False, patience=self._patience)) as events,
        ):
            while True:
                try:
                    with acting_for(caller):
                        event = await anext(events)
                except (DomainError, StopAsyncIteration) as error:
                    _log.info('relay stream ended', relay=address, adapter=adapter_id, error=repr(error))
                    return
                yield weights_of(event) if isinstance(event, ReceivedState) else Synced()

    @asynccontextmanager
    async def _relay(self, address: str) -> AsyncGenerator[WeightClient, None]:
        """Connect to a relay. Its channel is closed when the last stream from it is closed."""
        self._relayed_count[address] += 1
        try:
            yield WeightClient(self._channel(address, 'sampler'), segments=self._segments, devices=self._devices)
        finally:
            self._relayed_count[address] -= 1
            if not self._relayed_count[address]:
                del self._relayed_count[address]
                # The channel is missing if opening it failed.
                if (channel := self._channels.pop(address, None)) is not None:
                    await channel.close()

    def _open_checkpoint(self, address: str) -> CheckpointClient:
        return CheckpointClient(self._channel(address, 'checkpoint'), segments=self._segments, devices=self._devices)

    def _channel(self, address: str, service: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(
                address, internal_token=self._internal_token, tls=self._tls, service=service
            )
        return self._channels[address]

    def _notify(self) -> None:
        self._source_changed.set()
        self._source_changed = asyncio.Event()


async def _until(
    stream: AsyncGenerator[WeightUpdate, None], changed: asyncio.Event
) -> AsyncGenerator[WeightUpdate, None]:
    """Yield the updates of `stream` until it finishes or `changed` is set."""
    change = asyncio.ensure_future(changed.wait())
    try:
        async with aclosing(stream):
            while (update := await _next(stream, change)) is not None:
                yield update
    finally:
        change.cancel()


async def _next(stream: AsyncGenerator[WeightUpdate, None], change: asyncio.Future[bool]) -> WeightUpdate | None:
    """Return the next update; None if the stream has finished or `change` completed first."""
    update = asyncio.ensure_future(anext(stream, None))
    try:
        await asyncio.wait({update, change}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not update.done():
            update.cancel()
            await asyncio.wait({update})
    return None if update.cancelled() else update.result()
