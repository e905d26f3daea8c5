"""Positions of operations whose bodies cannot be read."""

import random
from collections.abc import AsyncIterator

import pytest
import zstandard

from fixtures.tinker_api import BODY_BYTES, TinkerApi, tinker_api
from services.gateway.tinker.wire import tinker_pb2 as wire

PROTOBUF = {'content-type': 'application/x-protobuf'}


@pytest.fixture
async def api() -> AsyncIterator[TinkerApi]:
    """The API for two tenants."""
    async with tinker_api() as running:
        yield running


def _unreadable_bodies(message: bytes) -> dict[str, tuple[bytes, str, int]]:
    """Return bodies that begin with `message` and cannot be read, with their encoding and response status."""
    padding, compressed = bytes(BODY_BYTES), zstandard.compress(message + random.Random(1).randbytes(BODY_BYTES // 2))
    return {
        'too long': (message + padding, 'identity', 413),
        'much too long': (message + 4 * padding, 'identity', 413),
        'too long when decompressed': (zstandard.compress(message + 64 * padding), 'zstd', 413),
        'too long and compressed': (
            zstandard.compress(message + random.Random(1).randbytes(3 * BODY_BYTES)),
            'zstd',
            413,
        ),
        'truncated': (message[:-1], 'identity', 400),
        'truncated after compression': (compressed[:-9], 'zstd', 400),
        'not protobuf': (message + b'\xff' * 9, 'identity', 400),
        'not protobuf when decompressed': (zstandard.compress(message + b'\xff' * 9), 'zstd', 400),
        'unknown encoding': (message, 'gzip', 400),
    }


@pytest.mark.parametrize('is_chunked', [False, True])
@pytest.mark.parametrize('kind', _unreadable_bodies(b''))
async def test_unreadable_operation_uses_its_position(api: TinkerApi, kind: str, *, is_chunked: bool) -> None:
    """An operation whose body cannot be read uses its position, so the next operation runs at once."""
    model_id = await api.model()
    body, encoding, status = _unreadable_bodies(
        wire.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn='ppo').SerializeToString()
    )[kind]

    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 1000):
            yield body[begin : begin + 1000]

    headers = {**PROTOBUF, 'content-encoding': encoding}
    response = await api.post('forward_backward', content=chunks() if is_chunked else body, headers=headers)
    assert response.status_code == status
    posted = await api.post('optim_step', {'model_id': model_id, 'seq_id': 2})
    assert (await api.outcome(posted)).status_code == 200
    # The clock does not advance, so the lane did not give up waiting for the first position.
    assert [operation.WhichOneof('verb') for operation in api.trainer.operations] == ['clip_grad_and_step']


@pytest.mark.parametrize(
    'head', [b'', b'\n', b'\n\x05ab', b'\n\xff\xff\xff', b'\x10\x01\n\x01a', b'\n\x01\xff\x10\x01']
)
async def test_body_without_a_position_uses_no_position(api: TinkerApi, head: bytes) -> None:
    """A body that is too long and does not begin with a model and a position is refused and uses no position."""
    await api.model()
    before = set(api.store.futures)
    body = head + b'\xff' * (BODY_BYTES + 1)
    assert (await api.post('forward_backward', content=body, headers=PROTOBUF)).status_code == 413
    assert set(api.store.futures) == before
