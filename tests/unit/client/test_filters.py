"""Conversion of list filters to requests, and refusal of invalid filters."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from twinkle.api.gateway.v1 import catalogue_service_pb2
from twinkle_client.convert.labels import labels
from twinkle_client.filters import CheckpointFilters, RunFilters, checkpoints_request, runs_request

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


def test_every_filter_of_the_contract_is_supported() -> None:
    """The filters are exactly the fields of the requests, except the page fields and `run_id`."""
    other_fields = {'page_size', 'page_token', 'run_id'}
    runs = set(catalogue_service_pb2.ListRunsRequest.DESCRIPTOR.fields_by_name) - other_fields
    checkpoints = set(catalogue_service_pb2.ListRunCheckpointsRequest.DESCRIPTOR.fields_by_name) - other_fields
    assert (set(RunFilters.__annotations__), set(CheckpointFilters.__annotations__)) == (runs, checkpoints)


def test_unset_filters_are_not_sent() -> None:
    """A filter with the value False is sent, and an unset filter is not sent."""
    assert not runs_request({}).HasField('is_active')
    assert runs_request({'is_active': False}).HasField('is_active')
    request = checkpoints_request('', {'is_public': False})
    assert [request.HasField(name) for name in ('is_public', 'is_optimizer_included', 'begin_time')] == [
        True,
        False,
        False,
    ]


def test_times_are_converted_from_their_time_zone() -> None:
    """Times are converted to UTC; a time without a zone is in the machine's local zone."""
    distant = NOON.astimezone(timezone(timedelta(hours=9)))
    here = NOON.astimezone().replace(tzinfo=None)
    for moment in (NOON, distant, here):
        assert checkpoints_request('r', {'begin_time': moment}).begin_time.ToDatetime(UTC) == NOON


def test_empty_time_range_is_refused() -> None:
    """A range whose end equals its beginning is empty and raises ValueError."""
    with pytest.raises(ValueError, match='end_time'):
        checkpoints_request('', {'begin_time': NOON, 'end_time': NOON})


@pytest.mark.parametrize('values', [{'step': 3}, {3: 'step'}, {'step': None}])
def test_labels_must_be_strings(values: dict[str, str]) -> None:
    """A label whose name or value is not a string raises TypeError instead of being converted."""
    with pytest.raises(TypeError, match='user_metadata'):
        labels(values)


@pytest.mark.parametrize('moment', [NOON.date(), NOON.isoformat(), NOON.timestamp()])
def test_filter_of_another_type_than_a_time_is_refused(moment: Any) -> None:
    """A filter of the wrong type is refused, because a request without the filter would list everything."""
    with pytest.raises(TypeError):
        checkpoints_request('', {'end_time': moment})
