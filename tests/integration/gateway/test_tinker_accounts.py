"""Tests of sessions, keys and accounts in the Tinker API, with valid keys, invalid keys and other tenants' keys."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.tinker_catalogue import BEST, RUN, RUN_PATH, TinkerCatalogue, tinker_catalogue

OWNED_ROUTES: list[tuple[str, str, Any]] = [
    ('GET', RUN_PATH, None),
    ('GET', f'{RUN_PATH}/checkpoints', None),
    ('GET', f'{BEST}/archive', None),
    ('GET', f'{RUN_PATH}/checkpoints/external_weights/out/external_weights_urls', None),
    ('PUT', f'{BEST}/ttl', {'ttl_seconds': 60}),
    ('POST', f'{BEST}/publish', None),
    ('DELETE', f'{BEST}/publish', None),
    ('DELETE', BEST, None),
    ('POST', 'copy_weights', {'source_path': f'tinker://{RUN}/weights/best'}),
    ('GET', 'sessions/SESSION', None),
    ('GET', 'sessions/SESSION/trace_export', None),
    ('PUT', 'sessions/SESSION/project', {'project_id': ''}),
]
"""Routes of items that a tenant owns."""
GENERAL_ROUTES: list[tuple[str, str, Any]] = [
    ('GET', 'training_runs', None),
    ('GET', 'checkpoints', None),
    ('GET', 'sessions', None),
    ('POST', 'sessions/search', {}),
    ('GET', 'auth/apikey/me', None),
    ('DELETE', 'auth/apikey/me', None),
    ('GET', 'audit?event_type=x', None),
    ('GET', 'billing/usage/events', None),
    ('GET', 'billing/usage/checkpoints/current', None),
]
"""Routes without the id of an item."""


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[TinkerCatalogue]:
    """The API, with a training checkpoint and an external checkpoint of alice."""
    async with tinker_catalogue(tmp_path) as running:
        await running.save('best')
        await running.save('out.external', seed=2)
        yield running


async def _create_session(api: TinkerCatalogue, *, key: str = 'alice', **fields: Any) -> str:
    return (await api.call('POST', 'create_session', key=key, json=fields)).json()['session_id']


@pytest.mark.parametrize('key', [None, 'tml-unknown-key', 'x', ''])
async def test_every_route_requires_a_valid_key(api: TinkerCatalogue, key: str | None) -> None:
    """Every route returns status 401 without a valid key, and no checkpoint is deleted."""
    session_id = await _create_session(api)
    for method, path, body in (*OWNED_ROUTES, *GENERAL_ROUTES):
        response = await api.call(method, path.replace('SESSION', session_id), key=key, json=body)
        assert response.status_code == 401, (method, path)
    assert len((await api.get(f'{RUN_PATH}/checkpoints'))['checkpoints']) == 2


async def test_items_of_another_tenant_are_not_found(api: TinkerCatalogue) -> None:
    """Requests for another tenant's items fail like requests for missing items, and change no checkpoint."""
    session_id = await _create_session(api)
    for method, path, body in OWNED_ROUTES:
        foreign = await api.call(method, path.replace('SESSION', session_id), key='bob', json=body)
        other = path.replace('SESSION', 'se-absent').replace(RUN, 'se-absent:train:0')
        absent_body = json.loads(json.dumps(body).replace(RUN, 'se-absent:train:0'))
        absent = await api.call(method, other, key='bob', json=absent_body)
        assert (foreign.status_code, absent.status_code) == (404, 404), (method, path, foreign.text, absent.text)
        detail = foreign.json()['detail'].replace(RUN, 'se-absent:train:0').replace(session_id, 'se-absent')
        assert detail == absent.json()['detail']
    checkpoints = (await api.get(f'{RUN_PATH}/checkpoints'))['checkpoints']
    assert [(item['public'], item['expires_at']) for item in checkpoints] == [(False, None)] * 2


async def test_lists_contain_only_items_of_the_tenant(api: TinkerCatalogue) -> None:
    """Lists of runs, checkpoints and sessions do not contain another tenant's items."""
    await _create_session(api)
    await api.until_listed(2)
    assert (await api.get('training_runs', key='bob'))['training_runs'] == []
    assert (await api.get('checkpoints', key='bob'))['checkpoints'] == []
    assert (await api.get('sessions', key='bob'))['sessions'] == []
    assert (await api.call('POST', 'sessions/search', key='bob', json={})).json()['sessions'] == []


async def test_session_shows_its_runs_and_its_labels(api: TinkerCatalogue) -> None:
    """A session shows its labels and display name, and lists of sessions are paged."""
    first = await _create_session(api, user_metadata={'team': 'a'}, display_name='First try')
    second = await _create_session(api)
    assert (await api.get('sessions?limit=1&offset=1'))['sessions'] in ([first], [second])
    assert set((await api.get('sessions'))['sessions']) == {first, second}
    shown = await api.get(f'sessions/{first}?access_scope=owned')
    assert shown == {
        'training_run_ids': [],
        'sampler_ids': [],
        'user_metadata': {'team': 'a'},
        'display_name': 'First try',
    }
    assert (await api.get(f'sessions/{first}/trace_export'))['status'] == 'failed'


async def test_sessions_are_found_by_their_fields(api: TinkerCatalogue) -> None:
    """A search finds sessions by name or id, labels, status and owner; a cursor continues after the previous page."""
    sessions = [
        await _create_session(api, display_name=f'Try {index}', user_metadata={'index': str(index)})
        for index in range(3)
    ]

    async def find(**search: Any) -> set[str]:
        response = await api.call('POST', 'sessions/search', json=search)
        assert response.status_code == 200, response.text
        return {session['session_id'] for session in response.json()['sessions']}

    assert await find(display_name='TRY') == set(sessions)
    assert await find(display_name='try 1') == {sessions[1]}
    assert await find(session_id=sessions[0], display_name='2') == {sessions[0], sessions[2]}
    assert await find(user_metadata={'index': '2'}) == {sessions[2]}
    await api.call('POST', f'sessions/{sessions[1]}/finish', json={'reason': {'type': 'errored'}})
    assert await find(statuses=[{'type': 'client_finished', 'reasons': ['errored']}]) == {sessions[1]}
    assert await find(statuses=[{'type': 'client_finished', 'reasons': ['success']}]) == set()
    assert await find(statuses=[{'type': 'active'}]) == {sessions[0], sessions[2]}
    assert await find(owner={'type': 'user', 'owner_urns': ['bob']}) == set()
    pages: list[str] = []
    cursor = None
    for _ in range(4):
        response = (await api.call('POST', 'sessions/search', json={'limit': 1, 'cursor': cursor})).json()
        pages += [session['session_id'] for session in response['sessions']]
        cursor = response['next_cursor']
        if cursor is None:
            break
    assert sorted(pages) == sorted(sessions)


async def test_sessions_and_their_runs_belong_to_projects(api: TinkerCatalogue) -> None:
    """A session can be created in a project or moved to a project; lists can be limited to a project of the tenant."""
    await api.gateway.make_project('alice', 'pr-1')
    await api.gateway.make_project('bob', 'pr-2')
    first, moved, other = (
        await _create_session(api, project_id='pr-1'),
        await _create_session(api),
        await _create_session(api),
    )
    path = f'sessions/{moved}/project'
    assert (await api.call('PUT', path, json={'project_id': 'pr-1'})).json()['project_id'] == 'pr-1'
    refusals = [
        (await api.call('PUT', path, json={'project_id': project_id})).json() for project_id in ('pr-2', 'pr-9')
    ]
    assert refusals[0]['detail'].replace('pr-2', 'pr-9') == refusals[1]['detail']
    assert '`twinkle projects create TENANT PROJECT`' in refusals[0]['detail']
    refused = await api.call('POST', 'create_session', json={'project_id': 'pr-2'})
    assert (refused.status_code, refused.json()['detail']) == (404, refusals[0]['detail'])
    assert set((await api.get('sessions?project_id=pr-1'))['sessions']) == {first, moved}
    response = await api.call('POST', 'sessions/search', json={'project_ids': ['pr-1']})
    assert {session['project_id'] for session in response.json()['sessions']} == {'pr-1'}
    assert (await api.get('training_runs?project_id=pr-1'))['training_runs'] == []
    run_id = f'{moved}:train:0'
    await api.add_run(run_id)
    await api.save('mine', run_id=run_id)
    shown = (await api.get('training_runs?project_id=pr-1'))['training_runs']
    assert [run['training_run_id'] for run in shown] == [run_id]
    await api.until_listed(3)
    storage = await api.get('billing/usage/checkpoints/current?project_id=pr-1')
    assert storage['data'][0]['checkpoint_count'] == 1
    await api.call('PUT', path, json={'project_id': ''})
    assert (await api.get('training_runs?project_id=pr-1'))['training_runs'] == []
    assert other in (await api.get('sessions'))['sessions']


@pytest.mark.parametrize(
    'body',
    [
        {'limit': 0},
        {'limit': 201},
        {'statuses': [{'type': 'unknown'}]},
        {'statuses': [1]},
        {'owner': {'type': 'unknown'}},
        {'cursor': {'last_created_at': 'now', 'last_session_id': 'x'}},
        {'cursor': {'last_created_at': '0001-01-01T00:00:00+14:00', 'last_session_id': 'x'}},
        {'project_ids': 'x'},
        {'user_metadata': {'a': 1}},
        {'display_name': ''},
    ],
)
async def test_malformed_searches_are_refused(api: TinkerCatalogue, body: Any) -> None:
    """A malformed search returns status 400."""
    assert (await api.call('POST', 'sessions/search', json=body)).status_code == 400


async def test_key_shows_its_tenant_and_can_be_revoked(api: TinkerCatalogue) -> None:
    """A key shows its tenant; revoking the key affects no other key."""
    shown = await api.get('auth/apikey/me', key='bob')
    assert isinstance(shown['key_id'], int)
    assert shown['details']['org_details'] == {'name': 'bob'}
    assert (await api.call('DELETE', 'auth/apikey/me', key='bob')).status_code == 200
    assert (await api.call('GET', 'auth/apikey/me', key='bob')).status_code == 401
    assert (await api.call('GET', 'auth/apikey/me')).status_code == 200


async def test_account_reports_the_size_of_its_checkpoints(api: TinkerCatalogue) -> None:
    """The reported storage is the size of the tenant's checkpoints; usage and audit lists are empty."""
    listed = await api.until_listed(2)
    (storage,) = (await api.get('billing/usage/checkpoints/current'))['data']
    assert (storage['checkpoint_count'], storage['size_bytes']) == (2, sum(item['size_bytes'] for item in listed))
    (other,) = (await api.get('billing/usage/checkpoints/current', key='bob'))['data']
    assert (other['checkpoint_count'], other['size_bytes']) == (0, 0)
    assert (await api.get('billing/usage/events')) == {'data': [], 'sessions': {}}
    assert (await api.get('audit?event_type=x')) == {'entries': []}
