"""Who may call what: every method of every contract against every kind of key that is no good."""

import asyncio
import importlib
import pkgutil
from datetime import timedelta

import grpc
import pytest

import twinkle.api
from fixtures.running_gateway import ADMIN, RunningGateway, bearer, failure_of
from services.gateway.credentials import Access, Scope, requirement_of
from twinkle.api.gateway.v1 import key_service_pb2, key_service_pb2_grpc

SCOPE_NUMBERS = {Scope.TRAIN: 1, Scope.SAMPLE: 2, Scope.DATA: 3, Scope.OPERATOR: 4, Scope.ADMIN: 5}


def _methods() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(twinkle.api.__path__, 'twinkle.api.')]
    descriptors = [importlib.import_module(name).DESCRIPTOR for name in names if name.endswith('_pb2')]
    services = [service for descriptor in descriptors for service in descriptor.services_by_name.values()]
    return sorted(f'/{service.full_name}/{method.name}' for service in services for method in service.methods)


METHODS = _methods()


async def failure(gateway: RunningGateway, path: str, metadata: tuple[tuple[str, str], ...]):
    """Return how a call of any method fails."""
    return await failure_of(gateway.channel.stream_stream(path)(iter([b'']), metadata=metadata))


async def test_no_method_answers_without_a_good_key(gateway: RunningGateway) -> None:
    """No key, an unknown, a revoked and an expired one: every method refuses, the last three alike."""
    revoked, expired = await gateway.make_key('alice'), await gateway.make_key('alice', ttl=timedelta(seconds=1))
    stub = key_service_pb2_grpc.KeyServiceStub(gateway.channel)
    await stub.RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=revoked.key.key_id), metadata=ADMIN)
    gateway.clock.advance(timedelta(seconds=1))
    bad = [bearer('tml-unknown'), bearer(revoked.secret), bearer(expired.secret)]
    assert len(METHODS) > 60
    for path in METHODS:
        missing = await failure(gateway, path, ())
        assert (missing.code, missing.reason) == (grpc.StatusCode.UNAUTHENTICATED, 'CREDENTIALS_MISSING')
        refusals = await asyncio.gather(*(failure(gateway, path, metadata) for metadata in bad))
        seen = {(refusal.code, refusal.reason, refusal.message, str(refusal.metadata)) for refusal in refusals}
        assert len(seen) == 1
        assert refusals[0].code is grpc.StatusCode.UNAUTHENTICATED
        assert refusals[0].reason == 'CREDENTIALS_INVALID'


@pytest.mark.parametrize('header', ['Basic abc', 'Bearer', 'Bearer  ', 'tml-x', ''])
async def test_header_that_is_no_bearer_token_is_as_none(gateway: RunningGateway, header: str) -> None:
    """Other schemes and empty tokens are missing credentials."""
    refusal = await failure(gateway, METHODS[0], (('authorization', header),))
    assert refusal.reason == 'CREDENTIALS_MISSING'


async def test_each_method_needs_exactly_its_scope(gateway: RunningGateway) -> None:
    """A key with every scope but the one a method needs is refused; what is internal refuses every key."""
    everything = set(SCOPE_NUMBERS.values())
    lacking = {
        scope: bearer((await gateway.make_key('alice', scopes=tuple(everything - {number}))).secret)
        for scope, number in SCOPE_NUMBERS.items()
    }
    for path in METHODS:
        requirement = requirement_of(path[1:])
        if requirement is Access.ANY_KEY:
            continue
        refusal = await failure(gateway, path, ADMIN if requirement is Access.INTERNAL else lacking[requirement])
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, 'SCOPE_MISSING'), path
        assert refusal.metadata == {'scope': requirement.value}


async def test_method_of_no_contract_is_unimplemented(gateway: RunningGateway) -> None:
    """A method nobody knows is told from one that is forbidden."""
    for path in ('/twinkle.api.unknown.v1.Service/Method', '/twinkle.api.model.v1.AdapterService/Unknown'):
        refusal = await failure(gateway, path, ADMIN)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNIMPLEMENTED, 'NOT_BUILT_YET')
