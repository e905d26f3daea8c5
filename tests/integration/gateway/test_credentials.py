"""Tests of the credentials and scopes that every method of every contract requires."""

import asyncio
import importlib
import pkgutil
from datetime import timedelta

import grpc
import pytest

import twinkle.api
from fixtures.running_gateway import ADMIN, Failure, RunningGateway, bearer, failure_of
from twinkle.api.gateway.v1 import key_service_pb2, key_service_pb2_grpc
from twinkle_services.gateway.credentials import Access, Scope, requirement_of

SCOPE_NUMBERS = {Scope.TRAIN: 1, Scope.SAMPLE: 2, Scope.DATA: 3, Scope.OPERATOR: 4, Scope.ADMIN: 5}


def _methods() -> dict[str, bool]:
    """Return, by method path, whether the client streams its requests."""
    names = [module.name for module in pkgutil.walk_packages(twinkle.api.__path__, 'twinkle.api.')]
    descriptors = [importlib.import_module(name).DESCRIPTOR for name in names if name.endswith('_pb2')]
    services = [service for descriptor in descriptors for service in descriptor.services_by_name.values()]
    return {
        f'/{service.full_name}/{method.name}': method.client_streaming
        for service in services
        for method in service.methods
    }


METHODS = _methods()
_LOST_STATUS = 'Internal error from Core'
"""Message of grpc.aio for a call that ended before its first request was sent."""


async def call_failure(gateway: RunningGateway, path: str, metadata: tuple[tuple[str, str], ...]):
    """Call a method of any kind and return its failure."""
    if not METHODS.get(path, False):
        return await failure_of(gateway.channel.unary_stream(path)(b'', metadata=metadata))
    # The messages of a stream are sent after the call has begun, and it may have ended by then; grpc then raises an
    # error without the status of the server.
    while True:
        try:
            async for _ in gateway.channel.stream_stream(path)(iter([b'']), metadata=metadata):
                pass
        except grpc.aio.AioRpcError as error:
            if error.details() != _LOST_STATUS:
                return Failure.of(error)
        else:
            raise AssertionError(f'{path} succeeded')


async def test_every_method_needs_a_valid_key(gateway: RunningGateway) -> None:
    """Every method refuses calls without a key, with equal errors for unknown, revoked and expired keys."""
    revoked, expired = await gateway.make_key('alice'), await gateway.make_key('alice', ttl=timedelta(seconds=1))
    stub = key_service_pb2_grpc.KeyServiceStub(gateway.channel)
    await stub.RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=revoked.key.key_id), metadata=ADMIN)
    gateway.clock.advance(timedelta(seconds=1))
    invalid = [bearer('tml-unknown'), bearer(revoked.secret), bearer(expired.secret)]
    assert len(METHODS) > 60
    for path in METHODS:
        missing = await call_failure(gateway, path, ())
        assert (missing.code, missing.reason) == (grpc.StatusCode.UNAUTHENTICATED, 'CREDENTIALS_MISSING')
        refusals = await asyncio.gather(*(call_failure(gateway, path, metadata) for metadata in invalid))
        seen = {(refusal.code, refusal.reason, refusal.message, str(refusal.metadata)) for refusal in refusals}
        assert len(seen) == 1
        assert refusals[0].code is grpc.StatusCode.UNAUTHENTICATED
        assert refusals[0].reason == 'CREDENTIALS_INVALID'


@pytest.mark.parametrize('header', ['Basic abc', 'Bearer', 'Bearer  ', 'tml-x', ''])
async def test_other_authorization_schemes_count_as_missing(gateway: RunningGateway, header: str) -> None:
    """Authorization headers with other schemes or empty tokens count as missing credentials."""
    refusal = await call_failure(gateway, min(METHODS), (('authorization', header),))
    assert refusal.reason == 'CREDENTIALS_MISSING'


async def test_every_method_needs_its_scope(gateway: RunningGateway) -> None:
    """A key with all scopes except the required one is refused; internal methods refuse even an administrator's key."""
    everything = set(SCOPE_NUMBERS.values())
    lacking = {
        scope: bearer((await gateway.make_key('alice', scopes=tuple(everything - {number}))).secret)
        for scope, number in SCOPE_NUMBERS.items()
    }
    for path in METHODS:
        requirement = requirement_of(path[1:])
        if requirement is Access.ANY_KEY:
            continue
        refusal = await call_failure(gateway, path, ADMIN if requirement is Access.INTERNAL else lacking[requirement])
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, 'SCOPE_MISSING'), path
        assert refusal.metadata == {'scope': requirement.value}


async def test_unknown_method_is_unimplemented(gateway: RunningGateway) -> None:
    """A method outside the contracts fails with UNIMPLEMENTED, not with a missing scope."""
    for path in ('/twinkle.api.unknown.v1.Service/Method', '/twinkle.api.model.v1.AdapterService/Unknown'):
        refusal = await call_failure(gateway, path, ADMIN)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNIMPLEMENTED, 'NOT_BUILT_YET')
