"""Bodies of uploads: how long they may take, and what is told of one that ends early."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from services.gateway.catalogue.rules import Checkpoint, UploadRequest
from services.gateway.http.body import ClientGone
from services.gateway.http.call import HttpCall, JsonResponse
from services.gateway.tinker.uploads import UploadRoutes
from services.kit.errors import DeadlinePassed, StreamOutOfOrder

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


class Shelf:
    """Takes uploads, whole ones only."""

    def __init__(self) -> None:
        """Hold nothing."""
        self.held_bytes = 0

    async def upload(self, order: UploadRequest, pieces: AsyncIterator[bytes], *, offset: int) -> Checkpoint:
        """Return a checkpoint of all the bytes."""
        assert offset == 0
        async for piece in pieces:
            self.held_bytes += len(piece)
        if self.held_bytes < order.size_bytes:
            raise StreamOutOfOrder.at_byte(self.held_bytes)
        return CHECKPOINT


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is put forward."""

    passed_seconds = 0.0

    def time(self) -> float:
        """Return what its clock shows."""
        return super().time() + self.passed_seconds


class Sender:
    """A client that sends a piece every so many seconds of its event loop's clock."""

    def __init__(self, *, piece_bytes: int, seconds: float) -> None:
        """Send pieces of that size."""
        self._piece = bytes(piece_bytes)
        self._seconds = seconds
        self.left = 100
        """Pieces to send."""
        self.leaves_at = 0
        """With so many left it leaves; 0: it does not."""

    async def receive(self) -> dict[str, Any]:
        """Return the next message."""
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, FastLoop)
        loop.passed_seconds += self._seconds
        self.left -= 1
        if self.left < self.leaves_at:
            return {'type': 'http.disconnect'}
        return {'type': 'http.request', 'body': self._piece, 'more_body': self.left > 0}

    def call(self, routes: UploadRoutes) -> HttpCall:
        """Return its call."""

        async def send(message: Any) -> None:
            raise AssertionError(message)

        scope = {'path_params': {'name': 'mine'}, 'query_string': b'base_model=org/tiny'}
        headers = {'content-length': str(self.left * len(self._piece))}
        return HttpCall(routes.routes()[0], scope, self.receive, send, headers, 'rq-1')


def upload(sender: Sender, shelf: Shelf) -> JsonResponse:
    """Return what a client is answered."""

    async def answer_of(call: HttpCall) -> Any:
        return await call.route.serve(call)

    with asyncio.Runner(loop_factory=FastLoop) as runner:
        answer = runner.run(answer_of(sender.call(UploadRoutes(shelf))))
    assert isinstance(answer, JsonResponse)
    return answer


def test_an_upload_may_take_hours() -> None:
    """As long as its bytes come at the least rate that there is."""
    shelf = Shelf()
    sender = Sender(piece_bytes=4 << 20, seconds=120)
    assert (upload(sender, shelf)).status == 201
    assert shelf.held_bytes == 100 * (4 << 20)


def test_an_upload_that_trickles_is_told_so() -> None:
    """What came is kept, and the client hears why it was cut."""
    shelf = Shelf()
    with pytest.raises(DeadlinePassed):
        upload(Sender(piece_bytes=1000, seconds=4), shelf)
    assert 0 < shelf.held_bytes < 100_000


def test_a_client_that_leaves_is_told_nothing() -> None:
    """What came is kept."""
    shelf = Shelf()
    sender = Sender(piece_bytes=1000, seconds=0)
    sender.leaves_at = 50
    with pytest.raises(ClientGone):
        upload(sender, shelf)
    assert shelf.held_bytes == 50_000
