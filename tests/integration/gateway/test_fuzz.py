"""Tests that random requests to every method and route cause no server error, and that refused requests have no effect.

`./run fuzz [N]` sends N different requests each time; the tests send the same few hundred requests each time.
"""

import errno
import gc
import os
import warnings
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import zstandard
from google.protobuf.descriptor_pb2 import MethodOptions
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fixtures.data_service import upload_chunk, upload_header
from fixtures.every_call import body_of, methods, routes_of, url_of
from fixtures.fuzzed import EXPORT, NO_KEY, POSITIONED, Call, Fuzzed, StoreFault, unexpected_errors
from fixtures.hostile import TEXTS, json_bodies, json_lines, messages, pipelines, rpc_bodies
from fixtures.running_gateway import bearer
from fixtures.stored_calls import OPERATIONS, stored_call
from fixtures.stored_calls import STORES as STORES_OF_METHODS
from fixtures.stored_state import StoredState
from fixtures.two_tenants import Ids, two_tenants
from twinkle.api.data.v1 import dataset_pb2, dataset_service_pb2
from twinkle.api.gateway.v1 import metric_service_pb2, metric_service_pb2_grpc
from twinkle_services.gateway.config import FuturesConfig
from twinkle_services.gateway.credentials import Access, requirement_of
from twinkle_services.gateway.tinker.wire import tinker_pb2
from twinkle_services.kit.rpc.json_values import struct_of

REQUESTED_COUNT = int(os.environ.get('TWINKLE_FUZZ_REQUESTS', '0'))
COUNT = REQUESTED_COUNT or 600
"""Number of requests that all tests send together."""
TESTS = 5
"""Number of tests that share the requests."""
ROUNDS = max(1, COUNT // 900)
"""Number of rounds. Each round starts with an empty state, because the check of a large state takes long."""
many_examples = settings(
    max_examples=-(-COUNT // (TESTS * ROUNDS)),
    database=None,
    derandomize=not REQUESTED_COUNT,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
MAX_STALL_SECONDS = 0.25
"""Maximum time that a request of `./run fuzz` may block the event loop, without the time of other threads."""
METHODS = methods()
DATASETS = 'twinkle.api.data.v1.DatasetService'
NOT_TEXT = ['%00', '%2f', '%2e%2e%2f', '%ff%fe', '%c0%ae', '%', '%zz', '%ed%a0%80', ';', '%23']
"""Parts of a path that are not valid text, or have a special meaning in URLs."""
INVALID_SECRETS = {'no key': None, 'unknown key': 'tml-unknown'}
"""Secrets of callers without a valid key."""
CALLERS = ['bob'] * 6 + [*INVALID_SECRETS]
"""Callers of routes. Most have a valid key."""
STORES = ('gateway', 'checkpoints', 'data', 'model', 'exports')
"""Folders of the services' stores."""
ERRNOS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE, errno.EACCES)
WIRE_ROUTES = ('/api/v1/forward', '/api/v1/forward_backward')

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.parametrize('number', range(ROUNDS)),
    # Examples are generated while the gateway, which uses random numbers too, runs in the same process.
    pytest.mark.filterwarnings('ignore:Do not use the .random. module inside strategies'),
]


@pytest.fixture
async def fuzzed(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[Fuzzed]:
    """All services, with resources of two tenants."""
    options = FuturesConfig(gap=timedelta(milliseconds=50))
    errors: list[str] = []
    with unexpected_errors(errors):
        async with two_tenants(tmp_path, tiny_llama_dir, is_training_stored=True, futures=options) as deployment:
            running = Fuzzed(deployment, StoredState(tmp_path), errors=errors)
            # A full garbage collection over the test's objects would block the event loop for a quarter of a second.
            gc.freeze()
            yield running
            gc.unfreeze()
            await running.check()
            running.state.close()
            if REQUESTED_COUNT:
                stall = running.longest_stall_seconds
                summary = running.outcomes.most_common(), f'longest stall: {1000 * stall:.0f} ms'
                print(*summary)  # noqa: T201 (shown for `./run fuzz`)
                assert stall <= MAX_STALL_SECONDS, f'the event loop was blocked for {stall} s by {running.stalled_by}'
            assert not running.failures, '\n'.join(running.failures)
    # httpx may leave an abandoned request's connection open, which would be reported in a later test.
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', ResourceWarning)
        gc.collect()


def known_of(ids: Sequence[Ids]) -> dict[str, list[str]]:
    """Return known values by field name; the empty name has the known strings for all other fields."""
    paths = [f'twinkle://{item.model}/weights/best' for item in ids]
    return {
        '': [text for item in ids for text in vars(item).values()],
        'session_id': [item.session for item in ids],
        'adapter_id': [item.model for item in ids] * 3,
        'run_id': [item.model for item in ids] * 3,
        'dataset_id': [item.dataset for item in ids] * 3,
        'loader_id': [item.loader for item in ids] * 3,
        'checkpoint_path': paths * 2,
        'base_model': ['tiny'] * 6,
        'optimizer': ['AdamW', 'SGD'],
        'loss': ['cross_entropy', 'ppo'],
        'tenant_id': ['carol', 'alice', 'bob'],
    }


@many_examples
@given(data=st.data())
async def test_methods_refuse_random_requests(fuzzed: Fuzzed, number: int, data: st.DataObject) -> None:
    """Requests with hostile values for every method, and invalid bytes, cause no server error."""
    del number
    ids = await fuzzed.ids()
    method = data.draw(st.sampled_from(METHODS))
    bodies = data.draw(rpc_bodies(method, known_of(ids)))
    name = f'{method.containing_service.full_name}/{method.name}'
    is_read = method.GetOptions().idempotency_level == MethodOptions.NO_SIDE_EFFECTS and f'/{name}' != EXPORT
    caller = data.draw(st.sampled_from(['bob', 'bob', 'bob', 'operator', *INVALID_SECRETS]))
    if requirement_of(name) is Access.INTERNAL and caller == 'no key':
        # This deployment has no internal token, so a caller on loopback without a key counts as a service.
        caller = 'unknown key'
    secret, refusals = _credentials(fuzzed, caller, kind='rpc')
    await fuzzed.send(Call(f'/{name}', tuple(bodies), secret=secret, is_read=is_read, refusals=refusals))


@many_examples
@given(data=st.data())
async def test_datasets_refuse_random_files_and_pipelines(fuzzed: Fuzzed, number: int, data: st.DataObject) -> None:
    """Uploads of unusual JSON, and steps with unusual arguments, cause no server error."""
    del number
    await fuzzed.ids()
    content = data.draw(json_lines())
    upload_id = f'file-{fuzzed.outcomes.total()}'
    parts = (upload_header(upload_id, len(content)), upload_chunk(0, content))
    secret = fuzzed.secrets['bob']
    await fuzzed.send(Call(f'/{DATASETS}/Upload', tuple(part.SerializeToString() for part in parts), secret=secret))
    step = dataset_pb2.DatasetStep()
    if data.draw(st.booleans()):
        step.map.preprocessor = data.draw(st.sampled_from(['QualityPreprocessor', 'MessageNormalizer', 'nope']))
        step.map.init_args.CopyFrom(struct_of(data.draw(pipelines() | st.just(dict[str, Any]()))))
    else:
        step.check.SetInParent()
    source = dataset_pb2.UploadSource(upload_id=upload_id, format=dataset_pb2.FILE_FORMAT_JSONL)
    request = dataset_service_pb2.CreateDatasetRequest(request_id=upload_id, steps=[step])
    request.source.upload.CopyFrom(source)
    await fuzzed.send(Call(f'/{DATASETS}/CreateDataset', (request.SerializeToString(),), secret=secret))


@many_examples
@given(data=st.data())
async def test_routes_refuse_random_bodies(fuzzed: Fuzzed, number: int, data: st.DataObject) -> None:
    """Bodies with hostile parts, and with correct, damaged or false compression, cause no server error."""
    del number
    ids = await fuzzed.ids()
    verb, path = data.draw(st.sampled_from([route for route in routes_of(fuzzed.deployment) if route[0] != 'GET']))
    one = data.draw(st.sampled_from(ids))
    headers = {'content-type': 'application/json'}
    if path in WIRE_ROUTES and data.draw(st.booleans()):
        kind = tinker_pb2.DESCRIPTOR.message_types_by_name['ForwardBackwardRequest']
        known = {'': ['cross_entropy', 'target_tokens', 'weights', 'logprobs'], 'model_id': [ids[0].model] * 9}
        body = data.draw(messages(kind, known)).SerializeToString()
        headers['content-type'] = 'application/x-protobuf'
    else:
        body = data.draw(json_bodies(body_of(path, one), known_of(ids)['']))
    match data.draw(st.sampled_from(['plain'] * 6 + ['zstd', 'cut', 'liar', 'type', 'odd'])):
        case 'zstd':
            headers['content-encoding'], body = 'zstd', zstandard.compress(body)
        case 'cut':
            headers['content-encoding'], body = 'zstd', zstandard.compress(body)[:-2]
        case 'liar':
            headers['content-encoding'] = data.draw(st.sampled_from(['zstd', 'gzip', 'identity', '', 'zstd, zstd']))
        case 'type':
            kinds = ['application/x-protobuf', 'text/plain', '', ';', 'application/json; charset=utf-16', 'x' * 300]
            headers['content-type'] = data.draw(st.sampled_from(kinds))
        case 'odd':
            headers |= {'x-request-id': 'x' * 500, 'accept': 'application/x-protobuf', 'traceparent': '00-zz'}
        case _:
            pass
    url = url_of(path, one)
    secret, refusals = _credentials(fuzzed, data.draw(st.sampled_from(CALLERS)), kind='http')
    await fuzzed.send(Call(f'{verb} {url}', (body,), tuple(headers.items()), secret, refusals=refusals))


@many_examples
@given(data=st.data())
async def test_routes_refuse_random_paths_and_queries(fuzzed: Fuzzed, number: int, data: st.DataObject) -> None:
    """Hostile strings and known ids in path and query parameters cause no server error."""
    del number
    ids = await fuzzed.ids()
    verb, path = data.draw(st.sampled_from(routes_of(fuzzed.deployment)))
    texts = st.sampled_from([text for text in TEXTS if len(text) < 3000]) | st.sampled_from(known_of(ids)[''])
    url = ''
    for part in path.split('/')[1:]:
        filled = _quoted(data.draw(texts), data) if part.startswith('{') else part
        url += '/' + (filled or '%20')
    names = ['limit', 'offset', 'cursor', 'type', 'status', 'project_id', 'access_scope', 'page_size', 'x', '']
    parameters = data.draw(st.lists(st.tuples(st.sampled_from(names), texts | st.integers().map(str)), max_size=3))
    query = '&'.join(f'{name}={_quoted(text, data)}' for name, text in parameters)
    body = b'' if verb == 'GET' else data.draw(json_bodies(body_of(path, ids[0]), known_of(ids)['']))
    line = f'{verb} {url}' + (f'?{query}' if query else '')
    secret, refusals = _credentials(fuzzed, data.draw(st.sampled_from(CALLERS)), kind='any path')
    headers = (('content-type', 'application/json'),)
    await fuzzed.send(Call(line, (body,), headers, secret, is_read=verb == 'GET', refusals=refusals))


@many_examples
@given(data=st.data())
async def test_refusals_of_stores_cause_no_server_error(fuzzed: Fuzzed, number: int, data: st.DataObject) -> None:
    """If a disk refuses one call, requests and futures succeed, are refused, or fail as unavailable."""
    del number
    ids = await fuzzed.ids()
    name = f'stored-{fuzzed.outcomes.total()}'
    kind = data.draw(st.sampled_from(['route', 'future', 'method', 'operation']))
    target = data.draw(st.sampled_from(list(STORES_OF_METHODS)))
    usual = [STORES_OF_METHODS[target]] if kind == 'method' else ['model', 'checkpoints', 'gateway']
    fault = StoreFault(
        data.draw(st.sampled_from([*STORES, *usual * 4])),
        data.draw(st.sampled_from(ERRNOS)),
        data.draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 6, 8])),
    )
    route = data.draw(st.sampled_from(routes_of(fuzzed.deployment)))
    verb = data.draw(st.sampled_from(list(OPERATIONS)))
    if kind in {'route', 'future'}:
        positioned = data.draw(st.sampled_from(sorted(POSITIONED)))
        await fuzzed.send_to_route(*(route if kind == 'route' else ('POST', positioned)), name, fault)
    elif kind == 'operation':
        await fuzzed.send_operation(verb, name, fault)
    else:
        bodies = tuple(message.SerializeToString() for message in stored_call(target, ids[0], name))
        await fuzzed.send(Call(target, bodies, secret=fuzzed.secrets['bob'], fault=fault))


async def test_faults_last_until_a_future_is_finished(fuzzed: Fuzzed, number: int) -> None:
    """A disk fault stays active until an accepted save is finished, and causes no server error."""
    del number
    await fuzzed.ids()
    await fuzzed.send_to_route('POST', '/api/v1/save_weights', 'saved', StoreFault('checkpoints', errno.ENOSPC, 0))
    assert (fuzzed.outcomes['ok'], fuzzed.outcomes['store refused a call']) == (1, 1)
    await fuzzed.check()


async def test_defect_in_a_future_is_found(fuzzed: Fuzzed, number: int) -> None:
    """A future that fails because of a defect after its request was accepted is reported with the logged error."""
    del number
    await fuzzed.ids()
    fuzzed.deployment.model.trainer.failures.append(RuntimeError('defect'))
    await fuzzed.send_to_route('POST', '/api/v1/optim_step', '', StoreFault('gateway', errno.ENOSPC, 1000))
    assert fuzzed.outcomes['ok'] == 1
    with pytest.raises(AssertionError, match=r'unexpected error: [\s\S]*defect[\s\S]*future fu-\w+ execute'):
        await fuzzed.check()


async def test_reported_metrics_are_not_changes(fuzzed: Fuzzed, number: int) -> None:
    """Metrics of an earlier step may be stored after a refused request, but points of a client may not."""
    del number
    run = (await fuzzed.ids())[0].model
    for verb in ('forward_backward', 'clip_grad_and_step'):
        await fuzzed.send_operation(verb, '', None)
    refused = Call('POST /api/v1/create_session', (b'{',), secret=fuzzed.secrets['bob'])
    await fuzzed.send(refused)
    metrics = metric_service_pb2_grpc.MetricServiceStub(fuzzed.deployment.gateway.channel)
    key = bearer(fuzzed.secrets['bob'])
    while not (await metrics.GetMetrics(metric_service_pb2.GetMetricsRequest(run_id=run), metadata=key)).series:
        pass
    await fuzzed.check()
    await fuzzed.send(refused)
    point = metric_service_pb2.MetricPoint(name='mine', step=1, value=1)
    await metrics.LogMetrics(metric_service_pb2.LogMetricsRequest(run_id=run, points=[point]), metadata=key)
    with pytest.raises(AssertionError, match='metric_chunks'):
        await fuzzed.check()
    fuzzed.refused.clear()


def _credentials(fuzzed: Fuzzed, caller: str, *, kind: str) -> tuple[str | None, frozenset[str]]:
    """Return a caller's secret and, if it is invalid, the permitted outcomes of such a request."""
    if caller in INVALID_SECRETS:
        return INVALID_SECRETS[caller], NO_KEY[kind]
    return fuzzed.secrets[caller], frozenset()


def _quoted(text: str, data: Any) -> str:
    """Return a text in percent-encoding, or occasionally invalid bytes."""
    if data.draw(st.integers(0, 9)) == 0:
        return data.draw(st.sampled_from(NOT_TEXT))
    return ''.join(f'%{byte:02x}' for byte in text.encode(errors='surrogatepass'))
