"""Every API refuses to sample from an adapter without a version; the error names the call that publishes a version."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.running_gateway import Failure, bearer, failure_of
from fixtures.sampled_answers import ints
from fixtures.two_tenants import TwoTenants, two_tenants
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampler_service_pb2_grpc, sampling_pb2
from twinkle_services.model.domain.adapter import ExpiredAdapter

PARAMS = sampling_pb2.SamplingParams(max_tokens=1)
PROMPT = {'chunks': [{'type': 'encoded_text', 'tokens': [1, 2]}]}


@pytest.fixture
async def deployment(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[TwoTenants]:
    """A gateway with two tenants."""
    async with two_tenants(tmp_path, tiny_llama_dir) as running:
        yield running


async def post(deployment: TwoTenants, path: str, **body: Any) -> Any:
    """Send a request of alice to the Tinker API, and return the result."""
    response = await deployment.call('POST', f'/api/v1/{path}', deployment.secrets['alice'], body)
    assert response.status_code == 200, response.text
    return response.json()


async def make_unpublished(deployment: TwoTenants) -> str:
    """Create a run of alice, and return its id; the catalogue may not list the run yet."""
    fields = {'session_id': deployment.alices.session, 'base_model': 'tiny', 'lora_config': {'rank': 8}}
    future = await post(deployment, 'create_model', model_seq_id=1, **fields)
    return (await post(deployment, 'retrieve_future', request_id=future['request_id']))['model_id']


async def wait_until(deployment: TwoTenants, run_id: str, *, is_active: bool) -> None:
    """Wait until the catalogue reports a run of alice in this state; the timeout of the test limits the wait."""
    stub = catalogue_service_pb2_grpc.CatalogueServiceStub(deployment.gateway.channel)
    metadata = bearer(deployment.secrets['alice'])
    while True:
        response = await stub.ListRuns(catalogue_service_pb2.ListRunsRequest(), metadata=metadata)
        if (run_id, is_active) in {(run.run_id, run.is_active) for run in response.runs}:
            return


async def failures(deployment: TwoTenants, adapter: sampling_pb2.AdapterRef, tenant_id: str) -> list[Failure]:
    """Return the failures of the methods that sample from, score with or load an adapter."""
    stub: Any = sampler_service_pb2_grpc.SamplerServiceStub(deployment.gateway.channel)
    metadata = bearer(deployment.secrets[tenant_id])
    prompt = sampling_pb2.Prompt(token_ids=ints([1, 2]))
    named: dict[str, Any] = {'base_model': 'tiny', 'adapter': adapter}
    calls = [
        stub.Sample(wire.SampleRequest(**named, prompt=prompt, params=PARAMS), metadata=metadata),
        stub.SampleBatch(wire.SampleBatchRequest(**named, prompts=[prompt, prompt], params=PARAMS), metadata=metadata),
        stub.ComputeLogprobs(wire.ComputeLogprobsRequest(**named, token_ids=[ints([1, 2])]), metadata=metadata),
        stub.LoadAdapter(wire.LoadAdapterRequest(adapter=adapter), metadata=metadata),
    ]
    return [await failure_of(call) for call in calls]


async def test_rpcs_name_the_call_that_publishes(deployment: TwoTenants) -> None:
    """Sampling, scoring and loading fail; only the adapter's tenant is told that no version is published."""
    run_id = await make_unpublished(deployment)
    for adapter in (
        sampling_pb2.AdapterRef(adapter_id=run_id),
        sampling_pb2.AdapterRef(adapter_id=run_id, exact=1),
        sampling_pb2.AdapterRef(adapter_id=run_id, at_least=1),
    ):
        for failure in await failures(deployment, adapter, 'alice'):
            assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'VERSION_NOT_FOUND')
            assert failure.metadata['adapterId'] == run_id
            assert 'no published version' in failure.message
            assert 'publish_version()' in failure.message
        assert {failure.reason for failure in await failures(deployment, adapter, 'bob')} == {'ADAPTER_NOT_FOUND'}
    absent = sampling_pb2.AdapterRef(adapter_id='absent')
    assert {failure.reason for failure in await failures(deployment, absent, 'alice')} == {'ADAPTER_NOT_FOUND'}


@pytest.mark.parametrize('is_listed', [True, False])
async def test_deleted_adapter_is_not_found(deployment: TwoTenants, *, is_listed: bool) -> None:
    """A deleted adapter without versions is reported as not found, even if the catalogue does not list the run yet."""
    run_id = await make_unpublished(deployment)
    if is_listed:
        await wait_until(deployment, run_id, is_active=True)
    future = await post(deployment, 'unload_model', model_id=run_id)
    await post(deployment, 'retrieve_future', request_id=future['request_id'])
    if is_listed:
        await wait_until(deployment, run_id, is_active=False)
    deleted = sampling_pb2.AdapterRef(adapter_id=run_id)
    assert {failure.reason for failure in await failures(deployment, deleted, 'alice')} == {'ADAPTER_NOT_FOUND'}


@pytest.mark.parametrize('is_listed', [True, False])
async def test_expired_adapter_is_reported_with_its_checkpoint(deployment: TwoTenants, *, is_listed: bool) -> None:
    """The error for an adapter that was removed as unused names its checkpoint, but only to its tenant."""
    run_id = await make_unpublished(deployment)
    if is_listed:
        await wait_until(deployment, run_id, is_active=True)
    path = f'twinkle://{run_id}/weights/adapter-expired-1'
    expired = ExpiredAdapter(adapter_id=run_id, tenant_id='alice', checkpoint_path=path)
    deployment.model.verbs.directory.expire(expired)
    if is_listed:
        await wait_until(deployment, run_id, is_active=False)
    adapter = sampling_pb2.AdapterRef(adapter_id=run_id)
    for failure in await failures(deployment, adapter, 'alice'):
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'ADAPTER_EXPIRED')
        assert failure.metadata['checkpointPath'] == path
    assert {failure.reason for failure in await failures(deployment, adapter, 'bob')} == {'ADAPTER_NOT_FOUND'}
    body = {'model': run_id, 'prompt': 'x', 'max_tokens': 1}
    response = await deployment.call('POST', '/v1/completions', deployment.secrets['alice'], body)
    assert (response.status_code, response.json()['error']['code']) == (404, 'model_not_found')
    assert path in response.json()['error']['message']
    future = await post(deployment, 'unload_model', model_id=run_id)
    result = await post(deployment, 'retrieve_future', request_id=future['request_id'])
    assert (result['category'], path in result['error']) == ('user', True)


async def test_openai_names_the_call_that_publishes(deployment: TwoTenants) -> None:
    """A completion of an unpublished run is refused with 404, and the message names both calls that publish."""
    run_id = await make_unpublished(deployment)
    body = {'model': run_id, 'prompt': 'x', 'max_tokens': 1}
    response = await deployment.call('POST', '/v1/completions', deployment.secrets['alice'], body)
    error = response.json()['error']
    assert (response.status_code, error['code'], error['param']) == (404, 'model_not_found', 'model')
    assert 'publish_version()' in error['message']
    assert 'save_weights_for_sampler()' in error['message']
    foreign = await deployment.call('POST', '/v1/completions', deployment.secrets['bob'], body)
    assert foreign.json()['error']['reason'] == 'BASE_MODEL_NOT_FOUND'


async def test_tinker_names_the_call_that_saves_weights(deployment: TwoTenants) -> None:
    """Sampling from weights that were never saved fails with status 404 and names the Tinker call that saves them."""
    run_id = await make_unpublished(deployment)
    path = f'tinker://{run_id}/sampler_weights/first'
    named = {'session_id': deployment.alices.session, 'sampling_session_seq_id': 7, 'model_path': path}
    for route, body in (('create_sampling_session', named), ('asample', {'model_path': path, 'prompt': PROMPT})):
        response = await deployment.call('POST', f'/api/v1/{route}', deployment.secrets['alice'], body)
        assert response.status_code == 404
        assert response.json()['detail'] == f"no weights '{path}'; save them with save_weights_for_sampler() first"
