"""Minimum rate of upload bodies, and the errors of interrupted uploads."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from twinkle_services.gateway.catalogue.rules import Checkpoint, UploadRequest
from twinkle_services.gateway.http.body import ClientDisconnected
from twinkle_services.gateway.http.call import HttpCall, JsonResponse
from twinkle_services.gateway.tinker.archives import UploadRoutes
from twinkle_services.gateway.tinker.base_models import BaseModels
from twinkle_services.kit.errors import DeadlinePassed, StreamOutOfOrder

CHECKPOINT = Checkpoint(
    checkpoint_id='ad-1/weights/mine',
    tenant_id='alice',
    run_id='ad-1',
    name='mine',
    path='twinkle://ad-1/weights/mine',
    base_model='org/tiny',
    is_optimizer_included=False,
    size_bytes=1,
    step_count=0,
    digest='',
    folder='',
    create_time=datetime(2026, 1, 1, tzinfo=UTC),
)


class FakeCheckpoints:
    """Fake checkpoint service that accepts complete uploads only."""

    def __init__(self) -> None:
        self.received_bytes = 0

    async def upload(self, order: UploadRequest, pieces: AsyncIterator[bytes], *, offset: int) -> Checkpoint:
        """Receive the bytes of an upload, and return its checkpoint if it is complete."""
        assert offset == 0
        async for piece in pieces:
            self.received_bytes += len(piece)
        if self.received_bytes < order.size_bytes:
            raise StreamOutOfOrder.at_byte(self.received_bytes)
        return CHECKPOINT


class FastLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock can be advanced."""

    passed_seconds = 0.0

    def time(self) -> float:
        """Return the time including the advances."""
        return super().time() + self.passed_seconds


class Sender:
    """Client that sends 100 chunks, each after a fixed time on the event loop's clock."""

    def __init__(self, *, piece_bytes: int, seconds: float) -> None:
        self._piece = bytes(piece_bytes)
        self._seconds = seconds
        self.remaining = 100
        """Number of chunks to send."""
        self.disconnects_at = 0
        """Number of unsent chunks at which the client disconnects; 0 for never."""

    async def receive(self) -> dict[str, Any]:
        """Return the next message."""
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, FastLoop)
        loop.passed_seconds += self._seconds
        self.remaining -= 1
        if self.remaining < self.disconnects_at:
            return {'type': 'http.disconnect'}
        return {'type': 'http.request', 'body': self._piece, 'more_body': self.remaining > 0}

    def call(self, routes: UploadRoutes) -> HttpCall:
        """Return the call of the client."""

        async def send(message: Any) -> None:
            raise AssertionError(message)

        scope = {'path_params': {'name': 'mine'}, 'query_string': b'base_model=org/tiny'}
        headers = {'content-length': str(self.remaining * len(self._piece))}
        return HttpCall(routes.routes()[0], scope, self.receive, send, headers, 'rq-1')


def upload(sender: Sender, checkpoints: FakeCheckpoints) -> JsonResponse:
    """Run an upload on a `FastLoop`, and return its response."""

    async def serve(call: HttpCall) -> Any:
        return await call.route.serve(call)

    with asyncio.Runner(loop_factory=FastLoop) as runner:
        response = runner.run(serve(sender.call(UploadRoutes(cast(Any, checkpoints), BaseModels([])))))
    assert isinstance(response, JsonResponse)
    return response


def test_upload_may_take_hours() -> None:
    """An upload may take hours if its bytes arrive at the minimum rate."""
    checkpoints = FakeCheckpoints()
    sender = Sender(piece_bytes=4 << 20, seconds=120)
    assert (upload(sender, checkpoints)).status == 201
    assert checkpoints.received_bytes == 100 * (4 << 20)


def test_slow_upload_fails_and_its_bytes_are_kept() -> None:
    """An upload that is too slow fails with DeadlinePassed, and the received bytes are kept."""
    checkpoints = FakeCheckpoints()
    with pytest.raises(DeadlinePassed):
        upload(Sender(piece_bytes=1000, seconds=4), checkpoints)
    assert 0 < checkpoints.received_bytes < 100_000


def test_disconnected_upload_keeps_its_bytes() -> None:
    """The bytes received before a client disconnects are kept."""
    checkpoints = FakeCheckpoints()
    sender = Sender(piece_bytes=1000, seconds=0)
    sender.disconnects_at = 50
    with pytest.raises(ClientDisconnected):
        upload(sender, checkpoints)
    assert checkpoints.received_bytes == 50_000
