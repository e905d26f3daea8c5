"""Positions of operations whose bodies cannot be read."""

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import zstandard

from fixtures.gateway_database import copied_database
from fixtures.tinker_api import BODY_BYTES, TinkerApi, tinker_api
from twinkle_services.gateway.tinker.bodies import JSON_LIMIT_BYTES
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire

pytestmark = pytest.mark.asyncio(loop_scope='module')
PROTOBUF = {'content-type': 'application/x-protobuf'}
PASSES = ('forward', 'forward_backward')
"""Routes whose body may have up to `BODY_BYTES` bytes; other routes have the limit `JSON_LIMIT_BYTES`."""
ROUTES = (
    *PASSES,
    'optim_step',
    'save_weights',
    'save_weights_for_sampler',
    'save_weights_external',
    'load_weights',
)
"""Every route whose requests have a position."""
DAMAGES = {
    'too long': '"ok": 1',
    'not UTF-8': '"text": "\udcff"',
    'not finite': '"number": NaN',
    'not a JSON value': '"number": -',
    'duplicate name': '"twice": {"a": 1, "a": 2}',
    'duplicate name in the object': '"twice": 1, "twice": 2',
    'unpaired surrogate': '"text": "\\ud800"',
    'number too large': '"number": 1e999',
    'nested too deep': f'"list": {"[" * 20_000}{"]" * 20_000}',
    'other models and positions': '"a": {"model_id": "b", "seq_id": 7}, "text": "\\"model_id\\": 1", "number": NaN',
}
"""Members of JSON objects that are refused."""


def _json_body(route: str, damage: str, position: str, *, is_first: bool) -> bytes:
    """Return a long JSON body with `position` near its beginning or end."""
    limit_bytes = BODY_BYTES if route in PASSES else JSON_LIMIT_BYTES
    # On routes with the larger limit, padding exceeds the stored head, so a position at the end is in the tail only.
    padding = 'x' * (limit_bytes + 1 if damage == 'too long' else limit_bytes // 20)
    rest = f'{DAMAGES[damage]}, "padding": "{padding}"'
    text = f'{{{position}, {rest}}}' if is_first else f'{{{rest}, {position}, "type": "operation"}}'
    return text.encode(errors='surrogateescape')


async def _assert_the_next_operation_runs(api: TinkerApi, model_id: str) -> None:
    posted = await api.post('optim_step', {'model_id': model_id, 'seq_id': 2})
    assert (await api.outcome(posted)).status_code == 200
    # The clock does not advance, so the lane did not give up waiting for the first position.
    operations = [operation for operation in api.trainer.operations if operation.adapter_id == model_id]
    assert [operation.WhichOneof('verb') for operation in operations] == ['clip_grad_and_step']


def _position(model_id: str) -> str:
    return json.dumps({'model_id': model_id, 'seq_id': 1})[1:-1]


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def api(prepared_database: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TinkerApi]:
    """The API, which all tests of this module share; each test has a new model."""
    folder = tmp_path_factory.mktemp('positions')
    async with copied_database(prepared_database, folder) as database, tinker_api(database) as running:
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
    """An operation whose body cannot be read consumes its position, so the next operation runs at once."""
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
    await _assert_the_next_operation_runs(api, model_id)


@pytest.mark.parametrize(
    'head', [b'', b'\n', b'\n\x05ab', b'\n\xff\xff\xff', b'\x10\x01\n\x01a', b'\n\x01\xff\x10\x01']
)
async def test_body_without_a_position_uses_no_position(api: TinkerApi, head: bytes) -> None:
    """A body that is too long and does not begin with a model and a position is refused and consumes no position."""
    await api.model()
    before = set(api.store.futures)
    body = head + b'\xff' * (BODY_BYTES + 1)
    assert (await api.post('forward_backward', content=body, headers=PROTOBUF)).status_code == 413
    assert set(api.store.futures) == before


@pytest.mark.parametrize('is_first', [True, False])
@pytest.mark.parametrize('encoding', ['identity', 'zstd'])
@pytest.mark.parametrize('damage', DAMAGES)
@pytest.mark.parametrize('route', ROUTES)
async def test_damaged_json_uses_its_position(
    api: TinkerApi, route: str, damage: str, encoding: str, *, is_first: bool
) -> None:
    """JSON that is too long or damaged consumes its position on every route, wherever the position is in the object."""
    model_id = await api.model()
    body = _json_body(route, damage, _position(model_id), is_first=is_first)
    content = zstandard.compress(body) if encoding == 'zstd' else body
    response = await api.post(route, content=content, headers={'content-encoding': encoding})
    assert response.status_code == (413 if damage == 'too long' else 400), response.text
    await _assert_the_next_operation_runs(api, model_id)


@pytest.mark.parametrize('encoding', ['identity', 'zstd', 'gzip'])
@pytest.mark.parametrize('route', ROUTES)
async def test_cut_json_uses_the_position_at_its_beginning(api: TinkerApi, route: str, encoding: str) -> None:
    """JSON that ends early, or has an unknown compression, consumes the position that can still be read."""
    model_id = await api.model()
    body = f'{{{_position(model_id)}, "padding": "'.encode() + random.Random(1).randbytes(BODY_BYTES // 2)
    content = zstandard.compress(body)[:-5] if encoding == 'zstd' else body
    response = await api.post(route, content=content, headers={'content-encoding': encoding})
    assert response.status_code == 400
    await _assert_the_next_operation_runs(api, model_id)


@pytest.mark.parametrize('route', ROUTES)
async def test_refused_protobuf_uses_its_position_on_every_route(api: TinkerApi, route: str) -> None:
    """A damaged or unexpected protobuf body consumes its position on every route."""
    model_id = await api.model()
    message = wire.ForwardBackwardRequest(model_id=model_id, seq_id=1).SerializeToString()
    assert (await api.post(route, content=message + b'\xff', headers=PROTOBUF)).status_code == 400
    await _assert_the_next_operation_runs(api, model_id)


@pytest.mark.parametrize('end', ['"seq_id": 1', '"seq_id": "1"}', '"a": {"seq_id": 1}}', 'seq_id: 1}'])
async def test_damaged_json_without_a_position_uses_no_position(api: TinkerApi, end: str) -> None:
    """A damaged body whose position is missing, incomplete, nested or not a number consumes no position."""
    model_id = await api.model()
    before = set(api.store.futures)
    body = f'{{"a": NaN, "model_id": "{model_id}", {end}'
    assert (await api.post('optim_step', content=body)).status_code == 400
    assert set(api.store.futures) == before
