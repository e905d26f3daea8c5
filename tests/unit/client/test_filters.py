"""Filters of lists become the contract's, and what none of them is is refused."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from twinkle.api.gateway.v1 import catalogue_service_pb2
from twinkle_client.convert.labels import labels
from twinkle_client.filters import CheckpointFilters, RunFilters, checkpoints_request, runs_request

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


def test_every_filter_of_the_contract_is_there() -> None:
    """Under the contract's own name."""
    own = {'page_size', 'page_token', 'run_id'}
    runs = set(catalogue_service_pb2.ListRunsRequest.DESCRIPTOR.fields_by_name) - own
    checkpoints = set(catalogue_service_pb2.ListRunCheckpointsRequest.DESCRIPTOR.fields_by_name) - own
    assert (set(RunFilters.__annotations__), set(CheckpointFilters.__annotations__)) == (runs, checkpoints)


def test_what_is_left_out_does_not_matter() -> None:
    """False is asked for, unset is not."""
    assert not runs_request({}).HasField('is_active')
    assert runs_request({'is_active': False}).HasField('is_active')
    request = checkpoints_request('', {'is_public': False})
    assert [request.HasField(name) for name in ('is_public', 'is_optimizer_included', 'begin_time')] == [
        True,
        False,
        False,
    ]


def test_moments_are_the_same_in_every_time_zone() -> None:
    """Without a zone they are this machine's, as everywhere in Python."""
    there = NOON.astimezone(timezone(timedelta(hours=9)))
    here = NOON.astimezone().replace(tzinfo=None)
    for moment in (NOON, there, here):
        assert checkpoints_request('r', {'begin_time': moment}).begin_time.ToDatetime(UTC) == NOON


def test_a_time_that_ends_before_it_begins_is_refused() -> None:
    """It could find nothing."""
    with pytest.raises(ValueError, match='end_time'):
        checkpoints_request('', {'begin_time': NOON, 'end_time': NOON})


@pytest.mark.parametrize('values', [{'step': 3}, {3: 'step'}, {'step': None}])
def test_labels_are_strings(values: dict[str, str]) -> None:
    """A number is not turned into one silently: it would be looked for as another."""
    with pytest.raises(TypeError, match='user_metadata'):
        labels(values)


@pytest.mark.parametrize('moment', [NOON.date(), NOON.isoformat(), NOON.timestamp()])
def test_what_is_no_time_is_refused(moment: Any) -> None:
    """Left out it would list everything, and whoever deletes what is listed would delete everything."""
    with pytest.raises(TypeError):
        checkpoints_request('', {'end_time': moment})
