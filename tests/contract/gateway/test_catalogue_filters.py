"""Tests of the filters for lists of runs and checkpoints in every store."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fixtures.gateway_entries import CHECKPOINT, RUN, START
from twinkle_services.gateway.catalogue.rules import CheckpointFilter, RunFilter
from twinkle_services.gateway.paging import Page

ALL = Page(size=100)
NAMES = ['team', 'a"b', "it's", '$.x', 'ü\\', '%', '']
"""Label names with characters that are special in SQL or JSON."""


@pytest.mark.parametrize(
    ('wanted', 'found'),
    [
        (RunFilter(), {'ad-1', 'ad-2', 'ad-3'}),
        (RunFilter(session_id='se-1'), {'ad-1', 'ad-2'}),
        (RunFilter(session_id='se_1'), set()),
        (RunFilter(is_active=True), {'ad-1', 'ad-3'}),
        (RunFilter(is_active=False), {'ad-2'}),
        (RunFilter(is_published=True), {'ad-1', 'ad-3'}),
        (RunFilter(is_published=False), {'ad-2'}),
        (RunFilter(user_metadata=dict.fromkeys(NAMES, 'red')), {'ad-3'}),
        (RunFilter(user_metadata={'team': 'red', 'a"b': 'blue'}), set()),
        (RunFilter(user_metadata={'Team': 'red'}), set()),
        (RunFilter(user_metadata={'team': 'red'}, session_id='se-1'), set()),
    ],
)
async def test_filter_selects_runs(stores: Any, wanted: RunFilter, found: set[str]) -> None:
    """A filter returns exactly the runs that match all of its fields."""
    changes: list[dict[str, Any]] = [
        {'session_id': 'se-1'},
        {'session_id': 'se-1', 'is_active': False, 'version': 0, 'user_metadata': {'team': 'blue'}},
        {'session_id': 'se-10', 'user_metadata': dict.fromkeys(NAMES, 'red')},
        {'session_id': 'se-1', 'tenant_id': 'bob', 'user_metadata': {'team': 'red'}},
    ]
    for number, change in enumerate(changes, 1):
        await stores.runs.save(replace(RUN, run_id=f'ad-{number}', **change))
    assert {run.run_id for run in (await stores.runs.list_newest('alice', ALL, wanted)).items} == found


@pytest.mark.parametrize(
    ('wanted', 'found'),
    [
        (CheckpointFilter(is_optimizer_included=True), {'first', 'second'}),
        (CheckpointFilter(is_optimizer_included=False), {'third'}),
        (CheckpointFilter(is_public=True), {'second'}),
        (CheckpointFilter(is_public=False), {'first', 'third'}),
        (CheckpointFilter(base_model='large'), {'third'}),
        (CheckpointFilter(begin_time=START + timedelta(hours=1)), {'second', 'third'}),
        (CheckpointFilter(end_time=START + timedelta(hours=1)), {'first'}),
        (CheckpointFilter(begin_time=START, end_time=START), set()),
        (CheckpointFilter(user_metadata={'note': 'best'}), {'third'}),
        (CheckpointFilter(user_metadata={'note': 'best'}, is_public=True), set()),
    ],
)
async def test_filter_selects_checkpoints(stores: Any, wanted: CheckpointFilter, found: set[str]) -> None:
    """A filter returns exactly the checkpoints that match all of its fields."""
    changes: list[dict[str, Any]] = [
        {},
        {'is_public': True, 'create_time': START + timedelta(hours=1)},
        {
            'is_optimizer_included': False,
            'base_model': 'large',
            'user_metadata': {'note': 'best'},
            'create_time': START + timedelta(hours=2),
        },
    ]
    for name, change in zip(('first', 'second', 'third'), changes, strict=True):
        item = replace(CHECKPOINT, checkpoint_id=f'ad-1/weights/{name}', name=name, **change)
        await stores.checkpoints.save(item)
    assert {item.name for item in (await stores.checkpoints.list_newest('alice', ALL, wanted)).items} == found
