"""Where weights come from: the checkpoint service, or another sampler that relays its versions.

A relay is only ever a shortcut. Where it is gone, does not answer soon, or lacks what is wanted, the
checkpoint service is asked at once, and the relay again when the fleet names one anew.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta

import grpc
import structlog

from services.kit.caller import Caller
from services.kit.errors import DomainError
from services.kit.rpc.channel import open_channel
from services.kit.rpc.context import acting_for
from services.kit.rpc.weights import ReceivedState, WeightClient
from services.kit.tls import TlsConfig
from services.kit.weights import Segments
from services.sampler.backends.checkpoint_client import CheckpointClient, held_by, weights_of
from services.sampler.domain.adapter import AdapterWeights, CheckpointFacts
from services.sampler.ports import Synced, WeightUpdate

_log = structlog.get_logger('weights')


class WeightSources:
    """Implements `ports.WeightSource` over the places that are known now.

    Concurrency: for one event loop.
    """

    def __init__(
        self,
        checkpoint_address: str = '',
        *,
        internal_token: str = '',
        tls: TlsConfig | None = None,
        segments: Segments | None = None,
        patience: timedelta = timedelta(seconds=5),
    ) -> None:
        """Ask the checkpoint service at that address; without one, wait until it is told.

        Args:
            checkpoint_address: 'host:port', or empty.
            internal_token: The deployment's.
            tls: This sampler's. Unset: plaintext.
            segments: Memory that may be shared with other services of this host. Unset: bytes are sent.
            patience: How long a relay may be silent while it owes something: its first answer, or the rest of a
                version. However long a version takes, it is let finish while its frames come.
        """
        self._internal_token = internal_token
        self._tls = tls or TlsConfig()
        self._segments = segments
        self._patience = patience
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._relayed_count: Counter[str] = Counter()
        """Streams from each relay."""
        self._checkpoint: CheckpointClient | None = None
        self._checkpoint_address = checkpoint_address
        self._is_configured = bool(checkpoint_address)
        self._relay_address = ''
        self._moved = asyncio.Event()
        if checkpoint_address:
            self._checkpoint = self._open_checkpoint(checkpoint_address)

    def use_checkpoint(self, address: str) -> None:
        """Take the checkpoint service that the fleet names; the one that was configured stays."""
        if not self._is_configured and address != self._checkpoint_address:
            self._checkpoint_address = address
            self._checkpoint = self._open_checkpoint(address)
            self._tell()

    def use_relay(self, address: str) -> None:
        """Take versions from another sampler from now on; empty: from the checkpoint service."""
        if address != self._relay_address:
            self._relay_address = address
            self._tell()

    async def close(self) -> None:
        """Close all channels."""
        for channel in list(self._channels.values()):
            await channel.close()

    async def follow(
        self, caller: Caller, adapter_id: str, held: AdapterWeights | None
    ) -> AsyncGenerator[WeightUpdate, None]:
        """Yield versions as they come; see the port. It moves when the fleet names another place."""
        failed_relay = ''
        while True:
            moved, address = self._moved, self._relay_address
            is_relayed = address not in ('', failed_relay)
            stream = (
                self._relayed(caller, adapter_id, held, address)
                if is_relayed
                else self._direct(caller, adapter_id, held)
            )
            async with aclosing(_until(stream, moved)) as updates:
                async for update in updates:
                    held = update if isinstance(update, AdapterWeights) else held
                    yield update
            if not moved.is_set():
                failed_relay = address

    async def fetch(self, caller: Caller, adapter_id: str, version: int) -> AdapterWeights:
        """Return one version; see the port."""
        return await (await self._source()).fetch(caller, adapter_id, version)

    async def find_checkpoint(self, caller: Caller, path: str) -> CheckpointFacts:
        """Return what a checkpoint is now; see the port."""
        return await (await self._source()).find_checkpoint(caller, path)

    async def fetch_checkpoint(self, caller: Caller, path: str) -> AdapterWeights:
        """Return a checkpoint's weights; see the port."""
        return await (await self._source()).fetch_checkpoint(caller, path)

    async def _source(self) -> CheckpointClient:
        """Return the checkpoint service, once it is known."""
        while self._checkpoint is None:
            await self._moved.wait()
        return self._checkpoint

    async def _direct(
        self, caller: Caller, adapter_id: str, held: AdapterWeights | None
    ) -> AsyncGenerator[WeightUpdate, None]:
        source = await self._source()
        async with aclosing(source.follow(caller, adapter_id, held)) as updates:
            async for update in updates:
                yield update

    async def _relayed(
        self, caller: Caller, adapter_id: str, held: AdapterWeights | None, address: str
    ) -> AsyncGenerator[WeightUpdate, None]:
        """Yield what a relay sends, until that ends for whatever reason."""
        async with (
            self._relay(address) as client,
            aclosing(client.follow(adapter_id, **held_by(held), is_retried=False, patience=self._patience)) as events,
        ):
            while True:
                try:
                    with acting_for(caller):
                        event = await anext(events)
                except (DomainError, StopAsyncIteration) as error:
                    _log.info('a relay is of no use now', relay=address, adapter=adapter_id, error=repr(error))
                    return
                yield weights_of(event) if isinstance(event, ReceivedState) else Synced()

    @asynccontextmanager
    async def _relay(self, address: str) -> AsyncGenerator[WeightClient, None]:
        """Connect to a relay. Relays come and go: the channel is closed with the last stream from it."""
        self._relayed_count[address] += 1
        try:
            yield WeightClient(self._channel(address, 'sampler'), segments=self._segments)
        finally:
            self._relayed_count[address] -= 1
            if not self._relayed_count[address]:
                del self._relayed_count[address]
                # There is none where none could be opened.
                if (channel := self._channels.pop(address, None)) is not None:
                    await channel.close()

    def _open_checkpoint(self, address: str) -> CheckpointClient:
        return CheckpointClient(self._channel(address, 'checkpoint'), segments=self._segments)

    def _channel(self, address: str, service: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(
                address, internal_token=self._internal_token, tls=self._tls, service=service
            )
        return self._channels[address]

    def _tell(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


async def _until(
    stream: AsyncGenerator[WeightUpdate, None], moved: asyncio.Event
) -> AsyncGenerator[WeightUpdate, None]:
    """Yield what `stream` brings until it ends or `moved` is set."""
    moving = asyncio.ensure_future(moved.wait())
    try:
        async with aclosing(stream):
            while (update := await _next(stream, moving)) is not None:
                yield update
    finally:
        moving.cancel()


async def _next(stream: AsyncGenerator[WeightUpdate, None], moving: asyncio.Future[bool]) -> WeightUpdate | None:
    """Return the next update; None where there is none, or `moving` was done first."""
    coming = asyncio.ensure_future(anext(stream, None))
    try:
        await asyncio.wait({coming, moving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})
    return None if coming.cancelled() else coming.result()
