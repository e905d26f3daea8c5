"""Conversion of session messages, with checks of all fields."""

from typing import Any

import pytest

from twinkle.api.gateway.v1 import session_service_pb2
from twinkle_services.gateway.sessions.servicer import finish_reason_from_proto, session_request_from_proto
from twinkle_services.kit.errors import InvalidField


@pytest.mark.parametrize(
    ('change', 'field'),
    [
        ({'request_id': ''}, 'request_id'),
        ({'client': 'x' * 257}, 'client'),
        ({'client': 'a\0b'}, 'client'),
        ({'user_metadata': {str(number): '' for number in range(65)}}, 'user_metadata'),
        ({'user_metadata': {'k': 'v' * 4097}}, 'user_metadata[k]'),
        ({'user_metadata': {'': 'v'}}, 'user_metadata'),
    ],
)
def test_bad_session_request_names_the_field(change: dict[str, Any], field: str) -> None:
    """The error for an invalid session request names the path of the invalid field."""
    good: dict[str, Any] = {'request_id': 'rq', 'client': 'test'}
    with pytest.raises(InvalidField) as caught:
        session_request_from_proto(session_service_pb2.CreateSessionRequest(**{**good, **change}))
    assert caught.value.field == field


def test_unknown_finish_reason_is_refused() -> None:
    """A finish reason outside the contract raises InvalidField."""
    with pytest.raises(InvalidField):
        finish_reason_from_proto(99)  # type: ignore[arg-type]
