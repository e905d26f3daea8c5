"""Plain fields are checked the same way in every service."""

from datetime import timedelta

import pytest
from google.protobuf.duration_pb2 import Duration

from services.kit.errors import InvalidField
from services.kit.rpc.fields import (
    adapter_id_from_proto,
    duration_from_proto,
    id_from_proto,
    name_from_proto,
    not_negative,
    ttl_from_proto,
)


@pytest.mark.parametrize('value', ['', 'x' * 257, 'a\x00b', 'a\nb'])
def test_what_is_no_id_is_refused(value: str) -> None:
    """Empty, endless and unprintable ids are named."""
    with pytest.raises(InvalidField) as caught:
        id_from_proto(value, 'request_id')
    assert caught.value.field == 'request_id'


@pytest.mark.parametrize('value', ['', '.', '..', '.x', 'a/b', 'a b', 'x' * 129])
def test_what_may_not_stand_in_a_path_is_no_name(value: str) -> None:
    """A name leads nowhere else."""
    with pytest.raises(InvalidField):
        name_from_proto(value, 'name')
    with pytest.raises(InvalidField):
        adapter_id_from_proto(value, 'adapter_id')


def test_a_colon_joins_the_parts_of_an_adapter_id_alone() -> None:
    """Names of checkpoints have none, and no id begins with one."""
    assert adapter_id_from_proto('s-1:train:0', 'adapter_id') == 's-1:train:0'
    for check, value in ((name_from_proto, 's-1:train:0'), (adapter_id_from_proto, ':train')):
        with pytest.raises(InvalidField):
            check(value, 'x')


def test_good_values_come_back_as_they_are() -> None:
    """Checks change nothing."""
    assert id_from_proto('hf://org/name', 'x') == 'hf://org/name'
    assert name_from_proto('step-1.0_b', 'x') == 'step-1.0_b'
    assert not_negative(0, 'x') == 0
    assert ttl_from_proto(Duration(seconds=90), 'x') == timedelta(seconds=90)


@pytest.mark.parametrize('message', [Duration(seconds=-1), Duration(seconds=1 << 62), Duration(seconds=61)])
def test_durations_out_of_range_are_refused(message: Duration) -> None:
    """Also one that is longer than Python can hold."""
    with pytest.raises(InvalidField):
        duration_from_proto(message, 'timeout', least=timedelta(), most=timedelta(minutes=1))


def test_a_count_below_zero_is_refused() -> None:
    """And named."""
    with pytest.raises(InvalidField):
        not_negative(-1, 'offset')
