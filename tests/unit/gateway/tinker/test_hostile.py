"""Arbitrary bodies of Tinker API requests never cause a server error or a status that the SDK retries."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fixtures.tinker_api import BODY_BYTES, TinkerApi, tinker_api
from twinkle_services.gateway.store.database import Database
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire

ROUTES = (
    'client/config',
    'client/dynamic_config',
    'telemetry',
    'create_session',
    'session_heartbeat',
    'sessions/ses-1/finish',
    'create_model',
    'load_weights',
    'get_info',
    'unload_model',
    'weights_info',
    'create_custom_loss',
    'forward_backward',
    'forward',
    'optim_step',
    'save_weights',
    'save_weights_for_sampler',
    'save_weights_external',
    'retrieve_future',
    'cancel_future',
)
NAMES = (
    'session_id', 'model_id', 'seq_id', 'model_seq_id', 'base_model', 'lora_config', 'rank', 'seed', 'train_mlp',
    'optimizer_config', 'type', 'user_metadata', 'path', 'optimizer', 'tinker_path', 'adam_params', 'learning_rate',
    'beta1', 'grad_clip_norm', 'ttl_seconds', 'overwrite', 'sampling_session_seq_id', 'kind', 'request_id', 'reason',
    'forward_input', 'forward_backward_input', 'data', 'loss_fn', 'loss_fn_config', 'model_input', 'chunks', 'tokens',
    'loss_fn_inputs', 'target_tokens', 'dtype', 'shape', 'sparse_crow_indices', 'sparse_col_indices', 'events', 'tags',
)  # fmt: skip
"""Names of fields of request bodies."""
TEXTS = st.text(max_size=8) | st.sampled_from(
    ['ses-1', 'ses-1:train:0', 'tiny', 'adamw', 'cross_entropy', 'tinker://a/weights/b', '\x00', '\u2028', 'int64']
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.sampled_from([0, 1, -1, 1 << 31, 1 << 63])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | TEXTS, inner, max_size=6),
    max_leaves=20,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)
MANY_EXAMPLES = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
async def api(database: Database) -> AsyncIterator[TinkerApi]:
    """The API for two tenants."""
    async with tinker_api(database) as running:
        yield running


def check_response(response: Any) -> None:
    """Assert that a response has no status of a server error or a retry, and that errors have a detail."""
    assert response.status_code < 500, response.text
    assert response.status_code not in {408, 409, 429}
    if response.status_code >= 400:
        assert response.json()['detail']


@MANY_EXAMPLES
@example(route='weights_info', body={'tinker_path': []})
@given(route=st.sampled_from(ROUTES), body=BODIES)
async def test_wrong_values_of_known_fields_are_client_errors(api: TinkerApi, route: str, body: dict[str, Any]) -> None:
    """Wrong values of known fields cause a client error and submit no request to the trainer."""
    check_response(await api.post(route, content=json.dumps(body)))
    assert (api.trainer.created, api.trainer.operations, api.store.futures) == ([], [], {})


@MANY_EXAMPLES
@given(
    route=st.sampled_from(ROUTES),
    data=st.binary(max_size=64),
    kind=st.sampled_from(['application/json', 'application/x-protobuf', 'text/plain', '']),
    encoding=st.sampled_from(['identity', 'zstd']),
)
async def test_malformed_bytes_are_client_errors(
    api: TinkerApi, route: str, data: bytes, kind: str, encoding: str
) -> None:
    """A body that does not have its declared format causes a client error."""
    headers = {'content-type': kind, 'content-encoding': encoding}
    check_response(await api.post(route, content=data, headers=headers))
    assert api.store.futures == {}


@MANY_EXAMPLES
@given(data=st.data())
async def test_broken_batches_of_a_model_are_refused(api: TinkerApi, data: st.DataObject) -> None:
    """A truncated or altered request is refused, or is another valid batch."""
    model_id = next((future.lane for future in api.store.futures.values()), None) or await api.model()
    good = wire.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn='cross_entropy')
    datum = good.data.add()
    datum.model_input.add().encoded_text.tokens = (1).to_bytes(4, 'little') * 3
    datum.loss_fn_inputs['target_tokens'].dense = (2).to_bytes(8, 'little') * 3
    datum.loss_fn_inputs['target_tokens'].dtype = wire.DTYPE_INT64
    raw = bytearray(good.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    body = bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    check_response(await api.post('forward_backward', content=body, headers={'content-type': 'application/x-protobuf'}))


@pytest.mark.parametrize('route', ['forward_backward', 'create_model', 'telemetry'])
async def test_deep_json_is_refused(api: TinkerApi, route: str) -> None:
    """Deeply nested or ambiguous JSON is refused with a detail."""
    deep = ('[' * 30_000, *('{"a":' * depth + '1' + '}' * depth for depth in (501, 10_000)))
    for body in (*deep, '{"a": 1e999}', '{"a": NaN}', '{"a":1,"a":2}'):
        response = await api.post(route, content=body)
        assert response.status_code == 400
        assert response.json()['detail']


async def test_bodies_that_are_too_long_are_refused(api: TinkerApi) -> None:
    """A body over the limit, as sent or after decompression, returns 413; an unknown encoding returns 400."""
    headers = {'content-type': 'application/x-protobuf'}
    assert (await api.post('forward_backward', content=bytes(BODY_BYTES + 1), headers=headers)).status_code == 413
    bomb = zstandard.compress(bytes(64 * BODY_BYTES))
    assert len(bomb) < BODY_BYTES
    compressed = {**headers, 'content-encoding': 'zstd'}
    assert (await api.post('forward_backward', content=bomb, headers=compressed)).status_code == 413
    unknown = {**headers, 'content-encoding': 'gzip'}
    assert (await api.post('forward_backward', content=b'x', headers=unknown)).status_code == 400


async def test_bodies_of_very_many_parts_are_refused(api: TinkerApi) -> None:
    """Too many examples, chunks or inputs are refused, because each part uses more memory than its bytes."""
    many_datums, many_chunks = wire.ForwardBackwardRequest(), wire.ForwardBackwardRequest()
    many_datums.data.extend([wire.Datum()] * 20_000)
    many_chunks.data.add().model_input.extend([wire.Chunk()] * 20_000)
    for name in range(2000):
        many_chunks.data[0].loss_fn_inputs[str(name)].SetInParent()
    for message in (many_datums, many_chunks):
        message.model_id, message.seq_id, message.loss_fn = await api.model(), 1, 'cross_entropy'
        response = await api.post(
            'forward_backward',
            content=message.SerializeToString(),
            headers={'content-type': 'application/x-protobuf'},
        )
        assert response.status_code == 400, response.text
        assert api.trainer.operations == []
