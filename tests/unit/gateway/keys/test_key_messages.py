"""Conversion of API key messages, with checks of all fields."""

from datetime import timedelta
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from twinkle.api.gateway.v1 import key_service_pb2
from twinkle_services.gateway.credentials import Scope
from twinkle_services.gateway.keys.servicer import key_request_from_proto, tenant_id_from_proto
from twinkle_services.kit.errors import InvalidField


@pytest.mark.parametrize('tenant_id', ['', 'Upper', 'under_score', 'a' * 65, 'a\n', 'ä'])
def test_bad_tenant_id_is_refused(tenant_id: str) -> None:
    """A tenant id that is not 1 to 64 lower-case letters, digits and '-' is refused."""
    with pytest.raises(InvalidField) as caught:
        tenant_id_from_proto(tenant_id)
    assert caught.value.field == 'tenant_id'


@pytest.mark.parametrize(
    ('change', 'field'),
    [
        ({'scopes': []}, 'scopes'),
        ({'scopes': [1, 0]}, 'scopes[1]'),
        ({'scopes': [99]}, 'scopes[0]'),
        ({'ttl': Duration()}, 'ttl'),
        ({'ttl': Duration(seconds=-5)}, 'ttl'),
        ({'ttl': Duration(seconds=1 << 60)}, 'ttl'),
        ({'display_name': 'x' * 257}, 'display_name'),
    ],
)
def test_bad_key_request_names_the_field(change: dict[str, Any], field: str) -> None:
    """The error for an invalid key request names the path of the invalid field."""
    good: dict[str, Any] = {'tenant_id': 'alice', 'scopes': [key_service_pb2.SCOPE_TRAIN]}
    with pytest.raises(InvalidField) as caught:
        key_request_from_proto(key_service_pb2.CreateKeyRequest(**{**good, **change}))
    assert caught.value.field == field


def test_key_without_ttl_never_expires() -> None:
    """An unset ttl converts to None, and repeated scopes count once."""
    request = key_service_pb2.CreateKeyRequest(tenant_id='alice', scopes=[1, 2, 2], ttl=Duration(seconds=60))
    assert key_request_from_proto(request).ttl == timedelta(minutes=1)
    request.ClearField('ttl')
    converted = key_request_from_proto(request)
    assert converted.ttl is None
    assert converted.scopes == {Scope.TRAIN, Scope.SAMPLE}
