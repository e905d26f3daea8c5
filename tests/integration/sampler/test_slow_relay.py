"""A relay whose frames arrive slowly, or stop in the middle of a version."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from datetime import timedelta
from typing import Any

import grpc
import pytest

from fixtures.checkpoint_service import ALICE
from fixtures.weight_peers import ADAPTER_ID, weights_of
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import StateChunk, iter_chunks
from twinkle_services.kit.weights.wire import add_weight_stream
from twinkle_services.kit.weights.wire.convert_manifest import manifest_to_proto
from twinkle_services.sampler.backends.weight_sources import WeightSources
from twinkle_services.sampler.domain.adapter import AdapterWeights

CHUNKS = 8
PATIENCE = timedelta(seconds=2)
PAUSE_SECONDS = PATIENCE.total_seconds() / 5


class Relay:
    """Sends versions in chunks with a pause before each chunk, and stops after some chunks."""

    def __init__(self, *versions: int, stops_after: int = 2 * CHUNKS) -> None:
        self._versions = versions
        self._stops_after = stops_after
        self.sent_count = 0

    async def Subscribe(  # noqa: N802 (the contract's name)
        self, request: wire.SubscribeRequest, context: Any
    ) -> AsyncIterator[StateChunk | wire.SubscribeResponse]:
        del context
        for version in self._versions:
            if version > request.held_version:
                async for message in self._send(version):
                    yield message
                yield wire.SubscribeResponse(is_synced=True)
        await asyncio.get_running_loop().create_future()

    async def _send(self, version: int) -> AsyncIterator[StateChunk | wire.SubscribeResponse]:
        state = weights_of(version, CHUNKS << 20)
        header = weights_pb2.FrameHeader(
            adapter_id=ADAPTER_ID,
            version=weights_pb2.VersionTarget(version=version),
            manifest=manifest_to_proto(state.manifest),
            encoding=weights_pb2.FRAME_ENCODING_WHOLE,
            encoded_size_bytes=state.manifest.size_bytes,
        )
        yield wire.SubscribeResponse(frame=weights_pb2.WeightFrame(header=header))
        for chunk in iter_chunks(state.data):
            if self.sent_count == self._stops_after:
                await asyncio.get_running_loop().create_future()
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=PAUSE_SECONDS)
            self.sent_count += 1
            yield chunk
        commit = weights_pb2.FrameCommit(digest=state.manifest.digest)
        yield wire.SubscribeResponse(frame=weights_pb2.WeightFrame(commit=commit))

    async def Fetch(self, request: wire.FetchRequest, context: Any) -> AsyncIterator[wire.FetchResponse]:  # noqa: N802
        del request, context
        yield wire.FetchResponse()

    async def Publish(self, frames: Any, context: Any) -> wire.PublishResponse:  # noqa: N802
        del frames, context
        return wire.PublishResponse()

    async def serve(self, stack: AsyncExitStack) -> str:
        """Serve until the stack is unwound; return the address."""
        server = grpc.aio.server()
        add_weight_stream(self, server)
        port = server.add_insecure_port('127.0.0.1:0')
        await server.start()
        stack.push_async_callback(server.stop, None)
        return f'127.0.0.1:{port}'


@pytest.mark.parametrize(
    ('stops_after', 'expected'),
    [
        (CHUNKS + 2, [(1, 1), (3, 1)]),
        pytest.param(2 * CHUNKS, [(1, 1), (2, 2)], marks=pytest.mark.slow),
        pytest.param(2, [(3, 0)], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
async def test_relay_is_abandoned_only_when_frames_stop(stops_after: int, expected: list[tuple[int, int]]) -> None:
    """A relay is abandoned if it stops sending within a version, but not because a version takes long."""
    relay, checkpoint = Relay(1, 2, stops_after=stops_after), Relay(3)
    seen: list[tuple[int, int]] = []
    async with AsyncExitStack() as stack:
        sources = WeightSources(await checkpoint.serve(stack), patience=PATIENCE)
        stack.push_async_callback(sources.close)
        sources.use_relay(await relay.serve(stack))
        async with asyncio.timeout(90), aclosing(sources.follow(ALICE, ADAPTER_ID, None)) as updates:
            while len(seen) < len(expected):
                update = await anext(updates)
                if isinstance(update, AdapterWeights):
                    # Only complete versions count, because chunks of the next version may have been sent already.
                    seen.append((update.version, relay.sent_count // CHUNKS))
    assert seen == expected
