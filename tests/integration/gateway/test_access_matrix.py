"""Tests of every HTTP route and gRPC method with invalid keys, missing scopes and another tenant's ids.

Routes come from the running gateway and methods from the contracts, so new routes and methods are tested automatically.
"""

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_status import rpc_status

from fixtures.data_service import ENCODE, start
from fixtures.every_call import body_of, methods, native_method_of, routes_of, url_of
from fixtures.running_gateway import ADMIN, EVERY_SCOPE, Failure, bearer
from fixtures.sampler_service import sample_request
from fixtures.span_folder import call_of, trace_id, write_spans
from fixtures.two_tenants import ABSENT, Ids, TwoTenants, two_tenants
from twinkle.api.data.v1 import dataset_pb2
from twinkle.api.data.v1 import dataset_service_pb2 as dataset_wire
from twinkle.api.gateway.v1 import (
    key_service_pb2,
    key_service_pb2_grpc,
    metric_service_pb2,
    rollout_service_pb2,
    trace_service_pb2,
)
from twinkle.api.sampler.v1 import sampler_service_pb2 as sampler_wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.credentials import Access, Scope, requirement_of

ROUTES_WITHOUT_IDS = {
    'DELETE /api/v1/auth/apikey/me',
    'GET /api/v1/audit',
    'GET /api/v1/auth/apikey/me',
    'GET /api/v1/billing/usage/checkpoints/current',
    'GET /api/v1/billing/usage/events',
    'GET /api/v1/checkpoints',
    'GET /api/v1/files/{token}/{name}',
    'GET /api/v1/get_server_capabilities',
    'GET /api/v1/healthz',
    'GET /api/v1/sessions',
    'GET /api/v1/training_runs',
    'GET /oai/api/v1/models',
    'GET /v1/models',
    'POST /api/v1/client/config',
    'POST /api/v1/client/dynamic_config',
    'POST /api/v1/create_custom_loss',
    'POST /api/v1/create_session',
    'POST /api/v1/sessions/search',
    'POST /api/v1/telemetry',
    'POST /console/api/links',
    'POST /console/rpc/{service}/{method}',
    'PUT /api/v1/uploads/{name}',
}
"""Routes without an id in their path or body; all others must return 404 for another tenant's id."""
CHOSEN_ALTERNATIVES = {'header', 'operation', 'clip_grad_and_step', 'step', 'lora_config'}
"""Names of the fields that are set in messages with alternatives (`oneof`)."""
OMITTED = {'full_parameters', 'training_config'}
"""Fields that would be refused before an id is looked up."""
CREATING_METHODS = {'SessionService/CreateSession'}
"""Methods whose responses contain a new id."""
METHODS_WITHOUT_NOT_FOUND = {
    'AdapterService/CreateAdapter',
    'AdapterService/EndLease',
    'AdapterService/Estimate',
    'AdapterService/ListAdapters',
    'AdapterService/TakeOver',
    'CatalogueService/GetUsage',
    'CatalogueService/ListRunCheckpoints',
    'CatalogueService/ListRuns',
    'CheckpointService/ListCheckpoints',
    'CheckpointService/UploadCheckpoint',
    'DatasetService/GetUpload',
    'DatasetService/ListDatasets',
    'DatasetService/Upload',
    'ExportService/ListExports',
    'LoaderService/CloseLoader',
    'SamplerService/DescribeTokens',
    'SamplerService/GetLoad',
    'SamplerService/ListResidentAdapters',
    'SamplerService/WatchLoad',
    'ServerService/GetServerInfo',
    'SessionService/CreateSession',
    'SessionService/ListSessions',
    'TraceService/ListTraces',
    'TrainingService/Train',
    'TrainingService/UploadBatch',
}
"""Methods that take no id, filter by an id, take a new id from the caller, or report missing ids within a stream.

All other methods must return NOT_FOUND for another tenant's id, or refuse all clients.
"""


@pytest.fixture
async def deployment(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[TwoTenants]:
    """A gateway with two tenants."""
    traces = tmp_path / 'traces'
    write_spans(traces / 'model.jsonl', call_of('alice', trace=1))
    async with two_tenants(tmp_path, tiny_llama_dir, telemetry={'trace_dir': traces}) as running:
        yield running


async def response_of(deployment: TwoTenants, route: tuple[str, str], secret: str | None, ids: Ids) -> tuple[int, str]:
    """Return status and body of a response, without the ids of this call."""
    method, path = route
    response = await deployment.call(method, url_of(path, ids), secret, body_of(path, ids))
    request_id = response.headers['x-request-id']
    return response.status_code, ids.hidden(response.text).replace(request_id, '<request>')


async def invalid_secrets(deployment: TwoTenants) -> list[str]:
    """Return an unknown, a revoked and an expired secret."""
    revoked = await deployment.gateway.make_key('alice')
    expired = await deployment.gateway.make_key('alice', ttl=timedelta(seconds=1))
    stub = key_service_pb2_grpc.KeyServiceStub(deployment.gateway.channel)
    await stub.RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=revoked.key.key_id), metadata=ADMIN)
    deployment.gateway.clock.advance(timedelta(seconds=1))
    return ['tml-unknown', revoked.secret, expired.secret]


async def test_every_route_needs_a_valid_key(deployment: TwoTenants) -> None:
    """Every route refuses calls without a key, with equal responses for unknown, revoked and expired keys."""
    secrets = await invalid_secrets(deployment)
    routes = routes_of(deployment)
    assert len(routes) > 50
    for route in routes:
        assert (await response_of(deployment, route, None, deployment.alices))[0] == 401, route
        responses = {await response_of(deployment, route, secret, deployment.alices) for secret in secrets}
        assert [status for status, _ in responses] == [401], route


async def test_ids_of_another_tenant_are_unknown_to_every_route(deployment: TwoTenants) -> None:
    """Every route with an id responds to another tenant's id exactly as to an unknown id, with status 404."""
    bob = deployment.secrets['bob']
    for route in routes_of(deployment):
        name = ' '.join(route)
        foreign, absent = (
            await response_of(deployment, route, bob, deployment.alices),
            await response_of(deployment, route, bob, ABSENT),
        )
        if name in ROUTES_WITHOUT_IDS:
            assert deployment.alices.model not in foreign[1], name
            assert foreign[0] == absent[0], name
        else:
            assert foreign == absent, name
            assert foreign[0] == 404, name


@pytest.mark.parametrize('path', ['copy_weights', 'create_sampling_session'])
async def test_weights_of_another_tenant_cannot_be_used_in_a_session(deployment: TwoTenants, path: str) -> None:
    """A tenant cannot use another tenant's weights in its session."""
    created = await deployment.call(
        'POST', '/api/v1/create_session', deployment.secrets['bob'], {'sdk_version': '0.38.0'}
    )
    responses: set[tuple[int, str]] = set()
    for ids in (deployment.alices, ABSENT):
        mixed_ids = replace(ids, session=created.json()['session_id'])
        status, text = await response_of(deployment, ('POST', f'/api/v1/{path}'), deployment.secrets['bob'], mixed_ids)
        responses.add((status, ids.hidden(text)))
    assert [status for status, _ in responses] == [404], responses


async def test_ids_of_another_tenant_are_unknown_to_every_method(deployment: TwoTenants) -> None:
    """Every method responds to another tenant's id exactly as to an unknown id, apart from ids that a call creates."""
    key = await deployment.gateway.make_key('bob', scopes=(1, 2, 3))
    for method in methods():
        foreign, absent = [await outcome(deployment, method, ids, key.secret) for ids in (deployment.alices, ABSENT)]
        name = f'{method.containing_service.name}/{method.name}'
        if name in CREATING_METHODS:
            assert foreign[0] == absent[0] == 'OK', name
        else:
            assert foreign == absent, name
        if name not in METHODS_WITHOUT_NOT_FOUND:
            assert foreign[0] in {'NOT_FOUND', 'PERMISSION_DENIED'}, (name, foreign)


def adapter_of(ids: Ids) -> sampling_pb2.AdapterRef:
    """Return a reference to an adapter to sample from."""
    return sampling_pb2.AdapterRef(adapter_id=ids.model)


REQUESTS: dict[str, Callable[[Ids], Message]] = {
    'CreateDataset': lambda ids: dataset_wire.CreateDatasetRequest(
        request_id='r',
        source=dataset_pb2.DatasetSource(
            upload=dataset_pb2.UploadSource(upload_id=ids.upload, format=dataset_pb2.FILE_FORMAT_JSONL)
        ),
    ),
    'Apply': lambda ids: dataset_wire.ApplyRequest(request_id='r', dataset_id=ids.dataset, steps=[ENCODE]),
    'ExportDataset': lambda ids: dataset_wire.ExportDatasetRequest(
        dataset_id=ids.dataset, format=dataset_pb2.FILE_FORMAT_JSONL
    ),
    'StreamBatches': lambda ids: start(ids.loader),
    'Sample': lambda ids: sample_request(adapter_of(ids)),
    'SampleBatch': lambda ids: sampler_wire.SampleBatchRequest(
        base_model='tiny', adapter=adapter_of(ids), prompts=[sample_request().prompt], params=sample_request().params
    ),
    'ComputeLogprobs': lambda ids: sampler_wire.ComputeLogprobsRequest(
        base_model='tiny', adapter=adapter_of(ids), token_ids=[sample_request().prompt.token_ids]
    ),
    'LogMetrics': lambda ids: metric_service_pb2.LogMetricsRequest(
        run_id=ids.model, points=[metric_service_pb2.MetricPoint(name='loss', step=0, value=0.0)]
    ),
    'WatchMetrics': lambda ids: metric_service_pb2.WatchMetricsRequest(
        runs=[metric_service_pb2.WatchedRun(run_id=ids.model)]
    ),
    'LogRollouts': lambda ids: rollout_service_pb2.LogRolloutsRequest(
        run_id=ids.model,
        step=0,
        groups=[rollout_service_pb2.RolloutGroup(group_id='a', rollouts=[rollout_service_pb2.Rollout(index=0)])],
    ),
    'GetRollout': lambda ids: rollout_service_pb2.GetRolloutRequest(run_id=ids.model, rollout_id='0/a/0'),
    'GetTrace': lambda _: trace_service_pb2.GetTraceRequest(trace_id=trace_id(1)),
    'LoadAdapter': lambda ids: sampler_wire.LoadAdapterRequest(adapter=adapter_of(ids)),
}
"""Functions that build the requests for which `message_of` creates no valid request."""


def message_of(kind: Descriptor, ids: Ids, depth: int = 0) -> Message:
    """Return a message whose id fields and nested messages are set; repeated fields stay empty."""
    message = message_factory.GetMessageClass(kind)()
    values = {
        'session_id': ids.session,
        'dataset_id': ids.dataset,
        'loader_id': ids.loader,
        'upload_id': ids.upload,
        'key_id': ids.key,
        'export_id': f'export of {ids.session}',
        'target': 'file:///x',
        'adapter_id': ids.model,
        'run_id': ids.model,
        'checkpoint_path': f'twinkle://{ids.model}/weights/best',
        'request_id': f'request of {ids.session}',
        'base_model': 'tiny',
        'sequence_number': 1,
        'version': 1,
        'size_bytes': 1,
        'seconds': 3600,
        'batch_size': 1,
        'lora_rank': 8,
    }
    for field in kind.fields:
        is_other = field.containing_oneof is not None and field.name not in CHOSEN_ALTERNATIVES
        if field.is_repeated or is_other or field.name in OMITTED:
            continue
        if field.name in values:
            setattr(message, field.name, values[field.name])
        elif field.message_type is not None and depth < 4:
            getattr(message, field.name).CopyFrom(message_of(field.message_type, ids, depth + 1))
    return message


async def first_response(start_call: Callable[[], Any]) -> tuple[Any, Any]:
    """Return a call and its first response.

    If the server refuses a call while the request is being sent, grpc.aio 1.85 may report INTERNAL without the server's
    details. Such calls are repeated a few times.
    """
    for _ in range(5):
        call = start_call()
        try:
            return call, await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL or rpc_status.from_call(error) is not None:
                raise
    raise AssertionError('grpc.aio reported INTERNAL without details for five calls')


async def outcome(deployment: TwoTenants, method: MethodDescriptor, ids: Ids, secret: str) -> tuple[str, str, str]:
    """Return the code, reason and message of a failed call, or OK and the text of the first response."""
    path = f'/{method.containing_service.full_name}/{method.name}'
    builder = REQUESTS.get(method.name)
    request = (builder(ids) if builder else message_of(method.input_type, ids)).SerializeToString()
    metadata = bearer(secret) if secret else None
    channel: Any = deployment.gateway.channel
    try:
        call, payload = await first_response(lambda: channel.stream_stream(path)(iter([request]), metadata=metadata))
    except grpc.aio.AioRpcError as error:
        failure = Failure.of(error)
        return failure.code.name, failure.reason, ids.hidden(failure.message)
    call.cancel()
    if payload is grpc.aio.EOF:
        return 'OK', '', ''
    response = message_factory.GetMessageClass(method.output_type).FromString(payload)
    # The text of a packed detail contains the length of an id, which may differ between tenants.
    return 'OK', '', re.sub(r' value: .*', '', ids.hidden(str(response)))


async def test_no_response_of_a_method_contains_a_path_of_the_server(deployment: TwoTenants, tmp_path: Path) -> None:
    """No response to a call with valid ids contains a path of the services; deletions are called last."""
    key = await deployment.gateway.make_key('alice', scopes=(1, 2, 3))
    codes: set[str] = set()
    for method in sorted(methods(), key=lambda method: method.name.startswith(('Delete', 'Close', 'Finish'))):
        response = await outcome(deployment, method, deployment.alices, key.secret)
        assert str(tmp_path) not in ' '.join(response), (method.full_name, response)
        codes.add(f'{method.name}: {response[0]}')
    assert codes >= {'GetCheckpoint: OK', 'ListCheckpoints: OK', 'ListRunCheckpoints: OK', 'GetAdapter: OK'}


async def test_every_method_needs_a_valid_key(deployment: TwoTenants) -> None:
    """Every method refuses calls without a key, with equal errors for unknown, revoked and expired keys."""
    secrets = await invalid_secrets(deployment)
    for method in methods():
        responses = {await outcome(deployment, method, deployment.alices, secret) for secret in secrets}
        assert len(responses) == 1, responses
        assert {response[0] for response in responses} == {'UNAUTHENTICATED'}, method.full_name
        if requirement_of(f'{method.containing_service.full_name}/{method.name}') is not Access.INTERNAL:
            # This deployment has no internal token, so a caller on loopback without a key counts as a service.
            assert (await outcome(deployment, method, deployment.alices, ''))[0] == 'UNAUTHENTICATED', method.full_name


async def test_every_method_and_route_needs_its_scope(deployment: TwoTenants) -> None:
    """Every method, and every route except signed links, refuses a key that lacks only the required scope."""
    secrets = {
        scope: (await deployment.gateway.make_key('bob', scopes=tuple(set(EVERY_SCOPE) - {number}))).secret
        for number, scope in enumerate(Scope, 1)
    }
    for method in methods():
        needed = requirement_of(f'{method.containing_service.full_name}/{method.name}')
        for scope in [needed] if isinstance(needed, Scope) else ():
            refusal = await outcome(deployment, method, deployment.alices, secrets[scope])
            assert refusal[:2] == ('PERMISSION_DENIED', 'SCOPE_MISSING'), method.full_name
    for route in routes_of(deployment):
        needed = requirement_of(native_method_of(deployment, route)[1:])
        if isinstance(needed, Scope) and route[1] != '/api/v1/files/{token}/{name}':
            assert (await response_of(deployment, route, secrets[needed], deployment.alices))[0] == 403, route
