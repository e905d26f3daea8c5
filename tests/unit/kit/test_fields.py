"""Checks of fields that several services share."""

from datetime import timedelta

import pytest
from google.protobuf.duration_pb2 import Duration

from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import (
    adapter_id_from_proto,
    duration_from_proto,
    id_from_proto,
    name_from_proto,
    not_negative,
    ttl_from_proto,
)


@pytest.mark.parametrize('value', ['', 'x' * 257, 'a\x00b', 'a\nb'])
def test_invalid_ids_are_refused(value: str) -> None:
    """Empty, overlong and unprintable ids are refused, and the error names the field."""
    with pytest.raises(InvalidField) as caught:
        id_from_proto(value, 'request_id')
    assert caught.value.field == 'request_id'


@pytest.mark.parametrize('value', ['', '.', '..', '.x', 'a/b', 'a b', 'x' * 129])
def test_names_with_path_syntax_are_refused(value: str) -> None:
    """Names and adapter ids that are empty, too long, or contain spaces or path syntax are refused."""
    with pytest.raises(InvalidField):
        name_from_proto(value, 'name')
    with pytest.raises(InvalidField):
        adapter_id_from_proto(value, 'adapter_id')


def test_colons_are_allowed_in_adapter_ids_only() -> None:
    """Adapter ids may contain colons after the first character, and names may not."""
    assert adapter_id_from_proto('s-1:train:0', 'adapter_id') == 's-1:train:0'
    for check, value in ((name_from_proto, 's-1:train:0'), (adapter_id_from_proto, ':train')):
        with pytest.raises(InvalidField):
            check(value, 'x')


def test_valid_values_are_returned_unchanged() -> None:
    """The checks return valid values without a change."""
    assert id_from_proto('hf://org/name', 'x') == 'hf://org/name'
    assert name_from_proto('step-1.0_b', 'x') == 'step-1.0_b'
    assert not_negative(0, 'x') == 0
    assert ttl_from_proto(Duration(seconds=90), 'x') == timedelta(seconds=90)


@pytest.mark.parametrize('message', [Duration(seconds=-1), Duration(seconds=1 << 62), Duration(seconds=61)])
def test_durations_out_of_range_are_refused(message: Duration) -> None:
    """Durations outside the range are refused, including those that Python cannot represent."""
    with pytest.raises(InvalidField):
        duration_from_proto(message, 'timeout', minimum=timedelta(), maximum=timedelta(minutes=1))


def test_negative_count_is_refused() -> None:
    """A negative count raises InvalidField."""
    with pytest.raises(InvalidField):
        not_negative(-1, 'offset')
