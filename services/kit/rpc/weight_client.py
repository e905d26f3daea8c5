"""The checkpoint service as trainers and samplers use it: whole, verified states in and out.

A transfer that breaks is taken up again at the byte where it broke; a caller sees a state only
when all of it has come and its digest is right.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from services.kit.errors import Code, DomainError, ServiceUnreachable
from services.kit.rpc.status import error_from_call
from services.kit.rpc.weights import chunk_from_proto, chunk_to_proto, manifest_from_proto, manifest_to_proto
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2_grpc, weights_pb2
from twinkle.checkpoint_engine import Assembler, PackedState, StateError, iter_chunks

_TRANSIENT = {Code.UNAVAILABLE, Code.DATA_LOSS, Code.RESOURCE_EXHAUSTED}
"""Codes after which the same transfer may go on."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class ReceivedState:
    """A state, whole and verified."""

    header: weights_pb2.FrameHeader
    """Says what it is: `adapter_id`, and `version` or `checkpoint`."""
    state: PackedState


@dataclass(frozen=True)
class Synced:
    """The newest version has been received; later ones follow when they are published."""


class WeightClient:
    """Moves states to and from the checkpoint service, on behalf of the current caller."""

    def __init__(self, channel: grpc.aio.Channel, *, attempts: int = 8) -> None:
        """Use a channel of `open_channel`, which stays the caller's to close.

        Args:
            channel: Leads to the checkpoint service.
            attempts: How often a transfer that does not move is tried before it fails.
        """
        # The generated stubs are typed for any channel; grpc.aio's is the one they run on.
        self._stub = weight_stream_service_pb2_grpc.WeightStreamServiceStub(channel)
        self._attempts = attempts

    async def publish_version(
        self, adapter_id: str, state: PackedState, *, version: int, is_pinned: bool = False
    ) -> weights_pb2.AdapterVersion:
        """Make `state` the adapter's newest version.

        Idempotency: the same version with the same state again is answered like the first time.

        Raises:
            DomainError: as the contract of Publish says.
        """
        target = weights_pb2.VersionTarget(version=version, is_pinned=is_pinned)
        header = weights_pb2.FrameHeader(adapter_id=adapter_id, version=target)
        return (await self._publish(header, state)).version

    async def save_checkpoint(
        self, adapter_id: str, state: PackedState, target: weights_pb2.CheckpointTarget
    ) -> wire.PublishResponse:
        """Keep `state` as a durable checkpoint; the answer's `checkpoint` says where.

        Raises:
            DomainError: as the contract of Publish says.
        """
        return await self._publish(weights_pb2.FrameHeader(adapter_id=adapter_id, checkpoint=target), state)

    async def fetch_version(self, adapter_id: str, version: int = 0) -> ReceivedState:
        """Return a version's adapter weights; 0 is the newest.

        Raises:
            DomainError: as the contract of Fetch says.
        """
        reference = wire.VersionRef(adapter_id=adapter_id, version=version)
        return await self._fetch(wire.FetchRequest(version=reference, is_adapter_only=True))

    async def fetch_checkpoint(self, checkpoint_path: str, *, is_adapter_only: bool = False) -> ReceivedState:
        """Return a checkpoint's state.

        Raises:
            DomainError: as the contract of Fetch says.
        """
        return await self._fetch(wire.FetchRequest(checkpoint_path=checkpoint_path, is_adapter_only=is_adapter_only))

    async def follow(self, adapter_id: str, *, held_version: int = 0) -> AsyncGenerator[ReceivedState | Synced, None]:
        """Yield the adapter's newest version and every later one, across restarts of the service.

        Versions that come faster than they are taken are skipped. The stream is closed with the
        generator (`contextlib.aclosing`).

        Args:
            adapter_id: The adapter.
            held_version: Only later ones are wanted.

        Raises:
            DomainError: what waiting does not cure, such as an adapter that was never published.
        """
        receiver = _Receiver(held_version)
        backoff = _Backoff()
        while True:
            async with aclosing(self._events(adapter_id, receiver)) as events:
                async for event in events:
                    backoff.reset()
                    yield event
            await backoff.pause()

    async def _events(self, adapter_id: str, receiver: '_Receiver') -> AsyncGenerator[ReceivedState | Synced, None]:
        """Yield what one stream brings, until it ends or breaks in a way that another one cures."""
        request = wire.SubscribeRequest(
            adapter_id=adapter_id,
            held_version=receiver.held_version,
            resume_version=receiver.half_version,
            resume_offset=receiver.offset,
        )
        call = self._stub.Subscribe(request)
        try:
            async for response in _translated(call):
                event = receiver.take(response.frame) if response.HasField('frame') else Synced()
                if event is not None:
                    yield event
        except DomainError as error:
            if error.code not in _TRANSIENT:
                raise
        finally:
            call.cancel()

    async def _publish(self, header: weights_pb2.FrameHeader, state: PackedState) -> wire.PublishResponse:
        header.manifest.CopyFrom(manifest_to_proto(state.manifest))
        header.encoding = weights_pb2.FRAME_ENCODING_WHOLE
        header.encoded_size_bytes = state.manifest.size_bytes
        backoff = _Backoff()
        while True:
            try:
                return await self._stub.Publish(_frames(header, state))
            except grpc.aio.AioRpcError as failure:
                error = error_from_call(failure, service='checkpoint')
                if error.code not in _TRANSIENT or backoff.count + 1 >= self._attempts:
                    raise error from failure
            await backoff.pause()

    async def _fetch(self, request: wire.FetchRequest) -> ReceivedState:
        receiver = _Receiver()
        backoff = _Backoff()
        while True:
            request.offset = begin = receiver.offset
            try:
                return await self._fetch_on(request, receiver)
            except DomainError as error:
                if error.code not in _TRANSIENT or backoff.count + 1 >= self._attempts:
                    raise
            if receiver.offset > begin:
                backoff.reset()
            await backoff.pause()

    async def _fetch_on(self, request: wire.FetchRequest, receiver: '_Receiver') -> ReceivedState:
        call = self._stub.Fetch(request)
        received: ReceivedState | None = None
        try:
            async for response in _translated(call):
                received = receiver.take(response.frame)
        finally:
            call.cancel()
        if received is None:
            raise _broken()
        return received


class _Backoff:
    """Waits longer after each failure, up to a bound."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    async def pause(self) -> None:
        await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2**self.count, _LONGEST_PAUSE_SECONDS))
        self.count = min(self.count + 1, 32)


class _Receiver:
    """Puts the states of one stream together, and of the streams that take it up."""

    def __init__(self, held_version: int = 0) -> None:
        self._header: weights_pb2.FrameHeader | None = None
        self._assembler: Assembler | None = None
        self.held_version = held_version

    @property
    def half_version(self) -> int:
        """The version that is half received; 0 for none."""
        return self._header.version.version if self._header is not None and self._assembler is not None else 0

    @property
    def offset(self) -> int:
        """How many bytes of it are held."""
        return self._assembler.next_offset if self._assembler is not None else 0

    def take(self, frame: weights_pb2.WeightFrame) -> ReceivedState | None:
        """Take the next frame; return the state it completed, if it did.

        Raises:
            DomainError: the frame is damaged; what was held before it is kept.
        """
        try:
            return self._take(frame)
        except StateError as error:
            raise _broken() from error

    def _take(self, frame: weights_pb2.WeightFrame) -> ReceivedState | None:
        if frame.HasField('header'):
            self._begin(frame.header)
        elif self._assembler is None or self._header is None:
            raise _broken()
        elif frame.HasField('chunk'):
            self._assembler.add(chunk_from_proto(frame.chunk))
        else:
            assembler, self._assembler = self._assembler, None
            state = assembler.finish()
            self.held_version = self._header.version.version
            return ReceivedState(self._header, state)
        return None

    def _begin(self, header: weights_pb2.FrameHeader) -> None:
        manifest = manifest_from_proto(header.manifest, 'frame.header.manifest')
        held = self._assembler
        is_continued = held is not None and held.manifest == manifest and held.next_offset == header.resume_offset
        if not is_continued:
            self._assembler = Assembler(manifest)
        self._header = header


def _broken() -> DomainError:
    return ServiceUnreachable('checkpoint')


async def _frames(header: weights_pb2.FrameHeader, state: PackedState) -> AsyncIterator[wire.PublishRequest]:
    yield wire.PublishRequest(frame=weights_pb2.WeightFrame(header=header))
    for chunk in iter_chunks(state.data):
        yield wire.PublishRequest(frame=weights_pb2.WeightFrame(chunk=chunk_to_proto(chunk)))
    commit = weights_pb2.FrameCommit(digest=state.manifest.digest)
    yield wire.PublishRequest(frame=weights_pb2.WeightFrame(commit=commit))


async def _translated(call: Any) -> AsyncIterator[Any]:
    """Yield the responses of `call`; its failure is raised as a domain error."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as failure:
        raise error_from_call(failure, service='checkpoint') from failure
