"""Tests of DescribeTokens over a socket."""

from pathlib import Path

import grpc
import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.running_gateway import failure_of
from fixtures.sampler_service import FakeWeightSource, ints, serving_sampler, tenant
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire


async def test_tokens_are_described_in_order(tmp_path: Path) -> None:
    """The description of each token has its bytes and states whether the token is special."""
    async with serving_sampler(FakeSamplerEngine(), FakeWeightSource(), tmp_path) as sampler:
        request = wire.DescribeTokensRequest(base_model='tiny', token_ids=ints([27, 1, 28]))
        answer = await sampler.stub.DescribeTokens(request, metadata=tenant('alice'))
    assert [(form.piece, form.is_special) for form in answer.tokens] == [(b'b', False), (b'b', True), (b'c', False)]


@pytest.mark.parametrize(
    ('base_model', 'token_ids', 'reason'),
    [('tiny', [], 'INVALID_FIELD'), ('tiny', [-1], 'INVALID_FIELD'), ('other', [1], 'BASE_MODEL_NOT_FOUND')],
)
async def test_invalid_requests_are_refused(tmp_path: Path, base_model: str, token_ids: list[int], reason: str) -> None:
    """A request without tokens or with a negative token is invalid; another base model is not found."""
    async with serving_sampler(FakeSamplerEngine(), FakeWeightSource(), tmp_path) as sampler:
        request = wire.DescribeTokensRequest(base_model=base_model, token_ids=ints(token_ids))
        failure = await failure_of(sampler.stub.DescribeTokens(request, metadata=tenant('alice')))
    assert failure.reason == reason
    assert failure.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
