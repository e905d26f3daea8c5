"""Calls are routed to the model service of their base model or adapter, and reveal no other tenant's adapters."""

import asyncio
from datetime import UTC, datetime

import pytest

from twinkle_services.gateway.catalogue.rules import Run
from twinkle_services.gateway.catalogue.sql import SqlAssignmentStore, SqlRunStore
from twinkle_services.gateway.errors import AdapterIdTaken
from twinkle_services.gateway.fleet.model_routes import ModelRoutes
from twinkle_services.gateway.fleet.model_table import ModelReport, RunOwners
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.errors import BaseModelNotFound, ServiceUnreachable

START = datetime(2026, 5, 1, tzinfo=UTC)


class Services:
    """Fake model services with their base models and adapters.

    A service in `down` is unreachable, and a service in `silent` never responds.
    """

    def __init__(self, **served_models: set[str]) -> None:
        self.served_models = served_models
        self.adapters: dict[str, set[tuple[str, str]]] = {name: set() for name in served_models}
        self.journal_ids: dict[str, tuple[str, ...]] = {}
        self.free_counts: dict[str, int] = {}
        self.down: set[str] = set()
        self.silent: set[str] = set()
        self.lookup_count = 0

    async def report(self, service: str) -> ModelReport | None:
        """Return the report of a service, or None while it is down."""
        await self._wait_if_silent(service)
        if service in self.down:
            return None
        return ModelReport(
            base_models=frozenset(self.served_models[service]),
            journal_ids=self.journal_ids.get(service, ()),
            free_count=self.free_counts.get(service, 0),
            adapter_count=len(self.adapters[service]),
        )

    async def has_adapter(self, service: str, tenant_id: str, adapter_id: str) -> bool:
        self.lookup_count += 1
        await self._wait_if_silent(service)
        if service in self.down:
            raise ServiceUnreachable('model')
        return (tenant_id, adapter_id) in self.adapters[service]

    async def _wait_if_silent(self, service: str) -> None:
        if service in self.silent:
            await asyncio.Event().wait()


def _run(run_id: str, base_model: str, *, tenant_id: str = 'alice') -> Run:
    return Run(
        run_id=run_id,
        tenant_id=tenant_id,
        base_model=base_model,
        lora_rank=8,
        step_count=0,
        version=0,
        is_active=True,
        create_time=START,
        update_time=START,
    )


def _routes(services: Services, database: Database) -> ModelRoutes:
    return ModelRoutes(
        tuple(services.served_models),
        facts=services,
        runs=SqlRunStore(database),
        assignments=SqlAssignmentStore(database),
    )


async def test_base_model_is_routed_to_its_model_service(database: Database) -> None:
    """A base model is routed to the service that serves it; the error for an unknown model lists the known models."""
    routes = _routes(Services(one={'tiny'}, two={'small'}), database)
    assert [await routes.holders_of(name) for name in ('tiny', 'small')] == [['one'], ['two']]
    with pytest.raises(BaseModelNotFound) as refusal:
        await routes.holders_of('large')
    assert refusal.value.known == ('small', 'tiny')


async def test_unreachable_service_keeps_its_base_model(database: Database) -> None:
    """Calls for a base model are not routed to another service while its own service is unreachable."""
    services = Services(one={'tiny'}, two={'small'})
    routes = _routes(services, database)
    await routes.refresh()
    services.down = {'two'}
    await routes.refresh()
    assert await routes.holders_of('small') == ['two']


async def test_service_that_changes_its_base_model_is_routed_by_the_new_one(database: Database) -> None:
    """A service that changes its base model receives calls for the new base model; the previous one is then unknown."""
    services = Services(one={'tiny'}, two={'small'})
    routes = _routes(services, database)
    await routes.refresh()
    services.served_models['two'] = {'large'}
    assert await routes.holders_of('large') == ['two']
    with pytest.raises(BaseModelNotFound):
        await routes.holders_of('small')


async def test_unknown_base_model_is_not_denied_before_all_services_responded(database: Database) -> None:
    """An unknown base model raises ServiceUnreachable while a service that may serve the model was not reached."""
    services = Services(one={'tiny'}, two={'small'})
    services.down = {'two'}
    routes = _routes(services, database)
    with pytest.raises(ServiceUnreachable):
        await routes.holders_of('small')
    services.down = set()
    assert await routes.holders_of('small') == ['two']


async def test_adapter_in_the_catalogue_is_routed_to_an_unreachable_service(database: Database) -> None:
    """An adapter in the catalogue is routed by its base model, and no service is queried."""
    services = Services(one={'tiny'}, two={'small'})
    await SqlRunStore(database).save(_run('ad-1', 'small'))
    routes = _routes(services, database)
    await routes.refresh()
    services.down = {'two'}
    assert await routes.owner_of('alice', 'ad-1') == 'two'
    assert services.lookup_count == 0


async def test_adapter_id_cannot_be_reused_for_another_base_model(database: Database) -> None:
    """An adapter id is refused only if the same tenant already uses it with another base model."""
    services = Services(one={'tiny'}, two={'small'})
    await SqlRunStore(database).save(_run('ad-1', 'tiny'))
    routes = _routes(services, database)
    with pytest.raises(AdapterIdTaken):
        await routes.creator_of('alice', 'small', 'ad-1', 'r1')
    assert await routes.creator_of('alice', 'tiny', 'ad-1', 'r1') == 'one'
    assert await routes.creator_of('bob', 'small', 'ad-1', 'r1') == 'two'
    assert await routes.creator_of('alice', 'small', '', 'r1') == 'two'


async def test_adapter_is_created_while_another_service_is_unreachable(database: Database) -> None:
    """Creating an adapter whose id is not in the catalogue queries no service."""
    services = Services(one={'tiny'}, two={'small'})
    routes = _routes(services, database)
    await routes.refresh()
    services.down = {'two'}
    assert await routes.creator_of('alice', 'tiny', 'new', 'r1') == 'one'
    assert services.lookup_count == 0


async def test_silent_service_delays_no_other_service(database: Database) -> None:
    """A base model and an adapter of one service are found while another service does not respond."""
    services = Services(one={'tiny'}, two={'small'})
    services.adapters['one'].add(('alice', 'new'))
    services.silent = {'two'}
    routes = _routes(services, database)
    assert await routes.holders_of('tiny') == ['one']
    assert await routes.owner_of('alice', 'new') == 'one'


async def test_new_adapter_is_found_by_querying_the_services(database: Database) -> None:
    """An adapter that is not yet in the catalogue is found by a query to the services."""
    services = Services(one={'tiny'}, two={'small'})
    services.adapters['two'].add(('alice', 'new'))
    assert await _routes(services, database).owner_of('alice', 'new') == 'two'


@pytest.mark.parametrize('down', [set[str](), {'two'}], ids=['all up', 'one down'])
async def test_absent_adapters_and_adapters_of_other_tenants_are_indistinguishable(
    database: Database, down: set[str]
) -> None:
    """An absent adapter and another tenant's adapter have the same outcome, even if one service is unreachable."""
    services = Services(one={'tiny'}, two={'small'})
    await SqlRunStore(database).save(_run('ad-bob', 'tiny', tenant_id='bob'))
    services.adapters['one'].add(('bob', 'ad-bob'))
    services.down = down
    routes = _routes(services, database)
    outcomes: list[object] = []
    for adapter_id in ('ad-bob', 'absent'):
        try:
            outcomes.append(await routes.owner_of('alice', adapter_id))
        except ServiceUnreachable as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert (outcomes[0] is None) is not bool(down)


async def test_adapter_of_an_unserved_base_model_is_not_reported_absent(database: Database) -> None:
    """An adapter in the catalogue raises ServiceUnreachable if no service serves its base model."""
    services = Services(one={'tiny'}, two={'small'})
    await SqlRunStore(database).save(_run('ad-1', 'large'))
    with pytest.raises(ServiceUnreachable):
        await _routes(services, database).owner_of('alice', 'ad-1')


async def test_new_adapters_go_to_the_service_with_the_most_free_slots(database: Database) -> None:
    """The service with the most free adapter slots is chosen, then the one with the fewest adapters, then the first."""
    services = Services(one={'tiny'}, two={'tiny'}, three={'tiny'})
    services.free_counts = {'one': 2, 'two': 4, 'three': 2}
    services.adapters['one'].add(('bob', 'ad-bob'))
    routes = _routes(services, database)
    created = [await routes.creator_of('alice', 'tiny', '', f'r{index}') for index in range(9)]
    assert created == ['two', 'two', 'three', 'one', 'two', 'three', 'one', 'two', 'three']
    services.down = {'three'}
    await routes.refresh()
    assert await routes.holders_of('tiny') == ['two', 'one', 'three']


@pytest.mark.parametrize('adapter_id', ['', 'ad-1'], ids=['request id', 'adapter id'])
async def test_repeated_creation_goes_to_the_first_service_after_a_restart(database: Database, adapter_id: str) -> None:
    """A restarted gateway sends a repeated request to its first receiver, even if another one has more free slots."""
    services = Services(one={'tiny'}, two={'tiny'})
    services.free_counts = {'one': 2}
    services.journal_ids = {'one': ('jn-1',), 'two': ('jn-2',)}
    assert await _routes(services, database).creator_of('alice', 'tiny', adapter_id, 'r1') == 'one'
    services.free_counts = {'two': 9}
    later = _routes(services, database)
    assert await later.creator_of('alice', 'tiny', adapter_id, 'r1') == 'one'
    assert await later.creator_of('alice', 'tiny', '', 'r2') == 'two'
    assert await later.creator_of('bob', 'tiny', adapter_id, 'r1') == 'two'


async def test_repeated_creation_waits_for_the_first_service_and_follows_a_takeover(database: Database) -> None:
    """A repeated request never reaches a service that would create a second adapter."""
    services = Services(one={'tiny'}, two={'tiny'})
    services.free_counts = {'one': 2}
    services.journal_ids = {'one': ('jn-1',), 'two': ('jn-2',)}
    assert await _routes(services, database).creator_of('alice', 'tiny', '', 'r1') == 'one'
    services.down = {'one'}
    restarted = _routes(services, database)
    with pytest.raises(ServiceUnreachable):
        await restarted.creator_of('alice', 'tiny', '', 'r1')
    assert await restarted.creator_of('alice', 'tiny', '', 'r2') == 'two'
    services.journal_ids['two'] = ('jn-2', 'jn-1')
    assert await restarted.creator_of('alice', 'tiny', '', 'r1') == 'two'
    services.down, services.journal_ids['one'] = set(), ('jn-3',)
    await restarted.refresh()
    assert await restarted.creator_of('alice', 'tiny', '', 'r1') == 'two'


async def test_adapter_is_found_at_the_service_that_has_it(database: Database) -> None:
    """If several services serve a base model, an adapter is routed to the service that has it or reported it last."""
    services = Services(one={'tiny'}, two={'tiny'})
    await SqlRunStore(database).save(_run('ad-1', 'tiny'))
    services.adapters['two'].add(('alice', 'ad-1'))
    routes = _routes(services, database)
    await routes.refresh()
    assert await routes.owner_of('alice', 'ad-1') == 'two'
    routes.owners.add('one', ('alice', 'ad-1'))
    assert await routes.owner_of('alice', 'ad-1') == 'one'


async def test_adapter_of_an_ended_service_is_unreachable_until_another_one_has_it(database: Database) -> None:
    """An adapter of an unreachable service is never reported as absent, and is found once another service has it."""
    services = Services(one={'tiny'}, two={'tiny'})
    await SqlRunStore(database).save(_run('ad-1', 'tiny'))
    services.adapters['one'].add(('alice', 'ad-1'))
    routes = _routes(services, database)
    await routes.refresh()
    assert await routes.owner_of('alice', 'ad-1') == 'one'
    services.down = {'one'}
    await routes.refresh()
    for restarted in (routes, _routes(services, database)):
        with pytest.raises(ServiceUnreachable):
            await restarted.owner_of('alice', 'ad-1')
    services.adapters['two'].add(('alice', 'ad-1'))
    assert await routes.owner_of('alice', 'ad-1') == 'two'


async def test_runs_are_absent_only_if_all_services_of_their_base_model_have_reported(database: Database) -> None:
    """A run counts as absent only once all services that may serve its base model have reported their runs."""
    services = Services(one={'tiny'}, two={'tiny'}, three={'small'})
    services.down = {'two'}
    routes = _routes(services, database)
    routes.owners.replace('one', [('alice', 'ad-1')])
    routes.owners.replace('three', [])
    assert list(await routes.settled_base_models()) == []
    services.down = set()
    await routes.refresh()
    assert list(await routes.settled_base_models()) == ['small']
    routes.owners.replace('two', [('alice', 'ad-2')])
    assert list(await routes.settled_base_models()) == ['small', 'tiny']
    assert set(routes.owners.keys) == {('alice', 'ad-1'), ('alice', 'ad-2')}


def test_owner_of_a_moved_run_survives_the_return_of_the_ended_service() -> None:
    """An empty report of a service that returned, and its late deletions, do not affect runs that were moved away."""
    owners, key = RunOwners(), ('alice', 'ad-1')
    owners.replace('one', [key])
    owners.add('two', key)
    owners.replace('one', [])
    assert not owners.remove('one', key)
    assert owners.find(*key) == 'two'
    assert owners.remove('two', key)
    assert owners.find(*key) is None
