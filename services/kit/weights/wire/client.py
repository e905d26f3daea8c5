"""Client of the checkpoint service for trainers and samplers, which transfers complete and verified states.

An interrupted reception continues at the byte where it stopped, and an interrupted publication is repeated. If both
ends share memory, states are passed in shared memory. Otherwise, large states arrive over a device transport if both
ends have one, and a follower receives a version as a delta against its last version if this saves enough bytes.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc

from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import PackedState, StateChunk, iter_chunks
from twinkle.checkpoint_engine.packing import StatePlan
from twinkle_services.kit.errors import DomainError, MemoryNotShared
from twinkle_services.kit.rpc.status import error_from_call
from twinkle_services.kit.weights import Devices, Segments
from twinkle_services.kit.weights.wire.convert_frames import (
    encodings_to_proto,
    frame_of,
    segment_to_proto,
    transports_to_proto,
)
from twinkle_services.kit.weights.wire.convert_manifest import fill_manifest
from twinkle_services.kit.weights.wire.handlers import WeightStreamStub
from twinkle_services.kit.weights.wire.outgoing import Outgoing, place
from twinkle_services.kit.weights.wire.receiver import (
    DeviceOffers,
    EncodingFailed,
    Memory,
    ReceivedState,
    Receiver,
    broken_stream,
)

_FIRST_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Synced:
    """Reports that the newest version was received; later versions follow when they are published."""


class WeightClient:
    """Transfers states to and from the checkpoint service, on behalf of the current caller."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        attempts: int = 8,
        segments: Segments | None = None,
        devices: Devices | None = None,
    ) -> None:
        """Create a client.

        Args:
            channel: Channel of `open_channel` to the checkpoint service or a relaying sampler. The caller closes it.
            attempts: Number of attempts after which a publication or a fetch fails. Progress of a fetch restarts the
                count. `follow` retries without a limit.
            segments: Shared memory, used while the other end can open it. None: bytes are sent over gRPC.
            devices: Device transports for received states, used until one fails. None: bytes arrive over gRPC.
        """
        self._stub = WeightStreamStub(channel)
        self._attempts = attempts
        self._memory = Memory(segments)
        self._devices = DeviceOffers(devices)

    async def publish_version(
        self, adapter_id: str, state: PackedState | StatePlan, *, version: int, is_pinned: bool = False
    ) -> weights_pb2.AdapterVersion:
        """Publish `state` as the newest version of the adapter.

        Idempotency: publishing the same version with the same state again returns the same result.

        Raises:
            DomainError: Any error of the method Publish.
        """
        target = weights_pb2.VersionTarget(version=version, is_pinned=is_pinned)
        header = weights_pb2.FrameHeader(adapter_id=adapter_id, version=target)
        return (await self._publish(header, state)).version

    async def save_checkpoint(
        self, adapter_id: str, state: PackedState | StatePlan, target: weights_pb2.CheckpointTarget
    ) -> wire.PublishResponse:
        """Save `state` as a durable checkpoint, which the response describes.

        Raises:
            DomainError: Any error of the method Publish.
        """
        return await self._publish(weights_pb2.FrameHeader(adapter_id=adapter_id, checkpoint=target), state)

    async def fetch_version(self, adapter_id: str, version: int = 0) -> ReceivedState:
        """Return the weights of a version; 0 selects the newest one.

        Raises:
            DomainError: Any error of the method Fetch.
        """
        reference = wire.VersionRef(adapter_id=adapter_id, version=version)
        return await self._fetch(wire.FetchRequest(version=reference, is_adapter_only=True))

    async def fetch_checkpoint(self, checkpoint_path: str, *, is_adapter_only: bool = False) -> ReceivedState:
        """Return the state of a checkpoint.

        Raises:
            DomainError: Any error of the method Fetch.
        """
        return await self._fetch(wire.FetchRequest(checkpoint_path=checkpoint_path, is_adapter_only=is_adapter_only))

    async def follow(
        self,
        adapter_id: str,
        *,
        held_version: int = 0,
        held: PackedState | None = None,
        is_retried: bool = True,
        patience: timedelta | None = None,
    ) -> AsyncGenerator[ReceivedState | Synced, None]:
        """Yield the adapter's newest version and later ones, across restarts of the service.

        `Synced` is yielded when no newer version exists. A slow consumer misses versions. Close the generator with
        `contextlib.aclosing` to end the stream. The generator keeps the last state in memory as the base of deltas.

        Args:
            adapter_id: Adapter to follow.
            held_version: Version that the caller has; only later ones are yielded.
            held: State of `held_version`, used as the base of a delta. None: the next version is sent without a delta.
            is_retried: Whether to reconnect after the stream finishes or breaks. If False, the generator finishes
                instead, unless the accepted encodings have changed.
            patience: Maximum time between two messages, until the newest version is received and during later
                transfers. A longer silence counts as a broken stream. None for no limit.

        Raises:
            DomainError: An error that is not transient, such as an adapter without published versions.
        """
        receiver = Receiver(self._memory, self._devices, held_version=held_version, held=held)
        backoff = _Backoff()
        while True:
            offered = receiver.encodings
            async with aclosing(self._events(adapter_id, receiver, patience)) as events:
                async for event in events:
                    backoff.reset()
                    yield event
            if not is_retried and receiver.encodings == offered:
                return
            await backoff.pause()

    async def _events(
        self, adapter_id: str, receiver: Receiver, patience: timedelta | None
    ) -> AsyncGenerator[ReceivedState | Synced, None]:
        """Yield the events of one stream until it finishes or fails with a transient error."""
        offered = receiver.encodings
        call = self._stub.subscribe(_subscription(adapter_id, receiver))
        messages = _translated(call)
        is_synced = False
        try:
            # A synchronized stream may be silent for days.
            while message := await _next(messages, None if is_synced and not receiver.partial_version else patience):
                event = await _event(receiver, message)
                is_synced = is_synced or isinstance(event, Synced)
                if event is not None:
                    yield event
                if receiver.encodings != offered:
                    return  # reconnect to offer the new encodings, such as deltas to the received state
        except DomainError as error:
            if not error.disposition.is_transient:
                raise
        finally:
            call.cancel()

    async def _publish(self, header: weights_pb2.FrameHeader, state: PackedState | StatePlan) -> wire.PublishResponse:
        outgoing = await asyncio.to_thread(place, state, self._memory.segments)
        fill_manifest(header.manifest, outgoing.state.manifest)
        try:
            return await self._send_outgoing(header, outgoing)
        finally:
            outgoing.close()

    async def _send_outgoing(self, header: weights_pb2.FrameHeader, outgoing: Outgoing) -> wire.PublishResponse:
        if outgoing.segment is not None:
            header.encoding = weights_pb2.FRAME_ENCODING_SHARED_MEMORY
            header.segment.CopyFrom(segment_to_proto(outgoing.segment.ref))
            try:
                return await self._send(header, outgoing.state)
            except DomainError as error:
                if error.reason != MemoryNotShared.reason:
                    raise
                self._memory.give_up()
            header.ClearField('segment')
        header.encoding = weights_pb2.FRAME_ENCODING_WHOLE
        header.encoded_size_bytes = outgoing.state.manifest.size_bytes
        return await self._send(header, outgoing.state)

    async def _send(self, header: weights_pb2.FrameHeader, state: PackedState) -> wire.PublishResponse:
        backoff = _Backoff()
        while True:
            try:
                return await self._stub.publish(_frames(header, state))
            except grpc.aio.AioRpcError as failure:
                error = error_from_call(failure, service='checkpoint')
                if not error.disposition.is_transient or backoff.count + 1 >= self._attempts:
                    raise error from failure
            await backoff.pause()

    async def _fetch(self, request: wire.FetchRequest) -> ReceivedState:
        receiver = Receiver(self._memory, self._devices)
        backoff = _Backoff()
        while True:
            request.offset = begin = receiver.offset
            request.host_id = receiver.host_id
            request.accepted_transports[:] = transports_to_proto(receiver.transports)
            try:
                return await self._fetch_once(request, receiver)
            except EncodingFailed:
                continue
            except DomainError as error:
                has_progressed = receiver.offset > begin
                is_last = not has_progressed and backoff.count + 1 >= self._attempts
                if not error.disposition.is_transient or is_last:
                    raise
            if has_progressed:
                backoff.reset()
            await backoff.pause()

    async def _fetch_once(self, request: wire.FetchRequest, receiver: Receiver) -> ReceivedState:
        call = self._stub.fetch(request)
        received: ReceivedState | None = None
        try:
            async for message in _translated(call):
                received = await receiver.take(frame_of(message))
        finally:
            call.cancel()
        if received is None:
            raise broken_stream()
        return received


class _Backoff:
    """Waits longer after each failure, up to a limit."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    async def pause(self) -> None:
        await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2**self.count, _MAX_PAUSE_SECONDS))
        self.count = min(self.count + 1, 32)


def _subscription(adapter_id: str, receiver: Receiver) -> wire.SubscribeRequest:
    return wire.SubscribeRequest(
        adapter_id=adapter_id,
        held_version=receiver.held_version,
        resume_version=receiver.partial_version,
        resume_offset=receiver.offset,
        resume_digest=receiver.resume_digest,
        accepted_encodings=encodings_to_proto(receiver.encodings),
        host_id=receiver.host_id,
        accepted_transports=transports_to_proto(receiver.transports),
    )


async def _event(receiver: Receiver, message: StateChunk | wire.SubscribeResponse) -> ReceivedState | Synced | None:
    if isinstance(message, wire.SubscribeResponse) and not message.HasField('frame'):
        return Synced()
    return await receiver.take(frame_of(message))


async def _frames(
    header: weights_pb2.FrameHeader, state: PackedState
) -> AsyncIterator[StateChunk | wire.PublishRequest]:
    announced = wire.PublishRequest()
    announced.frame.header.CopyFrom(header)
    yield announced
    if header.encoding == weights_pb2.FRAME_ENCODING_WHOLE:
        for chunk in iter_chunks(state.data):
            yield chunk
    commit = weights_pb2.FrameCommit(digest=state.manifest.digest)
    yield wire.PublishRequest(frame=weights_pb2.WeightFrame(commit=commit))


async def _next(messages: AsyncIterator[Any], patience: timedelta | None) -> Any:
    """Return the next message, or None at the end.

    Raises:
        DomainError: The stream failed or was silent for longer than `patience`.
    """
    try:
        async with asyncio.timeout(patience.total_seconds() if patience else None):
            return await anext(messages, None)
    except TimeoutError as silence:
        raise broken_stream() from silence


async def _translated(call: Any) -> AsyncIterator[Any]:
    """Yield the responses of `call`, and raise its failure as a domain error."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as failure:
        raise error_from_call(failure, service='checkpoint') from failure
